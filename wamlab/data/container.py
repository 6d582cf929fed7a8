"""What can be told about a video file without decoding it: missing, empty, a pointer, cut, damaged.

An MP4 file says many things twice: samples are counted in four tables, durations stand in headers
and in a table, sizes and places must fit the file. `check_mp4` compares them, because a decoder
that follows one damaged table returns other frames without a word.
"""

import os
from pathlib import Path
from typing import BinaryIO

import numpy as np

from wamlab.config import UserError

REMUX = "copy it again, or rebuild its tables: ffmpeg -i IN -c copy OUT"


class VideoError(UserError):
    """A video file, or a time in it, that cannot be read exactly: file, cause, what is allowed."""


def refuse_unreadable(path: str | Path) -> None:
    """Refuse a file that holds no video data at all.

    Raises:
        VideoError: missing, a folder, empty, or a Git-LFS pointer.
    """
    try:
        with open(path, "rb") as file:
            head = file.read(64)
    except OSError as error:
        raise VideoError(f"{path}: cannot be read: {error.strerror}") from error
    if not head:
        raise VideoError(f"{path}: empty (0 bytes): copy or record it again")
    if head.startswith(b"version https://git-lfs"):
        raise VideoError(f"{path}: a Git-LFS pointer, not the video: run `git lfs pull`")


def check_mp4(path: str | Path) -> None:
    """Compare the tables of an MP4 file's video tracks with each other and with the file.

    Files of other kinds, and fragmented MP4 (its tables are empty), pass.

    Raises:
        VideoError: no index, truncated (frames expected and readable), or tables that disagree.
    """
    size = os.path.getsize(path)
    with open(path, "rb") as file:
        top = _top_level(file, size)
        if "moov" not in top:
            if not top.keys() & {"ftyp", "mdat"}:
                return
            raise VideoError(
                f"{path}: no index (no moov box): cut off before its end, or never finished"
            )
        start, end = top["moov"]
        if end > size:
            raise VideoError(f"{path}: truncated inside its index: {end - size} bytes are missing")
        file.seek(start)
        moov = file.read(end - start)
    try:
        for track in _children(moov, "trak"):
            mdia = _child(track, "mdia")
            if _child(mdia, "hdlr")[8:12] == b"vide":
                _check_track(moov, track, size)
    except _Damaged as damage:
        raise VideoError(f"{path}: {damage}") from damage


class _Damaged(Exception):  # noqa: N818  (its message lacks the file's name; never leaves here)
    """What is wrong with a file."""


def _top_level(file: BinaryIO, size: int) -> dict[str, tuple[int, int]]:
    """Return the place of each box's content: {kind: (start, end)}."""
    found, at = {}, 0
    while at + 8 <= size:
        file.seek(at)
        length, kind, header = int.from_bytes(file.read(4), "big"), file.read(4), 8
        if length == 1:
            length, header = int.from_bytes(file.read(8), "big"), 16
        if length == 0:  # up to the end of the file
            length = size - at
        if length < header:
            break
        found[kind.decode("latin-1")] = (at + header, at + length)
        at += length
    return found


def _children(data: bytes, kind: str) -> list[bytes]:
    """Return the content of every box of a kind that stands directly in a box's content."""
    found, at = [], 0
    while at + 8 <= len(data):
        length, name = int.from_bytes(data[at : at + 4], "big"), data[at + 4 : at + 8]
        if length == 0:
            break  # QuickTime ends some lists so
        if length < 8 or at + length > len(data):
            raise _Damaged(f"its index is damaged at box {name.decode('latin-1')!r}: {REMUX}")
        if name.decode("latin-1") == kind:
            found.append(data[at + 8 : at + length])
        at += length
    return found


def _child(data: bytes, kind: str) -> bytes:
    found = _children(data, kind)
    if not found:
        raise _Damaged(f"its index holds no {kind!r} box: {REMUX}")
    return found[0]


def _table(table: bytes, kind: str, columns: int) -> np.ndarray | None:
    """Return a table of 32-bit numbers, int64 [entries, columns], or None where it is absent."""
    found = _children(table, kind)
    if not found:
        return None
    count = int.from_bytes(found[0][4:8], "big")
    if len(found[0]) < 8 + 4 * columns * count:
        raise _Damaged(f"its table {kind!r} counts {count} entries and holds fewer: {REMUX}")
    numbers = np.frombuffer(found[0], ">u4", count * columns, 8)
    return numbers.astype(np.int64).reshape(count, columns)


