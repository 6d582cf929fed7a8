"""Image augmentation: crop, antialiased resize, colour jitter, and the grid of views.

`augment_cpu` does what the public training code does in its workers, one sample at a time, at its
cost. `Augment` does the same mathematics for a batch on its device, from uint8 views to the uint8
grid. Both take their random numbers from the same draws, one set a sample shared by all its views,
and agree within 1/255.

Shapes: B samples, V views, T frames, N = V * T frames of one sample, H W the native size of a view,
h w its size after the resize.
"""

from collections.abc import Callable
from functools import cached_property, lru_cache
from itertools import permutations
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from wamlab.config import ConfigError, check_name
from wamlab.data.embodiment import Embodiment
from wamlab.data.jitter import ADJUSTMENTS, PLANE_ADJUSTMENTS, Jitter
from wamlab.draws import Draws

CROP_SHARE = 0.95
SPREAD = {"brightness": 0.3, "contrast": 0.4, "saturation": 0.5, "hue": 0.08}
ORDERS = tuple(permutations(range(4)))

# Rows of view numbers, None = a black panel. A row with fewer views than the widest repeats each of
# its pixel columns.
LAYOUTS: dict[str, tuple[tuple[int | None, ...], ...]] = {
    "single": ((0,),),
    "side_by_side": ((0, 1),),
    "droid": ((2,), (0, 1)),
    "three_view": ((0, 2), (1, None)),  # head, right hand; left hand, black
}
IMPLS = ("auto", "pieces", "batched", "compiled")
PIECE = 9  # frames: at 88x160 each fp32 image of the jitter is then 1.5 MB and stays in the cache


class AugmentDraws(NamedTuple):
    """What is drawn for B samples: the crop's corner, and the jitter's factors and order.

    Without jitter both are None. `order_B4[i]` lists sample i's adjustments, first to last, as
    numbers into (brightness, contrast, saturation, hue).
    """

    top: Tensor
    left: Tensor
    factors: Tensor | None
    order: Tensor | None


def crop_size(size: int) -> int:
    """Return the side of the crop: 95 % of the image's, rounded down."""
    return int(CROP_SHARE * size)


def draw_augmentation(draws: Draws, height: int, width: int, train: bool = True) -> AugmentDraws:
    """Draw the parameters of every sample of `draws`, on its device.

    Args:
        draws: seed, step and sample ids [B].
        height, width: native size of a view, pixels.
        train: random crop and jitter; else the centre crop alone.

    Returns:
        int64 [B] corners, fp32 [B, 4] factors and int64 [B, 4] orders.
    """
    if not train:
        corner = (torch.full_like(draws.sample_ids, _centre(size)) for size in (height, width))
        return AugmentDraws(*corner, None, None)

    def integer(name: str, high: int) -> Tensor:
        return draws.integers(f"augment.{name}", high, (1,))[:, 0]

    dev = draws.sample_ids.device
    spread = torch.tensor(tuple(SPREAD.values()), device=dev)
    neutral = torch.tensor((1.0, 1.0, 1.0, 0.0), device=dev)
    return AugmentDraws(
        integer("top", height - crop_size(height) + 1),
        integer("left", width - crop_size(width) + 1),
        neutral + spread * (2 * draws.uniform("augment.factors", (4,)) - 1),
        torch.tensor(ORDERS, device=dev)[integer("order", len(ORDERS))],
    )


def _centre(size: int) -> int:
    # Python rounds halves to even, as the public centre crop does: 180 rows start at row 4, not 5.
    return round((size - crop_size(size)) / 2)


def augment_cpu(
    views_VT3HW: Tensor, draws: Draws, embodiment: Embodiment, train: bool = True
) -> Tensor:
    """Augment one sample as the public workers do: float frames, one adjustment after the other.

    Args:
        views_VT3HW: uint8 frames of one sample at their native size.
        draws: the draws of this one sample.
        embodiment: gives the size of a view and the layout.
        train: random crop and jitter; else the centre crop alone.

    Returns:
        uint8 [T, rows * h, columns * w, 3].

    Raises:
        ConfigError: the views do not fit the embodiment.
    """
    _check(views_VT3HW, embodiment, ndim=5)
    V, T, _, H, W = views_VT3HW.shape
    params = draw_augmentation(draws, H, W, train)
    x = _augment_frames(views_VT3HW.flatten(0, 1), params, 0, embodiment.view_hw)
    return _build_grid(x.unflatten(0, (V, T)), embodiment.layout)


