"""The exercises of notebook 04 can be solved, and near misses are not taken for solutions."""

import pytest
from solutions.sharding import SOLUTIONS

from wamlab.jupyter.exercise import attempt
from wamlab.jupyter.exercises_sharding import EXERCISES


def test_every_exercise_has_a_solution():
    assert SOLUTIONS.keys() == EXERCISES.keys()


@pytest.mark.parametrize("name", list(EXERCISES))
def test_the_solution_solves_it(name):
    outcome = attempt(name, SOLUTIONS[name])
    assert outcome.solved, outcome.text


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("state-bytes", lambda parameters, ranks, stage: 16 * parameters / ranks),
        ("micro-weights", lambda sizes: [1 / len(sizes)] * len(sizes)),
        ("wire-bytes", lambda p, ranks, micro, deferred: (ranks - 1) / ranks * 8 * p),
    ],
)
def test_a_near_miss_does_not(name, wrong):
    assert not attempt(name, wrong).solved
