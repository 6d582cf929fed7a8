"""Flow matching: the noise schedule, what is drawn for a training step, and the joint loss.

Between data (sigma 0) and noise (sigma 1) a sample moves on a straight line,
x = (1 - sigma) data + sigma noise, and the network learns its velocity, noise - data. Video and
actions travel together: publicly all frames of a block and its actions share one sigma, while each
block has its own.

Shapes: B batch, C channels, F latent frames, Y X latent height and width, A action tokens,
E action channels. Index k counts the schedule's steps from 0 (pure noise) to 999.
"""

import functools
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from wamlab.config import check_name
from wamlab.draws import Draws

STEPS = 1000
SHIFT = 5.0  # pushes the times towards noise: their mean is 747.6
MODES = ("standard", "decoupled", "high_noise")


class Schedule(NamedTuple):
    """The training tables, fp32 [1000] each: noise share, network time 0..1000, loss weight."""

    sigma: Tensor
    time: Tensor
    weight: Tensor


@functools.cache
@torch.inference_mode(False)  # the tables serve training too, whoever asks first
def schedule(device: torch.device | str = "cpu") -> Schedule:
    """Return the tables of the shifted linear schedule.

    The weight is a bell around time 500, shifted so that pure noise weighs 0 and scaled to mean 1.
    """
    u = 1 - torch.arange(STEPS, dtype=torch.float64) / STEPS
    sigma = SHIFT * u / (1 + (SHIFT - 1) * u)
    time = STEPS * sigma
    bell = torch.exp(-2 * ((time - STEPS / 2) / STEPS) ** 2)
    bell = bell - bell.min()
    weight = bell * STEPS / bell.sum()
    return Schedule(*(table.float().to(device) for table in (sigma, time, weight)))


class BlockSizes(Protocol):
    """What the draws need to know of a network's configuration."""

    num_frame_per_block: int
    num_action_per_block: int


def draw_timesteps(
    draws: Draws,
    config: BlockSizes,
    mode: str = "standard",
    *,
    latent_frames: int = 9,
    actions: int | None = None,
    high_noise_beta_alpha: float = 3.0,
) -> tuple[Tensor, Tensor]:
    """Draw the schedule index of every latent frame and every action token.

    Args:
        draws: of the step and its samples.
        config: frames and actions of a block.
        mode: "standard": uniform, frames and actions of a block share one index; "high_noise":
            the same with indices pushed to noise by Beta(alpha, 1); "decoupled": video as in
            high-noise with alpha 3, every action token uniform on its own.
        latent_frames: F.
        actions: A; None for all blocks' actions, 0 for none.
        high_noise_beta_alpha: alpha of "high_noise".

    Returns:
        int64 [B, F] and [B, A].

    Raises:
        ConfigError: unknown mode.
    """
    check_name(mode, MODES, "noise mode")
    per_block, registers = config.num_frame_per_block, config.num_action_per_block
    if mode == "standard":
        raw_BF = draws.integers("video_time", STEPS, (latent_frames,))
    else:
        alpha = 3.0 if mode == "decoupled" else high_noise_beta_alpha
        # the inverse of Beta(alpha, 1)'s distribution function u = r^alpha
        raw_BF = beta_index(draws.uniform("video_time", (latent_frames,)) ** (1 / alpha))
    video_BF = share_in_blocks(raw_BF, per_block)
    if actions is None:
        actions = (latent_frames - 1) // per_block * registers
    if mode == "decoupled":
        return video_BF, draws.integers("action_time", STEPS, (actions,))
    return video_BF, follow_blocks(video_BF, per_block, registers)[:, :actions]


def share_in_blocks(index_BF: Tensor, frames_per_block: int) -> Tensor:
    """Give all frames of a block the index of its first; frame 0 keeps its own."""
    first = index_BF[:, 1::frames_per_block]
    return torch.cat([index_BF[:, :1], first.repeat_interleave(frames_per_block, dim=1)], dim=1)


def follow_blocks(index_BF: Tensor, frames_per_block: int, actions_per_block: int) -> Tensor:
    """Give every action token the index of its block: [B, F] -> [B, A]."""
    return index_BF[:, 1::frames_per_block].repeat_interleave(actions_per_block, dim=1)


def beta_index(r: Tensor) -> Tensor:
    """Turn Beta draws into indices; r near 1 is pure noise."""
    return (STEPS * (1 - r)).floor().clamp(0, STEPS - 1).long()