def _check_track(movie: bytes, track: bytes, size: int) -> None:
    mdia = _child(track, "mdia")
    table = _child(_child(mdia, "minf"), "stbl")
    if not _duration(_child(mdia, "mdhd"), 12)[0] or not _duration(_child(movie, "mvhd"), 12)[0]:
        raise _Damaged(f"its time scale is 0: {REMUX}")
    sizes = _sample_sizes(_child(table, "stsz"), size)
    if not len(sizes):
        return  # fragmented: its samples stand elsewhere
    deltas = _spread(_table(table, "stts", 2), len(sizes), "stts")
    offsets = _spread(_table(table, "ctts", 2), len(sizes), "ctts")
    _check_places(table, sizes, size)
    keys = _table(table, "stss", 1)
    if keys is not None and ((np.diff(keys[:, 0]) <= 0).any() or keys.max(initial=1) > len(sizes)):
        raise _Damaged(f"its table of keyframes is not ascending: {REMUX}")
    pts = np.cumsum(deltas) - deltas + offsets.astype(np.int32)
    _check_times(movie, track, deltas, pts)
    _check_bitrate(movie, track, sizes, deltas)


def _sample_sizes(data: bytes, size: int) -> np.ndarray:
    same, count = (int.from_bytes(data[i : i + 4], "big") for i in (4, 8))
    if same * count > size or (not same and 12 + 4 * count > len(data)):
        raise _Damaged(f"its table of sizes counts {count} frames and holds fewer: {REMUX}")
    if same:
        return np.full(count, same, np.int64)
    sizes = np.frombuffer(data, ">u4", count, 12).astype(np.int64)
    if not sizes.all():
        raise _Damaged(f"frame {int(np.argmin(sizes))} holds no data: {REMUX}")
    return sizes


def _spread(runs: np.ndarray | None, count: int, kind: str) -> np.ndarray:
    """Return the value of each sample, int64 [count], from (length, value) runs."""
    if runs is None:
        if kind == "ctts":
            return np.zeros(count, np.int64)
        raise _Damaged(f"its index holds no {kind!r} box: {REMUX}")
    if runs[:, 0].sum() != count:
        raise _Damaged(f"its table {kind!r} counts {runs[:, 0].sum()} of {count} frames: {REMUX}")
    return np.repeat(runs[:, 1], runs[:, 0])


def _check_places(table: bytes, sizes: np.ndarray, size: int) -> None:
    """Refuse samples that lie outside the file (it was cut) or on one another."""
    chunks = _table(table, "stco", 1)
    if chunks is None:
        pairs = _table(table, "co64", 2)
        chunks = pairs[:, :1] * 2**32 + pairs[:, 1:] if pairs is not None else np.zeros((0, 1), int)
    runs = _table(table, "stsc", 3)
    first = np.zeros(0, int) if runs is None else runs[:, 0]
    if not len(first) or first[0] != 1 or (np.diff(first) <= 0).any() or first[-1] > len(chunks):
        raise _Damaged(f"its table of chunks is damaged: {REMUX}")
    repeats = np.diff(np.append(first, len(chunks) + 1))
    if (runs[:, 1] * repeats).sum() != len(sizes):
        total = (runs[:, 1] * repeats).sum()
        raise _Damaged(f"its chunks hold {total} of {len(sizes)} frames: {REMUX}")
    per_chunk = np.repeat(runs[:, 1], repeats)
    ends = np.cumsum(sizes)
    before = np.repeat(np.append(0, ends)[np.cumsum(per_chunk) - per_chunk], per_chunk)
    starts = np.repeat(chunks[:, 0], per_chunk) + ends - sizes - before
    readable = int((starts + sizes <= size).sum())
    if readable < len(sizes):
        raise _Damaged(
            f"truncated: {len(sizes)} frames expected, {readable} readable; copy it again"
        )
    order = np.argsort(starts, kind="stable")
    if (starts[order][1:] < (starts + sizes)[order][:-1]).any():
        raise _Damaged(f"its frames overlap in the file: {REMUX}")


def _check_times(movie: bytes, track: bytes, deltas: np.ndarray, pts: np.ndarray) -> None:
    """Refuse durations and times that contradict one another by half a frame or more."""
    rate, duration = _duration(_child(_child(track, "mdia"), "mdhd"), 12)
    movie_rate, _ = _duration(_child(movie, "mvhd"), 12)
    frame = max(float(np.median(deltas)), 1.0)
    even = (deltas[:-1] == frame).all()
    # headers are exact, to a millisecond, or count one last frame more; a variable rate leaves the
    # length of the last frame shown open
    off, exact = abs(duration - deltas.sum()), max(frame / 50, rate / 1000)
    left = duration - (pts.max() - pts.min())
    fits = min(off, abs(off - frame)) <= exact or (not even and 0 <= left <= 2 * deltas.max())
    if duration and not fits:
        raise _Damaged(
            f"its header says {duration / rate:.6g} s and its frames last "
            f"{deltas.sum() / rate:.6g} s: {REMUX}"
        )
    if even and not evenly_spaced(pts, frame):
        raise _Damaged(f"decoding at a constant rate, it shows frames at other times: {REMUX}")
    _check_variable(deltas, pts)
    _, shown = _duration(_child(track, "tkhd"), 16)
    edits = _edits(track)
    length = sum(e[0] for e in edits) if edits else deltas.sum() * movie_rate / rate
    if shown and abs(shown - length) * rate / movie_rate > 1.1 * frame + rate / movie_rate:
        lasts = f"{shown / movie_rate:.6g} s and its parts {length / movie_rate:.6g} s"
        raise _Damaged(f"its track lasts {lasts}: {REMUX}")
    _check_edits(edits, deltas, pts, rate / movie_rate)