def _check(views: Tensor, embodiment: Embodiment, ndim: int) -> None:
    count = len(embodiment.views)
    if views.ndim == ndim and views.shape[ndim - 5] == count and views.dtype == torch.uint8:
        return
    shape = "[B, V, T, 3, H, W]" if ndim == 6 else "[V, T, 3, H, W]"
    raise ConfigError(
        f"embodiment {embodiment.name!r} takes uint8 views {shape} with V = {count} "
        f"({', '.join(embodiment.views)}), got {views.dtype} {list(views.shape)}"
    )


def _augment_frames(
    x_N3HW: Tensor, params: AugmentDraws, sample: int, view_hw: tuple[int, int]
) -> Tensor:
    x = _crop(x_N3HW.float() / 255, params, sample)
    x = F.interpolate(x, view_hw, mode="bilinear", antialias=True)
    for k, factor in _adjustments(params, sample):
        x = ADJUSTMENTS[k](x, factor)
    return (x * 255).to(torch.uint8).permute(0, 2, 3, 1).contiguous()


def _crop(x_N3HW: Tensor, params: AugmentDraws, sample: int) -> Tensor:
    H, W = x_N3HW.shape[-2:]
    top, left = int(params.top[sample]), int(params.left[sample])
    return x_N3HW[..., top : top + crop_size(H), left : left + crop_size(W)]


def _adjustments(params: AugmentDraws, sample: int) -> list[tuple[int, float]]:
    """Return the numbers and factors of a sample's adjustments, first to last."""
    if params.order is None:
        return []
    return [(k, float(params.factors[sample, k])) for k in params.order[sample].tolist()]


