"""One operation of a block alone, forward and backward: written plainly, compiled, and by hand."""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from wamlab.config import ConfigError, check_least, lookup, replace
from wamlab.measure import Record, device_name, measure_ms, stamp
from wamlab.model.dit import MODEL_SIZES, ModelOptions
from wamlab.model.plan import OPERATIONS
from wamlab.train.bench_dit import layout_of

# operation -> how often forward and backward read or write a whole activation, at the least
PASSES = {"norm_modulate": 5, "gated_residual": 6}


@dataclasses.dataclass(frozen=True, kw_only=True)
class OpCase:
    """One operation at the shapes of a model size."""

    op: str
    size: str = "tiny"
    micro_batch: int = 1
    precision: str = "fp32"
    device: str = "cpu"
    repeats: int = 20

    def __post_init__(self) -> None:
        lookup(PASSES, self.op, "operation")
        lookup(MODEL_SIZES, self.size, "model size")
        check_least(self, {"micro_batch": 1, "repeats": 1})


def measure_op(case: OpCase) -> list[Record]:
    """Time an operation in each way that this machine has.

    Returns:
        Records of scope "op": "reference" eager, "compiled" (`fused` through torch.compile), and
        "triton", with a `reason` where it cannot run. `gb_per_s` counts the bytes that must move;
        `largest_error` compares the gradients with reference's in float32.
    """
    expected = _gradients(case, "reference", torch.float32)
    return [_measure(case, way, expected) for way in ("reference", "compiled", "triton")]


def _measure(case: OpCase, way: str, expected: list[Tensor]) -> Record:
    dev = torch.device(case.device)
    about = {"scope": "op", "dimension": "compute", "model": case.size}
    about |= {"device": device_name(dev), "micro_batch": case.micro_batch}
    about |= {"precision": case.precision}
    if way == "triton" and (reason := _why_not_triton(dev)):
        return stamp(Record(name=f"{case.op}, {way}", reason=reason, **about))
    dtype = torch.bfloat16 if case.precision == "bf16" else torch.float32
    inputs, run = _build(case, way, dtype)
    timing = measure_ms(run, dev=dev, repeats=case.repeats)
    found = _gradients(case, way, dtype)
    error = max(
        ((a.float() - b).norm() / b.norm()).item() for a, b in zip(found, expected, strict=True)
    )
    moved = PASSES[case.op] * inputs[0].nbytes
    extra = {"gb_per_s": moved / timing.median / 1e6, "largest_error": error}
    return stamp(Record(name=f"{case.op}, {way}", step_ms=timing, extra=extra, **about))


def _why_not_triton(dev: torch.device) -> str | None:
    if dev.type != "cuda":
        return "Triton kernels need a CUDA GPU to be timed"
    try:
        ModelOptions(impl="triton")
    except ConfigError as error:
        return str(error)
    return None


def _build(
    case: OpCase, way: str, dtype: torch.dtype
) -> tuple[list[Tensor], Callable[[], list[Tensor]]]:
    """Return the inputs, and a call that runs forward and backward and returns the gradients."""
    dev, config = torch.device(case.device), MODEL_SIZES[case.size]
    layout = layout_of(case.size)
    segment = layout.time_rows(coupled=True).to(dev)
    generator = torch.Generator().manual_seed(0)
    tables = 2 if case.op == "norm_modulate" else 1
    shapes = [(case.micro_batch, layout.tokens, config.dim)] * (3 - tables)
    shapes += [(case.micro_batch, int(segment.max()) + 1, config.dim)] * tables
    inputs = [torch.randn(s, generator=generator).to(dev, dtype).requires_grad_() for s in shapes]
    weights = torch.randn(shapes[0], generator=generator).to(dev, dtype)
    call = _call(case.op, way)

    def run() -> list[Tensor]:
        out = call(*inputs, segment)
        return list(torch.autograd.grad(out, inputs, weights))

    return inputs, run


def _call(op: str, way: str) -> Callable[..., Tensor]:
    ops = OPERATIONS[{"compiled": "fused"}.get(way, way)]
    extra: dict[str, Any] = {"eps": 1e-6} if op == "norm_modulate" else {}

    def call(*tensors: Tensor) -> Tensor:
        return getattr(ops, op)(*tensors, **extra)

    return torch.compile(call, fullgraph=True, dynamic=False) if way == "compiled" else call


def _gradients(case: OpCase, way: str, dtype: torch.dtype) -> list[Tensor]:
    one = replace(case, micro_batch=1)
    return [g.detach() for g in _build(one, way, dtype)[1]()]
