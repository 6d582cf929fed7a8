"""The operations of `reference` under the same names, written for a compiler to fuse.

Inside `torch.compile` every function here becomes one pass over its tokens, joined with its
neighbours where that helps: statistics, gather of the time row, scale and shift never reach memory
on their own. Intermediate values stay fp32 and are rounded once, except where the public model
rounds too (before the RMSNorm weight). They also run eagerly. A hand-written kernel takes the place
of a body here where it beats the compiled one by 10 % in a record.

Shapes: see `reference`.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from wamlab.model.reference import action_sinusoid as action_sinusoid
from wamlab.model.reference import gelu_tanh as gelu_tanh
from wamlab.model.reference import time_sinusoid as time_sinusoid


def rms_norm(x_BTD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """See `reference.rms_norm`."""
    return F.rms_norm(x_BTD.float(), x_BTD.shape[-1:], eps=eps).to(x_BTD.dtype) * weight_D


def rotation(angles_TP: Tensor) -> Tensor:
    """Return cosines and sines, fp32 [2, T, P]: the compiler has no complex numbers."""
    return torch.stack([angles_TP.cos(), angles_TP.sin()]).float()


def rope(x_BTHK: Tensor, rotation_2TP: Tensor) -> Tensor:
    """See `reference.rope`; in fp32, the cosines and sines taken in fp64 beforehand."""
    cos_T1P, sin_T1P = rotation_2TP[:, :, None].unbind(0)
    even, odd = x_BTHK.float().unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack([even * cos_T1P - odd * sin_T1P, even * sin_T1P + odd * cos_T1P], dim=-1)
    return turned.flatten(-2).to(x_BTHK.dtype)


def norm_rope(
    x_BTD: Tensor, weight_D: Tensor, rotation_2TP: Tensor, heads: int, *, eps: float
) -> Tensor:
    """See `reference.norm_rope`."""
    return rope(rms_norm(x_BTD, weight_D, eps).unflatten(-1, (heads, -1)), rotation_2TP)


def norm_modulate(
    x_BTD: Tensor, shift_BGD: Tensor, scale_BGD: Tensor, segment_T: Tensor | None, *, eps: float
) -> Tensor:
    """See `reference.norm_modulate`; rounded once, at the end."""
    shift_BTD, scale_BTD = _per_token(shift_BGD, segment_T), _per_token(scale_BGD, segment_T)
    normed = F.layer_norm(x_BTD.float(), x_BTD.shape[-1:], eps=eps)
    return torch.addcmul(shift_BTD.float(), normed, 1 + scale_BTD.float()).to(x_BTD.dtype)


def gated_residual(
    x_BTD: Tensor, update_BTD: Tensor, gate_BGD: Tensor, segment_T: Tensor | None
) -> Tensor:
    """See `reference.gated_residual`; rounded once."""
    return torch.addcmul(x_BTD, update_BTD, _per_token(gate_BGD, segment_T))


def patchify(x_BCFYX: Tensor, weight: Tensor, bias_D: Tensor) -> Tensor:
    """See `reference.patchify`; a matrix product over gathered patches, no convolution."""
    B, C, N, Y, X = x_BCFYX.shape
    patches = x_BCFYX[..., : Y // 2 * 2, : X // 2 * 2].reshape(B, C, N, Y // 2, 2, X // 2, 2)
    patches = patches.permute(0, 2, 3, 5, 1, 4, 6).reshape(B, N * (Y // 2) * (X // 2), C * 4)
    return F.linear(patches, weight.flatten(1), bias_D)


def _per_token(rows_BGD: Tensor, segment_T: Tensor | None) -> Tensor:
    # index_select: its backward is one index_add, where that of [:, segment] sorts first
    return rows_BGD if segment_T is None else rows_BGD.index_select(1, segment_T)
