"""A world action model: frozen encoders, the DiT, and the loss of one training step.

    video, prompt -> VAE, CLIP, UMT5 (no gradient) -> noise and times -> DiT -> two velocity losses

No wrapper is in sight: a trainer knows the model by `loss`, `blocks`, `frozen` and `set_option`.
The default options compute as the public training code does, and at its cost: one sample at a time
through the encoders, a second VAE pass for the conditioning `y` even where it is thrown away, and
every prompt encoded in every step.

Shapes: B batch, T video frames, H W pixels; z latent channels, F latent frames, h w latent pixels.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from wamlab.config import ConfigError, check_least, check_name, lookup, replace
from wamlab.draws import Draws
from wamlab.model import flow_matching
from wamlab.model.dit import MODEL_SIZES, WorldActionDiT
from wamlab.model.flops import flops
from wamlab.model.frozen import seeded
from wamlab.model.image import IMAGE_SIZES, ImageEncoder, image_fingerprint
from wamlab.model.latent_cache import LatentCache
from wamlab.model.plan import PUBLIC, SHORTCUTS, ModelOptions
from wamlab.model.prompt_cache import PromptCache, encoder_meta
from wamlab.model.text import TEXT_SIZES, TextEncoder
from wamlab.model.vae import VAE_SIZES, load_vae, vae_fingerprint
from wamlab.model.vae_still import StillEncoder

PUBLIC_CHUNK = 4  # frames that the public code gives to the VAE at a time


@dataclasses.dataclass(frozen=True, kw_only=True)
class Encoders:
    """What belongs to a model size: its encoders and the size of the video they see."""

    vae: str
    text: str
    image: str
    target_hw: tuple[int, int] | None  # null: the video's own size


ENCODERS: dict[str, Encoders] = {
    "tiny": Encoders(vae="tiny", text="tiny", image="tiny", target_hw=(64, 128)),
    "small": Encoders(vae="tiny", text="tiny", image="tiny", target_hw=(160, 320)),
    "dreamzero-5b": Encoders(
        vae="wan2.2", text="umt5-xxl", image="clip-vit-h", target_hw=(160, 320)
    ),
    "dreamzero-14b": Encoders(vae="wan2.1", text="umt5-xxl", image="clip-vit-h", target_hw=None),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class WAMConfig:
    """One world action model; null means "what belongs to the size"."""

    size: str = "tiny"
    layers: int | None = None
    num_action_per_block: int | None = None
    vae: str | None = None
    text: str | None = None
    image: str | None = None
    target_hw: tuple[int, int] | None = None
    seed: int = 0
    noise: Literal["standard", "decoupled", "high_noise"] = "standard"
    # of the action loss in the sum: publicly 1; its mean counts padded channels, so that 32 over
    # the real ones makes an action channel weigh what a latent one does
    action_weight: float = 1.0
    encoder_precision: Literal["auto", "fp32", "bf16"] = "auto"  # auto: bf16 on a GPU
    vae_weights: str | None = None  # a public checkpoint; null: random weights from the seed
    text_weights: str | None = None
    image_weights: str | None = None
    tokenizer: str | None = None  # a folder or a Hugging Face name, instead of the text encoder's
    prompt_cache: str | None = None  # a file of `wamlab encode-prompts`: no text encoder is built
    latent_cache: str | None = None  # a folder of `wamlab encode-latents`: for plain samples only

    def __post_init__(self) -> None:
        lookup(MODEL_SIZES, self.size, "model size")
        check_least(self, {"layers": 1, "num_action_per_block": 1})
        lookup(VAE_SIZES, self.encoders.vae, "VAE size")
        lookup(TEXT_SIZES, self.encoders.text, "text encoder size")
        lookup(IMAGE_SIZES, self.encoders.image, "image encoder size")

    @property
    def encoders(self) -> Encoders:
        """The size's encoders, with this configuration's own choices in their place."""
        own = {f.name: getattr(self, f.name) for f in dataclasses.fields(Encoders)}
        return replace(ENCODERS[self.size], {k: v for k, v in own.items() if v is not None})


@dataclasses.dataclass(frozen=True, kw_only=True)
class WAMOptions:
    """How to compute a step; the defaults are the public way, and every value is exact."""

    batched_encoders: bool = False  # the whole micro-batch and clip at once; off: one by one
    skip_unused_y: bool = False  # no VAE pass for `y` where the DiT does not read it
    prompt_cache: bool = False  # encode each distinct prompt once
    zero_from: Literal["sample", "batch"] = "sample"  # "batch": the public fault, see TextEncoder
    compile_encoders: bool = False  # on a GPU: the VAE as one compiled graph, channels last
    vae_chunk: int | None = None  # frames a VAE step of `batched_encoders`; null: the whole clip
    dit: ModelOptions = PUBLIC


class WorldActionModel(nn.Module):
    """Frozen encoders and a trainable DiT.

    Args:
        config: what the model is; `set_option` says how it is computed.
        dit_device: where the DiT's parameters are made, "meta" for a checkpoint that fills them
            later; the encoders go to torch's default device.
    """

    def __init__(
        self,
        config: WAMConfig = WAMConfig(),
        *,
        dit_device: str | torch.device | None = None,
    ) -> None:
        super().__init__()
        self.config, self.options = config, WAMOptions()
        device = torch.get_default_device()
        with seeded(config.seed), torch.device(dit_device or device):
            self.dit = WorldActionDiT(_dit_config(config), self.options.dit)
        self._build_encoders(config, device)

    def _build_encoders(self, config: WAMConfig, device: torch.device) -> None:
        sizes = config.encoders
        auto = "bf16" if device.type == "cuda" else "fp32"
        precision = auto if config.encoder_precision == "auto" else config.encoder_precision
        dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]
        made = {"seed": config.seed, "device": device, "dtype": dtype}
        self.vae = load_vae(sizes.vae, config.vae_weights, encoder_only=True, **made)
        self._still = StillEncoder(self.vae)
        self.image = ImageEncoder(sizes.image, config.image_weights, **made)
        self.text = None
        if config.prompt_cache is None:
            more = made | {"tokenizer": config.tokenizer}
            self.text = TextEncoder(sizes.text, config.text_weights, **more)
        meta = encoder_meta(sizes.text, config.text_weights, config.seed)
        self.prompts = PromptCache(meta, config.prompt_cache)
        folder = config.latent_cache
        self.latents = LatentCache(folder, latent_meta(config)) if folder else None

    def loss(self, batch: dict[str, Any], draws: Draws) -> dict[str, Tensor]:
        """Return the losses of one micro-batch.

        Args:
            batch: `video` uint8 [B, T, H, W, 3] and `prompt` (list of B texts), or what `encode`
                made of them; `state` fp32 [B, K, 64], `action` fp32 [B, A, 32] in [-1, 1],
                `action_mask` bool [B, A, 32], `has_real_action` bool [B].
            draws: of the batch's sample ids.

        Returns:
            `loss`, `dynamics_loss`, `action_loss`: fp32 scalars, the first with its gradient.
        """
        found = flow_matching.loss(self.dit, self.encode(batch), draws, mode=self.config.noise)
        if self.config.action_weight != 1.0:
            actions = self.config.action_weight * found["action_loss"]
            found["loss"] = found["dynamics_loss"] + actions
        return found

    def blocks(self) -> list[nn.Module]:
        """Return the DiT's blocks, the units of recompute, compilation and sharding."""
        return self.dit.blocks()

    def frozen(self) -> list[nn.Module]:
        """Return the encoders: no gradient, no sharding, no checkpoint."""
        return [m for m in (self.vae, self.image, self.text) if m is not None]

    @property
    def trainable(self) -> nn.Module:
        """The part that is trained and saved."""
        return self.dit

    def set_option(self, name: str, value: Any) -> None:
        """Change how the model is computed.

        Args:
            name: a field of WAMOptions or ModelOptions, or "shortcuts" for all of the DiT's.
            value: its new value.

        Raises:
            ConfigError: no such option.
        """
        own = {f.name for f in dataclasses.fields(WAMOptions)} - {"dit"}
        inner = {f.name for f in dataclasses.fields(ModelOptions)}
        if name in own:
            self.options = replace(self.options, {name: value})
            if name == "compile_encoders":
                self._compile_vae(value)
            return
        check_name(name, own | inner | {"shortcuts"}, "model option")
        changes = dict.fromkeys(SHORTCUTS, value) if name == "shortcuts" else {name: value}
        self.options = replace(self.options, dit=replace(self.options.dit, changes))
        self.dit.set_options(self.options.dit)

    def _compile_vae(self, on: bool) -> None:
        """Compile the VAE on a GPU; on a CPU it would take longer than a demo's training."""
        if on and self.vae.conv1.weight.is_cuda:
            self.vae.channels_last()
            self.vae.compile_encoder()
        self._still = StillEncoder(self.vae, compile=on and self.vae.conv1.weight.is_cuda)

    @torch.no_grad()
    def encode(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Return the batch with the encoders' outputs in place of video and prompts.

        What is there already is kept, and with a latent cache what is in there is not encoded. The
        cache is filled up on the way; its samples must come without augmentation.

        Returns:
            The batch with `latents` fp32 [B, z, F, h, w], `clip_feature` [B, N, D],
            `prompt_embedding` bf16 [B, L, D], `prompt_length` int64 [B] (on the CPU), and where
            the DiT reads it `y` fp32 [B, 4 + z, F, h, w].
        """
        out = {k: v for k, v in batch.items() if k not in ("video", "prompt")}
        if "latents" not in out:
            out |= self._kept_or_encoded(batch)
        if "prompt_embedding" not in out:
            embedding, length_B = self._encode_prompts(batch["prompt"], out["latents"].device)
            out |= {"prompt_embedding": embedding, "prompt_length": length_B}
        return out

    def _kept_or_encoded(self, batch: dict[str, Any]) -> dict[str, Tensor]:
        if self.latents:
            ids = batch["sample_id"]
            if "video" not in batch or self.latents.has(ids):
                return self.latents.get(ids, ids.device)
        if "video" not in batch:
            raise ConfigError(f"a batch needs `video` or `latents`, got {sorted(batch)}")
        made = self._in_turn(self.encode_video, batch["video"])
        if self.latents:
            self.latents.put(ids, made)
        return made

    def _in_turn(self, encode: Any, video: Tensor) -> dict[str, Tensor]:
        """Encode the batch at once, or as the public code does one sample after the other."""
        if self.options.batched_encoders:
            return encode(video)
        parts = [encode(one) for one in video.split(1)]
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}

    @torch.no_grad()
    def encode_video(self, video: Tensor) -> dict[str, Tensor]:
        """Return `latents`, `clip_feature` and where it is read `y` of uint8 [B, T, H, W, 3]."""
        clip = preprocess(video, self.config.encoders.target_hw)
        features = self.image(clip[:, :, 0])
        used = self.dit.config.concat_first_frame_latent
        if not used and self.options.skip_unused_y:
            return {"latents": self._latents(clip), "clip_feature": features}
        if self.options.batched_encoders and self.options.vae_chunk is None:
            frames = 1 + (clip.shape[2] - 1) // 4 * 4
            latents, of_still = self._latents(clip), self._still.encode(clip[:, :, :1], frames)
        else:
            latents, of_still = self._latents(clip), self._latents(first_frame_alone(clip))
        out = {"latents": latents, "clip_feature": features}
        return out | ({"y": conditioning(of_still)} if used else {})

    def _latents(self, clip: Tensor) -> Tensor:
        batched = self.options.batched_encoders
        return self.vae.encode(clip, self.options.vae_chunk if batched else PUBLIC_CHUNK)

    def _encode_prompts(
        self, prompts: Sequence[str], device: torch.device
    ) -> tuple[Tensor, Tensor]:
        if self.text is not None and not self.options.prompt_cache:
            how = {"crop": False, "zero_from": self.options.zero_from}
            if self.options.batched_encoders or self.options.zero_from == "batch":
                return self.text.encode(prompts, **how)
            parts = [self.text.encode([prompt], **how) for prompt in prompts]
            return torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts])
        new = [p for p in dict.fromkeys(prompts) if p not in self.prompts]
        if new and self.text is not None:
            self.prompts.add(new, *self.text.encode(new))
        return self.prompts.lookup(prompts, device)

    def flops_per_sample(self) -> float:
        """Return the DiT's model FLOPs of one sample, forward and backward, encoders aside."""
        height, width = self.config.encoders.target_hw or (352, 640)
        side = self.vae.config.spatial
        return flops(self.dit.config, 1, latent_hw=(height // side, width // side))


def latent_meta(config: WAMConfig) -> dict[str, str]:
    """Return what a latent cache must have been made with."""
    sizes, weights = config.encoders, (config.vae_weights, config.image_weights)
    return {
        "vae": vae_fingerprint(sizes.vae, weights[0], config.seed),
        "image": image_fingerprint(sizes.image, weights[1], config.seed),
        "target_hw": str(sizes.target_hw),
    }


def preprocess(video: Tensor, target_hw: tuple[int, int] | None) -> Tensor:
    """Return clips as the encoders take them.

    Args:
        video: uint8 [B, T, H, W, 3].
        target_hw: the size to resize to, frame by frame: bilinear, not antialiased; None keeps it.

    Returns:
        fp32 [B, 3, T, h, w] in [-1, 1].
    """
    x = video.movedim(-1, 2).float().div(255).sub(0.5).div(0.5)  # [B, T, 3, H, W]
    if target_hw is not None and tuple(x.shape[-2:]) != target_hw:
        frames = F.interpolate(x.flatten(0, 1), target_hw, mode="bilinear", align_corners=False)
        x = frames.unflatten(0, x.shape[:2])
    return x.transpose(1, 2).contiguous()


def first_frame_alone(clip: Tensor) -> Tensor:
    """Return the clip [B, 3, T, H, W] with every frame but the first mid-grey, 0."""
    return torch.cat([clip[:, :, :1], torch.zeros_like(clip[:, :, 1:])], 2)


def conditioning(latents: Tensor) -> Tensor:
    """Return y [B, 4 + z, F, h, w]: four mask channels, 1 on frame 0, before the latents."""
    mask = torch.zeros_like(latents[:, :1]).repeat(1, 4, 1, 1, 1)
    mask[:, :, 0] = 1
    return torch.cat([mask, latents], 1)


def _dit_config(config: WAMConfig) -> Any:
    changes = {"num_layers": config.layers, "num_action_per_block": config.num_action_per_block}
    return replace(MODEL_SIZES[config.size], {k: v for k, v in changes.items() if v is not None})
