"""A model as a policy: chunks in the robot's units, contexts that go on, what is refused."""

import dataclasses

import numpy as np
import pytest
import torch
from conftest import ROOT

from wamlab.config import ConfigError
from wamlab.data.codec import Codec
from wamlab.data.embodiment import EMBODIMENTS
from wamlab.data.lerobot import LeRobotDataset
from wamlab.data.toy_env import ToyWorld
from wamlab.evaluate.policy import ModelPolicy, ObservationError, PolicyConfig
from wamlab.model.sampling import SamplingConfig
from wamlab.model.wam import WAMConfig, WorldActionModel

QUICK = PolicyConfig(sampling=SamplingConfig(guidance=1.0, steps=3, dit_steps="all"))


@pytest.fixture(scope="module")
def model() -> WorldActionModel:
    made = WorldActionModel(WAMConfig(layers=2))
    for option in ("batched_encoders", "skip_unused_y", "prompt_cache"):
        made.set_option(option, True)
    torch.manual_seed(0)
    torch.nn.init.normal_(made.dit.head.head.weight, std=0.1)
    return made


@pytest.fixture(scope="module")
def codec() -> Codec:
    root = ROOT / "data_samples/droid_mini"
    return LeRobotDataset(root, EMBODIMENTS["toy"], progress=False).codec


def observe(seed: int, *, frames: int = 0, **changes) -> dict:
    world = ToyWorld()
    state = world.reset(seed)
    views = world.render()
    if frames:
        views = {n: np.stack([v] * frames) for n, v in views.items()}
    return {"views": views, "state": state, "prompt": world.task} | changes


def test_a_chunk_is_in_the_robots_own_units_and_follows_from_the_observation(model, codec):
    policy = ModelPolicy(model, codec, QUICK)
    first, again = policy.infer(observe(0)), policy.fork().infer(observe(0))
    assert first.shape == (24, 8)
    assert first.dtype == np.float32
    np.testing.assert_array_equal(first, again)
    assert (first != policy.fork().infer(observe(1))).any()
    low, high = codec.action[1].q01, codec.action[1].q99  # the gripper's statistics
    assert np.abs(first[:, 7] - (low + high) / 2).max() < 3 * (high - low)


def test_a_batch_gives_what_each_robot_gives_alone(model, codec):
    policy = ModelPolicy(model, codec, QUICK)
    alone = [policy.fork().infer(observe(seed)) for seed in range(3)]
    np.testing.assert_allclose(
        policy.infer_batch([observe(seed) for seed in range(3)]), alone, atol=1e-4
    )


def test_a_context_goes_on_with_eight_frames_and_starts_anew_otherwise(model, codec):
    policy = ModelPolicy(model, codec, QUICK)
    chunks = []

    def chunk(**changes) -> int:
        policy.infer(observe(0, **changes))
        chunks.append(policy._chunks)
        return chunks[-1]

    assert [chunk(), chunk(frames=8), chunk(frames=8), chunk(frames=8)] == [1, 2, 3, 4]
    assert chunk(frames=8) == 1  # the window is full
    assert chunk(frames=8) == 2
    assert chunk(frames=8, prompt="wave") == 1  # another task
    assert [chunk(frames=8, prompt="wave"), chunk(frames=3, prompt="wave")] == [2, 1]
    policy.reset()
    assert chunk(frames=8, prompt="wave") == 1
    short = ModelPolicy(model, codec, dataclasses.replace(QUICK, context_chunks=2))
    for expected in (1, 2, 1):
        short.infer(observe(0, frames=8))
        assert short._chunks == expected


def test_what_was_seen_changes_what_is_done(model, codec):
    policy, blind = (ModelPolicy(model, codec, QUICK) for _ in range(2))
    policy.infer(observe(0))
    blind.infer(observe(1))
    now = observe(0, frames=8)
    assert (policy.infer(now) != blind.infer(now)).any()


def test_padded_action_channels_end_at_zero(model, codec):
    policy = ModelPolicy(model, codec, QUICK)
    policy.infer(observe(0))
    actions = policy.chunk.actions
    assert actions[..., 8:].abs().max() < 2e-3  # the schedule starts at sigma 0.9998, not 1
    assert actions[..., :8].abs().min() > 0


def test_guidance_leads_away_from_the_negative_prompt(model, codec):
    sampling = SamplingConfig(guidance=3.0, steps=3, dit_steps="all")
    made = [
        ModelPolicy(model, codec, PolicyConfig(sampling=sampling, negative_prompt=text))
        for text in ("", "a blurred picture")
    ]
    actions = [policy.infer(observe(0)) for policy in made]
    assert (made[0].chunk.latents != made[1].chunk.latents).any()
    assert all(np.isfinite(a).all() for a in actions)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"state": np.zeros(7)}, r"state must be 8 finite numbers \(joint_position \[7\].*\[7\]"),
        ({"state": np.full(8, np.nan)}, r"values that are not finite"),
        ({"views": {"image": np.zeros((4, 4, 3), np.uint8)}}, r"no view 'exterior_image_1_left'"),
        (
            {"views": dict.fromkeys(EMBODIMENTS["toy"].views, np.zeros((9, 9), np.uint8))},
            r"must be uint8 \[H, W, 3\] or \[T, H, W, 3\], got uint8 \[9, 9\]",
        ),
    ],
)
def test_what_does_not_fit_is_refused(model, codec, change, message):
    policy = ModelPolicy(model, codec, QUICK)
    with pytest.raises(ObservationError, match=message):
        policy.infer(observe(0, **change))
    policy.infer(observe(0))  # and nothing is broken by it


def test_views_of_two_sizes_are_refused(model, codec):
    views = observe(0)["views"]
    views["wrist_image_left"] = views["wrist_image_left"][:90]
    with pytest.raises(ObservationError, match=r"must have one shape, got \[1, 90.*\[1, 180"):
        ModelPolicy(model, codec, QUICK).infer(observe(0, views=views))


def test_a_model_of_another_chunk_length_is_refused(codec):
    model = WorldActionModel(WAMConfig(layers=1, num_action_per_block=16))
    with pytest.raises(ConfigError, match=r"16 actions a chunk, embodiment 'toy' takes 24"):
        ModelPolicy(model, codec)
    with pytest.raises(ConfigError, match="context_chunks must be 1 or more, got 0"):
        PolicyConfig(context_chunks=0)
