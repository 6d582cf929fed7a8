"""The world action model: the protocol, and that no way of computing changes a number."""

import dataclasses

import pytest
import torch
from torch import Tensor

from wamlab.config import ConfigError, from_dict, to_dict
from wamlab.draws import Draws
from wamlab.model.dit import MODEL_SIZES
from wamlab.model.prompt_cache import PromptCache
from wamlab.model.vae import VAE_SIZES
from wamlab.model.wam import (
    ENCODERS,
    WAMConfig,
    WAMOptions,
    WorldActionModel,
    conditioning,
    first_frame_alone,
    preprocess,
)

CONFIG = WAMConfig(layers=1, target_hw=(32, 64))


def make_batch(config: WAMConfig = CONFIG, size: int = 3, frames: int = 9, seed: int = 0) -> dict:
    g = torch.Generator().manual_seed(seed)
    dit = MODEL_SIZES[config.size]
    blocks = (frames - 1) // 8
    actions = blocks * (config.num_action_per_block or dit.num_action_per_block)
    return {
        "video": torch.randint(0, 256, (size, frames, 40, 72, 3), dtype=torch.uint8, generator=g),
        "prompt": ["lift the cup", "a", "lift the cup"][:size],
        "state": torch.randn(size, blocks, 64, generator=g),
        "action": torch.rand(size, actions, 32, generator=g) * 2 - 1,
        "action_mask": torch.rand(size, actions, 32, generator=g) < 0.5,
        "has_real_action": torch.tensor([True, False, True])[:size],
        "sample_id": torch.arange(size),
    }


def losses(model: WorldActionModel, batch: dict) -> dict[str, Tensor]:
    return model.loss(batch, Draws(0, 1, batch["sample_id"]))


@pytest.fixture(scope="module")
def model() -> WorldActionModel:
    model = WorldActionModel(CONFIG)
    torch.nn.init.normal_(model.dit.head.head.weight, std=0.1)  # publicly 0: nothing would show
    return model


@pytest.fixture(autouse=True)
def _public_way_again(model):
    yield
    model.options = WAMOptions()
    model.dit.set_options(model.options.dit)
    model.prompts = PromptCache(model.prompts.meta)


def test_the_losses_train_the_dit_alone(model):
    out = losses(model, make_batch())
    assert set(out) == {"loss", "dynamics_loss", "action_loss"}
    assert all(v.dtype == torch.float32 and v.dim() == 0 for v in out.values())
    torch.testing.assert_close(out["loss"], out["dynamics_loss"] + out["action_loss"])
    out["loss"].backward()
    assert all(p.grad is not None for p in model.trainable.parameters())
    for encoder in model.frozen():
        assert not encoder.training
        assert all(p.grad is None and not p.requires_grad for p in encoder.parameters())
    frozen = {id(p) for encoder in model.frozen() for p in encoder.parameters()}
    trained = {id(p) for p in model.trainable.parameters()}
    assert frozen | trained == {id(p) for p in model.parameters()}
    assert not frozen & trained
    model.zero_grad()


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("batched_encoders", True),
        ("skip_unused_y", True),
        ("prompt_cache", True),
        ("compile_encoders", True),
        ("shortcuts", True),
        ("impl", "fused"),
        ("attention", "dense"),
    ],
)
def test_an_option_alone_leaves_the_losses(model, option, value):
    batch = make_batch()
    want = losses(model, batch)
    model.set_option(option, value)
    for name, value in losses(model, batch).items():
        torch.testing.assert_close(value, want[name], atol=2e-5, rtol=1e-5)


def test_all_options_together_and_a_chunk_leave_the_losses(model):
    batch = make_batch(frames=17)
    want = losses(model, batch)
    for name in ("batched_encoders", "skip_unused_y", "prompt_cache", "shortcuts"):
        model.set_option(name, True)
    for chunk in (None, 8):
        model.set_option("vae_chunk", chunk)
        torch.testing.assert_close(losses(model, batch), want, atol=2e-5, rtol=1e-5)


def test_the_public_way_encodes_one_by_one_and_throws_a_pass_away(model):
    calls = {"vae": [], "image": [], "text": []}
    hooks = [
        getattr(model, name)
        .get_submodule(inner)
        .register_forward_pre_hook(
            lambda m, args, kw, name=name: calls[name].append(len([*args, *kw.values()][0])),
            with_kwargs=True,
        )
        for name, inner in (("vae", "encoder"), ("image", "network"), ("text", "network"))
    ]
    batch = make_batch()
    model.encode(batch)
    assert calls == {"vae": [1] * 3 * 2 * 3, "image": [1, 1, 1], "text": [1, 1, 1]}  # 3 chunks
    for name in ("batched_encoders", "skip_unused_y", "prompt_cache"):
        model.set_option(name, True)
    for value in calls.values():
        value.clear()
    model.encode(batch)
    model.encode(batch)
    assert calls == {"vae": [3, 3], "image": [3, 3], "text": [2]}  # two distinct prompts, once
    for hook in hooks:
        hook.remove()


def test_one_sample_does_not_depend_on_its_batch(model):
    batch = make_batch()
    whole = losses(model, batch)["loss"]
    parts = []
    for i in range(3):
        one = {k: v[i : i + 1] for k, v in batch.items()}
        parts.append(losses(model, one)["loss"])
    torch.testing.assert_close(torch.stack(parts).mean(), whole, atol=1e-5, rtol=1e-5)


