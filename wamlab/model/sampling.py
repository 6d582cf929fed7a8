"""From the first frame to actions and imagined video, one chunk at a time.

The past lives in a key/value cache: frame 0 and then the frames that were really observed. A chunk
(the next few latent frames and the actions that lead there) starts as noise, and UniPC denoises
video and actions together while both look at the past. Everything is batched over episodes.

Shapes: B batch (episodes), C channels, F latent frames, Y X latent height and width, Z state
tokens, S state channels.
"""

import dataclasses
from collections.abc import Callable
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from wamlab.config import ConfigError, lookup
from wamlab.model.cached_dit import CachedDiT, Conditioning
from wamlab.model.dit import WorldActionDiT
from wamlab.model.unipc import UniPC, shifted_sigmas

# at which of 16 steps the DiT runs; at the others its last velocities are used again
DIT_STEPS: dict[str, tuple[int, ...]] = {
    "8": (0, 1, 2, 6, 10, 13, 14, 15),
    "all": tuple(range(16)),
    "adaptive": (),
}
# adaptive: where the last two video velocities point the same way (cosine), how many steps to skip
SKIPS = ((0.95, 4), (0.93, 2))


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    """How a chunk is denoised; the defaults are the shipped ones.

    Args:
        steps: UniPC steps.
        dit_steps: a key of DIT_STEPS, or the steps at which the DiT runs (step 0 among them).
        guidance: scale of classifier-free guidance on the video; 1 leaves the negative prompt out.
        last_video_sigma: where the video's noise level ends; 0.8 is `decouple_inference_noise`:
            the actions are denoised fully while the video is only sketched.
        seed: of the noise; every chunk and every episode starts from the same noise.
        noise_dtype: precision in which it is drawn.
    """

    steps: int = 16
    dit_steps: str | tuple[int, ...] = "8"
    guidance: float = 5.0
    last_video_sigma: float = 0.0
    seed: int = 1140
    noise_dtype: Literal["bf16", "fp32"] = "bf16"

    def __post_init__(self) -> None:
        named = isinstance(self.dit_steps, str)
        at = lookup(DIT_STEPS, self.dit_steps, "dit_steps") if named else self.dit_steps
        if self.dit_steps not in ("all", "adaptive") and (
            0 not in at or max(at) >= self.steps or (named and self.steps != 16)
        ):
            raise ConfigError(
                f"dit_steps {self.dit_steps!r} does not fit {self.steps} steps: give a tuple of "
                f"steps 0..{self.steps - 1} with 0 among them, 'all' or 'adaptive'"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chunk:
    """One sampled chunk.

    Args:
        actions: fp32 [B, num_action_per_block, action_dim], normalised.
        latents: fp32 [B, C, num_frame_per_block, Y, X], the imagined frames.
        dit_runs: how many of the steps ran the DiT.
    """

    actions: Tensor
    latents: Tensor
    dit_runs: int


class Sampler:
    """Generates chunk after chunk of a batch of episodes that go in step.

    `start` a context with the first frame; `sample` a chunk; `observe` what really happened; sample
    again, until `needs_start`. A new prompt also needs a new start.

    Args:
        dit: the network.
        config: how to denoise.
    """

    def __init__(self, dit: WorldActionDiT, config: SamplingConfig = SamplingConfig()) -> None:
        self.dit, self.config = dit, config
        self._past: CachedDiT | None = None
        self._frames = 0  # latent frames of the context, those of the last chunk included

    @property
    def needs_start(self) -> bool:
        """Whether there is no context, or the one there is has reached the model's window."""
        window = self.dit.config.window
        return self._past is None or 0 < window <= self._frames

    def start(self, latent_BCFYX: Tensor, conditioning: Conditioning) -> None:
        """Begin a context.

        Args:
            latent_BCFYX: the first frame's latent [B, C, 1, Y, X].
            conditioning: prompts and features.

        Raises:
            ConfigError: more than one latent frame, or guidance without a negative prompt.
        """
        if latent_BCFYX.shape[2] != 1:
            raise ConfigError(f"start takes 1 latent frame, got {latent_BCFYX.shape[2]}")
        guided = self.config.guidance != 1.0
        self._past = CachedDiT(self.dit, conditioning.with_negative() if guided else conditioning)
        self._copies = 2 if guided else 1
        self._frames = 1
        self._see(latent_BCFYX)

    def observe(self, latents_BCFYX: Tensor) -> None:
        """Add what was really seen while the last chunk was executed (see `observed_latents`).

        Raises:
            ConfigError: not as many latent frames [B, C, F, Y, X] as the last chunk has.
        """
        missing = 0 if self._past is None else self._frames - self._past.frames
        if latents_BCFYX.shape[2] != missing or missing == 0:
            raise ConfigError(
                f"observe takes the {missing} latent frames of the last chunk, got "
                f"{latents_BCFYX.shape[2]}"
            )
        self._see(latents_BCFYX)

    def _see(self, latents_BCFYX: Tensor) -> None:
        self._size = latents_BCFYX.shape  # an odd last row or column is never predicted
        self._past.see(torch.cat([latents_BCFYX] * self._copies))

    @torch.no_grad()
    def sample(
        self,
        state_BZS: Tensor,
        *,
        action_mask: Tensor | None = None,
        watch: Callable[[Tensor, Tensor], None] | None = None,
    ) -> Chunk:
        """Denoise the next chunk.

        Args:
            state_BZS: the robots' present states [B, num_state_per_block, max_state_dim].
            action_mask: bool [action_dim], real channels; the loss says nothing of the others, so
                they are led to the zeros that padding is, not to where an untrained output leads.
            watch: called after every step with the latents and actions as they then are.

        Raises:
            ConfigError: there is no context, it is full, or the last chunk was not observed.
        """
        if self.needs_start:
            raise ConfigError("the context is full or there is none: call start first")
        if self._past.frames != self._frames:
            raise ConfigError("the frames of the last chunk are missing: call observe first")
        config = self.config
        video, action = self._noise(state_BZS.device)
        noise = action
        padded = None if action_mask is None else ~action_mask.to(action.device)
        action_run = UniPC(shifted_sigmas(config.steps))
        video_run = UniPC(shifted_sigmas(config.steps, last_sigma=config.last_video_sigma))
        choice = _Adaptive() if config.dit_steps == "adaptive" else _Fixed(config)
        runs = 0
        for i, times in enumerate(zip(video_run.timesteps, action_run.timesteps)):
            if choice.runs(i):
                velocities = self._velocities(video, action, state_BZS, times)
                if padded is not None:  # data 0: the velocity is the noise
                    velocities = velocities[0], torch.where(padded, noise, velocities[1])
                choice.saw(velocities[0])
                runs += 1
            video = video_run.step(video, velocities[0])
            action = action_run.step(action, velocities[1])
            if watch is not None:
                watch(video, action)
        self._frames += video.shape[2]
        return Chunk(actions=action, latents=video, dit_runs=runs)

    def _noise(self, device: torch.device) -> list[Tensor]:
        config, (batch, channels, _, height, width) = self.dit.config, self._size
        shapes = (
            (1, channels, config.num_frame_per_block, height // 2 * 2, width // 2 * 2),
            (1, config.num_action_per_block, config.action_dim),
        )
        dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[self.config.noise_dtype]
        noise = []
        for shape in shapes:
            generator = torch.Generator(device).manual_seed(self.config.seed)
            one = torch.randn(shape, generator=generator, device=device, dtype=dtype).float()
            noise.append(one.expand(batch, *shape[1:]))
        return noise

    def _velocities(
        self, video: Tensor, action: Tensor, state: Tensor, times: tuple[int, int]
    ) -> tuple[Tensor, Tensor]:
        batch = len(video)
        inputs = [torch.cat([x] * self._copies) for x in (video, action, state)]
        times_BG = torch.tensor([times], dtype=torch.float32, device=video.device)
        v_video, v_action = self._past.predict(*inputs, times_BG.expand(len(inputs[0]), -1))
        v_video, v_action = v_video.float(), v_action[:batch].float()
        if self._copies == 2:
            wanted, unwanted = v_video.chunk(2)
            v_video = unwanted + self.config.guidance * (wanted - unwanted)
        return v_video, v_action


class _Fixed:
    def __init__(self, config: SamplingConfig) -> None:
        named = isinstance(config.dit_steps, str)
        self._all = config.dit_steps == "all"
        self._at = DIT_STEPS[config.dit_steps] if named else config.dit_steps

    def runs(self, step: int) -> bool:
        return self._all or step in self._at

    def saw(self, velocity: Tensor) -> None:
        pass


class _Adaptive:
    """Skips where the velocity has settled; after a skip the DiT runs before it is asked again."""

    def __init__(self) -> None:
        self._velocities: list[Tensor] = []
        self._skip = 0

    def runs(self, step: int) -> bool:
        if self._skip == 0 and len(self._velocities) == 2:
            flat = (v.flatten(1) for v in self._velocities)
            alike = F.cosine_similarity(*flat, dim=1).min().item()  # the least settled episode
            self._skip = next((count for floor, count in SKIPS if alike > floor), 0)
            self._velocities = self._velocities[1:]
        self._skip -= 1
        return self._skip < 0

    def saw(self, velocity: Tensor) -> None:
        self._skip = 0
        self._velocities.append(velocity)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rollout:
    """Several chunks in a row, imagined.

    Args:
        actions: fp32 [B, chunks * num_action_per_block, action_dim].
        latents: fp32 [B, C, 1 + chunks * num_frame_per_block, Y, X], the given frame first.
        video: what `decode` made of them, or None.
    """

    actions: Tensor
    latents: Tensor
    video: Tensor | None = None


def rollout(
    sampler: Sampler,
    latent_BCFYX: Tensor,
    state_BZS: Tensor,
    conditioning: Conditioning,
    *,
    decode: Callable[[Tensor], Tensor] | None = None,
) -> Rollout:
    """Imagine actions and video from one frame; later chunks look back at imagined frames.

    Args:
        sampler: the model and how to denoise.
        latent_BCFYX: the first frame's latent [B, C, 1, Y, X].
        state_BZS: num_state_per_block states a chunk; their number says how many chunks.
        conditioning: prompts and features.
        decode: latents to video, such as `VAE.decode`.
    """
    sampler.start(latent_BCFYX, conditioning)
    frames, actions = [latent_BCFYX], []
    for i, state in enumerate(state_BZS.split(sampler.dit.config.num_state_per_block, dim=1)):
        if i > 0:
            sampler.observe(frames[-1])
        chunk = sampler.sample(state)
        frames.append(chunk.latents)
        actions.append(chunk.actions)
    rows, cols = frames[-1].shape[3:]
    latents = torch.cat([frames[0][..., :rows, :cols], *frames[1:]], dim=2)
    video = None if decode is None else decode(latents)
    return Rollout(actions=torch.cat(actions, dim=1), latents=latents, video=video)


def observed_latents(
    encode: Callable[[Tensor], Tensor], frames_B3THW: Tensor, latent_frames: int
) -> Tensor:
    """Encode the frames seen while a chunk was executed, for `Sampler.observe`.

    The causal encoder makes one latent of its first frame and one of every four after it; so the
    first is repeated in front and its own latent dropped.

    Args:
        encode: such as `VAE.encode`.
        frames_B3THW: 4 * latent_frames frames in [-1, 1].
        latent_frames: num_frame_per_block.
    """
    clip = torch.cat([frames_B3THW[:, :, :1], frames_B3THW], dim=2)
    return encode(clip)[:, :, -latent_frames:]
