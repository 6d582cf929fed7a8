"""The optimizations, one frozen dataclass each.

`optimizations=()` is what the public training code does: `StepPlan()` and the defaults of the model
and the data. An entry edits the data's configuration (`apply_data`), the finished model from
outside (`apply_model`) or the plan of a step (`apply_step`), which wrap.py and the trainer carry
out.
"""

import dataclasses
import importlib.util
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
from torch import nn

from wamlab.config import ConfigError, UserError, from_dict, lookup, replace
from wamlab.measure import Dimension


class MissingNeedError(UserError):
    """An optimization needs what this machine lacks; a ladder writes the row as skipped, with this
    reason."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepPlan:
    """How a training step is computed; the defaults are the public way."""

    micro_batch: int | None = 1  # samples a rank computes at once; null = its whole share
    recompute: str = "full"  # none, selective, full, or every-K
    compile: bool = False
    optimizer: Literal["adamw", "fused", "split"] = "adamw"
    second_moment: Literal["fp32", "bf16"] = "bf16"  # of the split optimizer
    fsdp: "Fsdp2 | None" = None
    ddp: "Ddp | None" = None
    cuda_graph: bool = False


class Optimization:
    """What an entry may do; a subclass is a frozen dataclass that states what it needs.

    `options`, `data` and `plan` are the values it sets on the model, in the data configuration and
    in the plan; an entry whose values are its own parameters overrides the method instead.
    """

    name: ClassVar[str]
    dimension: ClassVar[Dimension]
    order: ClassVar[int]  # entries are applied in this order, whatever order they are listed in
    needs: ClassVar[tuple[str, ...]] = ()  # keys of NEEDS
    exact: ClassVar[bool] = False  # losses stay bitwise equal
    tolerance: ClassVar[float] = 1e-5  # else: allowed relative loss difference in fp32
    options: ClassVar[Mapping[str, Any]] = {}
    data: ClassVar[Mapping[str, Any]] = {}
    plan: ClassVar[Mapping[str, Any]] = {}

    def apply_data(self, data: Any) -> Any:
        """Return the data configuration with this optimization in it."""
        return replace(data, self.data)

    def apply_model(self, model: nn.Module) -> None:
        """Set this optimization's options on the finished, unwrapped model.

        Raises:
            ConfigError: the model has no such option.
        """
        if self.options and not hasattr(model, "set_option"):
            kind = type(model).__name__
            raise ConfigError(
                f"optimization {self.name!r} sets {self.options}, but {kind} has no options"
            )
        for option, value in self.options.items():
            model.set_option(option, value)

    def apply_step(self, plan: StepPlan) -> StepPlan:
        """Return the plan with this optimization in it."""
        return replace(plan, self.plan)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shortcuts(Optimization):
    """The network's exact shortcuts: what is computed twice, or for nothing, is not computed.

    Attributes:
        trim_last_block: False computes the last block whole, so that it shares the other blocks'
            compiled graphs: worth it where compiling takes longer than the training.
    """

    trim_last_block: bool = True
    name, dimension, order = "shortcuts", "compute", 10
    options: ClassVar = {"shortcuts": True}

    def apply_model(self, model: nn.Module) -> None:
        """Set the shortcuts on the finished, unwrapped model."""
        super().apply_model(model)
        if not self.trim_last_block:
            model.set_option("trim_last_block", False)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compile(Optimization):
    """Fused operations, one block-masked attention, and torch.compile of each block as one
    graph."""

    attention: str = "auto"
    name, dimension, order, needs = "compile", "compute", 20, ("compiler",)
    tolerance = 1e-4
    plan: ClassVar = {"compile": True}

    def apply_model(self, model: nn.Module) -> None:
        """Choose the model's fused implementation where it has one; any model's blocks compile."""
        if hasattr(model, "set_option"):
            model.set_option("impl", "fused")
            model.set_option("attention", self.attention)
            model.set_option("compile_encoders", True)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Float8(Optimization):
    """The blocks' large matrix products in float8, by torchao: the loss differs by rounding."""

    recipe: Literal["tensorwise", "rowwise"] = "tensorwise"
    name, dimension, order, needs = "float8", "compute", 15, ("torchao", "float8")
    tolerance = 5e-2

    def apply_model(self, model: nn.Module) -> None:
        """Convert the linears of the model's blocks."""
        importlib.import_module("wamlab.train.float8").convert(model.blocks(), self.recipe)


