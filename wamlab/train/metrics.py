"""One StepRecord a step in steps.jsonl, read from the device only at log steps.

Between two log steps losses, norms and flags stay on the device as tensors, and times as CUDA
events; a log step reads them all in one transfer. Numbers are already averaged over ranks, so that
every rank sees the same and rank 0 writes.
"""

import dataclasses
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from wamlab.config import UserError
from wamlab.dist import gather, print0, rank
from wamlab.measure import Timing, append_jsonl, mfu, peak_gib, read_jsonl

LOSSES = ("loss", "dynamics_loss", "action_loss")


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepRecord:
    """One optimizer step. `skipped` steps changed nothing; `bad` says which rank held which
    samples."""

    step: int
    loss: float
    dynamics_loss: float | None
    action_loss: float | None
    grad_norm: float
    lr: float
    step_ms: float
    data_wait_ms: float
    samples_per_s: float
    peak_gib: float
    tflops: float | None  # model TFLOP/s of one device
    mfu: float | None
    skipped: bool = False
    bad: list[dict[str, Any]] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepNumbers:
    """What a step leaves behind, all of it on the device but the last three."""

    losses: Tensor  # float64 [K]: means over the global batch in the order of LOSSES, NaN = none
    norm: Tensor
    bad: Tensor
    micro_losses: Tensor  # float32 [micro-batches], of this rank
    sample_ids: list[Tensor]  # one int64 tensor a micro-batch, of this rank
    lr: float
    data_wait_s: float


class NonFiniteError(UserError):
    """Too many consecutive steps had a non-finite loss or gradient."""


class StepLog:
    """Collects steps and writes them; see the module's docstring.

    Args:
        device: this rank's device.
        path: steps.jsonl, or None to write no file.
        global_batch: samples a step over all ranks.
        world_size: ranks.
        flops_per_sample: model FLOPs of forward and backward, or None.
        precision: for the MFU's peak.
        max_skipped: consecutive skipped steps that end the run.
        trackers: called with each StepRecord on rank 0.
    """

    def __init__(
        self,
        device: torch.device,
        path: Path | None,
        *,
        global_batch: int,
        world_size: int,
        flops_per_sample: float | None,
        precision: str,
        max_skipped: int = 10,
        trackers: Iterable[Callable[[StepRecord], None]] = (),
    ) -> None:
        self.device, self.path, self.precision = device, path, precision
        self.global_batch, self.world_size = global_batch, world_size
        self.flops = flops_per_sample and flops_per_sample * global_batch / world_size
        self.max_skipped, self.trackers = max_skipped, tuple(trackers)
        self.records: list[StepRecord] = []
        self._open: list[tuple[int, StepNumbers, Any, Any]] = []
        self._skipped = 0
        self.restart()

    @staticmethod
    def cut(path: Path, step: int) -> None:
        """Drop the lines of a steps file from `step` on: a resumed run writes them again."""
        if path.is_file():
            rows = [row for row in read_jsonl(path) if row["step"] < step]
            path.unlink()
            append_jsonl(path, rows)

    def restart(self) -> None:
        """Start the next step's time now: what came since the last step was no training."""
        self._begin = self._mark()

    def end_step(self, step: int, numbers: StepNumbers) -> None:
        """Note one step without waiting for the device."""
        end = self._mark()
        self._open.append((step, numbers, self._begin, end))
        self._begin = end

    def flush(self, last_good: str | None = None) -> list[StepRecord]:
        """Read all noted steps from the device, write them on rank 0 and return them on every rank.

        Raises:
            NonFiniteError: `max_skipped` steps in a row were skipped; names the last good
                checkpoint.
        """
        if not self._open:
            return []
        rows = [
            torch.cat([n.losses, torch.stack([n.norm, n.bad]).double()])
            for _, n, _, _ in self._open
        ]
        values = torch.stack(rows).tolist()  # the one wait for the device
        new = [self._record(*noted, row) for noted, row in zip(self._open, values)]
        self._open.clear()
        self.records += new
        if rank() == 0:
            if self.path:
                append_jsonl(self.path, new)
            for tracker in self.trackers:
                for record in new:
                    tracker(record)
        self._check_skipped(new, last_good)
        return new

    def discard(self) -> None:
        """Forget the steps noted since the last flush: they were timed part by part, not run."""
        self._open.clear()

    def summary(self, records: Sequence[StepRecord]) -> dict[str, Any]:
        """Return the fields of a Record that steps give: times, rates, memory, data wait.

        The peak memory is the largest of all ranks. Every rank must call this.
        """
        peak = max(gather(max((r.peak_gib for r in records), default=0.0)))
        if not records:
            return {}
        timing = Timing.of([r.step_ms for r in records])
        rate = self.global_batch / timing.median * 1e3
        mfus = [r.mfu for r in records if r.mfu is not None]
        waits, times = [r.data_wait_ms for r in records], [r.step_ms for r in records]
        return {
            "step_ms": timing,
            "samples_per_s": rate,
            "samples_per_s_per_gpu": rate / self.world_size,
            "mfu": sum(mfus) / len(mfus) if mfus else None,
            "peak_gib": peak,
            "data_wait_share": sum(waits) / sum(times),
        }

    def _mark(self) -> Any:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _record(
        self, step: int, numbers: StepNumbers, begin: Any, end: Any, row: list[float]
    ) -> StepRecord:
        if self.device.type == "cuda":
            step_ms = begin.elapsed_time(end)
        else:
            step_ms = (end - begin) * 1e3
        loss, dynamics, action, norm, bad = row
        return StepRecord(
            step=step,
            loss=loss,
            dynamics_loss=None if dynamics != dynamics and loss == loss else dynamics,
            action_loss=None if action != action and loss == loss else action,
            grad_norm=norm,
            lr=numbers.lr,
            step_ms=step_ms,
            data_wait_ms=numbers.data_wait_s * 1e3,
            samples_per_s=self.global_batch / step_ms * 1e3,
            peak_gib=peak_gib(self.device),
            tflops=self.flops and self.flops / step_ms / 1e9,
            mfu=self.flops and mfu(self.flops, step_ms / 1e3, self.device, self.precision),
            skipped=bool(bad),
            bad=_who(numbers) if bad else None,
        )

    def _check_skipped(self, new: list[StepRecord], last_good: str | None) -> None:
        for record in new:
            self._skipped = self._skipped + 1 if record.skipped else 0
            if self._skipped >= self.max_skipped:
                where = last_good or "none was saved"
                raise NonFiniteError(
                    f"step {record.step}: the loss or a gradient was not finite in {self._skipped} "
                    f"steps in a row; ranks and samples stand in steps.jsonl (last: {record.bad}); "
                    f"last good checkpoint: {where}"
                )


