"""What a coded picture's first bytes tell: is a packet whole, and can decoding start there.

A damaged table of sizes or places makes a decoder read the wrong bytes, and most decoders hide what
they cannot read. H.264 and HEVC in MP4 and Matroska write each unit's length before it, AV1 writes
it in each unit's header: a packet that was cut at the wrong place does not add up.
"""

from collections.abc import Callable, Iterator

H264_IDR, H264_SLICES, H264_SEI = 5, range(1, 6), 6
HEVC_IRAP, HEVC_SLICES = range(16, 24), range(32)
AV1_FRAMES = (3, 6)  # a frame header alone, or with its tiles


def packet_reader(codec: str, extradata: bytes | None) -> Callable[[bytes], bool | None] | None:
    """Return a function from a packet to whether it is a keyframe, or None for other codecs.

    The function returns None where the packet does not say, and raises ValueError for a packet
    that is not whole.

    Args:
        codec: FFmpeg's name, such as "h264".
        extradata: the stream's own header, which says how wide a unit's length is.
    """
    if codec == "av1":
        return _av1_key
    if not extradata or extradata[0] != 1:  # units between start codes: no lengths to check
        return None
    if codec == "h264" and len(extradata) > 6:
        width = (extradata[4] & 3) + 1
        return lambda data: _h264_key(data, width)
    if codec == "hevc" and len(extradata) > 22:
        width = (extradata[21] & 3) + 1
        return lambda data: _hevc_key(data, width)
    return None


def _units(data: bytes, width: int) -> Iterator[tuple[int, int]]:
    """Yield (start, end) of each unit; `width` bytes before a unit hold its length."""
    at = 0
    while at < len(data):
        length = int.from_bytes(data[at : at + width], "big")
        at += width
        if length == 0 or at + length > len(data) or data[at] & 0x80:
            raise ValueError("its coded units do not add up")
        yield at, at + length
        at += length


def _h264_key(data: bytes, width: int) -> bool | None:
    idr, may_recover, intra = False, False, True
    slices = 0
    for start, _ in _units(data, width):
        kind = data[start] & 31
        idr |= kind == H264_IDR
        may_recover |= kind == H264_SEI
        if kind in (1, 5):
            slices += 1
            intra &= _slice_type(data[start + 1 : start + 9]) in (2, 4)
    if not slices:
        raise ValueError("it holds no picture")
    return True if idr else (None if may_recover or intra else False)


def _slice_type(head: bytes) -> int:
    """Return H.264's slice type (0 P, 1 B, 2 I, 3 SP, 4 SI): the header's second number."""
    bits = int.from_bytes(head.ljust(8, b"\0"), "big")
    at, value = 64, 0
    for _ in range(2):
        zeros = 0
        while at > 0 and not bits >> (at - 1) & 1:
            at, zeros = at - 1, zeros + 1
        at -= zeros + 1
        if at < 0:
            return -1
        value = (bits >> at & (2 ** (zeros + 1) - 1)) - 1
    return value % 5


def _hevc_key(data: bytes, width: int) -> bool:
    kinds = [data[start] >> 1 & 63 for start, _ in _units(data, width)]
    pictures = [kind for kind in kinds if kind in HEVC_SLICES]
    if not pictures:
        raise ValueError("it holds no picture")
    return pictures[0] in HEVC_IRAP


def _av1_key(data: bytes) -> bool:
    at, key = 0, None
    while at < len(data):
        kind, extended, sized = data[at] >> 3 & 15, data[at] >> 2 & 1, data[at] >> 1 & 1
        if data[at] & 0x81:
            raise ValueError("its coded units do not add up")
        at += 1 + extended
        length = len(data) - at
        if sized:
            length, at = _leb128(data, at)
        if at + length > len(data):
            raise ValueError("its coded units do not add up")
        if kind in AV1_FRAMES and key is None and length:
            key = data[at] >> 5 == 0  # a new frame of type "key": three zero bits
        at += length
    if key is None:
        raise ValueError("it holds no picture")
    return key


def _leb128(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 56, 7):
        if at >= len(data):
            break
        value |= (data[at] & 127) << shift
        at += 1
        if not data[at - 1] & 128:
            return value, at
    raise ValueError("its coded units do not add up")
