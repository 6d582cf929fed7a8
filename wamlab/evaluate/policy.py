"""A policy acts: observations in, chunks of actions out, in the robot's own units.

An observation is a dict:
    views   {view: uint8 [H, W, 3]}, the present frame of each of the embodiment's views, or
            {view: uint8 [T, H, W, 3]}, the T frames since the last chunk, the present one last
    state   float [S], the robot's present state, parts in the embodiment's order
    prompt  the task in words

A policy remembers what it saw until `reset`. A list of observations is a batch of robots that act
in step; its place in the list says which robot an observation comes from.

Shapes: B robots, V views, T frames, H steps of a chunk, E the robot's action width, S its state
width.
"""

import abc
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from wamlab.config import ConfigError, UserError
from wamlab.data.augment import Augment
from wamlab.data.codec import Codec
from wamlab.data.embodiment import FRAMES_PER_BLOCK, Embodiment
from wamlab.draws import Draws
from wamlab.model.cached_dit import Conditioning
from wamlab.model.sampling import Chunk, Sampler, SamplingConfig, observed_latents
from wamlab.model.wam import WorldActionModel, preprocess

Observation = Mapping[str, Any]


class ObservationError(UserError):
    """An observation that a policy cannot take: what came and what it takes."""


class Policy(abc.ABC):
    """Whatever acts.

    Attributes:
        embodiment: the robot it acts for.
        remembers: whether it makes use of the frames since its last chunk.
    """

    embodiment: Embodiment
    remembers: bool = False

    @property
    def horizon(self) -> int:
        """H, steps of a chunk."""
        return self.embodiment.horizon

    @abc.abstractmethod
    def reset(self) -> None:
        """Forget what was seen: the next observation is the first one of an episode."""

    @abc.abstractmethod
    def infer_batch(self, observations: Sequence[Observation]) -> list[np.ndarray]:
        """Return a chunk of actions float32 [H, E] for each robot of a batch.

        Raises:
            ObservationError: an observation does not fit the embodiment.
        """

    @abc.abstractmethod
    def fork(self) -> "Policy":
        """Return a policy of the same weights that has seen nothing: one a session."""

    def infer(self, observation: Observation) -> np.ndarray:
        """Return the next actions of one robot, float32 [H, E]; see `infer_batch`."""
        return self.infer_batch([observation])[0]


@dataclasses.dataclass(frozen=True, kw_only=True)
class PolicyConfig:
    """How a world action model acts.

    Args:
        sampling: how a chunk is denoised; guidance 1 leaves the negative prompt out.
        context_chunks: chunks that one context may hold, 1: every chunk looks at the present frame
            alone; null: as many as the model's window holds.
        negative_prompt: what guidance leads away from.
    """

    sampling: SamplingConfig = dataclasses.field(
        default_factory=lambda: SamplingConfig(guidance=1.0)
    )
    context_chunks: int | None = None
    negative_prompt: str = ""

    def __post_init__(self) -> None:
        if self.context_chunks is not None and self.context_chunks < 1:
            raise ConfigError(f"context_chunks must be 1 or more, got {self.context_chunks}")


