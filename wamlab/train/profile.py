"""Where the steps of a run spend their time, on every rank: parts over many steps, a trace of few.

The parts of a step are timed with a wait at every boundary (a histogram over steps); what CPU, GPU
and network did at each moment comes from a trace without such waits.
"""

import contextlib
import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from wamlab.config import ConfigError, from_dict, replace
from wamlab.data.loader import Loader
from wamlab.dist import device as pick_device
from wamlab.dist import gather
from wamlab.measure import Record, StepClock, Timing, device_name, stamp
from wamlab.profiler import Marks, compiler_counts, marked_blocks, profile_steps
from wamlab.trace import StepSplit, merge_ranks, read_trace, split_steps, summarise
from wamlab.train.communication import training_group
from wamlab.train.config import TrainConfig
from wamlab.train.trainer import Trainer


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProfileConfig:
    """What to profile; the run itself is left as it is, but for its checkpoints and logs."""

    train: TrainConfig = dataclasses.field(default_factory=TrainConfig)
    out: str = "runs/profile"  # folder of the traces, one a rank
    warmup: int = 1  # steps before anything is timed: compilation, the first files
    steps: int = 8  # steps timed part by part
    active: int = 1  # steps in the trace, at most 3
    memory: bool = False  # the trace also holds every allocation of the CPU

    def __post_init__(self) -> None:
        if self.warmup < 0 or self.steps < 1:
            raise ConfigError(
                f"warmup {self.warmup} and steps {self.steps}: at least 0 and 1 are needed"
            )


def profile_run(config: ProfileConfig | Mapping[str, Any]) -> Record:
    """Profile a run on every rank of it; a target of `launch`.

    Args:
        config: a ProfileConfig or its JSON object.

    Returns:
        The record, see `profile_trainer`.
    """
    if not isinstance(config, ProfileConfig):
        config = from_dict(ProfileConfig, config)
    with training_group(pick_device(config.train.device), config.train.timeout_s):
        return profile_trainer(config)


def profile_trainer(
    config: ProfileConfig, model: nn.Module | None = None, loader: Any = Loader
) -> Record:
    """Profile a run inside its process group; arguments as of Trainer.

    Returns:
        Record of scope "profile" with `parts_ms` (medians), and beside it `parts_steps` (part -> ms
        of each step), `split` (see `trace.summarise`, of this rank), `compiler` (graphs compiled
        and broken while steps were timed), `ranks` (see `trace.merge_ranks`) and `traces` (paths).
    """
    quiet = replace(config.train, out=None, save_every=0, validate_every=0, validation=None)
    quiet = replace(quiet, export=False, trackers=())
    trainer = Trainer(quiet, model, loader)
    with contextlib.closing(trainer.loader):
        for _ in range(config.warmup):
            trainer.step()
        before, clock = compiler_counts(), StepClock(trainer.device)
        trainer.stepper.clock = clock
        for _ in range(config.steps):
            trainer.step()
            clock.end_step()
        counts = {k: n - before[k] for k, n in compiler_counts().items()}
        path = _trace(trainer, config)
        trainer.log.discard()
    splits = split_steps(read_trace(path))
    return _record(trainer, clock, splits, compiler=counts, path=path)


def _trace(trainer: Trainer, config: ProfileConfig) -> Path:
    trainer.stepper.clock = Marks()
    blocks = [] if trainer.plan.compile else trainer.model.blocks()
    with marked_blocks(blocks):
        return profile_steps(
            trainer.step,
            config.out,
            dev=trainer.device,
            warmup=1,
            active=config.active,
            memory=config.memory,
        )


def _record(
    trainer: Trainer,
    clock: StepClock,
    splits: list[StepSplit],
    *,
    compiler: dict[str, int],
    path: Path,
) -> Record:
    totals = [sum(step.values()) for step in clock.steps]
    summary, config = summarise(splits), trainer.config
    everywhere = gather({"totals": totals, "trace": str(path)})
    exposed = summary["exposed_comm_ms"]
    names = dict.fromkeys(name for step in clock.steps for name in step)
    record = Record(
        name=config.name,
        scope="profile",
        model=config.model.size if config.model else type(trainer.model).__name__,
        layers=config.model.layers if config.model else None,
        device=device_name(trainer.device),
        world_size=trainer.world,
        micro_batch=trainer.micro_batch,
        grad_accum=trainer.share // trainer.micro_batch,
        precision=config.precision,
        recompute=trainer.plan.recompute,
        global_batch=config.global_batch,
        optimizations=tuple(o.name for o in trainer.optimizations),
        step_ms=Timing.of(totals),
        parts_ms=clock.median_ms(),
        data_wait_share=clock.median_ms().get("data_wait", 0.0) / Timing.of(totals).median,
        exposed_comm_share=None if exposed is None else exposed / summary["step_ms"],
        extra={
            "parts_steps": {n: [step.get(n, 0.0) for step in clock.steps] for n in names},
            "split": summary,
            "compiler": compiler,
            "ranks": merge_ranks([row["totals"] for row in everywhere]),
            "traces": [row["trace"] for row in everywhere],
        },
    )
    return stamp(record)
