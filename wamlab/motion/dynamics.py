"""Joint dynamics as a loss, and the Jacobian behind it computed in five ways.

A joint's rotation is perturbed in its own frame, R_j <- R_j exp(d_j). With A_j the rotation of
joint j in the world and a_jc its columns, point k moves by

    J_kj = [a_j1 x r, a_j2 x r, a_j3 x r],   r = p_k - p_j,   where j is a strict ancestor of k,

in m/rad, and not at all elsewhere: four fifths of J are zeros. All ways give the same numbers and
can be differentiated again, as a loss on J needs.

Shapes: N frames, J joints (also the points K), 3 axes; B clips of T frames in the losses.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.func import jacfwd, jacrev, jvp, vjp, vmap

from wamlab.config import lookup
from wamlab.motion.segments import G
from wamlab.motion.skeleton import Tree, fk, masses

SMALL = 1e-2  # rad: below it series, exact to float64 and with gradients at zero


def exp(w: Tensor) -> Tensor:
    """Return the rotation [..., 3, 3] about w [..., 3] by |w|; smooth at zero."""
    x, y, z = w.unbind(-1)
    zero = torch.zeros_like(x)
    hat = torch.stack([zero, -z, y, z, zero, -x, -y, x, zero], -1).unflatten(-1, (3, 3))
    square = w.square().sum(-1)[..., None, None]
    small = square < SMALL**2
    angle = torch.where(small, torch.ones_like(square), square).sqrt()
    sine = torch.where(small, 1 - square / 6 + square**2 / 120, angle.sin() / angle)
    versine = torch.where(small, 0.5 - square / 24 + square**2 / 720, (1 - angle.cos()) / angle**2)
    eye = torch.eye(3, dtype=w.dtype, device=w.device)
    return eye + sine * hat + versine * (hat @ hat)


def log(rot: Tensor) -> Tensor:
    """Return w [..., 3] with exp(w) = rot and |w| <= pi; smooth at zero, sound at pi.

    It goes through the quaternion whose largest part is computed first.
    """
    (a, b, c), (d, e, f), (g, h, i) = (row.unbind(-1) for row in rot.unbind(-2))
    squares = torch.stack([1 + a + e + i, 1 + a - e - i, 1 - a + e - i, 1 - a - e + i], -1)
    s, x, y, z = squares.unbind(-1)
    rows = [(s, h - f, c - g, d - b), (h - f, x, b + d, c + g), (c - g, b + d, y, f + h)]
    rows += [(d - b, c + g, f + h, z)]
    all_of = torch.stack([torch.stack(row, -1) for row in rows], -2)
    all_of = all_of / (2 * squares.clamp(min=0.1).sqrt()[..., None])
    best = squares.argmax(-1)[..., None, None].expand(*squares.shape[:-1], 1, 4)
    quat = all_of.gather(-2, best)[..., 0, :]
    quat = torch.where(quat[..., :1] < 0, -quat, quat)
    part, cosine = quat[..., 1:], quat[..., :1]
    square = part.square().sum(-1, keepdim=True)
    small = square < (SMALL / 2) ** 2
    sine = torch.where(small, torch.ones_like(square), square).sqrt()
    series = 2 + square / 3 + 3 * square**2 / 20
    return part * torch.where(small, series, 2 * torch.atan2(sine, cosine) / sine)


class Frames(NamedTuple):
    """N frames whose points are moved: rotations, root, offsets, tree."""

    rot: Tensor  # [N, J, 3, 3]
    root: Tensor  # [N, 3]
    offsets: Tensor  # [N, J, 3]
    tree: Tree

    def turned(self, delta_NJ3: Tensor) -> Tensor:
        """Return the points [N, J, 3] after R_j <- R_j exp(d_j)."""
        return fk(self.rot @ exp(delta_NJ3), self.root, self.offsets, self.tree)[0]

    def still(self) -> Tensor:
        """Return the perturbation of zero."""
        return torch.zeros_like(self.offsets)


def serial(frames: Frames) -> Tensor:
    """Frame by frame and output by output, one backward pass each."""
    rows = []
    for n in range(len(frames.rot)):
        one = Frames(*(x[n : n + 1] for x in frames[:3]), frames.tree)
        delta = one.still().requires_grad_()
        outputs = one.turned(delta).flatten()
        grads = [torch.autograd.grad(y, delta, create_graph=True)[0] for y in outputs]
        rows.append(torch.stack(grads).view(len(frames.tree), 3, len(frames.tree), 3))
    return torch.stack(rows)


def _mapped(transform: Callable) -> Callable[[Frames], Tensor]:
    def jacobian_of(frames: Frames) -> Tensor:
        def points(delta: Tensor, rot: Tensor, root: Tensor, offsets: Tensor) -> Tensor:
            return fk(rot @ exp(delta), root, offsets, frames.tree)[0]

        return vmap(transform(points))(frames.still(), *frames[:3])

    return jacobian_of


@functools.cache
def pairs(tree: Tree, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return points k and their strict ancestors j: the blocks of J that are not zero."""
    points, ancestors = tree.ancestors.nonzero()
    return torch.as_tensor(points, device=device), torch.as_tensor(ancestors, device=device)


