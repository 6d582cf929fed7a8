"""A motion transformer that denoises blocks of a motion given the clean blocks before them.

The sequence is [clean | noisy], as in the world action model: a clean block sees the clean blocks
up to itself, a noisy block the clean blocks before it and itself. Teacher forcing makes all blocks
independent given the clean motion, so they can be trained one after the other with a cache of keys
and values ("serial") or all at once under a mask ("parallel"): same numbers, same gradients.

Shapes: B windows, T frames, L tokens (2 T in parallel), D features, C channels, H heads, K width.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from wamlab.config import ConfigError, lookup

Cache = tuple[Tensor, Tensor]
# tokens. FlexAttention works in tiles of 128: with fewer than two of them it has nothing to leave
# out, and torch hands queries of less than one to a kernel made for decoding
FLEX_FROM = 256


@dataclasses.dataclass(frozen=True, kw_only=True)
class DenoiserConfig:
    """Sizes of the network."""

    features: int = 236  # 8 + 12 J, 19 joints
    dim: int = 64
    heads: int = 4
    layers: int = 3
    frequencies: int = 32  # sinusoids of time and of the noise level, each


MOTION_SIZES: dict[str, DenoiserConfig] = {
    "tiny": DenoiserConfig(),
    "small": DenoiserConfig(dim=256, layers=6),
    "base": DenoiserConfig(dim=512, heads=8, layers=8),
}


class Block(nn.Module):
    """Attention and MLP, shifted and scaled by the noise level; starts as the identity."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(dim, elementwise_affine=False) for _ in range(2))
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))
        self.modulation = nn.Linear(dim, 6 * dim)
        nn.init.zeros_(self.modulation.weight)
        nn.init.zeros_(self.modulation.bias)

    def forward(self, x_BLC: Tensor, level_BLC: Tensor, mask: Tensor | BlockMask) -> Tensor:
        """Let every token see what the mask allows."""
        shift, scale, gate, *rest = self._modulation(level_BLC)
        q, k, v = self._heads(self.norms[0](x_BLC) * (1 + scale) + shift)
        if isinstance(mask, BlockMask):
            flex = flex_attention if torch.compiler.is_compiling() else _compiled_flex()
            seen = flex(q, k, v, block_mask=mask)
        else:
            seen = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self._finish(x_BLC, seen, gate, rest)

    def step(
        self, clean: Tensor, noisy: Tensor, levels: tuple[Tensor, Tensor], cache: Cache | None
    ) -> tuple[Tensor, Tensor, Cache]:
        """Compute one block's clean and noisy tokens from the clean keys and values before it."""
        outs, cleans = [], cache
        for x, level in zip((clean, noisy), levels):
            shift, scale, gate, *rest = self._modulation(level)
            q, k, v = self._heads(self.norms[0](x) * (1 + scale) + shift)
            if cache is not None:
                k, v = torch.cat([cache[0], k], 2), torch.cat([cache[1], v], 2)
            cleans = (k, v) if not outs else cleans
            seen = F.scaled_dot_product_attention(q, k, v)
            outs.append(self._finish(x, seen, gate, rest))
        return *outs, cleans

    def _modulation(self, level_BLC: Tensor) -> tuple[Tensor, ...]:
        return self.modulation(F.silu(level_BLC)).chunk(6, -1)

    def _heads(self, x_BLC: Tensor) -> tuple[Tensor, ...]:
        qkv = self.qkv(x_BLC).unflatten(-1, (3, self.heads, -1))
        return qkv.permute(2, 0, 3, 1, 4).unbind(0)

    def _finish(self, x: Tensor, seen_BHLK: Tensor, gate: Tensor, rest: list[Tensor]) -> Tensor:
        x = x + gate * self.out(seen_BHLK.transpose(1, 2).flatten(2))
        shift, scale, gate = rest
        return x + gate * self.mlp(self.norms[1](x) * (1 + scale) + shift)


class MotionDenoiser(nn.Module):
    """Predicts the velocity from data to noise of every frame's features.

    Args:
        config: sizes.
        mode: a key of MODES.
    """

    def __init__(self, config: DenoiserConfig, mode: str = "parallel") -> None:
        super().__init__()
        lookup(MODES, mode, "training mode")
        self.config, self.mode = config, mode
        self.inward = nn.Linear(config.features, config.dim)
        self.time = nn.Linear(2 * config.frequencies, config.dim)
        self.level = nn.Sequential(
            nn.Linear(2 * config.frequencies, config.dim),
            nn.SiLU(),
            nn.Linear(config.dim, config.dim),
        )
        self.noisy_mark = nn.Parameter(torch.zeros(config.dim))
        self.layers = nn.ModuleList(Block(config.dim, config.heads) for _ in range(config.layers))
        self.outward = nn.Linear(config.dim, config.features)
        nn.init.zeros_(self.outward.weight)
        nn.init.zeros_(self.outward.bias)

    def forward(
        self, clean_BTD: Tensor, noisy_BTD: Tensor, level_BT: Tensor, block_BT: Tensor, rate: float
    ) -> Tensor:
        """Return the velocity [B, T, D].

        Args:
            clean_BTD: normalised features, the teacher's.
            noisy_BTD: (1 - level) clean + level noise.
            level_BT: noise level in [0, 1], one value a block.
            block_BT: int64, ascending from 0.
            rate: frames a second.
        """
        frames, dtype = clean_BTD.shape[1], self.inward.weight.dtype  # sharded, it may be bf16
        seconds = torch.arange(frames, dtype=level_BT.dtype, device=level_BT.device) / rate
        when = self.time(sinusoid(seconds, self.config.frequencies, 10.0).to(dtype))
        clean = self.inward(clean_BTD.to(dtype)) + when
        noisy = self.inward(noisy_BTD.to(dtype)) + when + self.noisy_mark
        steps = torch.stack([torch.zeros_like(level_BT), level_BT])
        levels = self.level(sinusoid(steps, self.config.frequencies, 1.0).to(dtype))
        hidden = MODES[self.mode](self, (clean, noisy), (levels[0], levels[1]), block_BT)
        return self.outward(F.layer_norm(hidden, hidden.shape[-1:]))


