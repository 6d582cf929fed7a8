"""Model FLOPs of the DiT: what the mathematics asks for, however it is computed.

A multiply-add counts 2; only matrix products, the patch convolution and attention count. The plain
form is counted (every token through the time MLPs, all text rows, the whole last block, attention
over the pairs that see each other), so that a shortcut shows as speed and not as less work, and
recompute does not raise the count. MFU divides this number.
"""

import dataclasses
from typing import Any

from wamlab.model.attention import Layout

IMAGE_ROWS = 257


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flops:
    """Forward FLOPs by part, of which `blocks` are what recompute repeats, and backward FLOPs."""

    blocks: dict[str, int]
    once: dict[str, int]
    backward: int

    @property
    def forward(self) -> int:
        """All forward FLOPs."""
        return sum(self.blocks.values()) + sum(self.once.values())

    @property
    def total(self) -> int:
        """Forward and backward, no recompute."""
        return self.forward + self.backward


def flops(
    config: Any,
    batch: int = 1,
    *,
    latent_frames: int = 9,
    latent_hw: tuple[int, int] | None = None,
    actions: bool = True,
) -> int:
    """Return the model FLOPs of one forward and backward of a batch; see `count_flops`."""
    sizes = {"latent_frames": latent_frames, "latent_hw": latent_hw, "actions": actions}
    return batch * count_flops(config, **sizes).total


def count_flops(
    config: Any,
    *,
    latent_frames: int = 9,
    latent_hw: tuple[int, int] | None = None,
    actions: bool = True,
) -> Flops:
    """Count one sample by parts.

    Args:
        config: a DiTConfig.
        latent_frames: F.
        latent_hw: latent height and width; None: that of the public models, 44 x 80 with the first
            frame as an input, else 10 x 20.
        actions: whether the clip has actions.
    """
    rows, cols = latent_hw or ((44, 80) if config.concat_first_frame_latent else (10, 20))
    layout = Layout.of(config, latent_frames, (rows // 2, cols // 2), actions=actions)
    once, first = _once(config, layout)
    blocks = {name: config.num_layers * n for name, n in _block(config, layout).items()}
    # twice the forward, less the gradients of the data that enter the first layer of each branch
    backward = 2 * (sum(blocks.values()) + sum(once.values())) - first
    return Flops(blocks=blocks, once=once, backward=backward)


def seen_pairs(layout: Layout) -> int:
    """Return how many (query, key) pairs attention computes."""
    return sum((g.last - g.first) * sum(b - a for a, b in g.keys) for g in layout.groups())


def _block(config: Any, layout: Layout) -> dict[str, int]:
    width, tokens, context = config.dim, layout.tokens, config.text_len + IMAGE_ROWS
    return {
        "self projections": 8 * tokens * width**2,
        "self attention": 4 * width * seen_pairs(layout),
        "cross projections": 4 * tokens * width**2,
        "context keys and values": 4 * context * width**2,
        "cross attention": 4 * width * tokens * context,
        "feed-forward": 4 * tokens * width * config.ffn_dim,
    }


def _once(config: Any, layout: Layout) -> tuple[dict[str, int], int]:
    """Return the parts around the blocks, and what the first layers of their branches cost."""
    width, hidden, clip = config.dim, config.hidden_size, config.clip_dim
    actions = layout.blocks * layout.actions_per_block
    states = layout.blocks * layout.states_per_block
    patch = 16 * layout.stream_tokens * width * config.in_dim
    time = 2 * layout.tokens * config.freq_dim * width
    text = 2 * config.text_len * config.text_dim * width
    action = 2 * actions * config.action_dim * width
    state = 2 * states * config.max_state_dim * hidden
    once = {
        "patch embedding": patch,
        "time": time + 14 * layout.tokens * width**2,
        "text": text + 2 * config.text_len * width**2,
        "image": 2 * IMAGE_ROWS * clip * (clip + width),
        "action encoder": action + 6 * actions * width**2,
        "state encoder": state + 2 * states * hidden * width,
        "action decoder": 2 * actions * hidden * (width + config.action_dim),
        "head": 8 * layout.stream_tokens * width * config.out_dim,
    }
    return once, patch + time + text + action + state
