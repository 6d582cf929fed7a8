"""Faults of a data set's videos, and checksums of their decoded frames."""

import zlib
from collections.abc import Iterator
from pathlib import Path

import av
import numpy as np

from wamlab.data.check_tables import Fault
from wamlab.data.container import VideoError
from wamlab.data.frame_times import FrameTimes, frame_times
from wamlab.data.meta_files import read_text
from wamlab.data.metadata import Episodes, Info, VideoSpan, video_span

CHECKSUMS = "meta/frame_checksums.txt"  # no table or metadata: writing it converts nothing anew


def check_videos_of(info: Info, episodes: Episodes, place: int, keys: list[str]) -> list[Fault]:
    """Return the faults of one episode's videos.

    Args:
        info, episodes: of the data set.
        place: of the episode in the table.
        keys: camera features of dtype "video".
    """
    return [f for key in keys for f in _check_video(info, episodes, place, key)]


def _check_video(info: Info, episodes: Episodes, place: int, key: str) -> Iterator[Fault]:
    span, length = video_span(info, episodes, place, key), int(episodes.lengths[place])
    name, number = _name(info, span.path), int(episodes.ids[place])

    def fault(cause: str, spoils: bool = True) -> Fault:
        return Fault(file=name, episode=number, cause=cause, spoils=spoils)

    if span.end_s is not None and abs((span.end_s - span.start_s) * info.fps - length) > 0.5:
        yield fault(
            f"meta/episodes puts it at {span.start_s:g} to {span.end_s:g} s, which is not its "
            f"{length} frames at {info.fps:g} fps"
        )
    try:
        times = frame_times(span.path)
        first, last = times.span(span.start_s, span.end_s)
        count = last - first + 1
        if count < length:
            yield fault(
                f"{count} frames, {length} expected: {length - count} are missing at its end"
            )
            return
        index = times.indices_at(np.arange(length) / info.fps, span.start_s, (first, last))
    except VideoError as error:
        yield fault(f"{str(error).removeprefix(f'{span.path}: ')} ({length} frames expected)")
        return
    if count > length:
        yield fault(f"{count} frames, {length} expected: the last ones have no row", spoils=False)
    cause = _shift(index - first - np.arange(length), info.fps)
    if cause:
        yield fault(cause)
    shape = info.features[key].get("shape") or ()
    if len(shape) == 3 and (times.height, times.width) != tuple(info.frame_hw(key)):
        size = "x".join(map(str, info.frame_hw(key)))
        yield fault(f"{times.height}x{times.width}, meta/info.json says {size}", spoils=False)


def _name(info: Info, path: Path) -> str:
    return str(path.relative_to(info.root))


def _shift(shift: np.ndarray, fps: float) -> str | None:
    if not shift.any():
        return None
    row = int(np.flatnonzero(shift)[0])
    if (shift == shift[-1]).all():
        return f"shifted by {shift[0]} frame{'s' * (abs(int(shift[0])) > 1)} against the table"
    return (
        f"frame {row + shift[row]}, not {row}, stands at {row / fps:.6g} s: the rate is not "
        f"{fps:g} fps throughout"
    )


def check_overlaps(info: Info, episodes: Episodes, keys: list[str]) -> Iterator[Fault]:
    """Yield the episodes whose part of a shared file overlaps another's."""
    for key in keys if info.shared_files else ():
        table = episodes.videos[key]
        order = np.lexsort((table.start_s, table.file, table.chunk))
        same = (np.diff(table.file[order]) == 0) & (np.diff(table.chunk[order]) == 0)
        early = table.end_s[order[:-1]] - table.start_s[order[1:]] > 0.5 / info.fps
        for before, place in zip(order[:-1][same & early], order[1:][same & early]):
            frames = (table.end_s[before] - table.start_s[place]) * info.fps
            yield Fault(
                file=_name(info, video_span(info, episodes, int(place), key).path),
                episode=int(episodes.ids[place]),
                cause=f"shares {frames:.0f} frames with episode {episodes.ids[before]}",
            )


def frame_checksums(path: Path) -> list[str]:
    """Return 8 hexadecimal digits for each shown frame: the CRC-32 of its decoded planes.

    The planes, and not RGB: decoding is exact by the codecs' standards, conversion is not.

    Raises:
        VideoError: the file cannot be read exactly, or a frame is damaged.
    """
    times = frame_times(path)
    found: dict[int, str] = {}
    try:
        with av.open(str(path)) as file:
            stream = file.streams[times.stream]
            stream.thread_type, stream.codec_context.thread_count = "NONE", 1
            for frame in file.decode(stream):
                if frame.is_corrupt:
                    raise VideoError(f"{path}: the picture at {frame.time:.6g} s is damaged")
                found[frame.pts] = f"{zlib.crc32(np.ascontiguousarray(frame.to_ndarray())):08x}"
    except av.error.FFmpegError as error:
        raise VideoError(f"{path}: {str(error).splitlines()[0]}") from error
    return _in_order(times, found)


def _in_order(times: FrameTimes, found: dict[int, str]) -> list[str]:
    shown = [int(p) for p in times.pts[times.lead :]]
    missing = [p for p in shown if p not in found]
    if missing:
        time = (missing[0] - shown[0]) * float(times.time_base)
        raise VideoError(f"{times.path}: the frame at {time:.6g} s cannot be decoded")
    return [found[p] for p in shown]


def write_checksums(root: Path, checksums: dict[str, list[str]]) -> None:
    """Store the checksums of every video beside the data set's metadata."""
    lines = [f"{name}\t{''.join(sums)}\n" for name, sums in sorted(checksums.items())]
    partial = (root / CHECKSUMS).with_suffix(".partial")
    partial.write_text("".join(lines))
    partial.replace(root / CHECKSUMS)


def read_checksums(root: Path) -> dict[str, list[str]]:
    """Return the stored checksums by file; empty when none were written.

    Raises:
        DatasetError: they cannot be read.
    """
    path = root / CHECKSUMS
    found = {}
    for line in read_text(path).splitlines() if path.is_file() else ():
        name, _, text = line.partition("\t")
        found[name] = [text[i : i + 8] for i in range(0, len(text), 8)]
    return found


def compare_checksums(
    name: str, found: list[str], stored: list[str] | None, spans: list[tuple[int, VideoSpan]]
) -> Fault | None:
    """Return the fault of a file whose frames are not those that were stored.

    Args:
        name: the file, relative to the data set.
        found, stored: checksums of its frames; None = none were stored.
        spans: (episode, its part) of the file.
    """
    if stored is None:
        cause = f"{CHECKSUMS} has no checksums of it: write them from a good copy"
        return Fault(file=name, cause=cause, spoils=False)
    if len(found) != len(stored):
        return Fault(
            file=name, cause=f"{len(found)} frames, {len(stored)} when checksums were made"
        )
    wrong = [k for k, (a, b) in enumerate(zip(found, stored)) if a != b]
    if not wrong:
        return None
    episode = spans[0][0]
    times = frame_times(spans[0][1].path)
    for number, span in spans:
        first, last = times.span(span.start_s, span.end_s)
        if first <= wrong[0] <= last:
            episode = number
    cause = f"{len(wrong)} frames differ from their checksums, the first is frame {wrong[0]}"
    return Fault(file=name, episode=episode, cause=cause)