class Noised(NamedTuple):
    """A noised batch: inputs of the network, its targets, the weight of each frame and action."""

    video: Tensor  # [B, C, F, Y, X]
    action: Tensor  # [B, A, E]
    video_time: Tensor  # [B, F]
    action_time: Tensor  # [B, A]
    video_target: Tensor
    action_target: Tensor
    video_weight: Tensor  # [B, F]
    action_weight: Tensor  # [B, A]


def add_noise(
    video: Tensor, video_noise: Tensor, action: Tensor, action_noise: Tensor, *, index: tuple
) -> Noised:
    """Move data and noise to the drawn points of their lines.

    Args:
        video: clean latents [B, C, F, Y, X].
        video_noise: standard normal, same shape.
        action: clean actions in [-1, 1], [B, A, E].
        action_noise: standard normal, same shape.
        index: what `draw_timesteps` returned.
    """
    table = schedule(video.device)
    index_BF, index_BA = index
    sigma_v = table.sigma[index_BF][:, None, :, None, None]
    sigma_a = table.sigma[index_BA][..., None]
    return Noised(
        video=(1 - sigma_v) * video + sigma_v * video_noise,
        action=(1 - sigma_a) * action + sigma_a * action_noise,
        video_time=table.time[index_BF],
        action_time=table.time[index_BA],
        video_target=video_noise - video,
        action_target=action_noise - action,
        video_weight=table.weight[index_BF],
        action_weight=table.weight[index_BA],
    )


def velocity_losses(
    video: Tensor,
    action: Tensor,
    noised: Noised,
    *,
    action_mask: Tensor,
    has_real_action: Tensor,
) -> dict[str, Tensor]:
    """Return the weighted squared errors of the two velocities and their sum.

    The action mean divides by all E channels and all samples, padded and masked ones included, as
    the public loss does: seven real channels of 32 weigh 7/32. A sample without real actions is
    masked on its own, whatever the batch.

    Args:
        video: predicted velocity; an odd last row or column may be missing from it.
        action: predicted velocity [B, A, E].
        noised: targets and weights.
        action_mask: bool [B, A, E], real channels.
        has_real_action: bool [B].

    Returns:
        `loss`, `dynamics_loss`, `action_loss`: fp32 scalars.
    """
    target = noised.video_target[..., : video.shape[-2], : video.shape[-1]]
    error_BF = (video.float() - target.float()).square().mean(dim=(1, 3, 4))
    dynamics = (error_BF * noised.video_weight).mean()
    if action.numel() == 0:
        # an empty sum is 0, yet gives the action parameters a gradient, which sharded ranks reduce
        nothing = action.float().sum()
        return {"loss": dynamics + nothing, "dynamics_loss": dynamics, "action_loss": nothing}
    error = (action.float() - noised.action_target.float()).square()
    real = action_mask & has_real_action[:, None, None]
    error_BA = (error * real).mean(dim=-1)
    action_loss = (error_BA * noised.action_weight).mean()
    return {
        "loss": dynamics + action_loss,
        "dynamics_loss": dynamics,
        "action_loss": action_loss,
    }


def loss(
    dit: Any, batch: dict[str, Any], draws: Draws, *, mode: str = "standard"
) -> dict[str, Tensor]:
    """Draw times and noise, run the network, return its losses.

    Args:
        dit: a WorldActionDiT.
        batch: `latents` [B, C, F, Y, X], `clip_feature`, `prompt_embedding`, `prompt_length`, `y`
            where the network reads it; `action` [B, A, E], `action_mask`, `has_real_action`,
            `state`; without `action`, video alone is learned.
        draws: of the batch's sample ids.
        mode: see `draw_timesteps`.

    Returns:
        See `velocity_losses`.
    """
    latents, action = batch["latents"].float(), batch.get("action")
    if action is None:
        action = latents.new_zeros(len(latents), 0, dit.config.action_dim)
    index = draw_timesteps(
        draws, dit.config, mode, latent_frames=latents.shape[2], actions=action.shape[1]
    )
    video_noise = draws.normal("video_noise", latents.shape[1:])
    action_noise = draws.normal("action_noise", action.shape[1:])
    noised = add_noise(latents, video_noise, action, action_noise, index=index)
    acts = action.shape[1] > 0
    video, moves = dit(
        noised.video,
        latents,
        noised.video_time,
        noised.action if acts else None,
        noised.action_time,
        batch["state"] if acts else None,
        batch["prompt_embedding"],
        batch["clip_feature"],
        batch.get("y"),
        context_length=batch.get("prompt_length"),
        coupled_times=mode != "decoupled",
    )
    mask, real = batch.get("action_mask"), batch.get("has_real_action")
    return velocity_losses(video, moves, noised, action_mask=mask, has_real_action=real)
