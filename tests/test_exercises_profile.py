"""The exercises of notebook 02 can be solved, and near misses are not taken for solutions."""

import pytest
from solutions.profile import SOLUTIONS

from wamlab.jupyter.exercise import attempt
from wamlab.jupyter.exercises_profile import EXERCISES


def test_every_exercise_has_a_solution():
    assert SOLUTIONS.keys() == EXERCISES.keys()


@pytest.mark.parametrize("name", list(EXERCISES))
def test_the_solution_solves_it(name):
    outcome = attempt(name, SOLUTIONS[name])
    assert outcome.solved, outcome.text


def overlaps_twice(compute, communication):
    both = sum(max(0, min(b, d) - max(a, c)) for a, b in compute for c, d in communication)
    return sum(b - a for a, b in communication) - both


def grandchildren_twice(operators):
    return {
        n: e - s - sum(d - c for m, c, d in operators if s <= c and d <= e and m != n)
        for n, s, e in operators
    }


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("exposed-ms", overlaps_twice),
        ("own-times", grandchildren_twice),
        ("modulation-bytes", lambda t, r, w, i: (t * w * i, r * w * i)),
        ("bound", lambda f, b, m: "memory" if b / m[1] > f / m[0] else "compute"),
        ("bound", lambda f, b, m: "launch" if f / m[0] < m[2] else "compute"),
    ],
)
def test_a_near_miss_does_not(name, wrong):
    assert not attempt(name, wrong).solved