@dataclasses.dataclass(frozen=True, kw_only=True)
class FusedAdamW(Optimization):
    """One optimizer kernel for all parameters, which clips and skips on the device."""

    name, dimension, order = "fused_adamw", "compute", 30
    plan: ClassVar = {"optimizer": "fused"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class CudaGraph(Optimization):
    """The whole step after the data, optimizer included, captured once and replayed."""

    name, dimension, order, needs = "cuda_graph", "compute", 90, ("cuda",)
    plan: ClassVar = {"cuda_graph": True}


@dataclasses.dataclass(frozen=True, kw_only=True)
class BatchedEncoders(Optimization):
    """Encoders over the whole micro-batch at once, and no VAE pass whose result is thrown away."""

    name, dimension, order = "batched_encoders", "parallel", 40
    options: ClassVar = {"batched_encoders": True, "skip_unused_y": True}


@dataclasses.dataclass(frozen=True, kw_only=True)
class PromptCache(Optimization):
    """Each distinct prompt is encoded once."""

    name, dimension, order = "prompt_cache", "parallel", 41
    options: ClassVar = {"prompt_cache": True}


@dataclasses.dataclass(frozen=True, kw_only=True)
class MicroBatch(Optimization):
    """Samples computed at once on a rank; null is the rank's whole share of the global batch."""

    size: int | None = None
    name, dimension, order = "micro_batch", "parallel", 50

    def __post_init__(self) -> None:
        if self.size is not None and self.size < 1:
            raise ConfigError(f"micro_batch.size must be at least 1 or null, got {self.size}")

    def apply_step(self, plan: StepPlan) -> StepPlan:
        """Set the plan's micro-batch."""
        return replace(plan, micro_batch=self.size)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recompute(Optimization):
    """Which blocks recompute their activations: none, selective, full, or every-K."""

    mode: str = "none"
    name, dimension, order, exact = "recompute", "parallel", 51, True

    def __post_init__(self) -> None:
        recompute_of(self.mode, 0)

    def apply_step(self, plan: StepPlan) -> StepPlan:
        """Set the plan's recompute mode."""
        return replace(plan, recompute=self.mode)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fsdp2(Optimization):
    """Parameters, gradients and optimizer state sharded by `fully_shard`, on one GPU too.

    Under bf16 the compute dtype is bf16 and the master weights stay float32. `keep_unsharded` last
    blocks keep their parameters between forward and backward (-1: all; the backward starts with the
    last). `prefetch` blocks are gathered ahead (0: FSDP2's own order). `defer_sync` reduces
    gradients once a step, not once a micro-batch, and costs unsharded gradients. `replicate` > 1 is
    HSDP: that many copies, each sharded; 0 asks the links. `reduce_dtype` is that of the sums,
    `scatter` what a gradient travels as to its float32 sum, `between` the same between the islands
    of HSDP, and `gather` what a weight travels as. float8 weights carry their rounding error into
    the next step's. `root` false leaves the root unwrapped: the mistake, to measure it.
    """

    keep_unsharded: int = 1
    prefetch: int = 1
    defer_sync: bool = False
    replicate: int = 1
    reduce_dtype: Literal["fp32", "bf16"] = "fp32"
    gather: Literal["same", "float8"] = "same"
    scatter: Literal["same", "bf16", "float8"] = "same"
    between: Literal["same", "bf16", "fp16"] = "same"
    root: bool = True
    name, dimension, order = "fsdp2", "parallel", 60

    def apply_step(self, plan: StepPlan) -> StepPlan:
        """Set the plan's sharding."""
        return replace(plan, fsdp=self)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ddp(Optimization):
    """Whole copies whose gradients are averaged bucket by bucket while the backward still runs.

    `wire` is what a gradient travels as: itself, rounded, `rank` columns and rows of each matrix
    (PowerSGD), or the `keep` share of largest entries (whose bytes are counted, not saved: an
    all-reduce sends zeros too). What was left out is sent with the next gradient
    (`error_feedback`). The first `start` share of the run is not compressed. `gate` chooses the
    `share` of (bucket, step) pairs that are: where the gradient changes much or little, where the
    batch moves much, at random, or always all of them.
    """

    bucket_mb: float = 25.0
    wire: Literal["same", "fp16", "bf16", "lowrank", "topk"] = "same"
    rank: int = 2
    keep: float = 0.05
    error_feedback: bool = True
    start: float = 0.1
    gate: Literal["always", "high", "low", "activity", "random"] = "always"
    share: float = 0.5
    name, dimension, order = "ddp", "communication", 62

    def __post_init__(self) -> None:
        for field in ("keep", "share"):
            if not 0.0 < getattr(self, field) <= 1.0:
                raise ConfigError(f"ddp.{field} is a share in (0, 1], got {getattr(self, field)}")
        if not 0.0 <= self.start < 1.0:
            raise ConfigError(f"ddp.start is a share of the steps in [0, 1), got {self.start}")
        if self.rank < 1 or self.bucket_mb <= 0:
            raise ConfigError(
                f"ddp needs rank >= 1 and bucket_mb > 0, got {self.rank} and {self.bucket_mb}"
            )

    def apply_step(self, plan: StepPlan) -> StepPlan:
        """Set the plan's gradient exchange."""
        if plan.fsdp:
            raise ConfigError(
                "ddp and fsdp2 both exchange gradients: list one; fsdp2 has `scatter`, `between` "
                "and `gather` for what travels"
            )
        return replace(plan, ddp=self)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SplitAdamW(Optimization):
    """bf16 parameters whose missing 16 bits lie beside them: 10 or 12 bytes a parameter, not 16."""

    second_moment: Literal["fp32", "bf16"] = "bf16"
    name, dimension, order = "split_adamw", "parallel", 61
    tolerance = 2e-2

    def apply_step(self, plan: StepPlan) -> StepPlan:
        """Set the plan's optimizer."""
        return replace(plan, optimizer="split", second_moment=self.second_moment)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Torchcodec(Optimization):
    """Only the wanted frames become RGB, decoded by torchcodec."""

    name, dimension, order, needs, exact = "torchcodec", "data", 70, ("torchcodec",), True
    data: ClassVar = {"decoder": "torchcodec", "decoder_cache": 32}


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeviceAugment(Optimization):
    """Crop, resize, jitter and grid of the whole micro-batch on the training device."""

    name, dimension, order = "device_augment", "data", 71
    tolerance = 2e-2  # pixels agree to 1/255
    data: ClassVar = {"augment": "device"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prefetch(Optimization):
    """Worker processes decode ahead, and the next micro-batches are already on the device."""

    workers: int = 2
    depth: int = 2
    name, dimension, order, exact = "prefetch", "data", 72, True

    def apply_data(self, data: Any) -> Any:
        """Set the loader's workers and depth."""
        return dataclasses.replace(data, workers=self.workers, prefetch=self.depth)


OPTIMIZATIONS: dict[str, type[Optimization]] = {
    cls.name: cls
    for cls in (
        *(Shortcuts, Float8, Compile, FusedAdamW, CudaGraph, BatchedEncoders, PromptCache),
        *(MicroBatch, Recompute, Fsdp2, SplitAdamW, Ddp, Torchcodec, DeviceAugment, Prefetch),
    )
}

NEEDS: dict[str, str] = {  # what an entry may need -> the cure where it is missing
    "compiler": "g++ (Debian, Ubuntu: `apt-get install g++`; on a GPU also gcc)",
    "cuda": "a CUDA GPU",
    "float8": "a CUDA GPU with float8 (Ada, Hopper or newer)",
    "torchao": "torchao (`pip install torchao`)",
    "torchcodec": "torchcodec (`pip install torchcodec`)",
}


def build_optimizations(entries: Sequence[str | dict[str, Any]]) -> tuple[Optimization, ...]:
    """Build the optimizations that a configuration names, in the order in which they are applied.

    Args:
        entries: names, or {"name": name, parameter: value}.

    Raises:
        ConfigError: an unknown name or parameter, or a name given twice.
    """
    built: dict[str, Optimization] = {}
    for entry in entries:
        values = {"name": entry} if isinstance(entry, str) else dict(entry)
        if "name" not in values:
            raise ConfigError(f'an optimization is a name or {{"name": ...}}, got {entry!r}')
        name = values.pop("name")
        if name in built:
            raise ConfigError(f"optimization {name!r} is listed twice")
        built[name] = from_dict(lookup(OPTIMIZATIONS, name, "optimization"), values)
    return tuple(sorted(built.values(), key=lambda o: o.order))


def build_plan(optimizations: Sequence[Optimization]) -> StepPlan:
    """Return the plan of a step with these optimizations in it, applied in the order given."""
    plan = StepPlan()
    for optimization in optimizations:
        plan = optimization.apply_step(plan)
    return plan


def tolerance(optimizations: Sequence[Optimization], precision: str) -> float:
    """Return the relative loss difference to the official row that these optimizations may
    cause."""
    if all(o.exact for o in optimizations):
        return 0.0
    if precision == "bf16":
        return 2e-2
    return sum(o.tolerance for o in optimizations if not o.exact)


def check_needs(optimizations: Sequence[Optimization], device: torch.device) -> None:
    """Refuse optimizations that this machine cannot run.

    Raises:
        MissingNeedError: naming the optimization, what it needs and where to get it.
    """
    found = {
        "compiler": shutil.which(os.environ.get("CXX", "g++")) is not None,
        "cuda": device.type == "cuda",
        "float8": device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9),
        **{p: importlib.util.find_spec(p) is not None for p in ("torchcodec", "torchao")},
    }
    for optimization in optimizations:
        for need in optimization.needs:
            if not found[need]:
                raise MissingNeedError(f"{optimization.name} needs {NEEDS[need]}")


def recompute_of(mode: str, index: int) -> str:
    """Return how block `index` recomputes: "none", "selective" or "full".

    Raises:
        ConfigError: an unknown mode.
    """
    if mode in ("none", "selective", "full"):
        return mode
    every = re.fullmatch(r"every-([1-9]\d*)", mode)
    if not every:
        raise ConfigError(
            f"recompute is none, selective, full or every-K (every-2, ...), got {mode!r}"
        )
    return "full" if index % int(every[1]) == 0 else "none"
