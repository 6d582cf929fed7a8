"""The frozen encoders: VAE both ways, conditioning, text, image, preprocessing, text cleaning.

Their sidecars carry no kind; it is read off the tensors they list. The tolerance is the sidecar's.
"""

import functools
import json
import re
import tempfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from golden_kinds.golden import Golden
from wamlab.model import text as text_module
from wamlab.model.image import ImageConfig, ImageEncoder
from wamlab.model.text import TextConfig, TextEncoder
from wamlab.model.vae import VAE, VAEConfig, load_vae
from wamlab.model.wam import conditioning, first_frame_alone, preprocess

MARKS = {"vae": "const.mean", "text": "pos_bias_block0", "image": "img0.pixels", "video": "uint8"}


def kind_of(sidecar: dict) -> str | None:
    """Return the kind whose typical tensor the sidecar lists."""
    tensors = sidecar.get("tensors", {})
    return next((f"encoder-{kind}" for kind, mark in MARKS.items() if mark in tensors), None)


def tolerances(golden: Golden) -> list[float]:
    """Return the numbers of the sidecar's tolerance sentence, in order."""
    return [float(n) for n in re.findall(r"\d+e-\d+", golden.sidecar["tolerance"])]


def assert_near(got: Tensor, want: Tensor, tolerance: float, what: str) -> None:
    """Assert the largest absolute difference."""
    assert got.shape == want.shape, f"{what}: shape {tuple(got.shape)}, want {tuple(want.shape)}"
    error = float((got.float() - want.float()).abs().max())
    assert error <= tolerance, f"{what}: off by {error:.2e}, allowed {tolerance:.0e}"


def stored_weights(golden: Golden, folder: str) -> Path:
    """Write the golden's state dict as a public stand-alone checkpoint."""
    path = Path(folder) / "weights.safetensors"
    save_file({name: value.clone() for name, value in golden.tensors("sd.").items()}, path)
    return path


@functools.cache
def load_golden_vae(path: Path) -> VAE:
    golden = Golden(path, ())
    config, const = golden.sidecar["config"], golden.tensors("const.")
    sizes = VAEConfig(
        dim=config["dim"],
        decoder_dim=config["dec_dim"],
        z_dim=config["z_dim"],
        patch=config["patch_size"],
        mean=tuple(const["mean"].tolist()),
        std=tuple(const["std"].tolist()),
        multipliers=tuple(config["dim_mult"]),
    )
    only = not golden.tensors("sd.decoder.")
    with tempfile.TemporaryDirectory() as folder:
        return load_vae(sizes, stored_weights(golden, folder), encoder_only=only)


def numbered(golden: Golden, prefix: str) -> list[str]:
    """Return enc0, enc1, ...: the cases of one prefix."""
    return sorted({m[0] for key in golden.tensors(prefix) if (m := re.match(r"\d+", key))})


def vae_cases(golden: Golden) -> list:
    cases = []
    for chunk in (None, 4, 8):
        how = f"chunk{chunk}" if chunk else "whole"
        for n in numbered(golden, "enc"):
            check = functools.partial(check_encode, number=n, chunk=chunk)
            cases.append(pytest.param(check, id=f"enc{n}-{how}"))
        for n in numbered(golden, "dec"):
            check = functools.partial(check_decode, number=n, chunk=chunk)
            cases.append(pytest.param(check, id=f"dec{n}-{how}"))
        check = functools.partial(check_conditioning, chunk=chunk)
        cases.append(pytest.param(check, id=f"y-{how}"))
    for half in ("enc", "dec"):
        if golden.tensors(f"tap.{half}.out."):
            check = functools.partial(check_taps, half=half)
            cases.append(pytest.param(check, id=f"taps-{half}"))
    return cases


@torch.no_grad()
def check_encode(golden: Golden, number: str, chunk: int | None) -> None:
    vae, case = load_golden_vae(golden.path), golden.tensors(f"enc{number}.")
    tolerance = tolerances(golden)[0]
    assert_near(vae.encode(case["video"], chunk), case["latent"], tolerance, "batched latent")
    alone = torch.cat([vae.encode(one, chunk) for one in case["video"].split(1)])
    assert_near(alone, case["latent"], tolerance, "latent one by one")
    mean, std = vae._stats.view(2, 1, -1, 1, 1, 1)
    unnormalised = vae.encode(case["video"], chunk) * std + mean
    assert_near(unnormalised, case["mu_unnormalised"], tolerance, "posterior mean")


@torch.no_grad()
def check_decode(golden: Golden, number: str, chunk: int | None) -> None:
    vae, case = load_golden_vae(golden.path), golden.tensors(f"dec{number}.")
    tolerance = tolerances(golden)[-1]
    assert_near(vae.decode(case["latent"], chunk), case["video"], tolerance, "video")
    free = vae.decode(case["latent"], chunk, clamp=False)
    assert_near(free, case["video_unclamped"], tolerance, "video before the clamp")


@torch.no_grad()
def check_conditioning(golden: Golden, chunk: int | None) -> None:
    vae, case = load_golden_vae(golden.path), golden.tensors("cond.")
    frames = golden.sidecar["cond"]["num_frames"]
    image = case["image"].transpose(1, 2)  # [B, 3, 1, H, W]
    clip = torch.cat([image, torch.rand_like(image).repeat(1, 1, frames - 1, 1, 1)], 2)
    y = conditioning(vae.encode(first_frame_alone(clip), chunk))
    assert_near(y, case["y"], tolerances(golden)[0], "y")


