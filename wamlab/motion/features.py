"""What the model sees of a motion, and how far a motion is from the true one.

A frame's features, D = 8 + 12 J, can be turned back into the motion but for where on the floor it
started and which way it faced:

    0      root height, m                        J6  local rotations, first two columns (the root's
    1      heading's rate, rad/s                     in the heading frame)
    2:4    root velocity on the floor in the     J3  positions in the heading frame, m
           heading frame, m/s                    J3  velocities in the heading frame, m/s
                                                 4   foot contact

The heading frame stands under the pelvis, +Z up, +X where hips and shoulders face. Everything is
batched, differentiable torch. Shapes: B clips, T frames, J joints, D features.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from wamlab.motion.skeleton import FEET, INDEX

STD_FLOOR = 1e-3  # of constant features
_LATERAL = [INDEX[f"{side}_{joint}"] for side in ("left", "right") for joint in ("hip", "shoulder")]


class Motion(NamedTuple):
    """A batch of motions in the world: float [B, T, ...]."""

    place: Tensor  # [B, T, J, 3], m
    rot: Tensor  # [B, T, J, 3, 3], local
    contact: Tensor  # [B, T, 4], 0 or 1: left ankle, left toe, right ankle, right toe


def about_z(angle: Tensor) -> Tensor:
    """Return rotations about +Z, [..., 3, 3]."""
    c, s, zero = angle.cos(), angle.sin(), torch.zeros_like(angle)
    rows = (c, -s, zero, s, c, zero, zero, zero, zero + 1)
    return torch.stack(rows, -1).unflatten(-1, (3, 3))


def heading(place_BTJ3: Tensor, smooth: int = 0) -> Tensor:
    """Return the heading angle [B, T], rad, unwrapped: where hips and shoulders face on the floor.

    Args:
        place_BTJ3: canonical joint positions, +Z up.
        smooth: frames on each side of a moving average over the lateral vector.
    """
    left_hip, left_arm, right_hip, right_arm = (place_BTJ3[..., j, :2] for j in _LATERAL)
    side_BT2 = left_hip + left_arm - right_hip - right_arm
    if smooth:
        padded = F.pad(side_BT2.transpose(-1, -2), (smooth, smooth), mode="replicate")
        side_BT2 = F.avg_pool1d(padded, 2 * smooth + 1, 1).transpose(-1, -2)
    angle = torch.atan2(-side_BT2[..., 0], side_BT2[..., 1])  # +Y is left of +X
    step = angle.diff(dim=-1)
    turns = torch.round(step / (2 * torch.pi)) * 2 * torch.pi
    return torch.cat([angle[..., :1], angle[..., 1:] - turns.cumsum(-1)], -1)


def forward_difference(x: Tensor, rate: float) -> Tensor:
    """Return (x[t + 1] - x[t]) * rate along dim 1; the last frame repeats the one before."""
    step = x.diff(dim=1) * rate
    return torch.cat([step, step[:, -1:]], 1)


def to_features(motion: Motion, rate: float) -> Tensor:
    """Return features [B, T, D].

    Args:
        motion: canonical joints.
        rate: frames a second.
    """
    place, rot = motion.place, motion.rot
    psi_BT = heading(place, smooth=round(rate / 12))
    back = about_z(-psi_BT)
    root_v = torch.einsum("btij,btj->bti", back, forward_difference(place[:, :, 0], rate))
    floor = place[:, :, :1] * place.new_tensor([1.0, 1.0, 0.0])
    seen = torch.einsum("btij,btkj->btki", back, place - floor)
    local = torch.cat([(back @ rot[:, :, 0])[:, :, None], rot[:, :, 1:]], 2)
    parts = [
        place[:, :, 0, 2:],
        forward_difference(psi_BT, rate)[..., None],
        root_v[..., :2],
        local[..., :2].transpose(-1, -2).flatten(2),
        seen.flatten(2),
        forward_difference(seen, rate).flatten(2),
        motion.contact.to(place.dtype),
    ]
    return torch.cat(parts, -1)


def from_features(features_BTD: Tensor, rate: float) -> Motion:
    """Return the motion that starts above the origin and faces +X; the inverse of `to_features`.

    Positions are those that the features hold, not forward kinematics of the rotations.
    """
    joints = (features_BTD.shape[-1] - 8) // 12
    sizes = [1, 1, 2, 6 * joints, 3 * joints, 3 * joints, 4]
    _, turn, root_v, columns, seen, _, contact = features_BTD.split(sizes, -1)
    psi_BT = _integrate(turn, rate)[..., 0]
    forth = about_z(psi_BT)
    flat_v = F.pad(root_v, (0, 1))
    root = _integrate(torch.einsum("btij,btj->bti", forth, flat_v), rate)
    seen = seen.unflatten(-1, (joints, 3))
    place = torch.einsum("btij,btkj->btki", forth, seen) + root[:, :, None]
    rot = from_columns(columns.unflatten(-1, (joints, 6)))
    rot = torch.cat([(forth @ rot[:, :, 0])[:, :, None], rot[:, :, 1:]], 2)
    return Motion(place, rot, contact)


def _integrate(speed: Tensor, rate: float) -> Tensor:
    steps = speed[:, :-1].cumsum(1) / rate
    return torch.cat([torch.zeros_like(speed[:, :1]), steps], 1)


def from_columns(columns: Tensor) -> Tensor:
    """Return the rotation [..., 3, 3] nearest in Gram and Schmidt's sense to two columns [..., 6].

    Source: Zhou et al., "On the Continuity of Rotation Representations", CVPR 2019.
    """
    a, b = columns.unflatten(-1, (2, 3)).unbind(-2)
    x = F.normalize(a, dim=-1)
    y = F.normalize(b - (x * b).sum(-1, keepdim=True) * x, dim=-1)
    return torch.stack([x, y, torch.linalg.cross(x, y)], -1)


class Normalizer(NamedTuple):
    """Mean and standard deviation of each feature over the training split alone."""

    mean: Tensor
    std: Tensor

    @classmethod
    def of(cls, features_ND: Tensor) -> "Normalizer":
        """Measure the features of the training frames [N, D]; constant ones get the floor."""
        return cls(features_ND.mean(0), features_ND.std(0).clamp(min=STD_FLOOR))

    def __call__(self, features: Tensor) -> Tensor:
        """Return features with mean 0 and deviation 1."""
        return (features - self.mean) / self.std

    def undo(self, features: Tensor) -> Tensor:
        """Return features in their own units."""
        return features * self.std + self.mean


def _aligned(place_BTJ3: Tensor) -> Tensor:
    """Put the first frame's root above the origin, facing +X; heights stay."""
    back_B33 = about_z(-heading(place_BTJ3)[:, 0])
    start = place_BTJ3[:, :1, :1] * place_BTJ3.new_tensor([1.0, 1.0, 0.0])
    return torch.einsum("bij,btkj->btki", back_B33, place_BTJ3 - start)


