"""Augmentation of motion windows as batched tensor operations, on whatever device they lie on.

Everything is drawn from (seed, step, sample id), so a window is augmented alike whether it is alone
or in a batch, in a worker or on the GPU. Rotations stay rotations, bones keep their lengths over
time, and nothing here is for validation.

Shapes: B windows, T frames, J canonical joints.
"""

import dataclasses
import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from wamlab.draws import Draws
from wamlab.motion.dynamics import exp, log
from wamlab.motion.features import Motion, about_z
from wamlab.motion.skeleton import CANONICAL, CANONICAL_TREE, fk, mirror_index

KNOTS = 5  # of noise over a window: slow enough to leave accelerations alone
GROUPS = {"arm": ("shoulder", "elbow", "wrist"), "leg": ("hip", "knee", "ankle", "toe")}


class Window(NamedTuple):
    """A batch of windows; everything else about a motion follows from it."""

    rot: Tensor  # [B, T, J, 3, 3], local
    root: Tensor  # [B, T, 3], m
    offsets: Tensor  # [B, J, 3], m
    contact: Tensor  # bool [B, T, 4]: left ankle, left toe, right ankle, right toe
    kind: Tensor  # int64 [B, T], index into segments.KINDS
    block: Tensor  # int64 [B, T], ascending from 0

    def motion(self) -> Motion:
        """Return positions, rotations and contacts, by forward kinematics."""
        place, _ = fk(self.rot, self.root, self.offsets[:, None], CANONICAL_TREE)
        return Motion(place, self.rot, self.contact)

    def to(self, device: torch.device | str, **options: bool) -> "Window":
        """Return the windows on a device."""
        return Window(*(x.to(device, **options) for x in self))


@dataclasses.dataclass(frozen=True, kw_only=True)
class AugmentConfig:
    """How much of each; all zeros change nothing."""

    bone: float = 0.05  # standard deviation of log length, one draw a bone group
    heading: float = math.pi  # largest turn about up, rad
    mirror: float = 0.5  # share of windows
    warp: float = 0.1  # largest change of the local speed of time
    rotation: float = 0.02  # rad, of slow noise in each joint's tangent space
    root: float = 0.01  # m, of slow noise
    dropout: float = 0.05  # share of joints that the model is not shown


NOTHING = AugmentConfig(
    bone=0.0, heading=0.0, mirror=0.0, warp=0.0, rotation=0.0, root=0.0, dropout=0.0
)


def augment(window: Window, draws: Draws, config: AugmentConfig) -> tuple[Window, Tensor]:
    """Return the windows changed, and bool [B, J] which joints the model may see.

    Args:
        window: as packed.
        draws: of the step's samples, on the windows' device.
        config: how much.
    """
    frames = window.root.shape[1]
    flip_B = draws.uniform("augment.mirror", ())[:, None, None] < config.mirror
    window = _where(flip_B[:, 0, 0], mirror(window), window)
    window = warp(window, _warped(draws, frames, config.warp))
    noise = config.rotation * _slow(draws, "augment.rotation", frames, (len(CANONICAL), 3))
    shake = config.root * _slow(draws, "augment.root", frames, (3,))
    scale = torch.exp(config.bone * draws.normal("augment.bone", (3,)))
    offsets = window.offsets * scale[:, _groups(scale.device)][..., None]
    grown = scale[:, 1] if config.bone else torch.ones_like(scale[:, 1])
    angle = config.heading * (2 * draws.uniform("augment.heading", ()) - 1)
    window = window._replace(
        rot=window.rot @ exp(noise),
        root=window.root * grown[:, None, None] + shake,  # longer legs carry the pelvis higher
        offsets=offsets,
    )
    seen = draws.uniform("augment.dropout", (len(CANONICAL),)) >= config.dropout
    return turn(window, angle), seen


def turn(window: Window, angle_B: Tensor) -> Window:
    """Return the windows turned about up by an angle each, rad."""
    by = about_z(angle_B)[:, None]
    pelvis = (by @ window.rot[:, :, 0])[:, :, None]
    root = (by @ window.root[..., None])[..., 0]
    return window._replace(rot=torch.cat([pelvis, window.rot[:, :, 1:]], 2), root=root)


def mirror(window: Window) -> Window:
    """Return the windows seen in a mirror: left is right, and R becomes S R S with S = (1, -1, 1).

    A torque about a joint's own axes, were there one, would become -S tau of the other side.
    """
    other = torch.tensor(mirror_index(), device=window.root.device)
    sign = window.root.new_tensor([1.0, -1.0, 1.0])
    return window._replace(
        rot=(window.rot * sign[:, None] * sign)[:, :, other],
        root=window.root * sign,
        offsets=(window.offsets * sign)[:, other],
        contact=window.contact[..., [2, 3, 0, 1]],
    )


def warp(window: Window, at_BT: Tensor) -> Window:
    """Return the windows at fractional frames: slerp, linear root, nearest labels.

    Args:
        window: T frames.
        at_BT: float, frames in [0, T - 1].
    """
    last = window.root.shape[1] - 1
    first_BT = at_BT.floor().long().clamp(max=last - 1)
    share = at_BT - first_BT

    def frames(x: Tensor, index_BT: Tensor) -> Tensor:
        shape = (*index_BT.shape, *[1] * (x.ndim - 2))
        return x.gather(1, index_BT.view(shape).expand(-1, -1, *x.shape[2:]))

    a, b = frames(window.rot, first_BT), frames(window.rot, first_BT + 1)
    rot = a @ exp(share[..., None, None] * log(a.mT @ b))
    low, high = frames(window.root, first_BT), frames(window.root, first_BT + 1)
    near = at_BT.round().long()
    labels = {n: frames(getattr(window, n), near) for n in ("contact", "kind", "block")}
    return window._replace(rot=rot, root=low + share[..., None] * (high - low), **labels)


def _warped(draws: Draws, frames: int, most: float) -> Tensor:
    """Return instants [B, T] that keep both ends and run at 1 - most to 1 + most frames a frame."""
    size = most * (2 * draws.uniform("augment.warp", (1,)) - 1)
    even = torch.linspace(0, 1, frames, device=size.device)
    bend = torch.sin(math.pi * even) / math.pi
    return ((even + size * bend) * (frames - 1)).clamp(0, frames - 1)


def _slow(draws: Draws, name: str, frames: int, shape: tuple[int, ...]) -> Tensor:
    """Return normal noise [B, T, *shape] that is drawn at a few knots and straight between them."""
    knots = draws.normal(name, (KNOTS, math.prod(shape))).transpose(1, 2)
    line = F.interpolate(knots, frames, mode="linear", align_corners=True)
    return line.transpose(1, 2).unflatten(2, shape)


def _groups(device: torch.device) -> Tensor:
    """Return the bone group of each joint: 0 trunk, 1 leg, 2 arm."""
    joints = [n.rpartition("_")[2] for n in CANONICAL]
    found = [1 if j in GROUPS["leg"] else 2 if j in GROUPS["arm"] else 0 for j in joints]
    return torch.tensor(found, device=device)


def _where(mask_B: Tensor, yes: Window, no: Window) -> Window:
    def pick(a: Tensor, b: Tensor) -> Tensor:
        return torch.where(mask_B.view(-1, *[1] * (a.ndim - 1)), a, b)

    return Window(*(pick(a, b) for a, b in zip(yes, no)))
