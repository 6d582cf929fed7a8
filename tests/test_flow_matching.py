"""The schedule, the draws and the loss."""

import pytest
import torch

from wamlab.config import ConfigError
from wamlab.draws import Draws
from wamlab.model import flow_matching
from wamlab.model.dit import MODEL_SIZES
from wamlab.model.flow_matching import (
    STEPS,
    add_noise,
    beta_index,
    draw_timesteps,
    schedule,
    velocity_losses,
)

CONFIG = MODEL_SIZES["tiny"]
FRAMES, ACTIONS = 9, 96


def draws(samples: int = 64, step: int = 0) -> Draws:
    return Draws(3, step, torch.arange(samples))


def noised_batch(batch: int = 3, index: int | None = None) -> flow_matching.Noised:
    torch.manual_seed(0)
    video, action = torch.randn(batch, 4, FRAMES, 5, 6), torch.rand(batch, ACTIONS, 7) * 2 - 1
    drawn = draw_timesteps(draws(batch), CONFIG)
    if index is not None:
        drawn = tuple(torch.full_like(k, index) for k in drawn)
    noise = torch.randn_like(video), torch.randn_like(action)
    return add_noise(video, noise[0], action, noise[1], index=drawn)


def test_schedule_is_shifted_and_weighted():
    table = schedule()
    assert table.sigma[0] == 1
    assert table.sigma[-1] == pytest.approx(0.00498, abs=1e-5)
    assert table.time.mean() == pytest.approx(747.6, abs=0.05)
    assert table.weight[0] == 0, "pure noise weighs nothing (K9)"
    assert table.weight.mean() == pytest.approx(1.0, abs=1e-6)
    assert table.weight.max() == pytest.approx(2.0764, abs=1e-4)
    assert table.time[table.weight.argmax()] == pytest.approx(500.6, abs=1.0)
    assert table.weight[-1] == pytest.approx(0.0319, abs=1e-4)


@pytest.mark.parametrize("mode", flow_matching.MODES)
def test_frames_of_a_block_share_the_index_of_its_first(mode):
    video, action = draw_timesteps(draws(), CONFIG, mode)
    assert (video.shape, action.shape) == ((64, FRAMES), (64, ACTIONS))
    assert torch.equal(video[:, 1::2], video[:, 2::2])
    assert (video[:, 0] != video[:, 1]).any(), "frame 0 has its own"
    for k in (video, action):
        assert (k >= 0).all()
        assert (k < STEPS).all()
    blocks = action.view(64, 4, 24)
    if mode == "decoupled":
        assert (blocks[..., :1] != blocks).any(), "one index a token"
    else:
        assert torch.equal(blocks, video[:, 1::2, None].expand_as(blocks)), "one index a block"


def test_distributions_of_the_modes():
    many = draws(samples=4000)
    uniform, noisy, steeper = (
        draw_timesteps(many, CONFIG, mode, high_noise_beta_alpha=alpha)[0].float().mean()
        for mode, alpha in (("standard", 3), ("high_noise", 3), ("high_noise", 7))
    )
    assert uniform == pytest.approx(499.5, abs=8)
    # the mean of Beta(a, 1) is a / (a + 1), and the index is 1000 (1 - r)
    assert noisy == pytest.approx(249.5, abs=6)
    assert steeper == pytest.approx(124.5, abs=5)
    assert beta_index(torch.tensor([0.0, 1.0, 0.5])).tolist() == [999, 0, 500]


def test_draws_depend_on_sample_and_step_alone():
    whole, part = draw_timesteps(draws(8), CONFIG), Draws(3, 0, torch.tensor([5, 2]))
    for all_samples, some in zip(whole, draw_timesteps(part, CONFIG)):
        assert torch.equal(all_samples[[5, 2]], some)
    later = draw_timesteps(draws(8, step=1), CONFIG)
    assert not torch.equal(whole[0], later[0])


