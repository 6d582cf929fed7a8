"""Five ways to one Jacobian, and the losses that use it."""

import numpy as np
import pytest
import torch
from scipy.spatial.transform import Rotation

from wamlab.config import ConfigError
from wamlab.motion.dynamics import (
    JACOBIANS,
    WAYS,
    Frames,
    Truth,
    blocks,
    com,
    dynamics_loss,
    exp,
    jacobian,
    log,
    pairs,
    pull,
    push,
    second_difference,
    torques,
)
from wamlab.motion.segments import G
from wamlab.motion.skeleton import CANONICAL_TREE, FEET, Tree, fk, masses
from wamlab.motion.synthetic import make

TREE = CANONICAL_TREE


def frames(count=3, dtype=torch.float64, tree=TREE, seed=0):
    draw = torch.Generator().manual_seed(seed)
    w = torch.randn(count, len(tree), 3, generator=draw, dtype=torch.float64)
    root = torch.randn(count, 3, generator=draw, dtype=torch.float64)
    offsets = 0.3 * torch.randn(count, len(tree), 3, generator=draw, dtype=torch.float64)
    return Frames(*(x.to(dtype) for x in (exp(w), root, offsets)), tree)


def clip(seed=0, first=60, last=200):
    made = make(seed)
    cut = made.clip.frames(first, last)
    rot, root = torch.as_tensor(cut.local_rot)[None], torch.as_tensor(cut.root_pos)[None]
    offsets = torch.as_tensor(cut.offsets)[None]
    flight = np.zeros(len(made.clip), bool)
    for b in made.blocks:
        flight[b.first : b.last] = b.kind == "flight"
    return rot, root, offsets, torch.as_tensor(flight[first:last])[None]


@pytest.mark.parametrize("size", [0.0, 1e-9, 1e-4, 0.0099, 0.0101, 1.0, 3.1, np.pi - 1e-7])
def test_exp_and_log_agree_with_scipy(size):
    draw = np.random.default_rng(0).normal(size=(40, 3))
    w = size * draw / np.linalg.norm(draw, axis=1, keepdims=True)
    rot = exp(torch.as_tensor(w))
    np.testing.assert_allclose(rot, Rotation.from_rotvec(w).as_matrix(), atol=1e-14)
    np.testing.assert_allclose(log(rot), w, atol=1e-8 if size > 3 else 2e-14)


