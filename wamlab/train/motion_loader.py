"""Batches of motion windows for the trainer: parsed, packed, prefetched or resident on the device.

Which windows a step sees follows from (seed, step) alone, as everywhere in wamlab; the arms differ
in where the numbers come from and in who waits for whom.
"""

import contextlib
import dataclasses
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from wamlab.config import ConfigError
from wamlab.data.loader import Ahead
from wamlab.data.sampler import permuted, share_of
from wamlab.draws import Draws
from wamlab.motion.augment import AugmentConfig, Window, augment
from wamlab.motion.windows import Windows, bvh_files


@dataclasses.dataclass(frozen=True, kw_only=True)
class MotionData:
    """What to train on and how to read it; the defaults are the slow way of naive code."""

    folder: str = "data_samples/mocap"
    rate: float = 60.0  # Hz
    frames: int = 32  # a window
    held_out: int = 1  # last files of the folder, for validation
    source: Literal["text", "packed", "resident"] = "text"  # text: parse the file at every access
    prefetch: int = 0  # batches that a thread prepares ahead
    augment: Literal["none", "loader", "device"] = "loader"  # loader: one window at a time
    train: bool = True

    def __post_init__(self) -> None:
        if self.prefetch < 0 or self.held_out < 0:
            raise ConfigError(
                f"prefetch {self.prefetch} and held_out {self.held_out} must be 0 or more"
            )
        if self.source == "resident" and (self.prefetch or self.augment == "loader"):
            raise ConfigError("resident windows are on the device: no prefetch, no loader augment")


def open_windows(data: MotionData) -> Windows:
    """Open the windows of the training files, or with `train=False` those held out.

    Raises:
        ConfigError: no file is left to train on.
    """
    paths = bvh_files(data.folder)
    if data.held_out >= len(paths):
        raise ConfigError(f"{data.folder} has {len(paths)} files, {data.held_out} are held out")
    cut = len(paths) - data.held_out
    cache = Path(data.folder) / ".wamlab"
    cache.mkdir(exist_ok=True)
    (cache / ".gitignore").write_text("*\n")
    chosen = paths[:cut] if data.train else paths[cut:]
    return Windows(chosen, data.frames, data.rate, packed=cache, parse=data.source == "text")


class MotionLoader:
    """An endless iterator over this rank's micro-batches, on the device.

    A batch holds the fields of `Window`, `sample_id` int64 [B], and `seen` bool [B, J] where the
    loader augmented it. `wait_s` adds up the seconds that `next` took.

    Args:
        data: how to read.
        amounts: of augmentation.
        windows: opened by `open_windows`.
        global_batch, micro_batch, seed, rank, world_size, device, start_step: see data/loader.py.
    """

    def __init__(
        self,
        data: MotionData,
        amounts: AugmentConfig,
        windows: Windows,
        *,
        global_batch: int,
        micro_batch: int,
        seed: int,
        rank: int = 0,
        world_size: int = 1,
        device: torch.device | str = "cpu",
        start_step: int = 0,
    ) -> None:
        self.data, self.amounts, self.windows = data, amounts, windows
        self.batch, self.micro, self.seed = global_batch, micro_batch, seed
        share = share_of(global_batch, micro_batch, world_size)
        self.share = slice(rank * share, (rank + 1) * share)
        self.device, self.step, self.wait_s = torch.device(device), start_step, 0.0
        self.pin = self.device.type == "cuda" and data.prefetch > 0
        self.stream = torch.cuda.Stream(self.device) if self.pin else None
        if data.source == "resident":
            self.resident = windows.batch(range(len(windows))).to(self.device)
        self._batches = self._read()
        self._ahead = Ahead(self._batches, data.prefetch) if data.prefetch else None

    def ids_of_step(self, step: int) -> np.ndarray:
        """Return the windows of one step over all ranks: shuffled epochs, int64 [global_batch]."""
        places = np.arange(step * self.batch, (step + 1) * self.batch)
        size = len(self.windows)
        return permuted(places % size, size, self.seed, places // size)

    def __iter__(self) -> "MotionLoader":
        return self

    def __next__(self) -> dict[str, Tensor]:
        start = time.perf_counter()
        batch, arrived = self._ahead.get() if self._ahead else next(self._batches)
        if arrived is not None:
            stream = torch.cuda.current_stream(self.device)
            stream.wait_event(arrived)
            for value in batch.values():
                value.record_stream(stream)
        self.wait_s += time.perf_counter() - start
        return batch

    def _read(self) -> Iterator[tuple[dict[str, Tensor], Any]]:
        step = self.step
        while True:
            ids = torch.from_numpy(self.ids_of_step(step)[self.share])
            for part in ids.split(self.micro):
                yield self._to_device(self._one(part, step))
            step += 1

    def _one(self, ids: Tensor, step: int) -> dict[str, Tensor]:
        if self.data.source == "resident":
            ids = ids.to(self.device)
            return {**Window(*(x[ids] for x in self.resident))._asdict(), "sample_id": ids}
        if self.data.augment != "loader":
            return {**self.windows.batch(ids.tolist())._asdict(), "sample_id": ids}
        made = [
            augment(self.windows.batch([i]), Draws(self.seed, step, ids[n : n + 1]), self.amounts)
            for n, i in enumerate(ids.tolist())
        ]
        window = Window(*(torch.cat(x) for x in zip(*(w for w, _ in made))))
        seen = torch.cat([s for _, s in made])
        return {**window._asdict(), "seen": seen, "sample_id": ids}

    def _to_device(self, batch: dict[str, Tensor]) -> tuple[dict[str, Tensor], Any]:
        with torch.cuda.stream(self.stream) if self.stream else contextlib.nullcontext():
            if self.pin:
                batch = {k: v.pin_memory() for k, v in batch.items()}
            batch = {k: v.to(self.device, non_blocking=self.pin) for k, v in batch.items()}
            return batch, self.stream.record_event() if self.stream else None

    def close(self) -> None:
        """End the thread."""
        if self._ahead:
            self._ahead.close()
