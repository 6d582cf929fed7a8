"""Exercises of notebook 01: the pieces of a world action model."""

import torch
from torch import Tensor

from wamlab.jupyter._exercise import Exercise
from wamlab.model.attention import Layout
from wamlab.model.reference import rms_norm

KINDS = "CNAS"


def describe(layout: Layout) -> tuple[Tensor, Tensor]:
    """Return, for every token of a layout, its kind (index into KINDS) and its block: int64 [T]."""
    groups = layout.groups()
    counts = torch.tensor([g.last - g.first for g in groups])
    kinds = torch.tensor([KINDS.index(g.name[0]) for g in groups])
    blocks = torch.tensor([int(g.name[1:]) for g in groups])
    return kinds.repeat_interleave(counts), blocks.repeat_interleave(counts)


_LAYOUTS = (
    Layout(frames=3, frame_tokens=1, frames_per_block=1, actions_per_block=1, states_per_block=1),
    Layout(frames=5, frame_tokens=2, frames_per_block=2, actions_per_block=3, states_per_block=1),
)


def _mask_spec(kind_T: Tensor, block_T: Tensor) -> Tensor:
    layout = next(x for x in _LAYOUTS if x.tokens == len(kind_T))
    return layout.mask()


def _rms_norm_inputs() -> list[tuple]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2, 5, 12, generator=generator)
    weight = torch.randn(12, generator=generator)
    return [(x, weight, 1e-6), (x * 1e-3, weight, 1e-6), (x.double(), weight.double(), 1e-2)]


def _velocity_spec(clean: Tensor, noise: Tensor, sigma: Tensor) -> tuple[Tensor, Tensor]:
    sigma = sigma[..., None]
    return (1 - sigma) * clean + sigma * noise, noise - clean


def _velocity_inputs() -> list[tuple]:
    generator = torch.Generator().manual_seed(2)
    clean, noise = torch.randn(2, 3, 6, 4, generator=generator).unbind(0)
    sigma = torch.rand(3, 6, generator=generator)
    return [(clean, noise, sigma), (clean, noise, torch.zeros(3, 6)), (clean, noise, sigma * 0 + 1)]


EXERCISES: dict[str, Exercise] = {
    "rmsnorm": Exercise(
        task="rmsnorm(x, weight, eps): x [B, T, D] divided by the root of its mean square over D "
        "(eps is added to the mean square), times weight [D].",
        spec=rms_norm,
        inputs=_rms_norm_inputs,
        hints=(
            "No mean is subtracted: that is the whole difference from LayerNorm.",
            "Square, average over the last dimension (keep it), add eps, take the square root.",
            "x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight",
        ),
        tolerance=1e-5,
    ),
    "mask": Exercise(
        task="mask(kind, block): int64 [T] each, the kind (0 clean, 1 noisy, 2 action, 3 state) "
        "and the block (0 = the lone first frame) of every token. Return bool [T, T]: True "
        "where the row's token sees the column's.",
        spec=_mask_spec,
        inputs=lambda: [describe(layout) for layout in _LAYOUTS],
        hints=(
            "Make columns of the queries (kind[:, None]) and rows of the keys (kind[None, :]), and "
            "write one condition for each kind of query; join them with |.",
            "Clean sees clean of its own and earlier blocks. Noisy and action of block i see "
            "clean tokens of EARLIER blocks, and the noisy, action and state tokens of block i.",
            "Noisy frame 0 stands alone: it sees only itself, not even clean frame 0. State tokens "
            "see only the state tokens of their own block.",
        ),
    ),
    "velocity_target": Exercise(
        task="velocity_target(clean, noise, sigma): clean and noise are [B, T, C], sigma [B, T] in "
        "0..1. Return (noisy, target): the point at sigma on the straight path from clean (0) to "
        "noise (1), and the velocity d noisy / d sigma.",
        spec=_velocity_spec,
        inputs=_velocity_inputs,
        hints=(
            "A straight path: noisy = clean at sigma 0, noisy = noise at sigma 1. Mind the missing "
            "last dimension of sigma.",
            "noisy = (1 - s) * clean + s * noise with s = sigma[..., None]. Differentiate it.",
            "The derivative does not depend on sigma: target = noise - clean.",
        ),
    ),
}
