"""The exercises of notebook 05 can be solved, and near misses are not taken for solutions."""

import pytest
import torch
from solutions.video import SOLUTIONS

from wamlab.jupyter.exercise import attempt
from wamlab.jupyter.exercises_video import EXERCISES


def test_every_exercise_has_a_solution():
    assert SOLUTIONS.keys() == EXERCISES.keys()


@pytest.mark.parametrize("name", list(EXERCISES))
def test_the_solution_solves_it(name):
    outcome = attempt(name, SOLUTIONS[name])
    assert outcome.solved, outcome.text


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("frames-decoded", lambda keys, wanted: max(wanted) + 1),
        (
            "frames-decoded",
            lambda keys, wanted: max(wanted) - max(k for k in keys if k <= wanted[0]),
        ),
        ("nearest-frame", lambda times, asked: (asked / times[1]).round().long()),
        ("nearest-frame", lambda times, asked: torch.searchsorted(times, asked)),
        ("decode-cores", lambda rate, views, ms: rate * ms / 1000),
    ],
)
def test_a_near_miss_does_not(name, wrong):
    assert not attempt(name, wrong).solved
