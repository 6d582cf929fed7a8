"""Experiments of notebook 02: the operations of a training step, one by one, with what each costs.

FLOPs and bytes are those that the mathematics asks for: every input read once, every output
written once. An operation made of several kernels moves more: a low point on the roofline.

Shapes: T tokens, D width, H heads, K head width, Q queries.
"""

import time
from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

from wamlab.jupyter.roofline import Cost
from wamlab.measure import Record, measure_ms
from wamlab.model import reference
from wamlab.model.attention import Layout
from wamlab.model.dit import DiTConfig


def step_ops(config: DiTConfig, layout: Layout, dev: torch.device) -> dict[str, Cost]:
    """Return operations of one block at their true shapes, as the public code runs them.

    Returns:
        Name -> (call, FLOPs, least bytes), for `roofline.measure_op`; float32.
    """
    T, D, H, wide = layout.tokens, config.dim, config.num_heads, config.ffn_dim
    x, rows = torch.randn(1, T, D, device=dev), torch.randn(1, T, D, device=dev)
    up, square = torch.randn(wide, D, device=dev), torch.randn(D, D, device=dev)
    ones, turn = torch.ones(D, device=dev), torch.randn(T, D // H // 2, device=dev)
    turn = reference.rotation(turn.double())
    heads = x.unflatten(-1, (H, -1))
    row = 4.0 * T * D  # bytes of one activation

    def rope() -> Tensor:
        return reference.norm_rope(x, ones, turn, H, eps=1e-6)

    def modulate() -> Tensor:
        return reference.norm_modulate(x, rows, rows, None, eps=1e-6)

    return {
        "up projection": (lambda: F.linear(x, up), 2.0 * T * D * wide, row + 4 * wide * (T + D)),
        "q projection": (lambda: F.linear(x, square), 2.0 * T * D * D, 2 * row + 4 * D * D),
        "norm + RoPE": (rope, 12.0 * T * D, 2 * row),
        "norm + modulate": (modulate, 9.0 * T * D, 4 * row),
        "gated residual": (lambda: x + rows * x, 2.0 * T * D, 4 * row),
        **_attention_ops(heads, layout),
    }


def _attention_ops(heads_1THK: Tensor, layout: Layout) -> dict[str, Cost]:
    """Return the smallest and the largest of a layer's attention calls."""
    found = {}
    q, width = heads_1THK.transpose(1, 2), heads_1THK.shape[2] * heads_1THK.shape[3]
    for group in (layout.groups()[-1], layout.groups()[-3]):
        keys = torch.cat([q[:, :, a:b] for a, b in group.keys], dim=2)
        queries = q[:, :, group.first : group.last]
        pairs = queries.shape[2] * keys.shape[2]
        least = 4.0 * width * (2 * queries.shape[2] + 2 * keys.shape[2])
        found[f"attention {group.name}"] = (
            lambda a=queries, b=keys: F.scaled_dot_product_attention(a, b, b),
            4.0 * pairs * width,
            least,
        )
    return found


def launch_us(dev: torch.device, calls: int = 2000) -> float:
    """Return what it costs to start one operation: microseconds of the host for each tiny one."""
    x = torch.ones(1, device=dev)
    for _ in range(calls):  # clocks and caches settle
        x = x + 1

    def run() -> None:
        y = x
        for _ in range(calls):
            y = y + 1

    start = time.perf_counter()
    run()  # a GPU is not waited for: its host only enqueues
    return (time.perf_counter() - start) / calls * 1e6


def time_of(runs: Mapping[str, Callable[[], object]], repeats: int = 3) -> dict[str, float]:
    """Return the median milliseconds of each call, after one that is not counted."""
    return {name: measure_ms(run, warmup=1, repeats=repeats).median for name, run in runs.items()}


def h200_costs(dit: list[Record], encode: list[Record]) -> dict[str, float]:
    """Return what committed records say of one official 5B sample on an H200, in milliseconds.

    The DiT at micro-batch 1, and one pass of the video encoder over one sample.
    """
    official = next(
        r
        for r in dit
        if (r.name, r.model, r.micro_batch) == ("official", "dreamzero-5b", 1) and r.step_ms
    )
    vae = next(r for r in encode if (r.name, r.model) == ("official", "wan2.2") and r.step_ms)
    one = vae.step_ms.median / vae.micro_batch
    return {"DiT, forward and backward": official.step_ms.median, "VAE, used": one, "VAE, y": one}