def mpjpe_cm(pred_BTJ3: Tensor, true_BTJ3: Tensor, valid: Tensor | None = None) -> float:
    """Return the mean joint position error, cm.

    Only the first frame's root on the floor and its heading are aligned, so drift counts.

    Args:
        pred_BTJ3, true_BTJ3: positions, m.
        valid: bool, broadcast to [B, T, J]: what counts; None is all.
    """
    error = (_aligned(pred_BTJ3) - _aligned(true_BTJ3)).norm(dim=-1)
    counted = error if valid is None else error[valid.expand_as(error)]
    return 100 * counted.mean().item()


def pa_mpjpe_cm(pred_BTJ3: Tensor, true_BTJ3: Tensor) -> float:
    """Return the mean joint position error after the best rotation, scale and shift a frame, cm."""
    pred, true = (x - x.mean(2, keepdim=True) for x in (pred_BTJ3, true_BTJ3))
    u, s, vt = torch.linalg.svd(true.transpose(-1, -2) @ pred)
    sign = torch.ones_like(s)
    sign[..., 2] = torch.det(u @ vt).sign()  # a rotation, never a mirror
    turn = u @ (sign[..., None] * vt)
    scale = (s * sign).sum(-1) / pred.square().sum((-1, -2)).clamp(min=1e-12)
    best = scale[..., None, None] * pred @ turn.transpose(-1, -2)
    return 100 * (best - true).norm(dim=-1).mean().item()


def vel_err(pred: Tensor, true: Tensor, rate: float) -> float:
    """Return the mean joint velocity error of positions [B, T, J, 3], m, aligned as in `mpjpe_cm`:
    cm/s."""
    error = ((_aligned(pred) - _aligned(true)).diff(dim=1) * rate).norm(dim=-1)
    return 100 * error.mean().item()


def accel_err(pred: Tensor, true: Tensor, rate: float) -> float:
    """Return the mean joint acceleration error of positions [B, T, J, 3], m, aligned as in
    `mpjpe_cm`: m/s^2."""
    error = ((_aligned(pred) - _aligned(true)).diff(n=2, dim=1) * rate**2).norm(dim=-1)
    return error.mean().item()


def skate(place_BTJ3: Tensor, contact_BT4: Tensor, rate: float) -> float:
    """Return the mean floor speed of feet while they are in contact, cm/s.

    Args:
        place_BTJ3: canonical joint positions, m.
        contact_BT4: above 0.5 is contact, in the order of FEET.
        rate: frames a second.
    """
    speed = (place_BTJ3[:, :, list(FEET), :2].diff(dim=1) * rate).norm(dim=-1)
    down = (contact_BT4[:, 1:] > 0.5) & (contact_BT4[:, :-1] > 0.5)
    return 100 * (speed * down).sum().item() / max(int(down.sum()), 1)
