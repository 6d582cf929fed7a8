"""The building blocks of the causal video VAEs, evaluated on a whole clip or chunk by chunk.

Shapes: B batch, C channels, T frames, H W pixels. Every activation is [B, C, T, H, W].
A chunked evaluation carries a `state`, a dict from module to what that module remembers of the
past. A whole clip is the same code with `state=None`: then nothing depends on Python values that
change between calls, and a compiler sees one graph.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

State = dict[nn.Module, Any]


def recall(state: State | None, module: nn.Module, new: Any) -> Any:
    """Return what `module` kept of the previous chunk (None in a first one) and keep `new`."""
    if state is None:
        return None
    old = state.get(module)
    state[module] = new
    return old


class Conv3d(nn.Conv3d):
    """torch's 3-D convolution, with channels that tensor cores can read, and oneDNN's on a CPU.

    `fill` is how many channels of zeros join on the way in and leave on the way out: kernels read
    16 bytes of channels at a time, and 3 or 12 of them are no multiple of that.
    """

    fill = (0, 0)

    def forward(self, x: Tensor) -> Tensor:
        """Return the convolution of x [B, C, T, H, W]."""
        if any(self.fill):
            return self._filled(x)
        # torch sends a small batch of 1 to a kernel of its own: 121 ms against 13 ms for 8 channels
        small = x.device.type == "cpu" and x.dtype == torch.float32 and x.shape[0] == 1
        if not small or torch.compiler.is_compiling() or not torch.backends.mkldnn.is_available():
            return super().forward(x)
        how = (self.padding, self.stride, self.dilation, self.groups)
        return torch.mkldnn_convolution(x, self.weight, self.bias, *how)

    def _filled(self, x: Tensor) -> Tensor:
        c_in, c_out = self.fill
        x = F.pad(x, (0, 0, 0, 0, 0, 0, 0, c_in))
        weight = F.pad(self.weight, (0, 0, 0, 0, 0, 0, 0, c_in, 0, c_out))
        y = self._conv_forward(x, weight, F.pad(self.bias, (0, c_out)))
        return y[:, : self.out_channels]


class CausalConv3d(Conv3d):
    """A 3-D convolution that sees no later frame: zeros, or the past, stand before the first."""

    def __init__(self, c_in: int, c_out: int, kernel: tuple[int, int, int]) -> None:
        super().__init__(c_in, c_out, kernel, padding=(0, kernel[1] // 2, kernel[2] // 2))
        self.history = kernel[0] - 1

    def forward(self, x: Tensor, state: State | None = None) -> Tensor:
        """Return [B, c_out, T, H, W] for x [B, c_in, T, H, W]."""
        if self.history:
            zero = torch.zeros_like(x[:, :, :1])  # of a frame's layout, so that cat keeps it
            before = state.get(self) if state is not None else None
            x = torch.cat([zero, zero, x] if before is None else [before, x], 2)
            if state is not None:
                state[self] = x[:, :, -2:].clone()
        return super().forward(x)


def normalise_rows(x_NC: Tensor, gamma_C: Tensor, scale: float, silu: bool) -> Tensor:
    """RMSNorm of rows of channels in fp32, and SiLU if asked; in x's dtype."""
    wide = x_NC.to(torch.promote_types(x_NC.dtype, torch.float32))
    squares = wide.square().sum(1, keepdim=True).clamp_min(1e-24)
    y_NC = wide * (scale * squares.rsqrt()) * gamma_C
    return (F.silu(y_NC) if silu else y_NC).to(x_NC.dtype)


