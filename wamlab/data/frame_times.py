"""Which frame stands at a time: one answer for every decoder.

A file is scanned once, by its packets: presentation time, keyframe, discard mark. A time in
seconds, counted from the first shown frame, goes to the nearest frame; no average rate and no
float32 time is ever used. A file that cannot be read exactly is refused by name, before any frame
of it is decoded.
"""

import collections
import dataclasses
import json
import os
import struct
import threading
from collections.abc import Sequence
from fractions import Fraction
from functools import cached_property
from pathlib import Path

import av
import numpy as np
import torch
from av.container import InputContainer

from wamlab.data.bitstream import h264_display_order, packet_check
from wamlab.data.container import VideoError, check_mp4, evenly_spaced, refuse_unreadable
from wamlab.data.matroska import check_matroska

# A pause longer than this many median frames is a hole: no frame stands for the times inside it.
HOLE = 4.0
CACHED_FRAMES = 4_000_000  # frames whose times are kept, about 70 MB


@dataclasses.dataclass(frozen=True, eq=False)
class FrameTimes:
    """The shown frames of a file in presentation order.

    `pts` int64 [N] in units of `time_base` seconds, strictly ascending; `key` bool [N], where
    decoding can start. The first `lead` entries are decoded but not shown (an edit list that starts
    inside a group of pictures). `rotation` is how far a decoded picture is turned counterclockwise
    to stand upright; `height` and `width` are those of the upright picture.
    """

    path: str
    pts: np.ndarray
    key: np.ndarray
    lead: int
    time_base: Fraction
    last_duration: int
    rotation: int
    height: int
    width: int
    codec: str
    stream: int

    def __len__(self) -> int:
        return len(self.pts) - self.lead

    @cached_property
    def seconds(self) -> np.ndarray:
        """Times of the shown frames, float64 [N], the first at 0."""
        shown = self.pts[self.lead :]
        return (shown - shown[0]) * float(self.time_base)

    @cached_property
    def absolute_s(self) -> np.ndarray:
        """Presentation times of the shown frames as the file counts them, float64 [N]."""
        return self.pts[self.lead :] * float(self.time_base)

    @cached_property
    def frame_s(self) -> float:
        """The median time between two frames, in seconds."""
        gaps = np.diff(self.seconds)
        return float(np.median(gaps)) if len(gaps) else self._last_s

    @property
    def _last_s(self) -> float:
        return max(self.last_duration, 1) * float(self.time_base)

    @property
    def end_s(self) -> float:
        """The time at which the last frame ends."""
        own = max([self._last_s, *np.diff(self.seconds[-2:])])
        return float(self.seconds[-1] + self._capped(own))

    def _capped(self, gap_s: np.ndarray | float) -> np.ndarray | float:
        return np.minimum(gap_s, HOLE * self.frame_s)

    def span(self, start_s: float, end_s: float | None) -> tuple[int, int]:
        """Return the first and last frame of the part from `start_s` to `end_s`, an episode.

        Raises:
            VideoError: the file does not cover it.
        """
        half = self.frame_s / 2
        to_s = self.end_s if end_s is None else end_s
        # tables add up measured lengths, so that they may end a frame later than the file
        if not (-half <= start_s < to_s <= self.end_s + 3 * half):
            raise VideoError(
                f"{self.path}: no part from {start_s:g} to {to_s:g} s: the file holds "
                f"0 to {self.end_s:.6g} s ({len(self)} frames)"
            )
        first = int(self._nearest(np.array([start_s]))[0])
        # a neighbour's first frame stands at end_s: leave out what begins half a frame before it
        last = int(np.searchsorted(self.seconds, to_s - half, side="left")) - 1
        return first, max(first, last) if end_s is not None else len(self) - 1

    def indices_at(
        self,
        times_s: Sequence[float] | torch.Tensor,
        start_s: float = 0.0,
        span: tuple | None = None,
    ) -> np.ndarray:
        """Return the frame nearest to each time.

        Args:
            times_s: seconds from `start_s`, [T], any order, repeats allowed.
            start_s: seconds from the first shown frame.
            span: first and last frame allowed, as `span` returns them; default the whole file.

        Returns:
            int64 [T], counted from the first shown frame.

        Raises:
            VideoError: a time is further than half a frame outside the span, or inside a hole of
                the file.
        """
        if isinstance(times_s, torch.Tensor):
            times_s = times_s.detach().cpu().numpy()
        asked = np.asarray(times_s, dtype=np.float64).reshape(-1)
        first, last = span or (0, len(self) - 1)
        index = np.clip(self._nearest(asked + start_s), first, last)
        low = self.seconds[first] - start_s
        end = self.seconds[last + 1] if last + 1 < len(self) else self.end_s
        high = self.seconds[last] + self._capped(end - self.seconds[last]) - start_s
        half = self.frame_s / 2 + 1e-6
        inside = (asked >= low - half) & (asked <= high + half)
        if not inside.all():
            bad = asked[~inside][0]
            raise VideoError(
                f"{self.path}: no frame at {bad:.6g} s: it holds {low:.6g} to {high:.6g} s "
                f"({last - first + 1} frames)"
            )
        self._refuse_holes(asked + start_s, index, start_s)
        return index

    def _nearest(self, times_s: np.ndarray) -> np.ndarray:
        right = np.clip(np.searchsorted(self.seconds, times_s), 0, len(self) - 1)
        left = np.maximum(right - 1, 0)
        closer = times_s - self.seconds[left] <= self.seconds[right] - times_s
        return np.where(closer, left, right)

    def _refuse_holes(self, times_s: np.ndarray, index: np.ndarray, start_s: float) -> None:
        inside = (times_s > self.seconds[0]) & (times_s < self.seconds[-1])
        far = inside & (np.abs(times_s - self.seconds[index]) > HOLE / 2 * self.frame_s + 1e-6)
        if far.any():
            time = times_s[far][0]
            right = int(np.searchsorted(self.seconds, time))
            raise VideoError(
                f"{self.path}: no frame at {time - start_s:.6g} s: it holds none between "
                f"{self.seconds[right - 1] - start_s:.6g} and {self.seconds[right] - start_s:.6g} s"
            )

    def seek_point(self, index: int) -> int:
        """Return the entry of `pts` from which decoding must start to show frame `index`."""
        entry = index + self.lead
        return entry - int(np.argmax(self.key[entry::-1]))

    def mapping(self, first: int, last: int) -> tuple[str, int]:
        """Return torchcodec's custom frame mapping of the frames `first` to `last`.

        Returns:
            The JSON text, and what to add to a frame's index to get its index in that mapping.
        """
        start, stop = self.seek_point(first), last + self.lead + 1
        durations = np.append(np.diff(self.pts), max(self.last_duration, 1))
        rows = zip(
            self.pts[start:stop].tolist(), durations[start:stop].tolist(), self.key[start:stop]
        )
        frames = [{"pts": p, "duration": d, "key_frame": int(k)} for p, d, k in rows]
        return json.dumps({"frames": frames}), self.lead - start