def test_exp_and_log_have_gradients_at_zero():
    w = torch.zeros(2, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(exp, (w,))
    turns = exp(0.02 * torch.randn(4, 3, dtype=torch.float64))
    for rot in (torch.eye(3, dtype=torch.float64), turns):
        found = torch.autograd.grad(log(rot.requires_grad_()).sum(), rot)[0]
        assert torch.isfinite(found).all()


@pytest.mark.parametrize("how", [w for w in JACOBIANS if w != "serial"])
@pytest.mark.parametrize(("dtype", "allowed"), [(torch.float64, 1e-12), (torch.float32, 1e-6)])
def test_every_way_gives_the_serial_jacobian(how, dtype, allowed):
    """Scale about one, as of a body in metres."""
    some = frames(2, dtype)
    far = (jacobian(some, how) - jacobian(some, "serial")).abs().max().item()
    assert far <= allowed


@pytest.mark.parametrize("how", WAYS)
def test_products_agree(how):
    some = frames(2)
    omega, force = torch.randn(2, len(TREE), 3).double(), torch.randn(2, len(TREE), 3).double()
    torch.testing.assert_close(push(some, omega, how), push(some, omega, "analytic"))
    torch.testing.assert_close(pull(some, force, how), pull(some, force, "analytic"))


def test_the_jacobian_is_what_a_small_turn_does():
    some = frames(1)
    d = 1e-6 * torch.randn(1, len(TREE), 3).double()
    moved = some.turned(d) - some.turned(-d)
    torch.testing.assert_close(push(some, 2 * d, "analytic"), moved, atol=1e-12, rtol=1e-6)


def test_only_ancestors_count():
    full = jacobian(frames(1))[0].abs().amax((1, 3)) > 0
    assert (full.numpy() == TREE.ancestors).all()
    points, _ = pairs(TREE, torch.device("cpu"))
    assert blocks(frames(2)).shape == (2, len(points), 3, 3)
    assert len(points) < 0.3 * len(TREE) ** 2


@pytest.mark.parametrize("how", ["jacrev", "jacfwd", "analytic", "products", "serial"])
def test_gradients_go_through_the_jacobian(how):
    tree = Tree((-1, 0, 1, 1))
    some, omega = frames(1, tree=tree), torch.randn(1, 4, 3).double()

    def loss(w):
        turned = some._replace(rot=some.rot @ exp(w))
        return push(turned, omega, how).square().sum()

    w = torch.zeros(1, 4, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(loss, (w,))


def test_an_unknown_way():
    with pytest.raises(
        ConfigError, match=r"unknown Jacobian 'analytical'.*did you mean 'analytic'"
    ):
        jacobian(frames(1), "analytical")


@pytest.mark.parametrize("how", WAYS)
def test_the_loss_is_the_same_every_way(how):
    rot, root, offsets, flight = (x[:, :6] if x.shape[1] > 19 else x for x in clip(0, 130, 180))
    truth = Truth(torch.zeros(1, 6, 19, 3).double(), flight)
    found = dynamics_loss(rot, root, offsets, truth, tree=TREE, rate=120.0, how=how)
    wanted = dynamics_loss(rot, root, offsets, truth, tree=TREE, rate=120.0)
    torch.testing.assert_close(found.vel, wanted.vel, rtol=1e-12, atol=0)


def test_velocities_of_the_true_motion_fit_better_the_finer_the_frames():
    """omega is a forward difference: what is left over is of first order in dt."""
    left = []
    for rate in (60.0, 240.0):
        made = make(0, rate=rate).clip
        rot, root = torch.as_tensor(made.local_rot)[None], torch.as_tensor(made.root_pos)[None]
        offsets = torch.as_tensor(made.offsets)[None]
        place = fk(rot, root, offsets[:, None], TREE)[0]
        truth = Truth(place, torch.zeros(rot.shape[:2], dtype=torch.bool))
        found = dynamics_loss(rot, root, offsets, truth, tree=TREE, rate=rate)
        left.append(found.vel.item() / place.diff(dim=1).mul(rate).square().sum(-1).mean().item())
    assert left[0] < 0.05
    assert left[1] < left[0] / 8


def test_a_body_at_rest_carries_its_weight():
    """At a standing knee the floor pushes up and the foot's weight pulls down on a lever."""
    rot, root, offsets, _ = clip(0, 0, 3)
    place = fk(rot, root, offsets[:, None], TREE)[0]
    some = Frames(rot[0, :1], root[0, :1], offsets, TREE)
    force = torch.zeros(1, 19, 3).double()
    ankles = [FEET[0], FEET[2]]
    force[:, ankles, 2] = 70.0 * G / 2
    found = torques(some, torch.zeros(1, 19, 3).double(), force)
    knee = TREE.parents[FEET[0]]
    world = fk(*some)[1][0, knee]
    below = [FEET[0], FEET[1]]
    lever = place[0, 0, below] - place[0, 0, knee]
    push_up = torch.zeros(2, 3).double()
    push_up[:, 2] = torch.as_tensor(masses())[below] * G - force[0, below, 2]
    wanted = world.T @ torch.linalg.cross(lever, push_up).sum(0)
    torch.testing.assert_close(found[0, knee], wanted)


def test_flight_and_torque_terms():
    rot, root, offsets, flight = clip(0)
    place = fk(rot, root, offsets[:, None], TREE)[0]
    falling = second_difference(com(place), 120.0)[0, :, 2][flight[0, 1:-1]][3:-3]
    assert abs(falling.mean().item() + G) < 1.5
    force = torch.zeros_like(place)
    count = rot.shape[1]
    inner = Frames(rot[0, 1:-1], root[0, 1:-1], offsets.expand(count - 2, -1, -1), TREE)
    tau = torques(inner, second_difference(place, 120.0)[0], force[0, 1:-1])
    tau = torch.nn.functional.pad(tau, (0, 0, 0, 0, 1, 1))[None]
    truth = Truth(place, flight, tau, flight, force)
    exact = dynamics_loss(rot, root, offsets, truth, tree=TREE, rate=120.0)
    assert exact.tau < 1e-12
    off = dynamics_loss(rot, root + 0.1 * torch.randn_like(root), offsets, truth, tree=TREE,
                        rate=120.0)  # fmt: skip
    assert off.fly > 100 * exact.fly
    assert off.tau > 1
    nowhere = truth._replace(flight=torch.zeros_like(flight))
    assert dynamics_loss(rot, root, offsets, nowhere, tree=TREE, rate=120.0).fly == 0
