"""Hand-written Triton kernels for two operations of a block; everything else is `fused`'s.

Off unless asked for (`impl="triton"`); they stay only where a record shows that they beat the
compiled `fused` by 10 % (`wamlab bench dit --only norm_modulate`). A program takes a run of tokens
that share a row of the time table: it reads the row once, keeps whole tokens in registers, and in
the backward adds up the row's gradient as it goes. So that gradient needs no atomics, and two runs
give the same bits. TRITON_INTERPRET=1 runs them on a CPU, very slowly.

Shapes: see `reference`; C runs of tokens.
"""

import dataclasses
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from wamlab.model.fused import action_sinusoid as action_sinusoid
from wamlab.model.fused import gelu_tanh as gelu_tanh
from wamlab.model.fused import norm_rope as norm_rope
from wamlab.model.fused import patchify as patchify
from wamlab.model.fused import rms_norm as rms_norm
from wamlab.model.fused import rope as rope
from wamlab.model.fused import rotation as rotation
from wamlab.model.fused import time_sinusoid as time_sinusoid

PROGRAMS = 1024  # enough to fill a GPU: so many, of 4 to 32 tokens each, are aimed at


def norm_modulate(
    x_BTD: Tensor, shift_BGD: Tensor, scale_BGD: Tensor, segment_T: Tensor | None, *, eps: float
) -> Tensor:
    """See `reference.norm_modulate`."""
    assert segment_T is not None, "ModelOptions refuses triton without distinct_times"
    return _norm_modulate(x_BTD, shift_BGD, scale_BGD, segment_T, eps)


def gated_residual(
    x_BTD: Tensor, update_BTD: Tensor, gate_BGD: Tensor, segment_T: Tensor | None
) -> Tensor:
    """See `reference.gated_residual`."""
    assert segment_T is not None, "ModelOptions refuses triton without distinct_times"
    return _gated_residual(x_BTD, update_BTD, gate_BGD, segment_T)


@dataclasses.dataclass(frozen=True, eq=False)
class _Runs:
    """Tokens sorted by their row, cut into runs: run c is order[first:last] and reads row g."""

    segment: Tensor  # [T], kept, so that its address stays its own
    order: Tensor  # [T]
    table: Tensor  # [C, 3]: first, last, g
    bounds: Tensor  # [G + 1]: the runs of row g are bounds[g] to bounds[g + 1]


_RUNS: dict[tuple, _Runs] = {}