def blocks(frames: Frames) -> Tensor:
    """Return the non-zero blocks of J in the order of `pairs`, [N, P, 3, 3]: point by axis."""
    place, world = fk(*frames)
    points, ancestors = pairs(frames.tree, frames.rot.device)
    arm = place[:, points] - place[:, ancestors]
    axes = world[:, ancestors]
    return torch.linalg.cross(axes, arm[..., None].expand_as(axes), dim=-2)


def analytic(frames: Frames) -> Tensor:
    """The formula above, all frames and pairs at once."""
    points, ancestors = pairs(frames.tree, frames.rot.device)
    n, j = len(frames.rot), len(frames.tree)
    full = frames.rot.new_zeros(n, j, j, 3, 3)
    full[:, points, ancestors] = blocks(frames)
    return full.transpose(2, 3)


JACOBIANS: dict[str, Callable[[Frames], Tensor]] = {
    "serial": serial,
    "jacrev": _mapped(jacrev),
    "jacfwd": _mapped(jacfwd),
    "analytic": analytic,
}
WAYS = (*JACOBIANS, "products")  # "products" never makes J: jvp and vjp of the kinematics


def jacobian(frames: Frames, how: str = "analytic") -> Tensor:
    """Return J [N, K, 3, J, 3] in m/rad, by a key of JACOBIANS."""
    return lookup(JACOBIANS, how, "Jacobian")(frames)


def push(frames: Frames, omega_NJ3: Tensor, how: str = "products") -> Tensor:
    """Return J omega [N, K, 3]: how fast the points move, m/s for rad/s."""
    if how == "products":
        return jvp(frames.turned, (frames.still(),), (omega_NJ3,))[1]
    return torch.einsum("nkajc,njc->nka", jacobian(frames, how), omega_NJ3)


def pull(frames: Frames, force_NK3: Tensor, how: str = "products") -> Tensor:
    """Return J^T f [N, J, 3]: the torque about each joint's own axes, N m for N."""
    if how == "products":
        return vjp(frames.turned, frames.still())[1](force_NK3)[0]
    return torch.einsum("nkajc,nka->njc", jacobian(frames, how), force_NK3)


def com(place: Tensor) -> Tensor:
    """Return the centre of mass [..., 3] of canonical joints [..., J, 3]."""
    weights = torch.as_tensor(masses(1.0), dtype=place.dtype, device=place.device)
    return torch.einsum("...ji,j->...i", place, weights)


def second_difference(x: Tensor, rate: float) -> Tensor:
    """Return the acceleration of x [B, T, ...] at its inner frames, [B, T - 2, ...]."""
    return (x[:, 2:] - 2 * x[:, 1:-1] + x[:, :-2]) * rate**2


