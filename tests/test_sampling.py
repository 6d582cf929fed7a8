"""Chunks from noise: the cache against the training forward, guidance, schedules, contexts."""

import dataclasses

import pytest
import torch

from wamlab.config import ConfigError, from_dict, to_dict
from wamlab.model import sampling
from wamlab.model.cached_dit import CachedDiT, Conditioning
from wamlab.model.dit import MODEL_SIZES, DiTConfig, ModelOptions, WorldActionDiT
from wamlab.model.sampling import (
    Sampler,
    SamplingConfig,
    observed_latents,
    rollout,
)
from wamlab.model.unipc import UniPC, shifted_sigmas

CONFIG = dataclasses.replace(
    MODEL_SIZES["tiny"],
    dim=24,
    num_heads=2,
    num_layers=2,
    ffn_dim=32,
    freq_dim=8,
    out_dim=4,
    text_dim=6,
    text_len=40,
    clip_dim=8,
    num_action_per_block=4,
)
ALL = SamplingConfig(dit_steps="all", noise_dtype="fp32")


def build(config: DiTConfig = CONFIG, **options) -> WorldActionDiT:
    torch.manual_seed(0)
    dit = WorldActionDiT(config, ModelOptions(impl="reference", **options))
    torch.nn.init.normal_(dit.head.head.weight, std=0.3)
    return dit


def conditioning(batch: int = 1, **changes) -> Conditioning:
    torch.manual_seed(1)
    lengths = torch.tensor([7, 5])[:batch]
    context = torch.randn(2, 40, 6)[:batch] * (torch.arange(40) < lengths[:, None])[..., None]
    negative = torch.randn(1, 40, 6) * (torch.arange(40) < 3)[:, None]
    values = {
        "context": context,
        "clip_feature": torch.randn(2, 5, 8)[:batch],
        "negative_context": negative,
        **changes,
    }
    return Conditioning(**values)


def first_latent(batch: int = 1, height: int = 4) -> torch.Tensor:
    torch.manual_seed(2)
    return torch.randn(2, 4, 1, height, 6)[:batch]


def states(batch: int = 1, chunks: int = 1) -> torch.Tensor:
    torch.manual_seed(3)
    return torch.randn(2, 4, 64)[:batch, :chunks]


def sample(dit: WorldActionDiT, config: SamplingConfig = ALL, batch: int = 1, **changes):
    sampler = Sampler(dit, config)
    sampler.start(first_latent(batch), conditioning(batch, **changes))
    return sampler.sample(states(batch))


def test_a_perfect_velocity_is_followed_to_the_data():
    clean, x = torch.randn(3, 5), torch.randn(3, 5)
    for steps in (1, 2, 5, 16):
        run, now = UniPC(shifted_sigmas(steps)), x
        for sigma in run.sigmas[:-1]:
            now = run.step(now, (now - clean) / sigma)
        torch.testing.assert_close(now, clean)


@pytest.mark.parametrize("concat", [False, True])
def test_a_joint_step_is_one_block_of_the_training_forward(concat):
    """With one layer exactly so; deeper, the state tokens of training see only themselves (K7)."""
    config = dataclasses.replace(CONFIG, num_layers=1, concat_first_frame_latent=concat)
    dit = build(config)
    clean, noisy = torch.randn(2, 1, 4, 5, 4, 6)
    action, state = torch.randn(1, 8, 32), torch.randn(1, 2, 64)
    y = torch.randn(1, 8, 5, 4, 6) if concat else None
    times, given = torch.full((1, 5), 624.0), conditioning(y=y)
    with torch.no_grad():
        want_video, want_action = dit(
            noisy, clean, times, action, torch.full((1, 8), 624.0), state,
            given.context, given.clip_feature, y,
        )  # fmt: skip
    past = CachedDiT(dit, given)
    past.see(clean[:, :, :1])
    past.see(clean[:, :, 1:3])
    video, act = past.predict(
        noisy[:, :, 3:], action[:, 4:], state[:, 1:], torch.full((1, 2), 624.0)
    )
    torch.testing.assert_close(video, want_video[:, :, 3:])
    torch.testing.assert_close(act, want_action[:, 4:])


def test_a_model_that_reads_the_first_latent_asks_for_it():
    dit = build(dataclasses.replace(CONFIG, concat_first_frame_latent=True))
    with pytest.raises(ConfigError, match="conditioning needs y"):
        CachedDiT(dit, conditioning())


