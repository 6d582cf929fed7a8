"""What coded pictures tell by themselves: whether a packet is whole, and their display order.

A damaged table of sizes or places makes a decoder read the wrong bytes, and most decoders hide what
they cannot read. H.264 and HEVC in MP4 and Matroska write each unit's length before it, AV1 writes
it in each unit's header: a packet that was cut at the wrong place does not add up. H.264 pictures
also count their display order, which damaged times contradict.
"""

from collections.abc import Callable, Iterator, Sequence

H264_IDR = 5


def packet_check(codec: str, extradata: bytes | None) -> Callable[[bytes], None] | None:
    """Return a function that raises ValueError for a packet that is not whole.

    Args:
        codec: FFmpeg's name, such as "h264".
        extradata: the stream's own header, which says how wide a unit's length is.

    Returns:
        None for codecs whose packets cannot be checked.
    """
    if codec == "av1":
        return _check_av1
    if not extradata or extradata[0] != 1:  # units between start codes: no lengths to check
        return None
    if codec == "h264" and len(extradata) > 6:
        width = (extradata[4] & 3) + 1
        return lambda data: _check_units([data[s] & 31 in (1, 5) for s, _ in _units(data, width)])
    if codec == "hevc" and len(extradata) > 22:
        width = (extradata[21] & 3) + 1
        return lambda data: _check_units([data[s] & 126 < 64 for s, _ in _units(data, width)])
    return None


def _check_units(are_pictures: list[bool]) -> None:
    if not any(are_pictures):
        raise ValueError("it holds no picture")


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


def _check_av1(data: bytes) -> None:
    at, pictures = 0, []
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
        pictures.append(kind in (3, 6))  # a frame header alone, or with its tiles
        at += length
    _check_units(pictures)


def _leb128(data: bytes, at: int) -> tuple[int, int]:
    """Return AV1's variable-length number at a place, and the place after it."""
    value = 0
    for shift in range(0, 56, 7):
        if at >= len(data):
            break
        value |= (data[at] & 127) << shift
        at += 1
        if not data[at - 1] & 128:
            return value, at
    raise ValueError("its coded units do not add up")


class _Bits:
    """Reads bits from the left; past the end come zeros."""

    def __init__(self, data: bytes) -> None:
        self.size = 8 * len(data) + 64
        self.value, self.at = int.from_bytes(data, "big") << 64, 0

    def read(self, count: int) -> int:
        self.at += count
        return self.value >> max(self.size - self.at, 0) & ((1 << count) - 1)

    def number(self) -> int:
        """Return an unsigned Exp-Golomb number."""
        zeros = 0
        while zeros < 32 and not self.read(1):
            zeros += 1
        return (1 << zeros) - 1 + self.read(zeros)


def h264_display_order(
    extradata: bytes | None, packets: Sequence[bytes]
) -> list[tuple[int, int]] | None:
    """Return each picture's place in display order as the pictures themselves give it.

    Source: ITU-T H.264, 8.2.1 (picture order count), types 0 and 2, frames only.

    Args:
        extradata: the stream's avcC record.
        packets: coded pictures in decoding order.

    Returns:
        (group, place) a packet, ascending in display order, or None where it is not known.
    """
    if not extradata or extradata[0] != 1 or extradata[5] & 31 != 1:
        return None
    width, length = (extradata[4] & 3) + 1, int.from_bytes(extradata[6:8], "big")
    layout = _h264_layout(extradata[8 : 8 + length])
    if layout is None:
        return None
    if not layout["place_bits"]:
        return [(0, number) for number in range(len(packets))]  # displayed as decoded
    order, group, place, reference = [], 0, 0, 0
    half = 1 << layout["place_bits"] - 1
    for data in packets:
        start = next((s for s, _ in _units(data, width) if data[s] & 31 in (1, 5)), None)
        if start is None:
            return None
        if data[start] & 31 == H264_IDR:
            group, place, reference = group + 1, 0, 0
        coded = _h264_place(data[start : start + 40], layout)
        place = reference + (coded - reference + half) % (2 * half) - half
        if data[start] & 0x60:  # others are predicted from it, and counted from it
            reference = place
        order.append((group, place))
    return order


def _h264_layout(sps: bytes) -> dict[str, int] | None:
    """Return the widths of a slice header's fields, or None for what is not followed here."""
    bits = _Bits(sps[1:].replace(b"\0\0\3", b"\0\0"))
    profile = bits.read(8)
    bits.read(16)
    bits.number()
    if profile in (100, 110, 122, 244, 44, 83, 86, 118, 128):
        if bits.number() == 3:
            return None
        bits.number(), bits.number(), bits.read(1)
        if bits.read(1):
            return None  # scaling lists
    frame_bits, kind, place_bits = bits.number() + 4, bits.number(), 0
    if kind == 0:
        place_bits = bits.number() + 4
    elif kind == 1:
        return None
    bits.number(), bits.read(1), bits.number(), bits.number()
    if not bits.read(1):
        return None  # fields
    return {"frame_bits": frame_bits, "place_bits": place_bits}


def _h264_place(head: bytes, layout: dict[str, int]) -> int:
    """Return the coded part of the picture order count of a slice."""
    bits = _Bits(head[1:].replace(b"\0\0\3", b"\0\0"))
    bits.number(), bits.number(), bits.number(), bits.read(layout["frame_bits"])
    if head[0] & 31 == H264_IDR:
        bits.number()
    return bits.read(layout["place_bits"])
