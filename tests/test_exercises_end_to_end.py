"""The exercises of notebook 06 can be solved, and stubs and near misses are not taken for it."""

import pytest
from solutions.end_to_end import SOLUTIONS

from wamlab.jupyter.exercise import attempt
from wamlab.jupyter.exercises_end_to_end import EXERCISES


def test_every_exercise_has_a_solution():
    assert SOLUTIONS.keys() == EXERCISES.keys()


@pytest.mark.parametrize("name", list(EXERCISES))
def test_the_solution_solves_it_and_the_stub_does_not(name):
    assert attempt(name, SOLUTIONS[name]).solved
    assert not attempt(name, lambda *args: None).solved


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("amdahl", lambda share, factor: 1 / (1 - share)),
        ("loss-difference", lambda a, b: sum(abs(x - y) for x, y in zip(a, b)) / len(a)),
        ("days", lambda samples, rate, gpus: samples / rate / 86_400),
    ],
)
def test_a_near_miss_does_not(name, wrong):
    assert not attempt(name, wrong).solved