def test_a_prediction_leaves_the_past_as_it_was():
    past = CachedDiT(build(), conditioning())
    past.see(first_latent())
    before = [cache.k.clone() for cache in past.caches]
    inputs = torch.randn(1, 4, 2, 4, 6), torch.randn(1, 4, 32), states()
    first = past.predict(*inputs, torch.full((1, 2), 500.0))
    again = past.predict(*inputs, torch.full((1, 2), 500.0))
    assert torch.equal(first[0], again[0])
    assert all(torch.equal(c.k, b) for c, b in zip(past.caches, before))
    assert past.frames == 1


def test_prompt_padding_costs_nothing_and_changes_nothing():
    want = sample(build(), batch=2)
    lengths = {"context_length": torch.tensor([7, 5]), "negative_length": torch.tensor([3])}
    got = sample(build(), batch=2, **lengths)
    torch.testing.assert_close(got.latents, want.latents, atol=1e-4, rtol=1e-3)
    torch.testing.assert_close(got.actions, want.actions, atol=1e-4, rtol=1e-3)


def test_every_episode_of_a_batch_is_sampled_as_if_alone():
    dit = build()
    both = sample(dit, batch=2)
    alone = sample(dit)
    torch.testing.assert_close(both.latents[:1], alone.latents, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(both.actions[:1], alone.actions, atol=1e-4, rtol=1e-4)
    assert not torch.allclose(both.actions[1:], alone.actions, atol=1e-2)


def test_guidance_pushes_the_video_away_from_the_negative_prompt():
    dit, given, x = build(), conditioning(), torch.randn(1, 4, 2, 4, 6)
    times, action = torch.full((1, 2), 900.0), torch.randn(1, 4, 32)
    outputs = []
    for context in (given.context, given.negative_context):
        past = CachedDiT(dit, dataclasses.replace(given, context=context))
        past.see(first_latent())
        outputs.append(past.predict(x, action, states(), times))
    (wanted, act), (unwanted, _) = outputs
    sampler = Sampler(dit, ALL)
    sampler.start(first_latent(), given)
    video, action_velocity = sampler._velocities(x, action, states(), (900, 900))
    torch.testing.assert_close(video, unwanted + 5 * (wanted - unwanted), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(action_velocity, act)


def test_without_guidance_the_negative_prompt_is_not_needed():
    config = dataclasses.replace(ALL, guidance=1.0)
    dit = build()
    got = sample(dit, config, negative_context=None)
    want = sample(dit, negative_context=conditioning().context)  # pushed away from itself
    torch.testing.assert_close(got.latents, want.latents, atol=1e-4, rtol=1e-4)
    with pytest.raises(ConfigError, match="guidance needs a negative_context"):
        sample(dit, negative_context=None)


@pytest.mark.parametrize(
    ("steps", "dit_steps", "runs"),
    [(16, "8", 8), (16, "all", 16), (4, "all", 4), (16, (0, 5, 9, 12, 15), 5), (3, (0,), 1)],
)
def test_the_dit_runs_at_the_chosen_steps(steps, dit_steps, runs):
    config = SamplingConfig(steps=steps, dit_steps=dit_steps)
    assert from_dict(SamplingConfig, to_dict(config)) == config
    chunk = sample(build(), config)
    assert chunk.dit_runs == runs
    assert chunk.latents.isfinite().all()


@pytest.mark.parametrize(("angle", "steps"), [(0.1, [0, 1, 6, 11]), (0.35, [0, 1, 4, 7, 10, 13])])
def test_adaptive_skipping_waits_where_the_velocity_has_settled(monkeypatch, angle, steps):
    """Cosine above 0.95 skips 4 steps, above 0.93 skips 2; then the DiT runs once unasked."""
    ran = []

    def predict(self, x, action, state, times):
        turned = torch.tensor(angle * len(ran))
        ran.append(int(times[0, 0]))
        velocity = torch.zeros_like(x)
        velocity[..., 0, 0], velocity[..., 0, 1] = turned.cos(), turned.sin()
        return velocity, torch.zeros_like(action)

    monkeypatch.setattr(CachedDiT, "predict", predict)
    chunk = sample(build(), SamplingConfig(dit_steps="adaptive"))
    timesteps = UniPC(shifted_sigmas(16)).timesteps
    assert [timesteps.index(t) for t in ran] == steps
    assert chunk.dit_runs == len(steps)


def test_decoupled_noise_leaves_the_video_a_sketch():
    seen = []
    dit = build()
    config = SamplingConfig(last_video_sigma=0.8)
    sampler = Sampler(dit, config)
    sampler.start(first_latent(), conditioning())
    predict = sampler._past.predict
    sampler._past.predict = lambda *a: seen.append(a[3][0].tolist()) or predict(*a)
    sampler.sample(states())
    assert seen[-1] == [849.0, 249.0]
    assert seen[0] == [999.0, 999.0]


def test_every_step_can_be_watched():
    sampler, steps = Sampler(build()), []
    sampler.start(first_latent(), conditioning())
    chunk = sampler.sample(states(), watch=lambda *now: steps.append(now))
    assert len(steps) == 16
    assert torch.equal(steps[-1][0], chunk.latents)
    assert torch.equal(steps[-1][1], chunk.actions)


def test_every_chunk_starts_from_the_same_noise():
    dit = build()
    assert torch.equal(sample(dit).latents, sample(dit).latents)
    other = sample(dit, dataclasses.replace(ALL, seed=7))
    assert not torch.equal(sample(dit).latents, other.latents)
    sampler = Sampler(dit)
    sampler.start(first_latent(2), conditioning(2))
    video, action = sampler._noise(torch.device("cpu"))
    assert video.shape == (2, 4, 2, 4, 6)
    assert action.shape == (2, 4, 32)
    assert torch.equal(video, video.bfloat16().float())
    assert torch.equal(video[0], video[1])


def test_one_call_imagines_actions_and_video():
    dit = build()
    result = rollout(
        Sampler(dit),
        first_latent(2, height=5),  # an odd last row, which the patches drop
        states(2, chunks=3),
        conditioning(2),
        decode=lambda latents: latents.mean(dim=1),
    )
    assert result.actions.shape == (2, 12, 32)
    assert result.latents.shape == (2, 4, 7, 4, 6)
    assert result.video.shape == (2, 7, 4, 6)
    assert torch.equal(result.latents[:, :, :1], first_latent(2, height=5)[..., :4, :])
    first = Sampler(dit)
    first.start(first_latent(2, height=5), conditioning(2))
    assert torch.equal(first.sample(states(2)).actions, result.actions[:, :4])


def test_half_precision_weights_sample_in_fp32():
    chunk = sample(build().bfloat16())
    assert {chunk.latents.dtype, chunk.actions.dtype} == {torch.float32}
    assert chunk.latents.isfinite().all()


def test_a_context_ends_at_the_window():
    sampler = Sampler(build(), SamplingConfig(steps=2, dit_steps="all"))
    with pytest.raises(ConfigError, match="call start first"):
        sampler.sample(states())
    assert sampler.needs_start
    sampler.start(first_latent(), conditioning())
    for chunk in range(4):
        assert not sampler.needs_start
        latents = sampler.sample(states()).latents
        if chunk < 3:
            sampler.observe(latents)
    assert sampler.needs_start
    with pytest.raises(ConfigError, match="context is full"):
        sampler.sample(states())
    sampler.start(first_latent(), conditioning())
    sampler.sample(states())


def test_what_was_seen_must_be_told():
    sampler = Sampler(build(), SamplingConfig(steps=2, dit_steps="all"))
    with pytest.raises(ConfigError, match="start takes 1 latent frame, got 2"):
        sampler.start(first_latent().expand(-1, -1, 2, -1, -1), conditioning())
    sampler.start(first_latent(), conditioning())
    with pytest.raises(ConfigError, match="observe takes the 0 latent frames"):
        sampler.observe(first_latent())
    sampler.sample(states())
    with pytest.raises(ConfigError, match="call observe first"):
        sampler.sample(states())
    with pytest.raises(ConfigError, match="takes the 2 latent frames of the last chunk, got 1"):
        sampler.observe(first_latent())


@pytest.mark.parametrize(
    "changes",
    [{"steps": 8}, {"dit_steps": (1, 2)}, {"dit_steps": (0, 16)}, {"dit_steps": ()}],
)
def test_schedules_that_do_not_fit_are_refused(changes):
    with pytest.raises(ConfigError, match="does not fit"):
        SamplingConfig(**changes)
    with pytest.raises(ConfigError, match="did you mean 'adaptive'"):
        SamplingConfig(dit_steps="adaptiv")


def test_observed_frames_become_the_blocks_latents():
    def encode(video):
        times = torch.cat([video[:, :1, :1], video[:, :1, 1:].unflatten(2, (-1, 4)).sum(3)], dim=2)
        return times

    frames = torch.arange(8.0).view(1, 1, 8, 1, 1).expand(1, 3, 8, 2, 2)
    latents = observed_latents(encode, frames, 2)
    assert latents[0, 0, :, 0, 0].tolist() == [0 + 1 + 2 + 3, 4 + 5 + 6 + 7]


def test_the_shipped_schedule_is_named():
    assert sampling.DIT_STEPS["8"] == (0, 1, 2, 6, 10, 13, 14, 15)
    assert SamplingConfig() == SamplingConfig(steps=16, dit_steps="8", guidance=5.0, seed=1140)
