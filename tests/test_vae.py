"""The VAE: whole clip = chunks = one by one, against diffusers, causality, shortcuts, errors."""

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from wamlab.config import ConfigError
from wamlab.model.stored import CheckpointError
from wamlab.model.vae import VAE, VAE_SIZES, VAEConfig, load_vae, vae_fingerprint
from wamlab.model.vae_blocks import AvgDown, DupUp, RMSNorm
from wamlab.model.vae_still import StillEncoder

SMALL = {
    name: VAEConfig(
        dim=dim,
        decoder_dim=8,
        z_dim=z,
        patch=patch,
        mean=tuple(0.1 * i for i in range(z)),
        std=tuple(1 + 0.1 * i for i in range(z)),
    )
    for name, dim, z, patch in (("2.1", 8, 4, 1), ("2.2", 4, 12, 2))
}
SMALL["tiny"] = VAE_SIZES["tiny"]


def small_vae(name: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> VAE:
    vae = load_vae(SMALL[name], seed=seed)
    with torch.no_grad():
        for parameter in vae.parameters():  # norm scales other than 1, and no vanishing signal
            noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed))
            parameter.add_(0.05 * noise)
    return vae.to(dtype)


def clip_of(vae: VAE, batch: int, frames: int, side: int = 2, seed: int = 1) -> Tensor:
    size = (batch, 3, frames, side * vae.config.spatial, (side + 1) * vae.config.spatial)
    noise = torch.rand(size, generator=torch.Generator().manual_seed(seed))
    return (noise * 2 - 1).to(vae.conv1.weight.dtype)


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("frames", [1, 5, 12, 17])
@torch.no_grad()
def test_chunks_are_the_whole_clip_in_fp64(name, frames):
    vae = small_vae(name, torch.float64)
    clip = clip_of(vae, 2, frames, side=1)
    latents = vae.encode(clip)
    assert latents.shape[2] == 1 + (frames - 1) // 4
    video = vae.decode(latents, clamp=False)
    assert video.shape[2] == 4 * latents.shape[2] - 3
    for chunk in (4, 8, 16, 32):
        torch.testing.assert_close(vae.encode(clip, chunk), latents, atol=1e-13, rtol=1e-12)
        again = vae.decode(latents, chunk, clamp=False)
        torch.testing.assert_close(again, video, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("name", SMALL)
@torch.no_grad()
def test_a_batch_is_its_samples_one_by_one(name):
    vae = small_vae(name)
    clip = clip_of(vae, 3, 9)
    latents = vae.encode(clip)
    alone = torch.cat([vae.encode(one) for one in clip.split(1)])
    torch.testing.assert_close(alone, latents, atol=2e-5, rtol=0)
    videos = torch.cat([vae.decode(one) for one in latents.split(1)])
    torch.testing.assert_close(videos, vae.decode(latents), atol=5e-5, rtol=0)


@torch.no_grad()
def test_a_batch_is_split_by_memory_and_a_clip_that_no_split_fits_is_refused(monkeypatch):
    vae = small_vae("2.1")
    clip, sizes = clip_of(vae, 3, 9), []
    vae.encoder.register_forward_pre_hook(lambda module, args: sizes.append(len(args[0])))
    whole = vae.encode(clip)
    assert sizes == [3]
    vae.memory_gib = 1e-6
    torch.testing.assert_close(vae.encode(clip), whole, atol=2e-5, rtol=0)
    assert sizes == [3, 1, 1, 1]
    monkeypatch.setattr("wamlab.model.vae.MAX_ELEMENTS", 2000)
    with pytest.raises(ConfigError, match=r"one clip needs a tensor of .* pass a smaller chunk"):
        vae.encode(clip)


@pytest.mark.parametrize("name", SMALL)
@torch.no_grad()
def test_no_latent_sees_a_later_frame(name):
    vae = small_vae(name, torch.float64)
    clip = clip_of(vae, 1, 13, side=1)
    changed = clip.clone()
    changed[:, :, 5:] += 1
    before, after = vae.encode(clip), vae.encode(changed)
    assert torch.equal(before[:, :, :2], after[:, :, :2])
    assert (before[:, :, 2:] != after[:, :, 2:]).flatten(2).any(2).all()


@pytest.mark.parametrize("name", SMALL)
@torch.no_grad()
def test_bf16_stays_close_with_fp32_statistics_and_fp32_latents(name):
    vae = small_vae(name)
    clip = clip_of(vae, 2, 9)
    exact = vae.encode(clip)
    vae = vae.to(torch.bfloat16)
    latents = vae.encode(clip)
    assert latents.dtype == torch.float32
    assert vae._stats.dtype == torch.float32
    assert (latents - exact).norm() < 0.02 * exact.norm()
    assert vae.decode(latents).dtype == torch.bfloat16


@pytest.mark.parametrize("name", ["2.1", "2.2"])
@torch.no_grad()
def test_channels_last_is_the_same_function(name):
    vae = small_vae(name)
    clip = clip_of(vae, 2, 9)
    latents = vae.encode(clip)
    vae.channels_last()
    assert vae.encoder.conv1.weight.is_contiguous(memory_format=torch.channels_last_3d)
    torch.testing.assert_close(vae.encode(clip), latents, atol=2e-5, rtol=0)
    torch.testing.assert_close(vae.encode(clip, 4), latents, atol=2e-5, rtol=0)


@pytest.mark.parametrize(
    "backend",
    ["eager", pytest.param("inductor", marks=pytest.mark.slow)],  # 100 s cold
)
@torch.no_grad()
def test_the_compiled_encoder_is_one_graph_and_the_eager_function(backend):
    vae = small_vae("2.2")
    clip = clip_of(vae, 1, 5, side=1)
    latents = vae.encode(clip)
    torch._dynamo.reset()
    vae.compile_encoder(backend=backend)
    torch.testing.assert_close(vae.encode(clip), latents, atol=2e-5, rtol=0)
    torch._dynamo.reset()


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("frames", [1, 5, 17, 33])
@torch.no_grad()
def test_a_still_image_needs_only_the_frames_it_reaches(name, frames):
    vae = small_vae(name, torch.float64)
    image = clip_of(vae, 2, 1, side=1)
    clip = torch.cat([image, torch.zeros_like(image).repeat(1, 1, frames - 1, 1, 1)], 2)
    still = StillEncoder(vae)
    for _ in range(2):  # the second time from the kept constants
        torch.testing.assert_close(
            still.encode(image, frames), vae.encode(clip), atol=1e-12, rtol=0
        )
    if frames == 33:
        (grey,) = still._grey.values()
        assert grey[0].shape[2] == 2  # after the first convolution three frames know the image


def test_public_sizes_have_the_published_counts():
    for name, millions, tensors in (("wan2.1", 126.9, 194), ("wan2.2", 704.7, 196)):
        with torch.device("meta"):
            vae = VAE(name)
        count = sum(p.numel() for p in vae.parameters())
        assert round(count / 1e6, 1) == millions
        assert len(vae.state_dict()) == tensors
    assert sum(p.numel() for p in VAE("tiny").parameters()) < 2e6


def test_rms_norm_is_the_formula():
    norm = RMSNorm(5, 3).double()
    with torch.no_grad():
        norm.gamma.copy_(torch.arange(5.0).view(5, 1, 1, 1))
    x = torch.randn(2, 5, 1, 2, 2, dtype=torch.float64)
    want = norm.gamma * x / x.pow(2).mean(1, keepdim=True).sqrt()
    torch.testing.assert_close(norm(x), want)
    torch.testing.assert_close(norm(x, silu=True), torch.nn.functional.silu(want))
    assert torch.equal(norm(torch.zeros_like(x)), torch.zeros_like(x))


def test_avg_down_and_dup_up_place_every_element_as_the_index_rules_say():
    x = torch.randn(1, 4, 3, 4, 2)
    down = AvgDown(4, 8, 2, 2)(x)
    padded = torch.cat([torch.zeros(1, 4, 1, 4, 2), x], 2)
    cells = torch.zeros(1, 32, 2, 2, 1)
    for c in range(4):
        for dt, dy, dx in torch.cartesian_prod(*[torch.arange(2)] * 3).tolist():
            cells[:, c * 8 + dt * 4 + dy * 2 + dx] = padded[:, c, dt::2, dy::2, dx::2]
    torch.testing.assert_close(down, torch.stack([g.mean(1) for g in cells.split(4, 1)], 1))

    up = DupUp(4, 2, 2, 2)(x, True)
    want = torch.zeros(1, 2, 6, 8, 4)
    for o in range(2):
        for dt, dy, dx in torch.cartesian_prod(*[torch.arange(2)] * 3).tolist():
            source = (o * 8 + dt * 4 + dy * 2 + dx) // 4  # 4 repeats of each channel
            want[:, o, dt::2, dy::2, dx::2] = x[:, source]
    assert torch.equal(up, want[:, :, 1:])
    assert torch.equal(DupUp(4, 2, 2, 2)(x, False), want)


def test_a_checkpoint_is_read_alone_or_inside_a_policy_and_checked_first(tmp_path):
    vae = small_vae("2.1")
    weights = {name: value.clone() for name, value in vae.state_dict().items()}
    save_file(weights, tmp_path / "alone.safetensors")
    inside = {f"action_head.vae.model.{name}": value for name, value in weights.items()}
    inside["action_head.model.other"] = torch.zeros(1)
    torch.save(inside, tmp_path / "policy.pth")
    clip = clip_of(vae, 1, 5, side=1)
    for source in ("alone.safetensors", "policy.pth"):
        loaded = load_vae(SMALL["2.1"], tmp_path / source, encoder_only=True)
        assert loaded.decoder is None
        assert torch.equal(loaded.encode(clip), vae.encode(clip))
        with pytest.raises(ConfigError, match="encoder_only"):
            loaded.decode(loaded.encode(clip))
    del weights["encoder.head.0.gamma"]
    weights["encoder.extra"] = torch.zeros(1)
    weights["conv1.bias"] = torch.zeros(3)
    save_file(weights, tmp_path / "bad.safetensors")
    with pytest.raises(CheckpointError, match=r"missing are encoder\.head\.0\.gamma; unknown are"):
        load_vae(SMALL["2.1"], tmp_path / "bad.safetensors")
    with pytest.raises(CheckpointError, match=r"of another shape are conv1\.bias"):
        load_vae(SMALL["2.1"], tmp_path / "bad.safetensors")


def test_statistics_beside_the_weights_replace_the_configured_ones(tmp_path):
    vae = VAE("tiny")
    extra = {"mean": torch.full((48,), 0.5), "std": torch.full((48,), 2.0)}
    save_file(vae.state_dict() | extra, tmp_path / "vae.safetensors")
    loaded = load_vae("tiny", tmp_path / "vae.safetensors")
    assert loaded._values == ((0.5,) * 48, (2.0,) * 48)
    clip = clip_of(vae, 1, 5, side=1)
    torch.testing.assert_close(loaded.encode(clip), (vae.encode(clip) - 0.5) / 2)
    with pytest.raises(ConfigError, match="latent statistics: 3 and 48, not 48"):
        vae.set_statistics((0.0,) * 3, (1.0,) * 48)


def test_a_fingerprint_names_sizes_seed_and_weights(tmp_path):
    save_file(small_vae("2.1").state_dict(), tmp_path / "a.safetensors")
    save_file(small_vae("2.1", seed=1).state_dict(), tmp_path / "b.safetensors")
    found = [vae_fingerprint("tiny", None, seed) for seed in (0, 1)]
    found += [vae_fingerprint(SMALL["2.1"], tmp_path / f"{n}.safetensors") for n in "ab"]
    assert len(set(found)) == 4
    assert found[2] == vae_fingerprint(SMALL["2.1"], tmp_path / "a.safetensors", seed=7)


def test_mistakes_are_named():
    vae = VAE("tiny")
    with pytest.raises(ConfigError, match="chunk 6: a multiple of 4 frames"):
        vae.encode(clip_of(vae, 1, 5), 6)
    with pytest.raises(ConfigError, match=r"\(33, 48\) pixels: both must divide by 16"):
        vae.encode(torch.zeros(1, 3, 5, 33, 48))
    with pytest.raises(ConfigError, match=r"VAE size 'wan22'.*did you mean 'wan2.2'"):
        VAE("wan22")


def diffusers_name(name: str, residual: bool) -> str:
    """Translate a public name to the one of diffusers' AutoencoderKLWan."""
    inner = {
        "residual.0": "norm1",
        "residual.2": "conv1",
        "residual.3": "norm2",
        "residual.6": "conv2",
        "shortcut": "conv_shortcut",
    }
    if name.startswith(("conv1.", "conv2.")):
        return name.replace("conv1.", "quant_conv.").replace("conv2.", "post_quant_conv.")
    half, where, rest = name.split(".", 2)
    if where in ("conv1", "head"):
        new = {"conv1": "conv_in", "head": "norm_out" if rest.startswith("0") else "conv_out"}
        return f"{half}.{new[where]}.{rest.removeprefix('0.').removeprefix('2.')}"
    if where == "middle":
        index, rest = rest.split(".", 1)
        block = ("mid_block.resnets.0", "mid_block.attentions.0", "mid_block.resnets.1")[int(index)]
    else:
        block, rest = level_name(half, rest, residual)
    for old, new in inner.items():
        if rest.startswith(old + "."):
            rest = new + rest.removeprefix(old)
    return f"{half}.{block}.{rest}"


def level_name(half: str, rest: str, residual: bool) -> tuple[str, str]:
    if residual:
        level, _, j, rest = rest.split(".", 3)
        sampler = ("downsampler", 2) if half == "encoder" else ("upsampler", 3)
        blocks = "down_blocks" if half == "encoder" else "up_blocks"
        inside = sampler[0] if int(j) == sampler[1] else f"resnets.{j}"
        return f"{blocks}.{level}.{inside}", rest
    index, rest = rest.split(".", 1)
    if half == "encoder":
        return f"down_blocks.{index}", rest
    level, j = divmod(int(index), 4)
    return f"up_blocks.{level}." + (f"resnets.{j}" if j < 3 else "upsamplers.0"), rest


@pytest.mark.parametrize("name", ["2.1", "2.2"])
@pytest.mark.filterwarnings("ignore")
@torch.no_grad()
def test_diffusers_computes_the_same(name):
    diffusers = pytest.importorskip(
        "diffusers", reason="the oracle AutoencoderKLWan needs diffusers"
    )
    vae, config = small_vae(name), SMALL[name]
    more = {}
    if name == "2.2":
        more = {"is_residual": True, "patch_size": 2, "in_channels": 12, "out_channels": 12}
        more |= {"decoder_base_dim": config.decoder_dim, "scale_factor_spatial": 16}
    oracle = diffusers.AutoencoderKLWan(base_dim=config.dim, z_dim=config.z_dim, **more)
    renamed = {diffusers_name(n, name == "2.2"): v for n, v in vae.state_dict().items()}
    oracle.load_state_dict(renamed)
    mean, std = vae._stats.view(2, 1, -1, 1, 1, 1)
    for frames in (1, 5, 12, 17):
        clip = clip_of(vae, 2, frames, side=1)
        want = (oracle.encode(clip).latent_dist.mode() - mean) / std
        latents = vae.encode(clip)
        torch.testing.assert_close(latents, want, atol=2e-5, rtol=0)
        video = oracle.decode(latents * std + mean).sample
        torch.testing.assert_close(vae.decode(latents), video, atol=5e-5, rtol=0)