def test_noise_moves_on_a_straight_line_and_the_target_is_its_slope():
    at_noise, at_data = noised_batch(index=0), noised_batch(index=STEPS - 1)
    torch.testing.assert_close(at_noise.video_target, at_data.video_target)
    step = schedule().sigma[0] - schedule().sigma[-1]
    for now, before, slope in (
        (at_noise.video, at_data.video, at_noise.video_target),
        (at_noise.action, at_data.action, at_noise.action_target),
    ):
        torch.testing.assert_close((now - before) / step, slope, rtol=1e-4, atol=1e-4)


def masks(batch: int = 3, real=(True, True, True)) -> dict:
    mask = torch.zeros(batch, ACTIONS, 7, dtype=torch.bool)
    mask[..., :5] = True
    return {"action_mask": mask, "has_real_action": torch.tensor(real)}


def test_loss_by_hand():
    """Means run over padded channels and masked samples too (K8); an odd row is cropped."""
    noised = noised_batch()
    video, action = noised.video_target[..., :4, :] + 1, noised.action_target - 2
    losses = velocity_losses(video, action, noised, **masks(real=(True, False, True)))
    torch.testing.assert_close(losses["dynamics_loss"], noised.video_weight.mean())
    weight = noised.action_weight.clone()
    weight[1] = 0
    torch.testing.assert_close(losses["action_loss"], weight.mean() * 4 * 5 / 7)
    torch.testing.assert_close(losses["loss"], losses["dynamics_loss"] + losses["action_loss"])
    assert all(x.dtype == torch.float32 and x.dim() == 0 for x in losses.values())


def test_real_action_is_a_matter_of_the_sample():
    """F2: the public mask, [B] expanded to [B, 1], meets [B, A, E] on the wrong axis."""
    noised, given = noised_batch(), masks(real=(True, False, True))
    public = given["has_real_action"].unsqueeze(-1)
    with pytest.raises(RuntimeError, match="must match"):
        noised.action_target * public
    assert (torch.ones(3, 3, 2) * public)[:, 1].sum() == 0, "silently over time where A = B"

    action = noised.action_target.clone()
    want = velocity_losses(noised.video_target, action, noised, **given)["action_loss"]
    action[1] += 100  # the sample without real actions
    got = velocity_losses(noised.video_target, action, noised, **given)["action_loss"]
    assert got == want == 0
    action[0] += 1
    assert velocity_losses(noised.video_target, action, noised, **given)["action_loss"] > 0


def test_without_actions_only_the_video_counts():
    noised = noised_batch()
    empty = noised.action_target[:, :0]
    losses = velocity_losses(
        noised.video_target + 1, empty, noised, action_mask=None, has_real_action=None
    )
    assert losses["action_loss"] == 0
    assert losses["loss"] == losses["dynamics_loss"] > 0


def test_bf16_times_merge_and_contradict_the_noise():
    """F1: cast to bf16, 294 of 1000 times are left, up to 2 away from the sample's own."""
    table = schedule()
    rounded = table.time.bfloat16().float()
    assert len(rounded.unique()) == 294
    assert (rounded - table.time).abs().max() == pytest.approx(2.0, abs=0.01)
    assert torch.tensor([747.55, 999.8]).bfloat16().tolist() == [748.0, 1000.0]
    assert noised_batch().video_time.dtype == torch.float32


def test_schedule_made_without_gradients_serves_training(monkeypatch):
    schedule.cache_clear()
    with torch.inference_mode():
        schedule()
    noised = noised_batch()
    video = noised.video_target.clone().requires_grad_()
    velocity_losses(video, noised.action_target, noised, **masks())["loss"].backward()
    assert video.grad is not None


def test_unknown_mode():
    with pytest.raises(ConfigError, match=r"noise mode 'highnoise'.*did you mean 'high_noise'"):
        draw_timesteps(draws(), CONFIG, "highnoise")