def torques(frames: Frames, accel_NK3: Tensor, force_NK3: Tensor, how: str = "products") -> Tensor:
    """Return the joint torques [N, J, 3] of point masses, N m, in each joint's own axes.

    Args:
        frames: the pose.
        accel_NK3: of the points, m/s^2.
        force_NK3: what the floor does to the points, N.
        how: one of WAYS.
    """
    mass = torch.as_tensor(masses(), dtype=accel_NK3.dtype, device=accel_NK3.device)
    gravity = accel_NK3.new_tensor([0.0, 0.0, G])
    return pull(frames, mass[:, None] * (accel_NK3 + gravity) - force_NK3, how)


class Dynamics(NamedTuple):
    """The three terms, each in its own unit."""

    vel: Tensor  # (m/s)^2
    fly: Tensor  # (m/s^2)^2
    tau: Tensor  # (N m)^2


class Truth(NamedTuple):
    """What the predicted motion is held against."""

    place: Tensor  # [B, T, J, 3], m
    flight: Tensor  # bool [B, T]
    tau: Tensor | None = None  # [B, T, J, 3], N m
    tau_valid: Tensor | None = None  # bool [B, T]
    force: Tensor | None = None  # [B, T, J, 3], N


def dynamics_loss(
    rot_BTJ33: Tensor,
    root_BT3: Tensor,
    offsets_BJ3: Tensor,
    truth: Truth,
    *,
    tree: Tree,
    rate: float,
    how: str = "products",
) -> Dynamics:
    """Return how far a motion's velocities, flight and torques are from the true ones.

    Args:
        rot_BTJ33: local rotations.
        root_BT3: root positions, m.
        offsets_BJ3: joint positions in their parents' frames, m.
        truth: what it is held against.
        tree: who hangs on whom.
        rate: frames a second.
        how: one of WAYS.

    vel: |J omega + v_root - dp/dt|^2 with omega_j = Log(R_j(t)^T R_j(t + 1)) / dt; fly: |a_com +
    g|^2 where the body flies; tau: |tau - tau_true|^2 where torques and floor forces are known.
    """
    count = rot_BTJ33.shape[1]
    offsets = offsets_BJ3[:, None].expand(-1, count, -1, -1)
    place, _ = fk(rot_BTJ33, root_BT3, offsets, tree)

    def cut(part: slice) -> Frames:
        sides = (x[:, part].flatten(0, 1) for x in (rot_BTJ33, root_BT3, offsets))
        return Frames(*sides, tree)

    omega = log(rot_BTJ33[:, :-1].mT @ rot_BTJ33[:, 1:]) * rate
    moved = push(cut(slice(0, -1)), omega.flatten(0, 1), how).unflatten(0, (-1, count - 1))
    moved = moved + root_BT3.diff(dim=1)[:, :, None] * rate
    vel = (moved - truth.place.diff(dim=1) * rate).square().sum(-1).mean()
    fall = second_difference(com(place), rate) + place.new_tensor([0.0, 0.0, G])
    flies = truth.flight[:, :-2] & truth.flight[:, 1:-1] & truth.flight[:, 2:]
    fly = _mean_where(fall.square().sum(-1), flies)
    tau = vel.new_zeros(())
    if truth.tau is not None:
        inner = slice(1, -1)
        accel = second_difference(place, rate).flatten(0, 1)
        found = torques(cut(inner), accel, truth.force[:, inner].flatten(0, 1), how)
        far = (found.unflatten(0, (-1, count - 2)) - truth.tau[:, inner]).square().sum((-1, -2))
        tau = _mean_where(far, truth.tau_valid[:, inner])
    return Dynamics(vel, fly, tau)


def _mean_where(x: Tensor, mask: Tensor) -> Tensor:
    return (x * mask).sum() / mask.sum().clamp(min=1)