def _runs(segment_T: Tensor, batch: int, rows: int) -> _Runs:
    """Return the runs of a layout's segment, made once: layouts are constants."""
    length = min(max(batch * len(segment_T) // PROGRAMS, 4), 32)
    key = (segment_T.device, segment_T.data_ptr(), len(segment_T), rows, length)
    if key not in _RUNS:
        assert len(_RUNS) < 256, "a segment that is made anew in every call"
        order = torch.argsort(segment_T, stable=True)
        counts = torch.bincount(segment_T, minlength=rows).tolist()
        runs, bounds, first = [], [0], 0
        for g, count in enumerate(counts):
            last = first + count
            runs += [[a, min(a + length, last), g] for a in range(first, last, length)]
            bounds.append(len(runs))
            first = last
        made = {"dtype": torch.int32, "device": segment_T.device}
        tables = (torch.tensor(runs, **made), torch.tensor(bounds, **made))
        _RUNS[key] = _Runs(segment_T, order.int(), *tables)
    return _RUNS[key]


@triton.jit
def _norm_modulate_kernel(
    x, shift, scale, out, order, runs, T, D, eps, sb, sg, BLOCK: tl.constexpr
):  # fmt: skip
    """One run of tokens; sb and sg are the strides of the tables [B, G, D]."""
    c, b, d = tl.program_id(0), tl.program_id(1), tl.arange(0, BLOCK)
    first, last, g = tl.load(runs + 3 * c), tl.load(runs + 3 * c + 1), tl.load(runs + 3 * c + 2)
    inside, row = d < D, b * sb + g * sg
    add = tl.load(shift + row + d, mask=inside, other=0.0).to(tl.float32)
    times = 1.0 + tl.load(scale + row + d, mask=inside, other=0.0).to(tl.float32)
    for i in range(first, last):
        at = (b * T + tl.load(order + i)).to(tl.int64) * D + d
        v = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        v = tl.where(inside, v - tl.sum(v) / D, 0.0)
        v = v * tl.rsqrt(tl.sum(v * v) / D + eps)
        tl.store(out + at, (v * times + add).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _norm_modulate_grad_kernel(
    x, scale, grad, dx, sums, order, runs, T, D, C, eps, sb, sg, BLOCK: tl.constexpr
):  # fmt: skip
    c, b, d = tl.program_id(0), tl.program_id(1), tl.arange(0, BLOCK)
    first, last, g = tl.load(runs + 3 * c), tl.load(runs + 3 * c + 1), tl.load(runs + 3 * c + 2)
    inside = d < D
    times = 1.0 + tl.load(scale + b * sb + g * sg + d, mask=inside, other=0.0).to(tl.float32)
    of_shift, of_scale = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    for i in range(first, last):
        at = (b * T + tl.load(order + i)).to(tl.int64) * D + d
        v = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        v = tl.where(inside, v - tl.sum(v) / D, 0.0)
        root = tl.rsqrt(tl.sum(v * v) / D + eps)
        v = v * root
        u = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
        of_shift += u
        of_scale += u * v
        u = u * times
        u = root * (u - tl.sum(u) / D - v * (tl.sum(u * v) / D))
        tl.store(dx + at, u.to(dx.dtype.element_ty), mask=inside)
    at = (b * C + c).to(tl.int64) * 2 * D + d
    tl.store(sums + at, of_shift, mask=inside)
    tl.store(sums + at + D, of_scale, mask=inside)


@triton.jit
def _gated_residual_kernel(
    x, update, gate, out, order, runs, T, D, sb, sg, BLOCK: tl.constexpr
):  # fmt: skip
    c, b, d = tl.program_id(0), tl.program_id(1), tl.arange(0, BLOCK)
    first, last, g = tl.load(runs + 3 * c), tl.load(runs + 3 * c + 1), tl.load(runs + 3 * c + 2)
    inside = d < D
    times = tl.load(gate + b * sb + g * sg + d, mask=inside, other=0.0).to(tl.float32)
    for i in range(first, last):
        at = (b * T + tl.load(order + i)).to(tl.int64) * D + d
        v = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        u = tl.load(update + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(out + at, (v + u * times).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _gated_residual_grad_kernel(
    update, gate, grad, du, sums, order, runs, T, D, C, sb, sg, BLOCK: tl.constexpr
):  # fmt: skip
    c, b, d = tl.program_id(0), tl.program_id(1), tl.arange(0, BLOCK)
    first, last, g = tl.load(runs + 3 * c), tl.load(runs + 3 * c + 1), tl.load(runs + 3 * c + 2)
    inside = d < D
    times = tl.load(gate + b * sb + g * sg + d, mask=inside, other=0.0).to(tl.float32)
    of_gate = tl.zeros([BLOCK], tl.float32)
    for i in range(first, last):
        at = (b * T + tl.load(order + i)).to(tl.int64) * D + d
        v = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
        of_gate += v * tl.load(update + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(du + at, (v * times).to(du.dtype.element_ty), mask=inside)
    tl.store(sums + (b * C + c).to(tl.int64) * D + d, of_gate, mask=inside)


@triton.jit
def _add_runs_kernel(sums, out, bounds, D, C, N, BLOCK: tl.constexpr):
    """Add up each row's runs, always in one order: [B, C, N, D] -> [N, B, G, D]."""
    n, g, b = tl.program_id(0) % N, tl.program_id(1), tl.program_id(2)
    d = tl.program_id(0) // N * BLOCK + tl.arange(0, BLOCK)
    inside, total = d < D, tl.zeros([BLOCK], tl.float32)
    for c in range(tl.load(bounds + g), tl.load(bounds + g + 1)):
        total += tl.load(sums + ((b * C + c).to(tl.int64) * N + n) * D + d, mask=inside, other=0.0)
    row = (n * tl.num_programs(2) + b) * tl.num_programs(1) + g
    tl.store(out + row.to(tl.int64) * D + d, total.to(out.dtype.element_ty), mask=inside)


def _launch(width: int) -> dict[str, Any]:
    block = triton.next_power_of_2(width)
    return {"BLOCK": block, "num_warps": 4 if block <= 1024 else 8 if block <= 4096 else 16}


def _add_runs(sums_BCND: Tensor, runs: _Runs, dtype: torch.dtype) -> tuple[Tensor, ...]:
    B, C, N, D = sums_BCND.shape
    G, block = len(runs.bounds) - 1, 256
    out_NBGD = sums_BCND.new_empty(N, B, G, D, dtype=dtype)
    grid = (triton.cdiv(D, block) * N, G, B)
    _add_runs_kernel[grid](sums_BCND, out_NBGD, runs.bounds, D, C, N, BLOCK=block)
    return out_NBGD.unbind(0)


@torch.library.custom_op("wamlab::norm_modulate", mutates_args=())
def _norm_modulate(
    x: Tensor, shift: Tensor, scale: Tensor, segment: Tensor, eps: float
) -> Tensor:  # fmt: skip
    (B, T, D), x = x.shape, x.contiguous()
    shift, scale = _rows(shift, scale)
    runs, out = _runs(segment, B, shift.shape[1]), torch.empty_like(x)
    strides = (scale.stride(0), scale.stride(1))
    _norm_modulate_kernel[(len(runs.table), B)](
        x, shift, scale, out, runs.order, runs.table, T, D, eps, *strides, **_launch(D)
    )
    return out


@torch.library.custom_op("wamlab::norm_modulate_grad", mutates_args=())
def _norm_modulate_grad(
    grad: Tensor, x: Tensor, scale: Tensor, segment: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    (B, T, D), x, grad = x.shape, x.contiguous(), grad.contiguous()
    (scale,) = _rows(scale)
    runs, dx = _runs(segment, B, scale.shape[1]), torch.empty_like(x)
    sums = x.new_empty(B, len(runs.table), 2, D, dtype=torch.float32)
    tables = (runs.order, runs.table, T, D, sums.shape[1], eps)
    _norm_modulate_grad_kernel[(sums.shape[1], B)](
        x, scale, grad, dx, sums, *tables, scale.stride(0), scale.stride(1), **_launch(D)
    )
    d_shift, d_scale = (t.clone() for t in _add_runs(sums, runs, scale.dtype))
    return dx, d_shift, d_scale


@torch.library.custom_op("wamlab::gated_residual", mutates_args=())
def _gated_residual(x: Tensor, update: Tensor, gate: Tensor, segment: Tensor) -> Tensor:
    (B, T, D), x, update = x.shape, x.contiguous(), update.contiguous()
    (gate,) = _rows(gate)
    runs, out = _runs(segment, B, gate.shape[1]), torch.empty_like(x)
    strides = (gate.stride(0), gate.stride(1))
    _gated_residual_kernel[(len(runs.table), B)](
        x, update, gate, out, runs.order, runs.table, T, D, *strides, **_launch(D)
    )
    return out


@torch.library.custom_op("wamlab::gated_residual_grad", mutates_args=())
def _gated_residual_grad(
    grad: Tensor, update: Tensor, gate: Tensor, segment: Tensor
) -> tuple[Tensor, Tensor]:
    (B, T, D), update, grad = update.shape, update.contiguous(), grad.contiguous()
    (gate,) = _rows(gate)
    runs, du = _runs(segment, B, gate.shape[1]), torch.empty_like(update)
    sums = update.new_empty(B, len(runs.table), 1, D, dtype=torch.float32)
    tables = (runs.order, runs.table, T, D, sums.shape[1])
    _gated_residual_grad_kernel[(sums.shape[1], B)](
        update, gate, grad, du, sums, *tables, gate.stride(0), gate.stride(1), **_launch(D)
    )
    return du, _add_runs(sums, runs, gate.dtype)[0].clone()


def _rows(*tables_BGD: Tensor) -> tuple[Tensor, ...]:
    """Return tables of equal strides with contiguous rows; slices of one table stay as they are."""
    same = all(t.stride() == tables_BGD[0].stride() and t.stride(2) == 1 for t in tables_BGD)
    return tables_BGD if same else tuple(t.contiguous() for t in tables_BGD)


_norm_modulate.register_fake(lambda x, shift, scale, segment, eps: torch.empty_like(x))
_norm_modulate_grad.register_fake(
    lambda grad, x, scale, segment, eps: (
        torch.empty_like(x),
        scale.new_empty(scale.shape),
        scale.new_empty(scale.shape),
    )
)
_gated_residual.register_fake(lambda x, update, gate, segment: torch.empty_like(x))
_gated_residual_grad.register_fake(
    lambda grad, update, gate, segment: (torch.empty_like(update), gate.new_empty(gate.shape))
)


def _save_norm(ctx: Any, inputs: tuple, output: Tensor) -> None:
    x, _, scale, segment, ctx.eps = inputs
    ctx.save_for_backward(x, scale, segment)


def _norm_backward(ctx: Any, grad: Tensor) -> tuple:
    return *_norm_modulate_grad(grad, *ctx.saved_tensors, ctx.eps), None, None


def _save_gate(ctx: Any, inputs: tuple, output: Tensor) -> None:
    ctx.save_for_backward(*inputs[1:])


def _gate_backward(ctx: Any, grad: Tensor) -> tuple:
    return grad, *_gated_residual_grad(grad, *ctx.saved_tensors), None


_norm_modulate.register_autograd(_norm_backward, setup_context=_save_norm)
_gated_residual.register_autograd(_gate_backward, setup_context=_save_gate)
