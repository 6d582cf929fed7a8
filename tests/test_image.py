"""The image encoder: preprocessing, the block that is never built, both key layouts, errors."""

import inspect
import re

import pytest
import torch
from conftest import ROOT
from safetensors.torch import save_file

from wamlab.config import ConfigError
from wamlab.model import image as module
from wamlab.model.image import MEAN, STD, ImageEncoder, image_fingerprint
from wamlab.model.stored import CheckpointError


def public_weights(seed: int = 0) -> dict[str, torch.Tensor]:
    """A whole public tower of the tiny size, with the parts that are not needed."""
    generator = torch.Generator().manual_seed(seed)
    network = ImageEncoder("tiny").network
    stored: dict[str, torch.Tensor] = {}
    for name, part in module._parts(network).items():
        rows, *rest = network.state_dict()[name].shape
        stored[part.name] = torch.randn(part.of * rows, *rest, generator=generator) * 0.1
    stored["visual.cls_embedding"] = stored["visual.cls_embedding"].view(1, 1, -1)
    stored["visual.pos_embedding"] = stored["visual.pos_embedding"][None]
    for name in list(stored):
        if name.startswith("visual.transformer.0."):
            stored[name.replace("transformer.0.", "transformer.1.")] = stored[name].clone()
    extra = {"visual.head": (64, 8), "log_scale": (), "textual.norm.weight": (4,)}
    return stored | {name: torch.ones(shape) for name, shape in extra.items()}


def plain_tower(stored: dict[str, torch.Tensor], pixels: torch.Tensor, blocks: int) -> torch.Tensor:
    """The tower in plain torch, from the public names alone."""
    get = {name.removeprefix("visual."): value for name, value in stored.items()}.__getitem__

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return torch.nn.functional.layer_norm(x, (64,), get(f"{name}.weight"), get(f"{name}.bias"))

    def linear(x: torch.Tensor, name: str) -> torch.Tensor:
        return x @ get(f"{name}.weight").T + get(f"{name}.bias")

    patches = torch.nn.functional.conv2d(pixels, get("patch_embedding.weight"), stride=14)
    x = torch.cat([get("cls_embedding").expand(len(pixels), 1, 64), patches.flatten(2).mT], 1)
    x = norm(x + get("pos_embedding"), "pre_norm")
    for i in range(blocks):
        at = f"transformer.{i}"
        qkv = linear(norm(x, f"{at}.norm1"), f"{at}.attn.to_qkv").chunk(3, -1)
        q, k, v = (t.unflatten(-1, (4, 16)).transpose(1, 2) for t in qkv)
        heads = torch.softmax(q @ k.mT / 16**0.5, -1) @ v
        x = x + linear(heads.transpose(1, 2).flatten(2), f"{at}.attn.proj")
        hidden = torch.nn.functional.gelu(linear(norm(x, f"{at}.norm2"), f"{at}.mlp.0"))
        x = x + linear(hidden, f"{at}.mlp.2")
    return x


@pytest.mark.parametrize("prefix", ["", "action_head.image_encoder.model."])
@pytest.mark.parametrize("log_scale", [(), (1,)])
def test_public_weights_load_and_the_last_block_is_not_run(tmp_path, prefix, log_scale):
    stored = public_weights() | {"log_scale": torch.ones(log_scale)}
    save_file({prefix + n: v for n, v in stored.items()}, tmp_path / "clip.safetensors")
    encoder = ImageEncoder("tiny", tmp_path / "clip.safetensors")
    image = torch.rand(2, 1, 3, 40, 72) * 2 - 1
    features, pixels = encoder(image), encoder.pixels(image)
    assert features.shape == (2, 257, 64)
    torch.testing.assert_close(features, plain_tower(stored, pixels, 1), atol=2e-5, rtol=0)
    assert (features - plain_tower(stored, pixels, 2)).abs().max() > 0.01
    half = ImageEncoder("tiny", tmp_path / "clip.safetensors", dtype=torch.bfloat16)(image)
    assert half.dtype == torch.bfloat16
    assert (half.float() - features).norm() < 0.02 * features.norm()


def test_pixels_are_resized_without_antialias_and_normalised():
    encoder = ImageEncoder("tiny")
    image = torch.rand(1, 3, 50, 90) * 2 - 1
    side = torch.nn.functional.interpolate(image, (224, 224), mode="bicubic", align_corners=False)
    for c in range(3):
        want = (side[:, c] * 0.5 + 0.5 - MEAN[c]) / STD[c]
        torch.testing.assert_close(encoder.pixels(image)[:, c], want)
    assert torch.equal(encoder.pixels(image), encoder.pixels(image[:, None]))


def test_key_names_of_both_transformers_layouts_map_to_the_same_public_ones(monkeypatch):
    network = ImageEncoder("tiny").network
    now = module._parts(network)
    plain = {name.removeprefix("vision_model."): part for name, part in now.items()}

    class Older:
        def state_dict(self):
            return {f"vision_model.{name}": None for name in plain}

    assert module._parts(Older()) == {f"vision_model.{n}": part for n, part in plain.items()}


def test_the_full_size_reads_every_public_tensor_but_the_unused():
    with torch.device("meta"):
        network = module._build(module.IMAGE_SIZES["clip-vit-h"])
    names = {part.name for part in module._parts(network).values()}
    assert len(names) == 393 - 12 - 2  # less one block, `head` and `log_scale`


def test_no_test_helper_hides_a_package_that_transformers_looks_for():
    """transformers imports `kernels`, `accelerate` and others where it finds a module so named."""
    from transformers.utils import import_utils

    optional = re.findall(r'_is_package_available\("(\w+)"', inspect.getsource(import_utils))
    assert "kernels" in optional
    assert not {path.stem for path in (ROOT / "tests").glob("*.py")} & set(optional)


def test_mistakes_are_named(tmp_path):
    stored = public_weights()
    stored["visual.transformer.0.attn.to_qkv.weight"] = torch.zeros(190, 64)
    save_file(stored, tmp_path / "clip.safetensors")
    with pytest.raises(CheckpointError, match=r"to_qkv\.weight \(190, 64\) for \(64, 64\)"):
        ImageEncoder("tiny", tmp_path / "clip.safetensors")
    with pytest.raises(ConfigError, match=r"image encoder size 'clip'"):
        ImageEncoder("clip")
    assert image_fingerprint("tiny", None, 0) != image_fingerprint("tiny", None, 1)