class RMSNorm(nn.Module):
    """gamma * x over its root mean square across channels, in fp32 unless `low_precision`.

    `rows`, a compiled `normalise_rows`, takes over where it is set: for training channels last.
    """

    def __init__(self, dim: int, rank: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(dim, *[1] * rank))
        self.scale = dim**0.5
        self.low_precision = False
        self.rows: Callable[..., Tensor] | None = None

    def forward(self, x: Tensor, silu: bool = False) -> Tensor:
        """Return the normalised x [B, C, ...] in x's dtype, after SiLU if asked."""
        if self.rows is not None:
            last = x.movedim(1, -1)
            rows = last.reshape(-1, last.shape[-1])
            y = self.rows(rows, self.gamma.flatten(), self.scale, silu)
            return y.view(last.shape).movedim(-1, 1)
        wide = x if self.low_precision else x.to(torch.promote_types(x.dtype, torch.float32))
        # the length, at least 1e-12, as a sum of squares: 12 times torch's norm's speed on a CPU
        squares = wide.square().sum(1, keepdim=True).clamp_min(1e-24)
        y = wide * (self.scale * squares.rsqrt()) * self.gamma
        return (F.silu(y) if silu else y).to(x.dtype)


class ResBlock(nn.Module):
    """Two normalised convolutions, and past them the identity or a 1x1x1 convolution."""

    def __init__(self, c_in: int, c_out: int) -> None:
        super().__init__()
        self.residual = nn.ModuleDict(
            {  # the public positions in a Sequential; 1, 4 (SiLU) and 5 (dropout) hold no weights
                "0": RMSNorm(c_in, 3),
                "2": CausalConv3d(c_in, c_out, (3, 3, 3)),
                "3": RMSNorm(c_out, 3),
                "6": CausalConv3d(c_out, c_out, (3, 3, 3)),
            }
        )
        self.shortcut = CausalConv3d(c_in, c_out, (1, 1, 1)) if c_in != c_out else nn.Identity()

    def forward(self, x: Tensor, state: State | None = None) -> Tensor:
        """Return [B, c_out, T, H, W]."""
        norm_a, conv_a, norm_b, conv_b = self.residual.values()
        y = conv_a(norm_a(x, silu=True), state)
        return self.shortcut(x) + conv_b(norm_b(y, silu=True), state)


class FrameAttention(nn.Module):
    """Single-head self-attention over the positions of each frame alone."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = RMSNorm(dim, 2)
        self.to_qkv = nn.Conv2d(dim, 3 * dim, 1)
        self.proj = nn.Conv2d(dim, dim, 1)

    def forward(self, x: Tensor, state: State | None = None) -> Tensor:
        """Return [B, C, T, H, W]."""
        frames = x.transpose(1, 2).flatten(0, 1)
        qkv = self.to_qkv(self.norm(frames)).flatten(2).transpose(1, 2)
        q, k, v = (t[:, None] for t in qkv.chunk(3, -1))
        out = F.scaled_dot_product_attention(q, k, v)[:, 0].transpose(1, 2)
        out = self.proj(out.reshape(frames.shape))
        return x + out.unflatten(0, (x.shape[0], x.shape[2])).transpose(1, 2)


class Down(nn.Module):
    """Halve height and width, and with `temporal` the frames after the first as well."""

    def __init__(self, dim: int, temporal: bool) -> None:
        super().__init__()
        self.resample = nn.ModuleDict({"1": nn.Conv2d(dim, dim, 3, stride=2)})
        self.time_conv = Conv3d(dim, dim, (3, 1, 1), (2, 1, 1)) if temporal else None

    def forward(self, x: Tensor, state: State | None = None) -> Tensor:
        """Return [B, C, T or (T+1)/2, H/2, W/2]; a clip's frame 0 is not convolved in time."""
        frames = F.pad(x.transpose(1, 2).flatten(0, 1), (0, 1, 0, 1))
        u = self.resample["1"](frames).unflatten(0, (x.shape[0], x.shape[2])).transpose(1, 2)
        if self.time_conv is None:
            return u
        before = recall(state, self, u[:, :, -1:])
        if before is not None:
            return self.time_conv(torch.cat([before, u], 2))
        if u.shape[2] == 1:
            return u
        return torch.cat([u[:, :, :1], self.time_conv(u)], 2)