def sinusoid(x: Tensor, count: int, longest: float) -> Tensor:
    """Return sines and cosines of x, [..., 2 count]; the periods go from `longest` to 1/300."""
    steps = torch.linspace(0, math.log(300.0), count, dtype=x.dtype, device=x.device)
    angle = 2 * math.pi * x[..., None] * steps.exp() / longest
    return torch.cat([angle.sin(), angle.cos()], -1)


def allowed(block_BT: Tensor) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """Return who sees whom in [clean | noisy], as FlexAttention asks for it."""
    frames = block_BT.shape[1]

    def seen(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        block_q, block_k = block_BT[b, q % frames], block_BT[b, k % frames]
        noisy_q, noisy_k = q >= frames, k >= frames
        past = ~noisy_k & ((block_k < block_q) | (~noisy_q & (block_k == block_q)))
        return past | (noisy_q & noisy_k & (block_k == block_q))

    return seen


def dense_mask(block_BT: Tensor) -> Tensor:
    """Return the same as bool [B, 1, L, L]."""
    batch, frames = block_BT.shape
    index = torch.arange(2 * frames, device=block_BT.device)
    rows = torch.arange(batch, device=block_BT.device)[:, None, None]
    return allowed(block_BT)(rows, index, index[:, None], index)[:, None]


def _parallel(
    model: MotionDenoiser, x: tuple[Tensor, Tensor], levels: tuple[Tensor, Tensor], block_BT: Tensor
) -> Tensor:
    """Return the noisy stream, all blocks in one pass."""
    batch, frames = block_BT.shape
    if block_BT.is_cuda and 2 * frames >= FLEX_FROM:
        mask = create_block_mask(allowed(block_BT), batch, None, 2 * frames, 2 * frames,
                                 device=str(block_BT.device))  # fmt: skip
    else:
        mask = dense_mask(block_BT)
    hidden, level = torch.cat(x, 1), torch.cat(levels, 1)
    for layer in model.layers:
        hidden = layer(hidden, level, mask)
    return hidden[:, frames:]


def _serial(
    model: MotionDenoiser,
    x: tuple[Tensor, Tensor],
    levels: tuple[Tensor, Tensor],
    block_BT: Tensor,
    detach: bool = False,
) -> Tensor:
    """Return the noisy stream, block by block; windows that are cut alike go together."""
    cuts, group_B = torch.unique(block_BT, dim=0, return_inverse=True)
    out = torch.zeros_like(x[1])
    for number, cut in enumerate(cuts.tolist()):
        rows = (group_B == number).nonzero()[:, 0]
        edges = [0, *(i for i in range(1, len(cut)) if cut[i] != cut[i - 1]), len(cut)]
        caches: list[Cache | None] = [None] * len(model.layers)
        pieces = []
        for first, last in itertools.pairwise(edges):
            clean, noisy, low, high = (s[rows, first:last] for s in (*x, *levels))
            for i, layer in enumerate(model.layers):
                clean, noisy, caches[i] = layer.step(clean, noisy, (low, high), caches[i])
                if detach:
                    caches[i] = tuple(part.detach() for part in caches[i])
            pieces.append(noisy)
        out = out.index_copy(0, rows, torch.cat(pieces, 1).to(out.dtype))
    return out


MODES: dict[str, Callable[..., Tensor]] = {
    "parallel": _parallel,
    "serial": _serial,
    "serial-detached": functools.partial(_serial, detach=True),  # not the same gradient
}


@functools.cache
def _compiled_flex() -> Callable[..., Tensor]:
    return torch.compile(flex_attention, dynamic=False)


def block_levels(level_BT: Tensor, block_BT: Tensor) -> Tensor:
    """Return each frame's noise level: the draw at the first frame of its block."""
    first = F.pad(block_BT.diff(dim=1) > 0, (1, 0), value=True)
    index = torch.arange(block_BT.shape[1], device=block_BT.device).expand_as(block_BT)
    start = torch.where(first, index, 0).cummax(1).values
    return level_BT.gather(1, start)


def fixed_blocks(batch: int, frames: int, length: int, device: torch.device | str) -> Tensor:
    """Return blocks of one length, int64 [B, T]; a length of 1 is plain causal attention.

    Raises:
        ConfigError: a length below 1.
    """
    if length < 1:
        raise ConfigError(f"a block has at least one frame, got {length}")
    return (torch.arange(frames, device=device) // length).expand(batch, -1)


@torch.no_grad()
def generate(
    model: MotionDenoiser,
    clean_BTD: Tensor,
    noise_BTD: Tensor,
    block_BT: Tensor,
    *,
    rate: float,
    steps: int = 10,
) -> Tensor:
    """Return every block but the first as the model continues the clean motion before it.

    Args:
        model: a trained denoiser.
        clean_BTD: the true motion, normalised.
        noise_BTD: where the blocks start from.
        block_BT: their frames.
        rate: frames a second.
        steps: Euler steps from noise to motion.
    """
    x_BTD = noise_BTD
    for i in range(steps):
        level_BT = torch.full_like(clean_BTD[..., 0], 1 - i / steps)
        x_BTD = x_BTD - model(clean_BTD, x_BTD, level_BT, block_BT, rate) / steps
    return torch.where(block_BT[..., None] == 0, clean_BTD, x_BTD)