def test_the_action_loss_may_weigh_more(model):
    heavy = WorldActionModel(dataclasses.replace(CONFIG, action_weight=4.0))
    plain, found = losses(model, make_batch()), losses(heavy, make_batch())
    torch.testing.assert_close(found["action_loss"], plain["action_loss"])
    torch.testing.assert_close(found["loss"], found["dynamics_loss"] + 4 * found["action_loss"])


def test_what_is_encoded_already_is_not_encoded_again(model):
    batch = make_batch()
    encoded = model.encode(batch)
    assert "video" not in encoded
    assert encoded["latents"].shape == (3, 48, 3, 2, 4)
    assert encoded["clip_feature"].shape == (3, 257, 64)
    assert encoded["prompt_embedding"].shape == (3, 512, 64)
    again = model.encode(encoded)
    assert all(again[k] is encoded[k] for k in encoded)
    torch.testing.assert_close(losses(model, encoded), losses(model, batch))
    with pytest.raises(ConfigError, match="a batch needs `video` or `latents`"):
        model.encode({"prompt": ["a"]})


def test_the_first_frame_conditions_an_i2v_model(monkeypatch):
    i2v = dataclasses.replace(MODEL_SIZES["tiny"], concat_first_frame_latent=True, num_layers=1)
    monkeypatch.setitem(MODEL_SIZES, "tiny", i2v)
    model = WorldActionModel(CONFIG)
    batch = make_batch()
    one_by_one = model.encode(batch)
    y = one_by_one["y"]
    assert y.shape == (3, 4 + 48, 3, 2, 4)
    assert (y[:, :4, 0] == 1).all()
    assert not y[:, :4, 1:].any()
    torch.testing.assert_close(y[:, 4:, 0], one_by_one["latents"][:, :, 0], atol=2e-5, rtol=0)
    for name in ("batched_encoders", "skip_unused_y"):
        model.set_option(name, True)
    torch.testing.assert_close(model.encode(batch)["y"], y, atol=2e-5, rtol=0)
    model.set_option("vae_chunk", 4)
    torch.testing.assert_close(model.encode(batch)["y"], y, atol=2e-5, rtol=0)
    assert losses(model, batch)["loss"].isfinite()


def test_conditioning_is_the_first_frame_on_grey():
    clip = torch.rand(2, 3, 5, 4, 4)
    still = first_frame_alone(clip)
    assert torch.equal(still[:, :, 0], clip[:, :, 0])
    assert not still[:, :, 1:].any()
    y = conditioning(torch.full((2, 6, 3, 1, 1), 7.0))
    assert y.shape == (2, 10, 3, 1, 1)
    assert y[0, :, :, 0, 0].tolist() == [[1.0, 0.0, 0.0]] * 4 + [[7.0] * 3] * 6


def test_preprocessing_resizes_only_where_the_size_differs():
    video = torch.randint(0, 256, (2, 3, 6, 8, 3), dtype=torch.uint8)
    plain = preprocess(video, None)
    assert plain.shape == (2, 3, 3, 6, 8)
    assert torch.equal(plain, preprocess(video, (6, 8)))
    torch.testing.assert_close(plain[1, 2, 0, 3, 4], video[1, 0, 3, 4, 2] / 127.5 - 1)
    assert preprocess(video, (3, 4)).shape == (2, 3, 3, 3, 4)


def test_a_seed_is_a_model(model):
    again = WorldActionModel(CONFIG)
    other = WorldActionModel(dataclasses.replace(CONFIG, seed=1))
    for name, value in again.vae.state_dict().items():
        assert torch.equal(value, model.vae.state_dict()[name])
    weights = [m.dit.blocks()[0].ffn[0].weight for m in (again, model, other)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])
    assert again.flops_per_sample() > 0
    assert len(again.blocks()) == 1


@pytest.mark.parametrize("size", MODEL_SIZES)
def test_every_size_has_encoders_that_fit_it(size):
    config, encoders = MODEL_SIZES[size], ENCODERS[size]
    assert from_dict(WAMConfig, to_dict(WAMConfig(size=size))) == WAMConfig(size=size)
    assert VAE_SIZES[encoders.vae].z_dim == config.out_dim
    with torch.device("meta"):
        model = WorldActionModel(WAMConfig(size=size, layers=1))
    assert model.text.config.dim == config.text_dim
    assert model.text.config.text_len == config.text_len
    assert model.image.config.dim == config.clip_dim
    assert model.vae.decoder is None
    assert {p.device.type for p in model.parameters()} == {"meta"}


def test_mistakes_are_named(model):
    with pytest.raises(ConfigError, match=r"model option 'batched'.*did you mean 'batched_enc"):
        model.set_option("batched", True)
    with pytest.raises(ConfigError, match="attention implementation"):
        model.set_option("attention", "fast")
    with pytest.raises(ConfigError, match=r"model size 'tny'.*did you mean 'tiny'"):
        WAMConfig(size="tny")
    with pytest.raises(ConfigError, match=r"VAE size 'wan'"):
        WAMConfig(vae="wan")
