"""The frozen CLIP image tower: tokens of a clip's first frame after the second-to-last block.

Shapes: B images, N = 1 + patches tokens, D the tower's width.
"""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from wamlab.model.frozen import Part, fingerprint, freeze, load_frozen, seeded, sizes_of

PREFIX = "action_head.image_encoder.model."
MEAN = (0.48145466, 0.4578275, 0.40821073)
STD = (0.26862954, 0.26130258, 0.27577711)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImageConfig:
    """The sizes of a CLIP image tower; the last of its `layers` blocks is never built."""

    dim: int
    heads: int
    layers: int
    image_size: int = 224
    patch: int = 14
    mlp_ratio: int = 4


IMAGE_SIZES: dict[str, ImageConfig] = {
    "clip-vit-h": ImageConfig(dim=1280, heads=16, layers=32),
    "tiny": ImageConfig(dim=64, heads=4, layers=2),
}


class ImageEncoder(nn.Module):
    """A frozen CLIP image tower without its last block and its pooled output.

    Args:
        size: a name in IMAGE_SIZES, or an ImageConfig.
        weights: a public checkpoint (stand-alone, or a full policy's); None = random ones.
        seed: of the random weights.
        device: where the weights go.
        dtype: their dtype, and the features'.

    Source: CLIP (arXiv 2103.00020); public keys of
        models_clip_open-clip-xlm-roberta-large-vit-huge-14.pth.
    """

    def __init__(
        self,
        size: str | ImageConfig = "tiny",
        weights: str | Path | None = None,
        *,
        seed: int = 0,
        device: str | torch.device = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.config = sizes_of(IMAGE_SIZES, size, "image encoder size")
        with seeded(seed), torch.device("meta" if weights else device):
            self.network = _build(self.config)
        if weights:
            load_frozen(
                self.network,
                weights,
                _parts(self.network),
                prefix=PREFIX,
                unused=_unused(self.config.layers - 1),
                dtype=dtype,
                device=device,
            )
            _fill_positions(self.network, device)
        self.network.to(dtype)
        freeze(self)

    def pixels(self, image: Tensor) -> Tensor:
        """Return CLIP's input [B, 3, S, S] for images [B, 1, 3, H, W] (or [B, 3, H, W]) in [-1, 1].

        Bicubic, not antialiased, the aspect ratio not kept, overshoot not clamped: as in training.
        """
        image = image.flatten(0, 1) if image.dim() == 5 else image
        side = (self.config.image_size,) * 2
        x = F.interpolate(image.float(), size=side, mode="bicubic", align_corners=False)
        x = x * 0.5 + 0.5
        # by numbers, not by a tensor made here: a CUDA graph cannot hold its copy to the device
        return torch.stack([(x[:, c] - MEAN[c]) / STD[c] for c in range(3)], 1)

    @torch.no_grad()
    def forward(self, image: Tensor) -> Tensor:
        """Return features [B, N, D] of images [B, 1, 3, H, W] (or [B, 3, H, W]) in [-1, 1]."""
        dtype = next(self.network.parameters()).dtype
        return self.network(pixel_values=self.pixels(image).to(dtype)).last_hidden_state


def image_fingerprint(size: str | ImageConfig, weights: str | Path | None, seed: int = 0) -> str:
    """Return the fingerprint of an image encoder, see `frozen.fingerprint`."""
    config = sizes_of(IMAGE_SIZES, size, "image encoder size")
    return fingerprint("image", config, seed=seed, weights=weights, prefix=PREFIX)


def _build(config: ImageConfig) -> nn.Module:
    from transformers import CLIPVisionConfig, CLIPVisionModel

    return CLIPVisionModel(
        CLIPVisionConfig(
            hidden_size=config.dim,
            intermediate_size=config.mlp_ratio * config.dim,
            num_hidden_layers=config.layers - 1,
            num_attention_heads=config.heads,
            image_size=config.image_size,
            patch_size=config.patch,
            hidden_act="gelu",
            layer_norm_eps=1e-5,
        )
    )


def _parts(network: nn.Module) -> dict[str, Part]:
    """Map transformers' names (4.x puts `vision_model.` in front) to the public ones."""
    outer = {
        "embeddings.class_embedding": "cls_embedding",
        "embeddings.position_embedding.weight": "pos_embedding",
        "embeddings.patch_embedding.weight": "patch_embedding.weight",
    }
    norms = {"pre_layrnorm": "pre_norm", "post_layernorm": "post_norm"}
    inner = {
        "self_attn.out_proj": "attn.proj",
        "layer_norm1": "norm1",
        "layer_norm2": "norm2",
        "mlp.fc1": "mlp.0",
        "mlp.fc2": "mlp.2",
    }

    def part(name: str) -> Part:
        name = name.removeprefix("vision_model.")
        if name in outer:
            return Part(name=f"visual.{outer[name]}")
        stem, kind = name.rsplit(".", 1)
        if stem in norms:
            return Part(name=f"visual.{norms[stem]}.{kind}")
        _, _, index, rest = stem.split(".", 3)
        block = f"visual.transformer.{index}"
        if rest in inner:
            return Part(name=f"{block}.{inner[rest]}.{kind}")
        which = "qkv".index(rest.removeprefix("self_attn.")[0])
        return Part(name=f"{block}.attn.to_qkv.{kind}", index=which, of=3)

    return {name: part(name) for name in network.state_dict()}


def _unused(last: int) -> Callable[[str], bool]:
    """The text tower, the projection, the temperature, and the block that is never built."""
    prefixes = ("textual.", "visual.head", "log_scale", f"visual.transformer.{last}.")
    return lambda name: name.startswith(prefixes)


def _fill_positions(network: nn.Module, device: str | torch.device) -> None:
    """Give the one buffer that is not stored, the position numbers, its memory and values."""
    for module in network.modules():
        if getattr(module, "position_ids", None) is not None:
            count = module.position_ids.shape[1]
            module.position_ids = torch.arange(count, device=device)[None]
