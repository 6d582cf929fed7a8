"""The exercises of notebook 06's second half can be solved, and near misses do not count."""

import pytest
from solutions.closed_loop import SOLUTIONS

from wamlab.jupyter.exercise import attempt
from wamlab.jupyter.exercises_closed_loop import EXERCISES


def test_every_exercise_has_a_solution():
    assert SOLUTIONS.keys() == EXERCISES.keys()


@pytest.mark.parametrize("name", list(EXERCISES))
def test_the_solution_solves_it_and_the_stub_does_not(name):
    assert attempt(name, SOLUTIONS[name]).solved
    assert not attempt(name, lambda *args: None).solved


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        # the interval of the normal approximation, which leaves [0, 1]
        ("wilson", lambda k, n: [k / n - 1.96 * (k * (n - k) / n**3) ** 0.5, 1.0]),
        ("time-to", lambda seconds, rates, goal: seconds[-1]),
        ("reliability", lambda success, decisions: success / decisions),
    ],
)
def test_a_near_miss_does_not(name, wrong):
    assert not attempt(name, wrong).solved
