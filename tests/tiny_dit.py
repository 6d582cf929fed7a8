"""A small network without zeros, a batch for it, and all that can be compared of a run."""

import torch

from wamlab.model.dit import PUBLIC, DiTConfig, ModelOptions, WorldActionDiT

CONFIG = DiTConfig(
    dim=48,
    num_heads=2,
    num_layers=2,
    ffn_dim=64,
    out_dim=4,
    freq_dim=32,
    text_dim=12,
    text_len=48,
    clip_dim=16,
    action_dim=7,
    max_state_dim=9,
    hidden_size=24,
    num_action_per_block=4,
)
LENGTHS = torch.tensor([5, 11])
GIVEN = ("x", "clean_x", "action", "state", "clip_feature")


def build(options: ModelOptions = PUBLIC, config: DiTConfig = CONFIG) -> WorldActionDiT:
    torch.manual_seed(1)
    dit = WorldActionDiT(config, options)
    for parameter in dit.parameters():  # nothing may hide behind a zero
        parameter.data.normal_(std=0.2 if parameter.dim() > 1 else 0.5)
    return dit


def batch(config: DiTConfig = CONFIG, *, size: int = 2, frames: int = 5, hw=(4, 6)) -> dict:
    torch.manual_seed(2)
    blocks = (frames - 1) // config.num_frame_per_block
    acts, states = (blocks * n for n in (config.num_action_per_block, config.num_state_per_block))
    context = torch.randn(size, config.text_len, config.text_dim)
    for row, length in zip(context, LENGTHS.repeat(size)[:size]):
        row[length:] = 0
    given = {
        "x": torch.randn(size, config.out_dim, frames, *hw),
        "clean_x": torch.randn(size, config.out_dim, frames, *hw),
        "timestep": torch.rand(size, frames) * 1000,
        "action": torch.randn(size, acts, config.action_dim),
        "timestep_action": torch.rand(size, acts) * 1000,
        "state": torch.randn(size, states, config.max_state_dim),
        "context": context,
        "clip_feature": torch.randn(size, 257, config.clip_dim),
        "context_length": LENGTHS.repeat(size)[:size],
    }
    if config.concat_first_frame_latent:
        given["y"] = torch.randn(size, 4 + config.out_dim, frames, *hw)
    return given


def coupled(given: dict, config: DiTConfig = CONFIG) -> dict:
    """The same batch with one time a block."""
    step = config.num_frame_per_block
    time = given["timestep"].clone()
    time[:, 2::step] = time[:, 1::step]
    actions = time[:, 1::step].repeat_interleave(config.num_action_per_block, dim=1)
    return given | {"timestep": time, "timestep_action": actions}


def outcome(dit: WorldActionDiT, given: dict) -> dict[str, torch.Tensor]:
    """Outputs, and the gradients of all parameters and inputs."""
    given = {k: v.clone() if torch.is_tensor(v) else v for k, v in given.items()}
    inputs = [name for name in GIVEN if given[name] is not None]
    for name in inputs:
        given[name].requires_grad_()
    dit.zero_grad()
    video, action = dit(**given)
    weigh = [torch.linspace(-1, 1, o.numel(), device=o.device).view_as(o) for o in (video, action)]
    sum((o.float() * w).sum() for o, w in zip((video, action), weigh)).backward()
    grads = {f"grad/{name}": p.grad.clone() for name, p in dit.named_parameters()}
    grads_in = {f"grad_in/{name}": given[name].grad for name in inputs}
    return {"video": video.detach(), "action": action.detach()} | grads | grads_in


def assert_same(got: dict, want: dict, tolerance: float = 2e-5) -> None:
    floor = 1e-3 * max(float(v.norm()) for v in want.values())
    for name, value in want.items():
        error = float((got[name] - value).detach().norm()) / max(
            float(value.detach().norm()), floor
        )
        assert error < tolerance, f"{name}: {error:.1e}"