class ModelPolicy(Policy):
    """A world action model that acts, and imagines what its actions will show.

    With the frames since the last chunk (one every H/8 steps, so 8 of them) a context goes on; with
    another number of frames, another prompt or batch, or when it is full, a new one starts from the
    present frame.

    Args:
        model: with its encoders, on one device, its DiT not sharded.
        codec: the robot's statistics.
        config: how to act.
    """

    def __init__(
        self, model: WorldActionModel, codec: Codec, config: PolicyConfig = PolicyConfig()
    ) -> None:
        self.model, self.codec, self.config = model, codec, config
        self.embodiment, self.remembers = codec.embodiment, config.context_chunks != 1
        actions = model.dit.config.num_action_per_block
        if actions != self.horizon:
            raise ConfigError(
                f"the model makes {actions} actions a chunk, embodiment {self.embodiment.name!r} "
                f"takes {self.horizon}: set num_action_per_block"
            )
        self._grid = Augment(self.embodiment, impl="pieces")
        self._mask = torch.from_numpy(codec.masks()[1])
        self.reset()

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return next(self.model.dit.parameters()).device

    def reset(self) -> None:
        """Forget what was seen."""
        self.sampler = Sampler(self.model.dit, self.config.sampling)
        self.chunk: Chunk | None = None  # the last one sampled, with the imagined latents
        self.seen: list[Tensor] = []  # latents [B, C, F, Y, X] of the context's real frames
        self._prompts: list[str] | None = None
        self._chunks = 0

    def fork(self) -> "ModelPolicy":
        """Return a policy of the same weights that has seen nothing."""
        return ModelPolicy(self.model, self.codec, self.config)

    @torch.no_grad()
    def infer_batch(self, observations: Sequence[Observation]) -> list[np.ndarray]:
        """Return a chunk of actions float32 [H, E] for each robot of a batch; see `Policy`."""
        prompts = [self.embodiment.prompt_text(str(o["prompt"])) for o in observations]
        state_BS = np.stack([self._state(o) for o in observations])
        clip = self.clip(observations)  # [B, T, H, W, 3]
        if self._goes_on(clip.shape[1], prompts):
            self.seen.append(self._observed(clip))
            self.sampler.observe(self.seen[-1])
        else:
            self._start(clip[:, -1:], prompts)
        state = torch.from_numpy(self.codec.encode_state(state_BS)).to(self.device)
        state_BZS = state[:, None].expand(-1, self.model.dit.config.num_state_per_block, -1)
        self.chunk = self.sampler.sample(state_BZS, action_mask=self._mask)
        self._chunks += 1
        actions = self.chunk.actions.flatten(0, 1).float().cpu().numpy()
        return list(self.codec.decode_action(actions, state_BS))

    def _goes_on(self, frames: int, prompts: list[str]) -> bool:
        most = self.config.context_chunks
        full = self.sampler.needs_start or (most is not None and self._chunks >= most)
        return not full and prompts == self._prompts and frames == FRAMES_PER_BLOCK

    def _start(self, clip: Tensor, prompts: list[str]) -> None:
        dit = self.model.dit.config
        if dit.concat_first_frame_latent:  # its `y` is as long as a context
            clip = clip.expand(-1, self.embodiment.frames, -1, -1, -1)
        found = self.model.encode({"video": clip, "prompt": prompts})
        unwanted = {}
        if self.config.sampling.guidance != 1.0:
            first = {"latents": found["latents"][:1], "prompt": [self.config.negative_prompt]}
            unwanted = self.model.encode(first)
        self.seen = [found["latents"][:, :, :1]]
        conditioning = Conditioning(
            context=found["prompt_embedding"],
            clip_feature=found["clip_feature"],
            y=found.get("y"),
            negative_context=unwanted.get("prompt_embedding"),
            context_length=found["prompt_length"],
            negative_length=unwanted.get("prompt_length"),
        )
        self.sampler.start(self.seen[0], conditioning)
        self._prompts, self._chunks = prompts, 0

    def _observed(self, clip: Tensor) -> Tensor:
        frames = preprocess(clip, self.model.config.encoders.target_hw)
        latent_frames = self.model.dit.config.num_frame_per_block
        return observed_latents(self.model.vae.encode, frames, latent_frames)

    def _state(self, observation: Observation) -> np.ndarray:
        state = np.asarray(observation["state"], np.float32)
        width = sum(p.width for p in self.embodiment.state)
        if state.shape != (width,) or not np.isfinite(state).all():
            parts = ", ".join(f"{p.name} [{p.width}]" for p in self.embodiment.state)
            raise ObservationError(
                f"state must be {width} finite numbers ({parts}), got shape {list(state.shape)}"
                + ("" if np.isfinite(state).all() else " with values that are not finite")
            )
        return state

    def clip(self, observations: Sequence[Observation]) -> Tensor:
        """Return the frames as the model's grid, uint8 [B, T, H, W, 3], on its device.

        Raises:
            ObservationError: a view is missing or of another kind, or shapes that differ.
        """
        robots = [
            [_frames(o["views"], name) for name in self.embodiment.views] for o in observations
        ]
        shapes = sorted({v.shape for views in robots for v in views})
        if len(shapes) > 1:
            sizes = " and ".join(str(list(s)) for s in shapes)
            raise ObservationError(f"all views of a batch must have one shape, got {sizes}")
        views = torch.from_numpy(np.stack([np.stack(v) for v in robots]))  # [B, V, T, H, W, 3]
        views = views.movedim(-1, 3).to(self.device)
        ids = torch.zeros(len(views), dtype=torch.int64, device=self.device)
        return self._grid(views, Draws(0, 0, ids), train=False)


def _frames(views: Mapping[str, Any], name: str) -> np.ndarray:
    """Return a view's frames, uint8 [T, H, W, 3]."""
    if name not in views:
        raise ObservationError(f"no view {name!r}: there are {', '.join(views) or 'none'}")
    frames = np.asarray(views[name])
    frames = frames[None] if frames.ndim == 3 else frames
    if frames.ndim != 4 or frames.shape[-1] != 3 or frames.dtype != np.uint8 or not len(frames):
        raise ObservationError(
            f"view {name!r} must be uint8 [H, W, 3] or [T, H, W, 3], got {frames.dtype} "
            f"{list(np.shape(views[name]))}"
        )
    return frames
