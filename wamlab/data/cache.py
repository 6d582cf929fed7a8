"""A bounded cache of open decoders, one a process.

An open decoder holds a file handle, buffers and its codec's reference pictures (a few MB at DROID's
size), so a cache without a bound grows until a worker runs out of handles or memory. This one keeps
the most recently used `size` of them, and never more than half of the handles that the process may
open. A decoder is lent to one thread at a time and used only in the process that opened it.
"""

import contextlib
import ctypes
import os
import resource
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence

import torch

from wamlab.config import ConfigError, lookup
from wamlab.data.decoder import VideoDecoder
from wamlab.data.metadata import VideoSpan
from wamlab.data.video import DECODERS

TRIM_EVERY = 32  # closed decoders
# Decoders that a fork copied. Freeing one in the child can wait forever for threads of the parent,
# so they are kept, unused, for the child's life.
_inherited: list[VideoDecoder] = []


class DecoderCache:
    """Opens decoders on demand and keeps the last ones used.

    Args:
        decoder: a key of DECODERS.
        size: decoders kept open; 0 opens a fresh one for every use, as the public code does.
        device: where frames are returned.
        threads: FFmpeg threads a decoder. One is right wherever several files are decoded at once.

    Raises:
        ConfigError: an unknown decoder, or a negative size.
    """

    def __init__(
        self,
        decoder: str,
        *,
        size: int = 32,
        device: torch.device | str = "cpu",
        threads: int = 1,
    ) -> None:
        self._class = lookup(DECODERS, decoder, "decoder")
        if size < 0 or threads < 1:
            raise ConfigError(
                f"decoder cache: size {size} must be 0 or more, threads {threads} 1 or more"
            )
        self.decoder, self.size, self.device, self.threads = decoder, size, device, threads
        self._idle: OrderedDict[VideoSpan, VideoDecoder] = OrderedDict()
        self._start()

    def _start(self) -> None:
        _inherited.extend(self._idle.values())
        self.opened, self._closed = 0, 0
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._idle = OrderedDict()

    def __reduce__(self) -> tuple:
        return _rebuild, (self.decoder, self.size, self.device, self.threads)

    def __len__(self) -> int:
        return len(self._idle)

    @property
    def limit(self) -> int:
        """The most decoders kept open: `size`, or half of the process's file handles."""
        handles = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return self.size if handles == resource.RLIM_INFINITY else min(self.size, handles // 2)

    @contextlib.contextmanager
    def lend(self, span: VideoSpan) -> Iterator[VideoDecoder]:
        """Lend the decoder of a file, or of an episode's part of it; nobody else has it meanwhile.

        Raises:
            VideoError: the file cannot be read exactly.
        """
        if self._pid != os.getpid():  # forked: the parent's decoders share its file offsets
            self._start()
        with self._lock:
            decoder = self._idle.pop(span, None)
        if decoder is None:
            part = {"start_s": span.start_s, "end_s": span.end_s}
            decoder = self._class(span.path, device=self.device, threads=self.threads, **part)
            self.opened += 1
        try:
            yield decoder
        except BaseException:
            decoder.close()  # what it read is unknown: the next use opens the file again
            raise
        self._keep(span, decoder)

    def _keep(self, span: VideoSpan, decoder: VideoDecoder) -> None:
        with self._lock:
            over = [self._idle.pop(span)] if span in self._idle else []  # two threads, one file
            self._idle[span] = decoder
            while len(self._idle) > self.limit:
                over.append(self._idle.popitem(last=False)[1])
            self._closed += len(over)
            trim = over and self._closed % TRIM_EVERY < len(over)
        for old in over:
            old.close()
        if trim:
            _give_memory_back()

    def __call__(self, span: VideoSpan) -> "Borrowed":
        """Return what `WindowDataset` takes as an opened video."""
        return Borrowed(self, span)

    def close(self) -> None:
        """Close every idle decoder of this process."""
        if self._pid == os.getpid():
            with self._lock:
                idle, self._idle = self._idle, OrderedDict()
            for decoder in idle.values():
                decoder.close()


class Borrowed:
    """A part of a file whose decoder is borrowed from a cache for each call."""

    def __init__(self, cache: DecoderCache, span: VideoSpan) -> None:
        self.cache, self.span = cache, span

    def frames_at(self, timestamps_s: Sequence[float] | torch.Tensor) -> torch.Tensor:
        """Return uint8 [T, C, H, W], see `VideoDecoder.frames_at`."""
        with self.cache.lend(self.span) as decoder:
            return decoder.frames_at(timestamps_s)


def _give_memory_back() -> None:
    # glibc keeps what closed decoders freed between longer-lived blocks: measured on 2,000 clips of
    # 12 frames, the process grew by 50 KB a clip without this call, by nothing with it (7 ms each).
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _rebuild(decoder: str, size: int, device: torch.device | str, threads: int) -> DecoderCache:
    return DecoderCache(decoder, size=size, device=device, threads=threads)
