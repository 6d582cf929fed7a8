"""Near misses are not taken for solutions of notebook 08's exercises."""

import pytest
import torch

from wamlab.jupyter.exercise import attempt
from wamlab.jupyter.exercises_motion import EXERCISES
from wamlab.motion.dynamics import Frames, jacobian
from wamlab.motion.model import dense_mask
from wamlab.motion.skeleton import Tree


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("takeoff-speed", lambda flight_s, gravity: gravity * flight_s),
        ("alias-hz", lambda signal, rate: signal % rate),
        ("alias-hz", lambda signal, rate: abs(signal - rate)),
        ("pinned-hits", lambda order, pinned: len(pinned) / len(set(order))),
        ("point-jacobian", lambda p, j, axes: torch.linalg.cross(axes, (p - j)[:, None], dim=0).T),
        ("point-jacobian", lambda p, j, axes: torch.linalg.cross((p - j)[:, None], axes, dim=0)),
        ("block-mask", lambda block: torch.ones(2 * len(block), 2 * len(block)).tril()),
    ],
)
def test_a_near_miss_does_not(name, wrong):
    assert not attempt(name, wrong).solved


def test_the_specifications_are_what_the_library_does():
    block = [0, 1, 1, 2, 2, 2]
    wanted = dense_mask(torch.tensor([block]))[0, 0]
    assert torch.equal(EXERCISES["block-mask"].spec(block), wanted)
    point, joint, axes = EXERCISES["point-jacobian"].inputs()[0]
    offsets = torch.stack([joint, axes.T @ (point - joint)])[None]
    eye = torch.eye(3, dtype=axes.dtype)
    frames = Frames(torch.stack([axes, eye])[None], joint[None], offsets, Tree((-1, 0)))
    found = jacobian(frames)[0, 1, :, 0]
    torch.testing.assert_close(found, EXERCISES["point-jacobian"].spec(point, joint, axes))
