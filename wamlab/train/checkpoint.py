"""Sharded, asynchronous checkpoints that are either whole or ignored.

    checkpoints/step_00000100/     one file a rank and .metadata, by torch.distributed.checkpoint
    checkpoints/step_00000100/complete.json     written last: without it the folder does not count

Only trained parameters and the optimizer's state are saved. Everything else of a run is a function
of (seed, step): sample ids, noise, times, augmentation, learning rate. So a run resumes from its
step number, on any number of ranks.
"""

import json
import shutil
import time
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from wamlab.config import save_json
from wamlab.dist import rank
from wamlab.model.stored import CheckpointError

MARKER = "complete.json"


class Checkpoints:
    """The checkpoints of one run; every rank makes the same calls, in a process group.

    Args:
        folder: where the step folders are.
        keep: how many complete checkpoints stay.
        device: this rank's; a GPU's state is staged through pinned memory.
    """

    def __init__(self, folder: str | Path, keep: int, device: torch.device) -> None:
        self.folder, self.keep = Path(folder), keep
        # its own group: the writer's thread must not mix its collectives with the training's
        self._group = dist.new_group(backend="gloo")
        self._stager = None
        if device.type == "cuda":
            self._stager = DefaultStager(StagingOptions(True, False, False, True))
        self._running: tuple[Future, Path, dict[str, Any], float] | None = None

    def save(self, state: Mapping[str, Tensor], step: int, meta: Mapping[str, Any]) -> None:
        """Copy the state and write it in the background; returns when the copy is made.

        A save that still runs is waited for first.

        Args:
            state: name -> tensor; a DTensor is saved shard by shard.
            step: the next optimizer step; names the folder.
            meta: JSON values for the marker.
        """
        self.wait()
        path = self.folder / f"step_{step:08d}"
        if rank() == 0:
            shutil.rmtree(path, ignore_errors=True)  # left by a run that was killed while writing
            path.mkdir(parents=True)
        dist.barrier(self._group)
        future = dcp.async_save(
            dict(state),
            checkpoint_id=path,
            process_group=self._group,
            async_stager=self._stager,
        )
        self._running = (future, path, {"step": step, **meta}, time.perf_counter())

    def poll(self) -> None:
        """Mark a save that has ended as complete and remove what is over; never waits.

        Raises:
            CheckpointError: the save failed.
        """
        if self._running and self._running[0].done():
            self._finish()

    def wait(self) -> None:
        """Wait for the save that runs, if any, and mark it; see `poll`."""
        if self._running:
            self._finish()

    def _finish(self) -> None:
        future, path, marker, start = self._running
        self._running = None
        try:
            future.result()
        except Exception as error:
            raise CheckpointError(
                f"checkpoint {path} could not be written: {error}; the last complete one is "
                f"{self.latest() or 'none'}; free disk space or choose another `out`"
            ) from error
        if rank() == 0:
            seconds = round(time.perf_counter() - start, 3)
            save_json({**marker, "seconds": seconds}, path / MARKER)
            self._prune()

    def _prune(self) -> None:
        complete = self.complete()
        kept = set(complete[-self.keep :])
        newest = complete[-1]
        for path in self.folder.glob("step_*"):
            if path not in kept and path <= newest:
                shutil.rmtree(path)

    def complete(self) -> list[Path]:
        """Return the complete checkpoints, oldest first."""
        return sorted(p.parent for p in self.folder.glob(f"step_*/{MARKER}"))

    def latest(self) -> Path | None:
        """Return the newest complete checkpoint."""
        return (self.complete() or [None])[-1]

    def close(self) -> None:
        """Wait for the save that runs, mark it and let the staging memory go."""
        self.wait()
        if self._stager is not None:
            self._stager.close()


def read_marker(path: Path) -> dict[str, Any]:
    """Return what a complete checkpoint's run noted beside it: `step` and the fields of its `meta`.

    Raises:
        CheckpointError: the checkpoint is not complete.
    """
    if not (path / MARKER).is_file():
        raise CheckpointError(f"{path} is not a complete checkpoint: it has no {MARKER}")
    return json.loads((path / MARKER).read_text())


def load(path: Path, state: Mapping[str, Tensor]) -> None:
    """Load a checkpoint into the tensors of `state`, in place, whatever ranks wrote it.

    Args:
        path: a complete checkpoint.
        state: name -> live tensor, with the names that were saved.

    Raises:
        CheckpointError: names or shapes that differ; checked before any tensor changes.
    """
    stored = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    _compare({n: tuple(m.size) for n, m in stored.items()}, state, path)
    dcp.load(dict(state), checkpoint_id=path)


def _compare(
    stored: Mapping[str, tuple[int, ...]], state: Mapping[str, Tensor], path: Path
) -> None:
    for what, names in (
        ("lacks", sorted(set(state) - set(stored))),
        ("has, but this run does not train,", sorted(set(stored) - set(state))),
    ):
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise CheckpointError(
                f"{path} {what} {', '.join(names[:3])}{more}: it was saved by a run of another "
                "model or optimizer; use its run.json, or a new `out`"
            )
    for name, tensor in state.items():
        if stored[name] != tuple(tensor.shape):
            raise CheckpointError(
                f"{path}: {name} has shape {stored[name]}, this run's has {tuple(tensor.shape)}"
            )
