"""Latents of a clip of which only the first frame is real: most of the work is the same for all.

The conditioning `y` encodes an image followed by grey frames. A causal network's activations depend
on the image in their first few frames alone: 3 after the first convolution, 11 of 33 after the
first level, 19 after the second. What follows depends on height, width and weights. It is computed
once a resolution, and of it only the few frames are kept that the next stage needs to look at.

Shapes: B images, C channels, T frames, H W pixels.
"""

from typing import Any

import torch
from torch import Tensor, nn

from wamlab.model.vae import VAE
from wamlab.model.vae_blocks import CausalConv3d, Down, Head, Level, ResBlock


def reach(module: nn.Module, frames: int) -> int:
    """Return how many frames of a module's output depend on the first `frames` of its input."""
    if isinstance(module, CausalConv3d):
        return frames + module.history
    if isinstance(module, ResBlock):
        return frames + 4
    if isinstance(module, Head):
        return frames + 2
    if isinstance(module, Level):
        for block in module.downsamples:
            frames = reach(block, frames)
    if isinstance(module, Down) and module.time_conv is not None:
        return (frames + 1) // 2 + 1  # output k reads inputs 2k-2, 2k-1, 2k
    return frames


def _halves_time(module: nn.Module) -> bool:
    if isinstance(module, Level):
        return any(_halves_time(block) for block in module.downsamples)
    return isinstance(module, Down) and module.time_conv is not None


class StillEncoder:
    """Encodes images as clips whose other frames are grey; equal to encoding the whole clips.

    Args:
        vae: the VAE; its weights must not change afterwards.
        compile: fuse the computation with torch.compile, once a shape.
    """

    def __init__(self, vae: VAE, *, compile: bool = False) -> None:
        self.vae = vae
        encoder = vae.encoder
        self.stages = [encoder.conv1, *encoder.downsamples, *encoder.middle, encoder.head]
        self._run = torch.compile(self._stages, dynamic=False) if compile else self._stages
        self._grey: dict[tuple[Any, ...], list[Tensor]] = {}

    @torch.no_grad()
    def encode(self, image: Tensor, frames: int) -> Tensor:
        """Return the normalised latents of [image, grey, grey, ...].

        Args:
            image: [B, 3, 1, H, W] in [-1, 1].
            frames: T of the clip, 1 + 4n.

        Returns:
            fp32 [B, z, 1 + (T-1)//4, H/8, W/8] (Wan2.2: H/16, W/16).
        """
        weight = self.vae.conv1.weight
        x = self.vae.encoder.gather(image.to(weight.dtype))
        key = (frames, *x.shape[3:], weight.device, weight.dtype)
        if key not in self._grey:
            self._grey[key] = self._constants(x[:1], frames)
        return self.vae.normalise(self._run(x, self._grey[key]))

    def _stages(self, x: Tensor, grey: list[Tensor]) -> Tensor:
        for stage, constant in zip(self.stages, grey):
            x = stage(torch.cat([x, constant.expand(len(x), -1, -1, -1, -1)], 2))
        return torch.cat([x, grey[-1].expand(len(x), -1, -1, -1, -1)], 2)

    def _constants(self, x: Tensor, frames: int) -> list[Tensor]:
        """Run one whole clip and keep, of each stage's input, what lies past the image's reach."""
        x = torch.cat([torch.zeros_like(x)] * frames, 2)
        known, grey = 1, []
        for stage in self.stages:
            out = stage(x)
            after = min(reach(stage, known), out.shape[2])
            needed = 2 * after - 1 if _halves_time(stage) else after
            grey.append(x[:, :, known:needed].clone())
            x, known = out, after
        return [*grey, x[:, :, known:].clone()]
