"""A DiT with a past: frames go in once, and each prediction looks back at their keys and values.

Shapes: B batch, C channels, F latent frames, Y X latent height and width, A action tokens, Z state
tokens, S state channels, I image rows, L text rows, T tokens, G distinct times, D width, H heads,
K head width.
"""

import dataclasses

import torch
import torch.nn.functional as F
from torch import Tensor

from wamlab.config import ConfigError
from wamlab.model import attention
from wamlab.model.dit import WorldActionDiT, unpatchify
from wamlab.model.plan import (
    OPERATIONS,
    Plan,
    count_text_rows,
    line_angles,
    text_count_bias,
    video_angles,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Conditioning:
    """What a context is generated from, besides its first frame.

    Args:
        context: prompt embeddings [B, L, text_dim].
        clip_feature: image tokens of frame 0 [B, I, clip_dim].
        y: [B, 4+C, F, Y, X] for models with concat_first_frame_latent.
        negative_context: embedding of the negative prompt [1 or B, L, text_dim].
        context_length: int64 [B], rows of each prompt; with it the padding rows cost nothing.
        negative_length: int64 [1 or B], of the negative prompt.
    """

    context: Tensor
    clip_feature: Tensor
    y: Tensor | None = None
    negative_context: Tensor | None = None
    context_length: Tensor | None = None
    negative_length: Tensor | None = None

    def with_negative(self) -> "Conditioning":
        """Return a batch of 2B: the prompts, then as many negative ones.

        Raises:
            ConfigError: there is no negative prompt.
        """
        if self.negative_context is None:
            raise ConfigError("guidance needs a negative_context; guidance=1 does without")
        batch = len(self.context)
        negative = self.negative_context.expand(batch, -1, -1)
        rows = max(negative.shape[1], self.context.shape[1])
        contexts = [F.pad(c, (0, 0, 0, rows - c.shape[1])) for c in (self.context, negative)]
        lengths = None
        if self.context_length is not None and self.negative_length is not None:
            lengths = torch.cat([self.context_length, self.negative_length.expand(batch)])
        return Conditioning(
            context=torch.cat(contexts),
            clip_feature=torch.cat([self.clip_feature] * 2),
            y=None if self.y is None else torch.cat([self.y] * 2),
            context_length=lengths,
        )


class LayerCache:
    """Keys and values [B, T, H, K] of what one layer has seen; keys are already rotated."""

    def __init__(self) -> None:
        self.k: Tensor | None = None
        self.v: Tensor | None = None
        self.growing = False

    def __call__(self, k_BTHK: Tensor, v_BTHK: Tensor) -> tuple[Tensor, Tensor]:
        """Return all keys and values, old and new; keep the new ones if `growing`."""
        if self.k is not None:
            k_BTHK, v_BTHK = torch.cat([self.k, k_BTHK], 1), torch.cat([self.v, v_BTHK], 1)
        if self.growing:
            self.k, self.v = k_BTHK, v_BTHK
        return k_BTHK, v_BTHK


class CachedDiT:
    """A DiT that remembers the clean frames it has seen.

    Args:
        dit: the network (its parameters not sharded).
        conditioning: prompts and first-frame features of the batch.

    Raises:
        ConfigError: the model needs `y`.
    """

    def __init__(self, dit: WorldActionDiT, conditioning: Conditioning) -> None:
        self.dit = dit
        self.y = conditioning.y if dit.config.concat_first_frame_latent else None
        if dit.config.concat_first_frame_latent and self.y is None:
            raise ConfigError("this model reads the first frame's latent: conditioning needs y")
        text_len = dit.config.text_len
        rows = count_text_rows(dit.options, conditioning.context_length, text_len)
        self._bias_L = text_count_bias(rows, text_len)
        with torch.no_grad():
            self._image, self._text = dit.embed_context(
                conditioning.clip_feature, conditioning.context, rows
            )
        self.caches = [LayerCache() for _ in dit.blocks]
        self.frames = 0
        self._plans: dict[tuple[int, ...], Plan] = {}

    def see(self, latents_BCFYX: Tensor) -> Tensor:
        """Append clean latent frames to the past.

        Returns:
            The video velocity at time 0 [B, C, F, Y, X]; only tests read it.
        """
        times = latents_BCFYX.new_zeros(len(latents_BCFYX), 2)
        velocity, _ = self._run(latents_BCFYX, times, grow=True)
        self.frames += latents_BCFYX.shape[2]
        return velocity

    def predict(
        self, x_BCFYX: Tensor, action_BAC: Tensor, state_BZS: Tensor, times_BG: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Predict the velocities of the chunk that follows the past; the past stays as it is.

        Args:
            x_BCFYX: noisy latents.
            action_BAC: noisy actions.
            state_BZS: clean states.
            times_BG: fp32 [B, 2], time of the video and of the actions, 0..1000.

        Returns:
            Velocity of the video and of the actions.
        """
        return self._run(x_BCFYX, times_BG, grow=False, registers=(action_BAC, state_BZS))

    @torch.no_grad()
    def _run(
        self,
        x_BCFYX: Tensor,
        times_BG: Tensor,
        *,
        grow: bool,
        registers: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        dit, ops = self.dit, OPERATIONS[self.dit.options.impl]
        weight, bias = dit.patch_embedding.weight, dit.patch_embedding.bias
        frames, height, width = x_BCFYX.shape[2:]
        if self.y is not None:
            x_BCFYX = torch.cat([x_BCFYX, self._y_slice(frames, height, width)], dim=1)
        tokens = [ops.patchify(x_BCFYX.to(weight.dtype), weight, bias)]
        video, actions = tokens[0].shape[1], 0
        if registers is not None:
            action, state = (r.to(weight.dtype) for r in registers)
            actions = action.shape[1]
            action_times = times_BG[:, 1:].expand(-1, actions)
            tokens += [dit.action_encoder(action, action_times), dit.state_encoder(state)]
        counts = tuple(t.shape[1] for t in tokens[1:])
        plan = self._plan(frames, height // 2, width // 2, counts, device=x_BCFYX.device)
        time_BGD, time_BG6D = dit.embed_times(times_BG)
        x = torch.cat(tokens, dim=1)
        for block, cache in zip(dit.blocks, self.caches):
            cache.growing = grow
            x = block(x, time_BG6D, self._image, self._text, plan=plan, cache=cache)
        patches = dit.head(x[:, :video], time_BGD, plan.segment[:video], ops)
        velocity = unpatchify(patches, height // 2, width // 2)
        return velocity, dit.action_decoder(x[:, video : video + actions])

    def _y_slice(self, frames: int, height: int, width: int) -> Tensor:
        start = min(self.frames, self.y.shape[2] - frames)  # past its end: its last frames
        return self.y[:, :, start : start + frames, :height, :width]

    def _plan(
        self, frames: int, rows: int, cols: int, counts: tuple[int, ...], *, device: torch.device
    ) -> Plan:
        key = (self.frames, frames, rows, cols, *counts)
        if key not in self._plans:
            config, impl = self.dit.config, self.dit.options.impl
            head_width = config.dim // config.num_heads
            block = (self.frames - 1) // config.num_frame_per_block
            angles = [video_angles(frames, rows, cols, head_width, start=self.frames)]
            angles += [line_angles(n, head_width, start=block * n) for n in counts]
            segment_T = torch.zeros(sum(len(a) for a in angles), dtype=torch.int64)
            segment_T[len(angles[0]) :] = 1
            self._plans[key] = Plan(
                impl=impl,
                attention=attention.full,
                rotation=OPERATIONS[impl].rotation(torch.cat(angles)).to(device),
                segment=segment_T.to(device),
                text_bias=None if self._bias_L is None else self._bias_L.to(device),
            )
        return self._plans[key]