_cache: collections.OrderedDict[tuple, FrameTimes] = collections.OrderedDict()
_lock = threading.Lock()


def frame_times(path: str | Path) -> FrameTimes:
    """Return the frame times of a file, from memory if it has not changed since it was scanned.

    Raises:
        VideoError: missing, empty, a Git-LFS pointer, without an index, truncated, damaged, or
            without exact times.
    """
    path = os.fspath(path)
    try:
        stat = os.stat(path)
    except OSError as error:
        raise VideoError(f"{path}: cannot be read: {error.strerror}") from error
    key = (os.path.abspath(path), stat.st_size, stat.st_mtime_ns)
    with _lock:
        if key in _cache:
            _cache.move_to_end(key)
            return _cache[key]
    times = _scan(path)
    with _lock:
        _cache[key] = times
        while len(_cache) > 1 and sum(len(t.pts) for t in _cache.values()) > CACHED_FRAMES:
            _cache.popitem(last=False)
    return times


def _scan(path: str) -> FrameTimes:
    refuse_unreadable(path)
    check_mp4(path)
    check_matroska(path)
    try:
        with av.open(path, options={"err_detect": "crccheck"}) as file:
            stream = file.streams.best("video")
            if stream is None or stream.codec_context is None:
                raise VideoError(f"{path}: holds no video that FFmpeg can decode")
            stream.thread_type, stream.codec_context.thread_count = "NONE", 1
            packets = [p for p in file.demux(stream) if p.size]
            _refuse_packets(path, stream, packets)
            _refuse_times(path, stream, packets)
            file.seek(0, backward=True)
            picture = _first_picture(file, stream, path)
            return _assemble(path, stream, packets, picture)
    except VideoError:
        raise
    except (av.error.FFmpegError, ValueError, OSError) as error:
        raise VideoError(f"{path}: not a readable video ({error})") from error