def _build_grid(x_VThw3: Tensor, layout: str) -> Tensor:
    columns = max(len(row) for row in LAYOUTS[layout])
    lines = []
    for row in LAYOUTS[layout]:
        panels = [torch.zeros_like(x_VThw3[0]) if v is None else x_VThw3[v] for v in row]
        line = torch.cat(panels, dim=-2)
        lines.append(line.repeat_interleave(columns // len(row), dim=-2))
    return torch.cat(lines, dim=-3)


class Augment:
    """Augmentation of a whole batch on its device, equal to `augment_cpu` within 1/255.

    Implementations:
        "pieces": one sample at a time, a few frames at a time, so that they stay in a core's cache.
        "batched": samples at once. The resize reads the few source pixels that an output pixel
            needs straight from the uncropped uint8 frame: the antialias weights do not depend on
            the crop's corner, which only shifts the indices.
        "compiled": "batched", fused by torch.compile.
        "auto": "compiled" on CUDA, "pieces" on a CPU.

    Args:
        embodiment: gives the size of a view and the layout.
        impl: one of the above.
        chunk: samples at once in "batched"; 4 hold the fp32 frames of 3 views at 88x160 in 67 MB.

    Raises:
        ConfigError: an unknown `impl`.
    """

    def __init__(self, embodiment: Embodiment, *, impl: str = "auto", chunk: int = 4) -> None:
        check_name(impl, IMPLS, "augmentation impl")
        self.embodiment, self.chunk, self.impl = embodiment, chunk, impl

    def __call__(self, views_BVT3HW: Tensor, draws: Draws, train: bool = True) -> Tensor:
        """Augment a batch.

        Args:
            views_BVT3HW: uint8 frames at their native size.
            draws: the draws of these samples, on the same device.
            train: random crop and jitter; else the centre crop alone.

        Returns:
            uint8 [B, T, rows * h, columns * w, 3] on the views' device.

        Raises:
            ConfigError: the views do not fit the embodiment.
        """
        _check(views_BVT3HW, self.embodiment, ndim=6)
        impl, size = self.impl, tuple(views_BVT3HW.shape[-2:])
        if impl == "auto":
            impl = "compiled" if views_BVT3HW.is_cuda else "pieces"
        if impl == "pieces":
            return self._pieces(views_BVT3HW, draw_augmentation(draws, *size, train))
        if impl == "batched":
            return self._batched(views_BVT3HW, *_draw_batch(draws, size, train), _augment_batch)
        compiled, drawn = self._compiled
        return self._batched(views_BVT3HW, *drawn(draws, size, train), compiled)

    @cached_property
    def _compiled(self) -> tuple[Callable, Callable]:
        """Made at the first use: torch.compile imports Dynamo, which takes as long as torch."""
        compiled, drawn = (
            torch.compile(fn, dynamic=False, fullgraph=True) for fn in (_augment_batch, _draw_batch)
        )
        return compiled, drawn

    def _pieces(self, views: Tensor, params: AugmentDraws) -> Tensor:
        V, T = views.shape[1:3]
        out = []
        for i, sample in enumerate(views):
            pieces = sample.flatten(0, 1).split(PIECE)
            frames = [_augment_piece(p, params, i, self.embodiment.view_hw) for p in pieces]
            out.append(_build_grid(torch.cat(frames).unflatten(0, (V, T)), self.embodiment.layout))
        return torch.stack(out)

    def _batched(
        self, views: Tensor, top_B: Tensor, left_B: Tensor, jitter: Jitter | None, fn: Callable
    ) -> Tensor:
        B, (H, W), (h, w) = len(views), views.shape[-2:], self.embodiment.view_hw
        rows, row_weights = _taps(crop_size(H), h, views.device)
        cols, col_weights = _taps(crop_size(W), w, views.device)
        rows_Bh, cols_Bw = top_B[:, None] + rows, left_B[:, None] + cols
        # Equal chunks, so that one compiled shape serves the run.
        size = max(c for c in range(1, min(B, self.chunk) + 1) if B % c == 0)
        out = []
        for i in range(0, B, size):
            part = slice(i, i + size)
            taps = (rows_Bh[part], row_weights, cols_Bw[part], col_weights)
            own = None if jitter is None else Jitter(*(f[part] for f in jitter))
            out.append(fn(views[part], taps, own, self.embodiment.layout))
        return torch.cat(out) if len(out) > 1 else out[0]


def _augment_piece(
    x_N3HW: Tensor, params: AugmentDraws, sample: int, view_hw: tuple[int, int]
) -> Tensor:
    x = _crop(x_N3HW, params, sample).float() / 255
    rgb = F.interpolate(x, view_hw, mode="bilinear", antialias=True).unbind(1)
    for k, factor in _adjustments(params, sample):
        rgb = PLANE_ADJUSTMENTS[k](rgb, factor)
    return torch.stack([(c * 255).to(torch.uint8) for c in rgb], -1)


@lru_cache(maxsize=32)
def _taps(size: int, out: int, dev: torch.device) -> tuple[Tensor, Tensor]:
    """Return a resize along one axis: first source pixel int64 [out], weights fp32 [taps, out]."""
    # torch's own weights: resizing the columns of the unit matrix gives the matrix of the resize.
    unit = torch.eye(size)[None, None]
    matrix = F.interpolate(unit, (out, size), mode="bilinear", antialias=True)[0, 0]
    used = (matrix != 0).int()
    first = used.argmax(1)
    count = int((size - used.flip(1).argmax(1) - first).max())
    first = first.clamp(max=size - count)
    weights = matrix.gather(1, first[:, None] + torch.arange(count))
    return first.to(dev), weights.T.contiguous().to(dev)


def _draw_batch(
    draws: Draws, size: tuple[int, int], train: bool
) -> tuple[Tensor, Tensor, Jitter | None]:
    """Draw the corners and the jitter: 236 operations on B numbers, each a launch if not fused."""
    top, left, factors, order = draw_augmentation(draws, *size, train)
    return top, left, None if order is None else Jitter.of(factors, order)


def _augment_batch(
    views: Tensor, taps: tuple[Tensor, ...], jitter: Jitter | None, layout: str
) -> Tensor:
    V, T = views.shape[1:3]
    rgb = _resize(views.flatten(1, 2), *taps).unbind(2)
    if jitter is not None:
        rgb = jitter.apply(rgb)
    x_BNhw3 = torch.stack([(c * 255).to(torch.uint8) for c in rgb], -1)
    return _build_grid(x_BNhw3.unflatten(1, (V, T)).transpose(0, 1), layout)


def _resize(x: Tensor, rows: Tensor, row_w: Tensor, cols: Tensor, col_w: Tensor) -> Tensor:
    """Resize uint8 [B, N, 3, H, W] to fp32 [B, N, 3, h, w] in [0, 1].

    `rows` [B, h] and `cols` [B, w] are the first source pixels, `row_w` and `col_w` the weights of
    the pixels from there on.
    """
    B, N, C, _, W = x.shape
    h, w = rows.shape[1], cols.shape[1]
    tall = wide = 0
    for k in range(len(row_w)):
        index = (rows + k)[:, None, None, :, None].expand(B, N, C, h, W)
        tall = tall + row_w[k, :, None] * x.gather(3, index)
    for k in range(len(col_w)):
        index = (cols + k)[:, None, None, None, :].expand(B, N, C, h, w)
        wide = wide + col_w[k] * tall.gather(4, index)
    return wide / 255
