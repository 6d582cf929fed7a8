"""The frozen causal video VAEs Wan2.1 and Wan2.2, under the public key names.

Shapes: B batch, C channels, T video frames, H W pixels; z latent channels, T' latent frames,
h w latent pixels.
"""

import dataclasses
import functools
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn

from wamlab.config import ConfigError
from wamlab.model.frozen import Part, fingerprint, freeze, load_frozen, seeded, sizes_of
from wamlab.model.vae_blocks import (
    AvgDown,
    CausalConv3d,
    Conv3d,
    Down,
    DupUp,
    FrameAttention,
    Head,
    Level,
    ResBlock,
    RMSNorm,
    State,
    Up,
    normalise_rows,
)

PREFIX = "action_head.vae.model."
MAX_ELEMENTS = 2**31 - 1  # cuDNN and most kernels count a tensor's elements in 32 bits


@dataclasses.dataclass(frozen=True, kw_only=True)
class VAEConfig:
    """One VAE's widths; `mean` and `std` normalise the latents, channel by channel."""

    dim: int
    decoder_dim: int
    z_dim: int
    patch: int  # pixels a side gathered into channels; 2 also means shortcuts around levels
    mean: tuple[float, ...]
    std: tuple[float, ...]
    multipliers: tuple[int, ...] = (1, 2, 4, 4)
    decoder_multipliers: tuple[int, ...] | None = None  # null: the encoder's

    @property
    def spatial(self) -> int:
        """Pixels a latent pixel covers along one side."""
        return 8 * self.patch


def _middle(dim: int) -> nn.ModuleList:
    return nn.ModuleList([ResBlock(dim, dim), FrameAttention(dim), ResBlock(dim, dim)])


class Encoder(nn.Module):
    """Video to the posterior's mean and log-variance, before the top-level `conv1`."""

    def __init__(self, config: VAEConfig) -> None:
        super().__init__()
        dims = [config.dim * m for m in (1, *config.multipliers)]
        self.patch = config.patch
        self.conv1 = CausalConv3d(3 * config.patch**2, dims[0], (3, 3, 3))
        levels = []
        for i, (c_in, c_out) in enumerate(pairwise(dims)):
            down, temporal = i < 3, i in (1, 2)
            blocks: list[nn.Module] = [ResBlock(c_in, c_out), ResBlock(c_out, c_out)]
            blocks += [Down(c_out, temporal)] if down else []
            if config.patch == 1:
                levels += blocks
                continue
            short = AvgDown(c_in, c_out, 2 if temporal else 1, 2 if down else 1)
            levels.append(Level("downsamples", blocks, short))
        self.downsamples = nn.ModuleList(levels)
        self.middle = _middle(dims[-1])
        self.head = Head(dims[-1], 2 * config.z_dim)

    def forward(self, x: Tensor, state: State | None = None) -> Tensor:
        """Return [B, 2z, T', h, w] for a video [B, 3, T, H, W]."""
        x = self.conv1(self.gather(x), state)
        for module in (*self.downsamples, *self.middle, self.head):
            x = module(x, state)
        return x

    def gather(self, x: Tensor) -> Tensor:
        """Return the video with each cell of patch x patch pixels as channels."""
        if self.patch == 1:
            return x
        cells = "b c t (h r) (w q) -> b (c q r) t h w"
        return rearrange(x, cells, r=self.patch, q=self.patch)