def _refuse_packets(path: str, stream: av.VideoStream, packets: list[av.Packet]) -> None:
    """Refuse packets that were cut or carry no time."""
    readable = sum(not p.is_corrupt for p in packets)
    if not packets or readable < len(packets):
        raise VideoError(f"{path}: damaged: {readable} of {len(packets)} frames are readable")
    codec = stream.codec_context
    check = packet_check(codec.codec.canonical_name, codec.extradata)
    for number, packet in enumerate(packets):
        if packet.pts is None:
            raise VideoError(f"{path}: frame {number} carries no presentation time")
        try:
            if check is not None:
                check(bytes(packet))
        except ValueError as error:
            raise VideoError(
                f"{path}: damaged at frame {number} of {len(packets)} in decoding order: {error}"
            ) from error


def _refuse_times(path: str, stream: av.VideoStream, packets: list[av.Packet]) -> None:
    """Refuse presentation times that contradict the decoding times or the pictures themselves."""
    pts = np.array([p.pts for p in packets])
    dts = np.array([p.pts if p.dts is None else p.dts for p in packets])
    steps = np.diff(dts)
    if stream.frames == 0 and "mp4" in stream.container.format.name:  # fragments have own clocks
        late = np.abs(steps - [p.duration or 0 for p in packets[:-1]]) > 1
        if late.any():
            at = float(dts[int(np.argmax(late))] * stream.time_base)
            raise VideoError(f"{path}: damaged: its fragments do not follow each other at {at:g} s")
    even = len(steps) > 1 and steps[0] > 0 and (steps == steps[0]).all()
    if even and not evenly_spaced(pts, float(steps[0])):
        raise VideoError(f"{path}: damaged: decoded evenly, its frames show at uneven times")
    codec = stream.codec_context
    if codec.codec.canonical_name == "h264":
        order = h264_display_order(codec.extradata, [bytes(p) for p in packets])
        if order and sorted(range(len(pts)), key=order.__getitem__) != np.argsort(pts).tolist():
            raise VideoError(f"{path}: damaged: its times contradict the order of its pictures")


def _first_picture(file: InputContainer, stream: av.VideoStream, path: str) -> av.VideoFrame:
    for frame in file.decode(stream):
        return frame
    raise VideoError(f"{path}: no frame can be decoded")


def _assemble(
    path: str, stream: av.VideoStream, packets: list[av.Packet], picture: av.VideoFrame
) -> FrameTimes:
    shown = np.array([not p.is_discard for p in packets])
    pts, key = np.array([p.pts for p in packets]), np.array([p.is_keyframe for p in packets])
    first = pts[shown].min()
    keep = shown | (pts < first)
    order = np.argsort(pts[keep], kind="stable")
    pts, key = pts[keep][order], key[keep][order]
    if (np.diff(pts) == 0).any():
        raise VideoError(f"{path}: two frames share one presentation time")
    last = max((p for p in packets), key=lambda p: p.pts)
    rotation = _rotation(picture, path)
    height, width = picture.height, picture.width
    if rotation in (90, 270):
        height, width = width, height
    return FrameTimes(
        path=path,
        pts=pts,
        key=key,
        lead=int((pts < first).sum()),
        time_base=stream.time_base,
        last_duration=last.duration or 0,
        rotation=rotation,
        height=height,
        width=width,
        codec=stream.codec_context.codec.canonical_name,
        stream=stream.index,
    )


def _rotation(picture: av.VideoFrame, path: str) -> int:
    """Return the counterclockwise turn that the display matrix asks for.

    The matrix is 9 fixed-point numbers, row by row; the upper left 2 x 2 part turns the picture.
    """
    for data in picture.side_data:
        if data.type.name == "DISPLAYMATRIX":
            a, b, _, c, d, *_ = struct.unpack("<9i", bytes(data))
            turns = {(1, 0, 0, 1): 0, (0, -1, 1, 0): 90, (-1, 0, 0, -1): 180, (0, 1, -1, 0): 270}
            unit = max(abs(a), abs(b), 1)
            turn = turns.get(tuple(v / unit for v in (a, b, c, d)))
            if turn is None:
                raise VideoError(f"{path}: its display matrix is no turn by 90, 180 or 270 degrees")
            return turn
    return 0
