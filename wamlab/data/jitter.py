"""Colour jitter: brightness, contrast, saturation and hue, each sample in its own random order.

`adjust_*` are the public operations, on one sample's frames. `Jitter.apply` does the same for
samples of different orders at once, without a branch, on planes that a compiler can fuse; both
agree to rounding.

Source: torchvision's definitions: contrast blends with the mean grey of each frame, hue turns in
HSV.

Shapes: B samples, N frames, h w pixels; values fp32 in [0, 1].
"""

from typing import NamedTuple

import torch
from torch import Tensor

GREY = (0.2989, 0.587, 0.114)  # ITU-R BT.601 as the public code rounds it
Planes = tuple[Tensor, Tensor, Tensor]  # red, green, blue, each [B, N, h, w]


def _grey(x: Tensor) -> Tensor:
    r, g, b = x.unbind(-3)
    return grey_of((r, g, b)).unsqueeze(-3)


def grey_of(rgb: Planes) -> Tensor:
    """Return the luma of three colour planes."""
    return GREY[0] * rgb[0] + GREY[1] * rgb[1] + GREY[2] * rgb[2]


def _blend(x: Tensor, other: Tensor, factor: float | Tensor) -> Tensor:
    return (factor * x + (1 - factor) * other).clamp(0, 1)


def adjust_brightness(x_N3hw: Tensor, factor: float) -> Tensor:
    """Return the frames times `factor`."""
    return (x_N3hw * factor).clamp(0, 1)


def adjust_contrast(x_N3hw: Tensor, factor: float) -> Tensor:
    """Return each frame blended with its own mean grey."""
    return _blend(x_N3hw, _grey(x_N3hw).mean((-3, -2, -1), keepdim=True), factor)


def adjust_saturation(x_N3hw: Tensor, factor: float) -> Tensor:
    """Return each frame blended with its grey image."""
    return _blend(x_N3hw, _grey(x_N3hw), factor)


def adjust_hue(x_N3hw: Tensor, shift: float) -> Tensor:
    """Return the frames with their hue turned by `shift` of a full circle."""
    r, g, b = x_N3hw.unbind(-3)
    top, bottom = x_N3hw.amax(-3), x_N3hw.amin(-3)
    grey = top == bottom
    saturation = (top - bottom) / torch.where(grey, 1.0, top)
    chroma = torch.where(grey, 1.0, top - bottom)
    red, green, blue = ((top - c) / chroma for c in (r, g, b))
    hue = (top == r) * (blue - green)
    hue = hue + ((top == g) & (top != r)) * (2 + red - blue)
    hue = hue + ((top != g) & (top != r)) * (4 + green - red)
    return _from_hsv(torch.remainder(hue / 6 + 1 + shift, 1.0), saturation, top)


def _from_hsv(hue: Tensor, saturation: Tensor, value: Tensor) -> Tensor:
    sector = torch.floor(hue * 6)
    part = hue * 6 - sector
    low = (value * (1 - saturation)).clamp(0, 1)
    falling = (value * (1 - saturation * part)).clamp(0, 1)
    rising = (value * (1 - saturation * (1 - part))).clamp(0, 1)
    six = torch.arange(6, device=hue.device)[:, None, None]
    chosen = (sector.long() % 6).unsqueeze(-3) == six
    red = torch.stack((value, falling, low, low, rising, value), -3)
    green = torch.stack((rising, value, value, falling, low, low), -3)
    blue = torch.stack((low, low, rising, value, value, falling), -3)
    return torch.stack([(chosen * c).sum(-3) for c in (red, green, blue)], -3)


ADJUSTMENTS = (adjust_brightness, adjust_contrast, adjust_saturation, adjust_hue)


class Jitter(NamedTuple):
    """The adjustments of B samples as two chains around the one contrast.

    `b s b HUE b s b` contains every order of brightness, saturation and hue, with hue, the costly
    one, only once. Both sides of contrast run that chain; where a sample's order has nothing at a
    place, its factor there is neutral: 1 for brightness and saturation, 0 for hue.

    Fields: the chain's factors before contrast [B, 7], contrast's [B], the chain's after it [B, 7].
    """

    before: Tensor
    contrast: Tensor
    after: Tensor

    @classmethod
    def of(cls, factors_B4: Tensor, order_B4: Tensor) -> "Jitter":
        """Arrange the factors (brightness, contrast, saturation, hue) by each sample's order."""
        place = order_B4.argsort(1)
        b, c, s, h = place.unbind(1)
        bright, contrast, saturate, turn = factors_B4.unbind(1)
        b_first, s_first = b < h, s < h
        links = (
            (b, bright, 1.0, b_first & (b < s)),
            (s, saturate, 1.0, s_first),
            (b, bright, 1.0, b_first & (b > s)),
            (h, turn, 0.0, h == h),
            (b, bright, 1.0, ~b_first & (b < s)),
            (s, saturate, 1.0, ~s_first),
            (b, bright, 1.0, ~b_first & (b > s)),
        )
        before = [torch.where(use & (at < c), f, neutral) for at, f, neutral, use in links]
        after = [torch.where(use & (at > c), f, neutral) for at, f, neutral, use in links]
        return cls(torch.stack(before, 1), contrast, torch.stack(after, 1))

    def apply(self, rgb: Planes) -> Planes:
        """Return the planes [B, N, h, w], each sample adjusted in its own order."""
        rgb = _contrast(_chain(rgb, self.before), self.contrast[:, None, None, None])
        return _chain(rgb, self.after)


def _chain(rgb: Planes, factors_B7: Tensor) -> Planes:
    f = [column[:, None, None, None] for column in factors_B7.unbind(1)]
    rgb = _brighten(_saturate(_brighten(rgb, f[0]), f[1]), f[2])
    rgb = _turn_hue(rgb, f[3])
    return _brighten(_saturate(_brighten(rgb, f[4]), f[5]), f[6])


def _brighten(rgb: Planes, factor: float | Tensor) -> Planes:
    return tuple((c * factor).clamp(0, 1) for c in rgb)


def _contrast(rgb: Planes, factor: float | Tensor) -> Planes:
    mean = grey_of(rgb).mean((-2, -1), keepdim=True)
    return tuple(_blend(c, mean, factor) for c in rgb)


def _saturate(rgb: Planes, factor: float | Tensor) -> Planes:
    grey = grey_of(rgb)
    return tuple(_blend(c, grey, factor) for c in rgb)


def _turn_hue(rgb: Planes, shift: float | Tensor) -> Planes:
    # In HSV a channel is the value less the chroma times a ramp over the six sectors.
    r, g, b = rgb
    value = torch.maximum(torch.maximum(r, g), b)
    chroma = value - torch.minimum(torch.minimum(r, g), b)
    divisor = torch.where(chroma == 0, 1.0, chroma)
    hue = torch.where(value == g, 2 + (b - r) / divisor, 4 + (r - g) / divisor)
    hue = torch.where(value == r, (g - b) / divisor, hue) + 6 * shift

    def channel(start: int) -> Tensor:
        sector = torch.remainder(start + hue, 6.0)
        return value - chroma * torch.minimum(sector, 4 - sector).clamp(0, 1)

    return channel(5), channel(3), channel(1)


# The same four on planes: the hue costs a quarter of what `adjust_hue` does on a CPU.
PLANE_ADJUSTMENTS = (_brighten, _contrast, _saturate, _turn_hue)
