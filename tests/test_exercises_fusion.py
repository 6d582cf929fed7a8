"""The exercises of notebook 03 can be solved, and near misses are not taken for solutions."""

import pytest
import torch
from solutions.fusion import SOLUTIONS

from wamlab.jupyter.exercise import attempt
from wamlab.jupyter.exercises_fusion import EXERCISES


def test_every_exercise_has_a_solution():
    assert SOLUTIONS.keys() == EXERCISES.keys()


@pytest.mark.parametrize("name", list(EXERCISES))
def test_the_solution_solves_it(name):
    outcome = attempt(name, SOLUTIONS[name])
    assert outcome.solved, outcome.text


def last_one_wins(grad, segment, rows):
    found = torch.zeros(rows, grad.shape[1], dtype=grad.dtype)
    found[segment] += grad
    return found


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("norm-bytes", lambda t, w, i: (7 * t * w * i, 2 * t * w * i)),
        ("distinct", lambda t: (t, torch.arange(len(t)))),
        ("segment-sums", last_one_wins),
        ("segment-sums", lambda g, s, r: torch.stack([g[s == i].mean(0) for i in range(r)])),
        ("graph-gain", lambda k, u, b: (k * u / 1e3 + b) / b),
        ("gradient-after", lambda n, g, existed, zeroed: n * g),
    ],
)
def test_a_near_miss_does_not(name, wrong):
    assert not attempt(name, wrong).solved