def _who(numbers: StepNumbers) -> list[dict[str, Any]]:
    """Return, from every rank, the samples of the micro-batches whose own loss is not finite.

    Where every loss is finite the fault lies in a gradient, and all the step's samples are named.
    """
    finite = torch.isfinite(numbers.micro_losses).tolist()
    everywhere = torch.cat(numbers.sample_ids).tolist()
    ids = [i for part, ok in zip(numbers.sample_ids, finite) if not ok for i in part.tolist()]
    found = gather({"rank": rank(), "sample_ids": ids, "all": everywhere})
    named = [{"rank": f["rank"], "sample_ids": f["sample_ids"]} for f in found if f["sample_ids"]]
    return named or [{"rank": f["rank"], "sample_ids": f["all"]} for f in found]


def console(folder: Path | None) -> Callable[[StepRecord], None]:
    """Return a tracker that prints one line a step."""

    def track(record: StepRecord) -> None:
        wait = record.data_wait_ms / record.step_ms
        print0(
            f"step {record.step:>6}  loss {record.loss:8.5f}  norm {record.grad_norm:8.3f}  "
            f"lr {record.lr:.2e}  {record.step_ms:8.1f} ms  {record.samples_per_s:7.2f} samples/s  "
            f"data wait {wait:4.0%}  {record.peak_gib:6.2f} GiB" + "  SKIPPED" * record.skipped
        )

    return track


def tensorboard(folder: Path) -> Callable[[StepRecord], None]:
    """Return a tracker that writes TensorBoard scalars (extra `trackers`)."""
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(folder)

    def track(record: StepRecord) -> None:
        for key, value in dataclasses.asdict(record).items():
            if isinstance(value, float):
                writer.add_scalar(key, value, record.step)
        writer.flush()

    return track


def wandb(folder: Path) -> Callable[[StepRecord], None]:
    """Return a tracker that logs to Weights & Biases (`pip install wandb`)."""
    import wandb as client

    run = client.init(dir=str(folder))
    return lambda record: run.log(dataclasses.asdict(record), step=record.step)


TRACKERS: dict[str, Callable[[Any], Callable[[StepRecord], None]]] = {
    "console": console,
    "tensorboard": tensorboard,
    "wandb": wandb,
}