def _check_variable(deltas: np.ndarray, pts: np.ndarray) -> None:
    """Refuse a few frames that show when no frame is decoded, while all others follow that rule.

    Encoders that reorder frames take decoding times from the presentation times, some frames late.
    """
    dts, shown = np.cumsum(deltas) - deltas, np.sort(pts)
    late = np.flatnonzero(dts == shown[0])
    if not len(late) or (deltas[:-1] == deltas[0]).all() or (pts == dts).all():
        return
    off = int((shown[: len(shown) - late[0]] != dts[late[0] :]).sum())
    if 0 < off <= len(shown) / 10:
        raise _Damaged(f"{off} of its {len(shown)} frames show at odd times: {REMUX}")


def evenly_spaced(pts: np.ndarray, frame: float) -> bool:
    """Say whether presentation times, in any order, stand one frame apart, to a twentieth."""
    return bool((np.abs(np.diff(np.sort(pts)) - frame) <= max(1, frame / 20)).all())


def _check_edits(
    edits: list[tuple[int, int]], deltas: np.ndarray, pts: np.ndarray, scale: float
) -> None:
    """Refuse edits that reach past the last frame, or begin inside a frame."""
    frame, shown = float(np.median(deltas)), np.sort(pts)
    for length, start in edits:
        if start < 0:
            continue
        end = start + length * scale
        # the last frame shown need not be the last decoded, so its own length is not known here
        if end > shown[-1] + 2 * max(frame, deltas[-1]) + scale:
            raise _Damaged(f"its edit list reaches past its last frame: {REMUX}")
        first = int(np.searchsorted(shown, start))
        if 0 < first < len(shown) and shown[first] - start > frame / 20:
            raise _Damaged("its edit list begins inside a frame: cut it between two, or re-encode")
        kept = int(np.searchsorted(shown, end))
        gaps = np.diff(shown[max(kept - 8, 0) : kept + 1])
        far = len(gaps) > 1 and gaps[-1] > 1.5 * gaps[:-1].max()
        if kept < len(shown) and (far or shown[0] - start > frame / 2):
            raise _Damaged(f"its edit list leaves out frames at odd places: {REMUX}")


def _check_bitrate(movie: bytes, track: bytes, sizes: np.ndarray, deltas: np.ndarray) -> None:
    """Refuse a time scale that contradicts the bit rate, where an edit list hides its other mark.

    FFmpeg's muxer notes the bit rate that it found (buffer and average 0) beside the codec; other
    values are an encoder's aim, which proves nothing.
    """
    mdia, edits = _child(track, "mdia"), _edits(track)
    rate, movie_rate = (_duration(h, 12)[0] for h in (_child(mdia, "mdhd"), _child(movie, "mvhd")))
    if sum(length for length, _ in edits) * rate / movie_rate > 0.95 * deltas.sum() or not edits:
        return  # the whole track is shown: its length has been compared
    entry = _child(_child(_child(mdia, "minf"), "stbl"), "stsd")[8:]
    noted = _children(entry[86:], "btrt")  # after the fixed part of a picture's entry
    if noted and noted[0][:4] == noted[0][8:12] == b"\0\0\0\0":
        real, found = 8 * sizes.sum() * rate / deltas.sum(), int.from_bytes(noted[0][4:8], "big")
        if found and abs(real / found - 1) > 0.05:
            raise _Damaged(f"it notes {found} bits a second and holds {real:.0f}: {REMUX}")


def _duration(header: bytes, at: int) -> tuple[int, int]:
    """Return (time scale, duration) of a header; its version says how wide the fields are."""
    wide = header[0] == 1
    if wide:
        at += 8
    scale = int.from_bytes(header[at : at + 4], "big")
    width = 8 if wide else 4
    duration = int.from_bytes(header[at + 4 : at + 4 + width], "big")
    return scale, 0 if duration == 2 ** (8 * width) - 1 else duration


def _edits(track: bytes) -> list[tuple[int, int]]:
    """Return each edit's length in movie units and start in media units (-1: a pause)."""
    found = _children(track, "edts")
    data = _children(found[0], "elst") if found else []
    if not data:
        return []
    width = 8 if data[0][0] == 1 else 4
    count, entry = int.from_bytes(data[0][4:8], "big"), 2 * width + 4
    if len(data[0]) < 8 + count * entry:
        raise _Damaged(f"its edit list counts {count} entries and holds fewer: {REMUX}")
    edits = []
    for at in range(8, 8 + count * entry, entry):
        length = int.from_bytes(data[0][at : at + width], "big")
        start = int.from_bytes(data[0][at + width : at + 2 * width], "big", signed=True)
        if data[0][at + 2 * width : at + entry] != b"\0\1\0\0":
            raise _Damaged("its edit list changes the speed, which no decoder here plays")
        edits.append((length, start))
    return edits