class Up(nn.Module):
    """Double height and width, and with `temporal` the frames after the first as well."""

    def __init__(self, dim: int, c_out: int, temporal: bool) -> None:
        super().__init__()
        self.resample = nn.ModuleDict({"1": nn.Conv2d(dim, c_out, 3, padding=1)})
        self.time_conv = CausalConv3d(dim, 2 * dim, (3, 1, 1)) if temporal else None

    def forward(self, x: Tensor, state: State | None = None) -> Tensor:
        """Return [B, c_out, T or 2T-1, 2H, 2W]."""
        if self.time_conv is not None:
            x = self._double_time(x, state)
        frames = F.interpolate(x.transpose(1, 2).flatten(0, 1), scale_factor=2.0, mode="nearest")
        return self.resample["1"](frames).unflatten(0, (x.shape[0], x.shape[2])).transpose(1, 2)

    def _double_time(self, x: Tensor, state: State | None) -> Tensor:
        """Pass the clip's frame 0; of each other, convolved as a clip of their own, make two."""
        begun = recall(state, self, True)
        first, rest = (x[:, :, :0], x) if begun else (x[:, :, :1], x[:, :, 1:])
        if rest.shape[2] == 0:
            return first
        pairs = rearrange(self.time_conv(rest, state), "b (k c) t h w -> b c (t k) h w", k=2)
        return torch.cat([first, pairs], 2)


class AvgDown(nn.Module):
    """The parameter-free shortcut of an encoder level: cells to channels, averaged in runs."""

    def __init__(self, c_in: int, c_out: int, time: int, space: int) -> None:
        super().__init__()
        self.c_in, self.c_out, self.time, self.space = c_in, c_out, time, space

    def forward(self, x: Tensor) -> Tensor:
        """Return [B, c_out, ceil(T/time), H/space, W/space]; zero frames fill up in front."""
        missing = -x.shape[2] % self.time
        if missing:
            x = torch.cat([torch.zeros_like(x[:, :, :missing]), x], 2)
        cells = "b c (t dt) (h dy) (w dx) -> b (c dt dy dx) t h w"
        x = rearrange(x, cells, dt=self.time, dy=self.space, dx=self.space)
        return x.unflatten(1, (self.c_out, -1)).mean(2)


class DupUp(nn.Module):
    """The parameter-free shortcut of a decoder level: repeat channels, spread them over cells."""

    def __init__(self, c_in: int, c_out: int, time: int, space: int) -> None:
        super().__init__()
        self.time, self.space = time, space
        self.repeats = c_out * time * space**2 // c_in

    def forward(self, x: Tensor, first: bool) -> Tensor:
        """Return [B, c_out, T*time, H*space, W*space]; a clip's first time-1 frames are cut."""
        x = x.repeat_interleave(self.repeats, 1)
        cells = "b (o dt dy dx) t h w -> b o (t dt) (h dy) (w dx)"
        x = rearrange(x, cells, dt=self.time, dy=self.space, dx=self.space)
        return x[:, :, self.time - 1 :] if first else x


class Level(nn.Module):
    """One resolution of Wan2.2: its blocks, plus the parameter-free shortcut around all of them."""

    def __init__(self, name: str, blocks: list[nn.Module], shortcut: nn.Module | None) -> None:
        super().__init__()
        self.add_module(name, nn.ModuleList(blocks))
        self.name, self.shortcut = name, shortcut

    def forward(self, x: Tensor, state: State | None = None) -> Tensor:
        """Return the level's output."""
        begun = recall(state, self, True)
        y = x
        for block in getattr(self, self.name):
            y = block(y, state)
        if self.shortcut is None:
            return y
        return y + (self.shortcut(x) if self.name == "downsamples" else self.shortcut(x, not begun))


class Head(nn.ModuleDict):
    """The last norm, SiLU and convolution of either half."""

    def __init__(self, c_in: int, c_out: int) -> None:
        super().__init__({"0": RMSNorm(c_in, 3), "2": CausalConv3d(c_in, c_out, (3, 3, 3))})

    def forward(self, x: Tensor, state: State | None = None) -> Tensor:
        """Return [B, c_out, T, H, W]."""
        return self["2"](self["0"](x, silu=True), state)
