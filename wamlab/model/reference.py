"""The operations of a block in plain torch: the specification that `fused` must equal.

Every function has a namesake with the same arguments in `fused`. `segment_T` is the idea that both
share: shift, scale and gate have one row a distinct time (G rows), and segment_T names the row of
each token; None says that there is one row a token already (T rows).

Shapes: B batch, T tokens, G rows of the time table, D width, H heads, K head width, P = K/2 pairs,
C channels, F latent frames, Y X latent height and width, y x patch rows and columns.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm(x_BTD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """Scale every token to unit root mean square over the FULL width, all heads together.

    The statistics are fp32, and the result is rounded to x's dtype before it meets the weight.
    """
    x32 = x_BTD.float()
    x32 = x32 * torch.rsqrt(x32.square().mean(dim=-1, keepdim=True) + eps)
    return x32.to(x_BTD.dtype) * weight_D


def rotation(angles_TP: Tensor) -> Tensor:
    """Return what `norm_rope` rotates by: complex128 [T, P] of modulus 1."""
    return torch.polar(torch.ones_like(angles_TP), angles_TP)


def rope(x_BTHK: Tensor, rotation_TP: Tensor) -> Tensor:
    """Rotate the channel pairs (2k, 2k+1) of every head by the token's angles, in double precision.

    Source: Su et al., RoFormer, arXiv:2104.09864, equation 34, with interleaved pairs.
    """
    pairs = x_BTHK.double().unflatten(-1, (-1, 2))
    turned = torch.view_as_complex(pairs) * rotation_TP[:, None]
    return torch.view_as_real(turned).flatten(-2).to(x_BTHK.dtype)


def norm_rope(
    x_BTD: Tensor, weight_D: Tensor, rotation_TP: Tensor, heads: int, *, eps: float
) -> Tensor:
    """Normalise over the full width, split into heads, rotate: [B, T, D] -> [B, T, H, K]."""
    return rope(rms_norm(x_BTD, weight_D, eps).unflatten(-1, (heads, -1)), rotation_TP)


def norm_modulate(
    x_BTD: Tensor, shift_BGD: Tensor, scale_BGD: Tensor, segment_T: Tensor | None, *, eps: float
) -> Tensor:
    """LayerNorm without weights, then each token's own scale and shift (adaLN).

    Source: Peebles and Xie, Scalable Diffusion Models with Transformers, arXiv:2212.09748.
    """
    shift_BTD, scale_BTD = _per_token(shift_BGD, segment_T), _per_token(scale_BGD, segment_T)
    return F.layer_norm(x_BTD, x_BTD.shape[-1:], eps=eps) * (1 + scale_BTD) + shift_BTD


def gated_residual(
    x_BTD: Tensor, update_BTD: Tensor, gate_BGD: Tensor, segment_T: Tensor | None
) -> Tensor:
    """Return x + update * gate."""
    return x_BTD + update_BTD * _per_token(gate_BGD, segment_T)


def gelu_tanh(x: Tensor) -> Tensor:
    """GELU in its tanh form."""
    return F.gelu(x, approximate="tanh")


def time_sinusoid(time: Tensor, width: int) -> Tensor:
    """Return cosines, then sines, of the time at `width`/2 frequencies: fp64 [..., width].

    Args:
        time: [...], flow-matching time, 0..1000.
        width: number of channels, even.
    """
    half = width // 2
    frequencies = 10000.0 ** -(torch.arange(half, device=time.device, dtype=torch.float64) / half)
    angles = time.double()[..., None] * frequencies
    return torch.cat([angles.cos(), angles.sin()], dim=-1)


def action_sinusoid(time: Tensor, width: int) -> Tensor:
    """Return sines, then cosines (the other way round), in fp32 [..., width]."""
    half = width // 2
    exponent = -torch.arange(half, device=time.device, dtype=torch.float32)
    angles = time.float()[..., None] * torch.exp(exponent * (math.log(10000.0) / half))
    return torch.cat([angles.sin(), angles.cos()], dim=-1)


def patchify(x_BCFYX: Tensor, weight: Tensor, bias_D: Tensor) -> Tensor:
    """Embed each 1x2x2 patch, an odd last row or column dropped: [B, C, F, Y, X] -> [B, S, D].

    Args:
        x_BCFYX: latents.
        weight: [D, C, 1, 2, 2], a convolution whose stride is its kernel.
        bias_D: [D].
    """
    return F.conv3d(x_BCFYX, weight, bias_D, stride=(1, 2, 2)).flatten(2).transpose(1, 2)


def _per_token(rows_BGD: Tensor, segment_T: Tensor | None) -> Tensor:
    return rows_BGD if segment_T is None else rows_BGD[:, segment_T]
