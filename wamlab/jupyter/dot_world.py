"""A world of one dot, written directly as latents: learned in seconds, and rolled out by eye.

The prompt names a direction, the robot moves the dot there, one step an action. Everything a world
action model is given is here, without an encoder: clean latents, actions, states, prompt embedding.
"""

import torch
from torch import Tensor

from wamlab.model.dit import DiTConfig

GRID, FRAMES, STEPS = 8, 5, 4  # latent pixels a side, latent frames, actions a block of 2 frames
DIRECTIONS = {"left": (0.0, -1.0), "right": (0.0, 1.0), "up": (-1.0, 0.0), "down": (1.0, 0.0)}
CONFIG = DiTConfig(
    dim=64,
    num_heads=2,
    num_layers=2,
    ffn_dim=192,
    out_dim=2,
    freq_dim=64,
    text_dim=8,
    text_len=4,
    clip_dim=8,
    action_dim=2,
    max_state_dim=2,
    hidden_size=32,
    num_action_per_block=STEPS,
    max_chunk_size=2,
)


def episodes(count: int, seed: int = 0) -> dict[str, Tensor]:
    """Return a batch for `flow_matching.loss`: `count` clips of random start and direction."""
    generator = torch.Generator().manual_seed(seed)
    which = torch.randint(len(DIRECTIONS), (count,), generator=generator)
    heading_BE = torch.tensor(list(DIRECTIONS.values()))[which]
    middle, spread = (GRID - 1) / 2, GRID / 4
    start_BE = middle + spread * (2 * torch.rand(count, 2, generator=generator) - 1)
    start_BE = (start_BE - heading_BE * GRID / 4).clamp(1, GRID - 2)
    per_frame = GRID / 2 / (FRAMES - 1)
    travel_F = per_frame * torch.arange(FRAMES)
    path_BFE = start_BE[:, None] + heading_BE[:, None] * travel_F[:, None]
    actions = (FRAMES - 1) // 2 * STEPS
    return {
        "latents": draw(path_BFE),
        "action": 0.8 * heading_BE[:, None].expand(-1, actions, -1),
        "action_mask": torch.ones(count, actions, 2, dtype=torch.bool),
        "has_real_action": torch.ones(count, dtype=torch.bool),
        "state": path_BFE[:, 0:-1:2] / GRID * 2 - 1,
        **condition(which),
    }


def condition(which_B: Tensor) -> dict[str, Tensor]:
    """Return prompt embedding and image features of directions, given by their index."""
    prompt = torch.zeros(len(which_B), CONFIG.text_len, CONFIG.text_dim)
    prompt[torch.arange(len(which_B)), 0, which_B] = 3.0
    return {"prompt_embedding": prompt, "clip_feature": torch.zeros(len(which_B), 1, 8)}


def draw(path_BFE: Tensor) -> Tensor:
    """Return latents [B, 2, F, GRID, GRID]: a soft dot, and its negative, at (row, column)."""
    axis = torch.arange(GRID, dtype=torch.float32)
    row, col = (((axis - path_BFE[..., i, None]) ** 2) for i in (0, 1))
    dot = 3 * torch.exp(-(row[..., :, None] + col[..., None, :]) / 2) - 0.5
    return torch.stack([dot, -dot], dim=1)


def locate(latents_BCFYX: Tensor) -> Tensor:
    """Return the dot's (row, column) in each frame, the mean of what is bright: [B, F, 2]."""
    bright = ((latents_BCFYX[:, 0] - latents_BCFYX[:, 1]) / 2 - 0.5).clamp(min=0)
    axis = torch.arange(GRID, dtype=torch.float32)
    total = bright.sum((-1, -2)).clamp(min=1e-6)
    row, col = bright.sum(-1) @ axis / total, bright.sum(-2) @ axis / total
    return torch.stack([row, col], dim=-1)