class Decoder(nn.Module):
    """Latents (after `conv2`) to video."""

    def __init__(self, config: VAEConfig) -> None:
        super().__init__()
        widths = (config.decoder_multipliers or config.multipliers)[::-1]
        dims = [config.decoder_dim * m for m in (widths[0], *widths)]
        self.patch = config.patch
        self.conv1 = CausalConv3d(config.z_dim, dims[0], (3, 3, 3))
        self.middle = _middle(dims[0])
        levels = []
        for i, (c_in, c_out) in enumerate(pairwise(dims)):
            up, temporal = i < 3, i < 2
            halved = config.patch == 1  # in Wan2.1 the upsampling convolution halves the channels
            first_in = c_in // 2 if halved and i > 0 else c_in
            blocks: list[nn.Module] = [
                ResBlock(first_in if j == 0 else c_out, c_out) for j in range(3)
            ]
            blocks += [Up(c_out, c_out // 2 if halved else c_out, temporal)] if up else []
            if halved:
                levels += blocks
                continue
            short = DupUp(c_in, c_out, 2 if temporal else 1, 2) if up else None
            levels.append(Level("upsamples", blocks, short))
        self.upsamples = nn.ModuleList(levels)
        self.head = Head(dims[-1], 3 * config.patch**2)

    def forward(self, x: Tensor, state: State | None = None) -> Tensor:
        """Return a video [B, 3, 4T'-3, H, W] for [B, z, T', h, w]."""
        for module in (self.conv1, *self.middle, *self.upsamples, self.head):
            x = module(x, state)
        if self.patch == 1:
            return x
        cells = "b (c q r) t h w -> b c t (h r) (w q)"
        return rearrange(x, cells, r=self.patch, q=self.patch)


class VAE(nn.Module):
    """A frozen video VAE that computes in its weights' dtype and gives fp32 latents.

    Args:
        size: a name in VAE_SIZES, or a VAEConfig.
        encoder_only: leave the decoder out (training never decodes; it is up to 555 M parameters).

    Source: Wan2.1 (arXiv 2503.20314) and Wan2.2; public keys of Wan2.1_VAE.pth and Wan2.2_VAE.pth.
    """

    memory_gib = 16.0  # what one call may use for activations; larger batches are split

    def __init__(self, size: str | VAEConfig, *, encoder_only: bool = False) -> None:
        super().__init__()
        self.config = sizes_of(VAE_SIZES, size, "VAE size")
        z = self.config.z_dim
        self.encoder = Encoder(self.config)
        self.conv1 = CausalConv3d(2 * z, 2 * z, (1, 1, 1))
        self.conv2 = None if encoder_only else CausalConv3d(z, z, (1, 1, 1))
        self.decoder = None if encoder_only else Decoder(self.config)
        self._compiled: Callable[[Tensor], Tensor] | None = None
        self.set_statistics(self.config.mean, self.config.std)

    def set_statistics(self, mean: tuple[float, ...], std: tuple[float, ...]) -> None:
        """Set the latents' mean and standard deviation, one number a channel, or a ConfigError."""
        if len(mean) != self.config.z_dim or len(std) != self.config.z_dim:
            raise ConfigError(
                f"latent statistics: {len(mean)} and {len(std)}, not {self.config.z_dim}"
            )
        self._values = (tuple(mean), tuple(std))
        self._place_statistics()

    def _place_statistics(self) -> None:
        weight = self.conv1.weight
        dtype = torch.promote_types(weight.dtype, torch.float32)
        self._stats = torch.tensor(self._values, device=weight.device, dtype=dtype)

    def _apply(self, fn: Any, recurse: bool = True) -> "VAE":
        super()._apply(fn, recurse)
        self._place_statistics()  # follows the weights to their device, but never down to bf16
        return self

    def channels_last(self) -> None:
        """Lay weights (and so activations) out channels last, the order tensor cores read."""
        formats = {4: torch.channels_last, 5: torch.channels_last_3d}
        for parameter in self.parameters():
            if parameter.dim() in formats:
                order = formats[parameter.dim()]
                parameter.data = parameter.data.contiguous(memory_format=order)
        for module in self.modules():
            if isinstance(module, Conv3d):
                module.fill = (-module.in_channels % 8, -module.out_channels % 8)

    def compile_norms(self) -> None:
        """Compile the norms alone, for training channels last: one small graph a width."""
        for module in self.modules():
            if isinstance(module, RMSNorm):
                module.rows = _compiled_rows()

    def compile_encoder(self, **how: Any) -> None:
        """Compile the whole-clip encoder as one graph, once a shape; `how` is torch.compile's."""
        forward = self.encoder.forward
        self._compiled = torch.compile(forward, fullgraph=True, dynamic=False, **how)

    def encode(self, video: Tensor, chunk: int | None = None) -> Tensor:
        """Return the normalised posterior mean of each clip.

        Args:
            video: [B, 3, T, H, W] in [-1, 1]; of T frames the first 1 + 4 * ((T-1) // 4) are used.
            chunk: frames a step after frame 0, a multiple of 4 (the public code: 4); None = the
                whole clip, the same function with fewer and larger operations.

        Returns:
            fp32 [B, z, 1 + (T-1)//4, H/8, W/8] (Wan2.2: H/16, W/16).

        Raises:
            ConfigError: a chunk that is no multiple of 4, or a size the VAE cannot halve.
        """
        _check_chunk(chunk)
        side = self.config.spatial
        if video.shape[3] % side or video.shape[4] % side:
            raise ConfigError(
                f"a video of {tuple(video.shape[3:])} pixels: both must divide by {side}"
            )
        video = video[:, :, : 1 + (video.shape[2] - 1) // 4 * 4].to(self.conv1.weight.dtype)
        frame = self.config.dim * video[0, 0, 0].numel() // self.config.patch**2
        frames = min(chunk or video.shape[2], video.shape[2])
        parts = [self._encode(part, chunk) for part in self._split(video, frame, frames)]
        return torch.cat(parts) if len(parts) > 1 else parts[0]

    def _encode(self, video: Tensor, chunk: int | None) -> Tensor:
        whole = self._compiled if chunk is None and self._compiled else self.encoder
        return self.normalise(_in_chunks(whole, video, chunk))

    def normalise(self, encoded: Tensor) -> Tensor:
        """Return the encoder's output as normalised latents: fp32 posterior means."""
        moments = self.conv1(encoded)
        mean, std = self._stats.view(2, 1, -1, 1, 1, 1)
        return (moments[:, : self.config.z_dim].to(mean.dtype) - mean) * (1.0 / std)

    def decode(self, latents: Tensor, chunk: int | None = None, *, clamp: bool = True) -> Tensor:
        """Return the videos of normalised latents.

        Args:
            latents: [B, z, T', h, w].
            chunk: video frames a step after the first, a multiple of 4; None = the whole clip.
            clamp: limit the result to [-1, 1], as the public code does.

        Returns:
            [B, 3, 4T'-3, H, W] in the weights' dtype.

        Raises:
            ConfigError: a chunk that is no multiple of 4, or a VAE built with `encoder_only`.
        """
        _check_chunk(chunk)
        if self.decoder is None:
            raise ConfigError("this VAE was built with encoder_only=True: it cannot decode")
        # widest: the input of the last upsampling convolution (2.1) or of the last level (2.2)
        wide = self.config.decoder_multipliers or self.config.multipliers
        frame = wide[1] * self.config.decoder_dim * 8**2 * latents[0, 0, 0].numel()
        frames = min(chunk or MAX_ELEMENTS, 4 * latents.shape[2] - 3)
        parts = self._split(latents, frame, frames)
        videos = [self._decode(part, chunk and chunk // 4) for part in parts]
        video = torch.cat(videos) if len(videos) > 1 else videos[0]
        return video.clamp(-1, 1) if clamp else video

    def _decode(self, latents: Tensor, chunk: int | None) -> Tensor:
        mean, std = self._stats.view(2, 1, -1, 1, 1, 1)
        x = latents.to(mean.dtype) / (1.0 / std) + mean
        return _in_chunks(self.decoder, self.conv2(x.to(self.conv1.weight.dtype)), chunk)

    def _split(self, x: Tensor, frame: int, frames: int) -> tuple[Tensor, ...]:
        """Split a batch by index range and memory; `frame`: elements of the largest activation."""
        elements = frame * (frames + 2)  # two frames of history
        if elements > MAX_ELEMENTS:
            raise ConfigError(
                f"one clip needs a tensor of {elements} elements: pass a smaller chunk"
            )
        # About six of them live at once in eager mode, most of them the norms' fp32 intermediates.
        fits = self.memory_gib * 2**30 / (6 * elements * self.conv1.weight.element_size())
        parts = -(-len(x) // max(1, int(min(MAX_ELEMENTS // elements, fits))))
        return x.split(-(-len(x) // parts))  # of one size where they can be: one compiled shape


@functools.cache
def _compiled_rows() -> Callable[..., Tensor]:
    compiled = torch.compile(normalise_rows, dynamic=False)

    def rows(x_NC: Tensor, *how: Any) -> Tensor:
        torch._dynamo.maybe_mark_dynamic(x_NC, 0)  # any clip, one graph for each width
        return compiled(x_NC, *how)

    return rows


def _check_chunk(chunk: int | None) -> None:
    if chunk is not None and (chunk < 4 or chunk % 4):
        raise ConfigError(f"chunk {chunk!r}: a multiple of 4 frames, or None for the whole clip")


def _in_chunks(half: Callable[..., Tensor], x: Tensor, chunk: int | None) -> Tensor:
    """Evaluate a half of the VAE on the whole clip, or on frame 0 and then `chunk` at a time."""
    if chunk is None:
        return half(x)
    state: State = {}
    parts = [x[:, :, :1], *(x[:, :, 1:].split(chunk, 2) if x.shape[2] > 1 else ())]
    return torch.cat([half(part, state) for part in parts], 2)


def _numbers(text: str) -> tuple[float, ...]:
    return tuple(float(word) for word in text.split())


VAE_SIZES: dict[str, VAEConfig] = {
    "wan2.1": VAEConfig(
        dim=96,
        decoder_dim=96,
        z_dim=16,
        patch=1,
        mean=_numbers("""
    -0.7571 -0.7089 -0.9113 0.1075 -0.1745 0.9653 -0.1517 1.5508 0.4134 -0.0715 0.5517
    -0.3632 -0.1922 -0.9497 0.2503 -0.2921"""),
        std=_numbers("""
    2.8184 1.4541 2.3275 2.6558 1.2196 1.7708 2.6052 2.0743 3.2687 2.1526 2.8652 1.5579
    1.6382 1.1253 2.8251 1.9160"""),
    ),
    "wan2.2": VAEConfig(
        dim=160,
        decoder_dim=256,
        z_dim=48,
        patch=2,
        mean=_numbers("""
    -0.2289 -0.0052 -0.1323 -0.2339 -0.2799 0.0174 0.1838 0.1557 -0.1382 0.0542 0.2813
    0.0891 0.1570 -0.0098 0.0375 -0.1825 -0.2246 -0.1207 -0.0698 0.5109 0.2665 -0.2108
    -0.2158 0.2502 -0.2055 -0.0322 0.1109 0.1567 -0.0729 0.0899 -0.2799 -0.1230 -0.0313
    -0.1649 0.0117 0.0723 -0.2839 -0.2083 -0.0520 0.3748 0.0152 0.1957 0.1433 -0.2944
    0.3573 -0.0548 -0.1681 -0.0667"""),
        std=_numbers("""
    0.4765 1.0364 0.4514 1.1677 0.5313 0.4990 0.4818 0.5013 0.8158 1.0344 0.5894 1.0901
    0.6885 0.6165 0.8454 0.4978 0.5759 0.3523 0.7135 0.6804 0.5833 1.4146 0.8986 0.5659
    0.7069 0.5338 0.4889 0.4917 0.4069 0.4999 0.6866 0.4093 0.5709 0.6065 0.6415 0.4944
    0.5726 1.2042 0.5458 1.6887 0.3971 1.0600 0.3943 0.5537 0.5444 0.4089 0.7468 0.7744"""),
    ),
    # Wan2.2 in small; its trained weights bring their own statistics
    "tiny": VAEConfig(
        dim=8,
        decoder_dim=8,
        decoder_multipliers=(2, 3, 6, 6),
        z_dim=48,
        patch=2,
        mean=(0.0,) * 48,
        std=(1.0,) * 48,
    ),
}


def load_vae(
    size: str | VAEConfig,
    weights: str | Path | None = None,
    *,
    seed: int = 0,
    encoder_only: bool = False,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
) -> VAE:
    """Build a frozen VAE.

    Args:
        size: a name in VAE_SIZES, or a VAEConfig.
        weights: a public checkpoint (stand-alone, or a full policy's); None = random ones.
            Tensors `mean` and `std` beside them replace the config's statistics.
        seed: of the random weights.
        encoder_only: leave the decoder out.
        device: where the weights go.
        dtype: their dtype, in which the VAE computes.

    Raises:
        CheckpointError: the checkpoint does not fit.
    """
    with seeded(seed), torch.device("meta" if weights else device):
        vae = VAE(size, encoder_only=encoder_only)
    if weights:
        beside = load_frozen(
            vae,
            weights,
            {name: Part(name=name) for name in vae.state_dict()},
            prefix=PREFIX,
            unused=lambda name: encoder_only and name.startswith(("decoder.", "conv2.")),
            dtype=dtype,
            device=device,
            beside=("mean", "std"),
        )
        if len(beside) == 2:
            vae.set_statistics(tuple(beside["mean"].tolist()), tuple(beside["std"].tolist()))
    freeze(vae)
    return vae.to(dtype)


def vae_fingerprint(size: str | VAEConfig, weights: str | Path | None, seed: int = 0) -> str:
    """Return the fingerprint of a VAE without building it, see `frozen.fingerprint`."""
    config = sizes_of(VAE_SIZES, size, "VAE size")
    return fingerprint("vae", config, seed=seed, weights=weights, prefix=PREFIX)
