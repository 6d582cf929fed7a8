"""TrainConfig, the one JSON file that repeats a run, and the presets of three kinds of machine."""

import dataclasses
from typing import Any, Literal

from wamlab.config import ConfigError, check_least, lookup
from wamlab.data.loader import DataConfig
from wamlab.model.lora import LoRAConfig
from wamlab.model.wam import WAMConfig
from wamlab.train.metrics import TRACKERS
from wamlab.train.optim import OptimConfig
from wamlab.train.optimizations import build_optimizations


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """A training run; the defaults are a CPU run that does what the public training code does.

    `model` and `data` may be null where a model and a loader are handed to the Trainer.
    """

    name: str = "train"
    model: WAMConfig | None = dataclasses.field(default_factory=WAMConfig)
    data: DataConfig | None = dataclasses.field(default_factory=DataConfig)
    policy: str | None = None  # start from a public policy checkpoint
    backbone: str | None = None  # start from a plain Wan backbone; what it lacks starts fresh
    lora: LoRAConfig | None = None  # train adapters and the action and state modules only
    optimizations: tuple[str | dict[str, Any], ...] = ()
    backend: Literal["torch", "deepspeed"] = "torch"  # deepspeed: the ZeRO-2 offload baseline
    optim: OptimConfig = dataclasses.field(default_factory=OptimConfig)
    steps: int = 7  # optimizer steps, warm-up included
    global_batch: int = 2  # samples a step, over all ranks
    seed: int = 0
    device: Literal["auto", "cpu", "cuda"] = "auto"
    precision: Literal["fp32", "bf16"] = "fp32"
    warmup_steps: int = 2  # first steps that the record's times leave out
    parts_steps: int = 0  # further steps, timed part by part; on a CPU the measured ones are timed
    wait_steps: int = 5  # rehearsed steps after a run of several ranks that measure the wait
    out: str | None = None  # run folder: steps.jsonl, run.json, checkpoints/
    log_every: int = 10  # steps between two reads of the device
    save_every: int = 0  # steps between two checkpoints; 0 saves none
    keep: int = 2  # complete checkpoints that stay
    export: bool = False  # write the weights under the public names at the end, to `out`/weights
    resume: bool = True  # go on from the newest complete checkpoint under `out`
    validate_every: int = 0
    validation: DataConfig | None = None
    validation_batches: int = 4
    max_skipped: int = 10  # steps in a row with a non-finite loss or gradient that end the run
    trackers: tuple[str, ...] = ()  # names of TRACKERS
    timeout_s: float = 600.0  # of one collective
    silence_s: float = 20.0  # without a heartbeat, after which another host of the run is lost

    def __post_init__(self) -> None:
        check_least(self, LEAST)
        if not 0 <= self.warmup_steps < self.steps:
            raise ConfigError(
                f"warmup_steps {self.warmup_steps} leaves none of the {self.steps} steps to measure"
            )
        if (self.save_every or self.export) and not self.out:
            raise ConfigError("save_every and export need `out`, the folder that they write to")
        if self.policy and self.backbone:
            raise ConfigError("policy and backbone both say where the weights start: set one")
        if bool(self.validate_every) != bool(self.validation):
            raise ConfigError("validate_every and validation go together: set both or neither")
        for name in self.trackers:
            lookup(TRACKERS, name, "tracker")
            if name != "console" and not self.out:
                raise ConfigError(f"tracker {name!r} needs `out`, the folder that it writes to")
        data = self.data
        for optimization in build_optimizations(self.optimizations):
            data = data and optimization.apply_data(data)  # refuses what the loader would


LEAST: dict[str, float] = {
    **dict.fromkeys(("steps", "global_batch", "log_every", "keep", "validation_batches"), 1),
    **dict.fromkeys(("seed", "parts_steps", "wait_steps", "save_every", "validate_every"), 0),
    **dict.fromkeys(("timeout_s", "silence_s", "max_skipped"), 0),
}

FULL = ("shortcuts", "compile", "fused_adamw", "batched_encoders", "prompt_cache", "micro_batch")

PRESETS: dict[str, TrainConfig] = {
    "cpu": TrainConfig(name="cpu", device="cpu"),
    "gpu": TrainConfig(
        name="gpu",
        model=WAMConfig(size="small"),
        device="cuda",
        precision="bf16",
        global_batch=8,
        optimizations=(*FULL, "recompute", "fsdp2", "device_augment", "prefetch"),
    ),
    "node": TrainConfig(
        name="node",
        model=WAMConfig(size="dreamzero-5b"),
        device="cuda",
        precision="bf16",
        global_batch=128,
        optimizations=(
            *FULL,
            {"name": "recompute", "mode": "selective"},
            "fsdp2",
            "split_adamw",
            "torchcodec",
            "device_augment",
            {"name": "prefetch", "workers": 4},
        ),
    ),
}
