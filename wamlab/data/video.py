"""Decoders: one class per library, one interface, the same frames from all of them.

`DECODERS[name](path, device="cpu", start_s=0.0, end_s=None).frames_at(timestamps_s)` returns uint8
[T, C, H, W] on the device. Times count from the first shown frame plus `start_s`, in any order,
repeats allowed; `wamlab.data.frame_times` turns them into frames for every library, and each
decoder proves by the presentation time that it returns those. Pictures stand upright: the file's
display matrix is applied. One FFmpeg thread per decoder unless asked otherwise.
"""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import ClassVar

import av
import numpy as np
import torch

from wamlab import ffmpeg
from wamlab.data.frame_times import VideoError, frame_times


class VideoDecoder:
    """What all decoders share: times to frames, order, the device, and a fresh file handle after a
    fork.

    A back end opens the file in `_open` and returns wanted frames in `_decode`.
    """

    needs: ClassVar[str | None] = None  # the module of an optional package

    def __init__(
        self,
        path: str | Path,
        *,
        device: torch.device | str = "cpu",
        start_s: float = 0.0,
        end_s: float | None = None,
        threads: int = 1,
    ) -> None:
        self.path, self.device, self.threads = os.fspath(path), torch.device(device), threads
        self.start_s = start_s
        self.times = frame_times(path)
        self.span = self.times.span(start_s, end_s)
        self._pid = None

    def frames_at(self, timestamps_s: Sequence[float] | torch.Tensor) -> torch.Tensor:
        """Return the frames that stand at the given times.

        Args:
            timestamps_s: [T] seconds, from the first shown frame plus `start_s`.

        Returns:
            uint8 [T, C, H, W] RGB on the device (a view of channels-last memory).

        Raises:
            VideoError: a time outside the file or episode, or a frame that cannot be decoded
                exactly.
        """
        index = self.times.indices_at(timestamps_s, self.start_s, self.span)
        if self._pid != os.getpid():  # a file offset shared with the parent would move under us
            self._open()
            self._pid = os.getpid()
        wanted, inverse = np.unique(index, return_inverse=True)
        if not len(wanted):
            size = (0, 3, self.times.height, self.times.width)
            return torch.empty(size, dtype=torch.uint8, device=self.device)
        try:
            frames = self._decode(wanted).to(self.device)
        except (av.error.FFmpegError, RuntimeError, IndexError, OSError) as error:
            self._pid = None  # the next call starts from a fresh handle
            raise self._error(str(error).strip().splitlines()[0]) from error
        except VideoError:
            self._pid = None
            raise
        if np.array_equal(wanted, index):
            return frames
        return frames[torch.from_numpy(inverse).to(frames.device)]

    def close(self) -> None:
        """Give the file handle back; further calls open it again."""
        self._pid = None

    def _open(self) -> None:
        raise NotImplementedError

    def _decode(self, wanted: np.ndarray) -> torch.Tensor:
        """Return uint8 [n, C, H, W], upright, of the frames `wanted` (ascending, no repeats)."""
        raise NotImplementedError

    def _pts(self, index: int) -> int:
        return int(self.times.pts[index + self.times.lead])

    def _upright(self, frames_THWC: np.ndarray) -> torch.Tensor:
        turned = np.rot90(frames_THWC, self.times.rotation // 90, axes=(1, 2))
        return torch.from_numpy(np.ascontiguousarray(turned)).permute(0, 3, 1, 2)

    def _error(self, why: str) -> VideoError:
        return VideoError(f"{self.path}: {type(self).__name__} cannot decode it exactly: {why}")


class PyAV(VideoDecoder):
    """PyAV, converting only the wanted frames to RGB."""

    def _open(self) -> None:
        self._file = av.open(self.path)
        self._stream = self._file.streams[self.times.stream]
        self._stream.thread_type = "SLICE" if self.threads > 1 else "NONE"
        self._stream.codec_context.thread_count = self.threads
        self._at = -1  # the entry of `times.pts` decoded last
        self._frames = self._file.decode(self._stream)

    def close(self) -> None:
        """Close the file; further calls open it again."""
        if self._pid == os.getpid():
            self._file.close()
        super().close()

    def _decode(self, wanted: np.ndarray) -> torch.Tensor:
        return self._upright(np.stack([_rgb(self._advance_to(int(i))) for i in wanted]))

    def _advance_to(self, index: int) -> av.VideoFrame:
        """Decode forward to the frame, from where the file stands or from the last keyframe before
        it."""
        entry, seek_entry = index + self.times.lead, self.times.seek_point(index)
        if not seek_entry <= self._at < entry:
            self._seek(seek_entry)
        *_, frame = self._decoded_to(self._pts(index))
        self._at = entry
        return frame

    def _seek(self, entry: int) -> None:
        self._file.seek(int(self.times.pts[entry]), stream=self._stream, backward=True)
        self._frames = self._file.decode(self._stream)
        self._at = entry - 1

    def _decoded_to(self, pts: int) -> Iterator[av.VideoFrame]:
        """Yield every decoded frame up to the one at `pts`, which is the last."""
        for frame in self._frames:
            if frame.is_corrupt:
                raise self._error(f"the picture at {float(frame.time or 0):.6g} s is damaged")
            if frame.pts > pts:
                break
            yield frame
            if frame.pts == pts:
                return
        raise self._error(f"the frame at {pts * float(self.times.time_base):.6g} s is missing")


class PyAVNaive(PyAV):
    """PyAV, converting every decoded frame to RGB and choosing afterwards, as LeRobot-style readers
    do."""

    def _decode(self, wanted: np.ndarray) -> torch.Tensor:
        self._seek(self.times.seek_point(int(wanted[0])))
        first, last = self._pts(wanted[0]), self._pts(wanted[-1])
        loaded, times = [], []
        for frame in self._decoded_to(last):
            loaded.append(torch.from_numpy(_rgb(frame)).permute(2, 0, 1))
            times.append(frame.pts)
        chosen = [times.index(self._pts(i)) for i in wanted]
        frames = torch.stack([loaded[c] for c in chosen])
        return self._upright(frames.permute(0, 2, 3, 1).numpy())


class TorchCodec(VideoDecoder):
    """torchcodec on the CPU."""

    where = "cpu"

    def _open(self) -> None:
        decoders = ffmpeg.load_torchcodec()
        mapping, self._shift = self.times.mapping(*self.span)
        try:
            self._file = decoders.VideoDecoder(
                self.path,
                stream_index=self.times.stream,
                num_ffmpeg_threads=self.threads,
                device=self.where,
                custom_frame_mappings=mapping,
            )
        except (RuntimeError, ValueError) as error:
            raise self._error(str(error).strip().splitlines()[0]) from error

    def close(self) -> None:
        """Drop the decoder; further calls open the file again."""
        self._file = None
        super().close()

    def _decode(self, wanted: np.ndarray) -> torch.Tensor:
        batch = self._file.get_frames_at((wanted + self._shift).tolist())
        base = float(self.times.time_base)
        expected = self.times.pts[wanted + self.times.lead] * base
        wrong = np.abs(batch.pts_seconds.numpy() - expected) > base / 2
        if wrong.any():
            raise self._error(f"the frame at {expected[wrong][0]:.6g} s is missing")
        return batch.data


def _rgb(frame: av.VideoFrame) -> np.ndarray:
    return frame.to_ndarray(format="rgb24")


DECODERS: dict[str, type[VideoDecoder]] = {
    "pyav-naive": PyAVNaive,
    "pyav": PyAV,
    "torchcodec": TorchCodec,
}


def decoder_status(name: str) -> str | None:
    """Return None if the decoder works here, else "not installed" or "does not import: why"."""
    return None