@torch.no_grad()
def check_taps(golden: Golden, half: str) -> None:
    """Compare the output of every named module, each against its own largest value."""
    vae, want = load_golden_vae(golden.path), golden.tensors(f"tap.{half}.out.")
    got: dict[str, Tensor] = {}
    hooks = [
        vae.get_submodule(name).register_forward_hook(
            lambda module, args, out, name=name: got.__setitem__(name, out)
        )
        for name in want
    ]
    case = golden.tensors(f"tap.{half}.")
    run = vae.encode if half == "enc" else vae.decode
    run(case["video" if half == "enc" else "latent"])
    for hook in hooks:
        hook.remove()
    for name, value in want.items():
        scale = max(1.0, float(value.abs().max()))
        assert_near(got[name], value, tolerances(golden)[-1] * scale, name)


def text_cases(golden: Golden) -> list:
    cases = [pytest.param(check_text, id="hidden")]
    cases += [
        pytest.param(functools.partial(check_embedding, crop=crop, zero_from=zero), id=name)
        for crop, zero, name in (
            (True, "sample", "one-by-one-cropped"),
            (False, "sample", "one-by-one"),
            (True, "batch", "public-batch-cropped"),
            (False, "batch", "public-batch"),
        )
    ]
    if golden.path.with_name("text_clean.json").is_file():
        cases.append(pytest.param(check_cleaning, id="cleaning"))
    return cases


def load_text(golden: Golden) -> TextEncoder:
    config = golden.sidecar["config"]
    sizes = TextConfig(
        vocab=config["vocab"],
        dim=config["dim"],
        heads=config["num_heads"],
        head_dim=config["dim_attn"] // config["num_heads"],
        ffn_dim=config["dim_ffn"],
        layers=config["num_layers"],
        buckets=config["num_buckets"],
        tokenizer="bytes",
        text_len=golden.sidecar["seq_len"],
    )
    with tempfile.TemporaryDirectory() as folder:
        return TextEncoder(sizes, stored_weights(golden, folder))


@torch.no_grad()
def check_text(golden: Golden) -> None:
    encoder, case = load_text(golden), golden.tensors()
    hidden = encoder(case["ids"], case["mask"]) * case["mask"][..., None]
    assert_near(hidden, case["hidden_valid_zeroed"], tolerances(golden)[0], "hidden")


def check_embedding(golden: Golden, crop: bool, zero_from: str) -> None:
    encoder, case = load_text(golden), golden.tensors()
    got, length = encoder.embed(case["ids"], case["mask"], crop=crop, zero_from=zero_from)
    name = "one_by_one" if zero_from == "sample" else "public_batch"
    want = case[f"prompt_emb_{name}"]
    assert got.dtype == want.dtype == torch.bfloat16
    # two fp32 results 2e-5 apart may round to neighbouring bf16 numbers: one unit in the last place
    torch.testing.assert_close(got, want, atol=tolerances(golden)[0], rtol=2**-7)
    assert torch.equal(got == 0, want == 0), "other rows are zero"
    lengths = case["mask"].sum(1)
    assert torch.equal(
        length, lengths if zero_from == "sample" else lengths.min().expand_as(lengths)
    )


def check_cleaning(golden: Golden) -> None:
    for row in json.loads(golden.path.with_name("text_clean.json").read_text()):
        assert text_module.clean(row["in"]) == row["out"]


def image_cases(golden: Golden) -> list:
    return [
        pytest.param(functools.partial(check_image, number=n), id=f"img{n}")
        for n in numbered(golden, "img")
    ]


def check_image(golden: Golden, number: str) -> None:
    config, case = golden.sidecar["config"], golden.tensors(f"img{number}.")
    sizes = ImageConfig(
        dim=config["dim"],
        heads=config["heads"],
        layers=config["layers"],
        image_size=config["image_size"],
        patch=config["patch_size"],
        mlp_ratio=config["mlp_ratio"],
    )
    with tempfile.TemporaryDirectory() as folder:
        encoder = ImageEncoder(sizes, stored_weights(golden, folder))
    tolerance = tolerances(golden)[0]
    assert_near(encoder.pixels(case["image"]), case["pixels"], tolerance, "pixels")
    features = encoder(case["image"])
    assert_near(features, case["features"], tolerance, "features")
    last = golden.tensors("last_block_features")
    if number == "0" and last:
        assert (features - last[""]).abs().max() > 100 * tolerance, "the last block was run"


def video_cases(golden: Golden) -> list:
    return [pytest.param(check_preprocess, id="preprocess")]


def check_preprocess(golden: Golden) -> None:
    case, target = golden.tensors(), tuple(golden.sidecar["config"]["target"])
    tolerance = tolerances(golden)[0]
    assert_near(preprocess(case["uint8"], None), case["normalised"], tolerance, "normalised")
    assert_near(preprocess(case["uint8"], target), case["resized"], tolerance, "resized")


KINDS = {
    "encoder-vae": vae_cases,
    "encoder-text": text_cases,
    "encoder-image": image_cases,
    "encoder-video": video_cases,
}
