"""A world of one dot, written directly as latents: small enough to see what a model imagines.

The prompt names a direction and the robot moves the dot there. A batch holds everything that a
world action model is given, and no encoder is needed: clean latents, actions, states, prompt.

Shapes: B batch, F latent frames, E action channels (row, column), Y X latent pixels.
"""

import torch
from torch import Tensor

from wamlab.draws import Draws
from wamlab.model import flow_matching
from wamlab.model.dit import DiTConfig, WorldActionDiT

GRID, FRAMES, ACTIONS = 8, 5, 4  # latent pixels a side, latent frames, actions a block
PIXELS_PER_FRAME = 0.75
DIRECTIONS = {"left": (0.0, -1.0), "right": (0.0, 1.0), "up": (-1.0, 0.0), "down": (1.0, 0.0)}
CONFIG = DiTConfig(
    dim=64,
    num_heads=2,
    num_layers=2,
    ffn_dim=128,
    out_dim=2,
    freq_dim=64,
    text_dim=8,
    text_len=2,
    clip_dim=8,
    action_dim=2,
    max_state_dim=2,
    hidden_size=32,
    num_action_per_block=ACTIONS,
    max_chunk_size=2,
)


def episodes(draws: Draws) -> dict[str, Tensor]:
    """Return clips of random start and direction, as `flow_matching.loss` takes them."""
    which_B = draws.integers("direction", len(DIRECTIONS), (1,))[:, 0]
    heading_BE = torch.tensor(list(DIRECTIONS.values()))[which_B]
    start_BE = GRID / 2 - 0.5 + 2 * draws.uniform("start", (2,)) - 1
    travel_F1 = PIXELS_PER_FRAME * torch.arange(FRAMES)[:, None]
    path_BFE = start_BE[:, None] + heading_BE[:, None] * travel_F1
    actions = (FRAMES - 1) // 2 * ACTIONS
    return {
        "latents": render(path_BFE),
        "action": 0.8 * heading_BE[:, None].expand(-1, actions, -1),
        "action_mask": torch.ones(len(which_B), actions, 2, dtype=torch.bool),
        "has_real_action": torch.ones(len(which_B), dtype=torch.bool),
        "state": states(path_BFE[:, :-1:2]),
        **condition(which_B),
    }


def condition(which_B: Tensor) -> dict[str, Tensor]:
    """Return prompt embedding and image features of directions, given by their index."""
    prompt = torch.zeros(len(which_B), CONFIG.text_len, CONFIG.text_dim)
    prompt[torch.arange(len(which_B)), 0, which_B] = 3.0
    return {"prompt_embedding": prompt, "clip_feature": torch.zeros(len(which_B), 1, 8)}


def states(place_BFE: Tensor) -> Tensor:
    """Return the robot's own measurement of where the dot is, -1..1."""
    return 2 * place_BFE / GRID - 1


def render(path_BFE: Tensor) -> Tensor:
    """Return latents [B, 2, F, GRID, GRID]: a soft dot at (row, column), and its negative."""
    axis = torch.arange(GRID, dtype=torch.float32)
    row, col = ((axis - path_BFE[..., i, None]) ** 2 / 3 for i in (0, 1))
    dot = 3 * torch.exp(-(row[..., :, None] + col[..., None, :])) - 0.7
    return torch.stack([dot, -dot], dim=1)


def locate(latents_BCFYX: Tensor) -> Tensor:
    """Return the dot's (row, column) in each frame: the mean place of the bright pixels."""
    image = (latents_BCFYX[:, 0] - latents_BCFYX[:, 1]) / 2
    bright = (image - 0.5 * image.amax((-1, -2), keepdim=True)).clamp(min=0)
    axis, total = torch.arange(GRID, dtype=torch.float32), bright.sum((-1, -2))
    return torch.stack([bright.sum(-1) @ axis / total, bright.sum(-2) @ axis / total], dim=-1)


def train(
    steps: int = 3000, *, batch: int = 8, seed: int = 0
) -> tuple[WorldActionDiT, list[float]]:
    """Train a model of this world; returns it with the loss of every step.

    The defaults made data_samples/dot_world, in 300 seconds of one CPU core.
    """
    torch.manual_seed(seed)
    dit, losses = WorldActionDiT(CONFIG), []
    optimizer = torch.optim.AdamW(dit.parameters(), lr=2e-3, betas=(0.9, 0.95))
    rate = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps, pct_start=0.1)
    for step in range(steps):
        draws = Draws(seed, step, step * batch + torch.arange(batch))
        loss = flow_matching.loss(dit, episodes(draws), draws)["loss"]
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(dit.parameters(), 1.0)
        optimizer.step()
        rate.step()
        losses.append(loss.item())
    return dit, losses
