"""What every video decoder shares: from times to frames, their order, the device, forks."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import av
import numpy as np
import torch

from wamlab.config import UserError
from wamlab.data.container import VideoError
from wamlab.data.frame_times import frame_times

_inherited: list[dict[str, Any]] = []


class VideoDecoder:
    """Times to frames, order, device, and a fresh file handle after a fork.

    A back end opens the file in `_open` and returns wanted frames in `_decode`.

    Args:
        path: the video file.
        device: where frames are returned.
        start_s, end_s: the part of the file that is read, an episode: seconds from the first shown
            frame; `end_s` None reads to its end.
        threads: FFmpeg threads.

    Raises:
        VideoError: the file cannot be read exactly, or does not cover the part.
    """

    name: ClassVar[str]  # its row in DECODERS
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
        self._pid = self._file = None

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
        wanted, inverse = np.unique(index, return_inverse=True)
        if not len(wanted):
            size = (0, 3, self.times.height, self.times.width)
            return torch.empty(size, dtype=torch.uint8, device=self.device)
        try:
            if self._pid != os.getpid():
                self._leave_inherited()
                self._open()
                self._pid = os.getpid()
            frames = self._decode(wanted).to(self.device)
        except UserError:
            self._pid = None  # the next call starts from a fresh handle
            raise
        except (av.error.FFmpegError, RuntimeError, ValueError, IndexError, OSError) as error:
            self._pid = None
            raise self._error(str(error).strip().partition("\n")[0]) from error
        if np.array_equal(wanted, index):
            return frames
        return frames[torch.from_numpy(inverse).to(frames.device)]

    def _leave_inherited(self) -> None:
        """Leave a handle that a fork copied: its file offset is shared with the parent.

        It is kept unused, because freeing it can wait for threads that only the parent has.
        """
        if self._pid is not None:
            _inherited.append(dict(vars(self)))

    def close(self) -> None:
        """Drop the open file; further calls open it again."""
        self._pid = self._file = None

    def _open(self) -> None:
        raise NotImplementedError

    def _decode(self, wanted: np.ndarray) -> torch.Tensor:
        """Return uint8 [n, C, H, W], upright, of the frames `wanted` (ascending, no repeats)."""
        raise NotImplementedError

    def _pts(self, index: int) -> int:
        return int(self.times.pts[index + self.times.lead])

    def _prove(self, wanted: np.ndarray, got_s: np.ndarray, expected_s: np.ndarray) -> None:
        """Refuse frames whose own times are not those of `wanted` to a quarter of a frame."""
        far = np.abs(got_s - expected_s[wanted]) > self.times.frame_s / 4
        if far.any():
            asked = self.times.seconds[wanted[far][0]]
            raise self._error(f"the frame at {asked:.6g} s is missing")

    def _upright(self, frames_THWC: np.ndarray) -> torch.Tensor:
        turned = np.rot90(frames_THWC, self.times.rotation // 90, axes=(1, 2))
        return torch.from_numpy(np.ascontiguousarray(turned)).permute(0, 3, 1, 2)

    def _error(self, why: str) -> VideoError:
        return VideoError(f"{self.path}: {self.name} cannot decode it exactly: {why}")
