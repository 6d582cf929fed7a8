"""The exercises of notebook 07 can be solved, and near misses are not taken for solutions."""

import pytest
from solutions.communication import SOLUTIONS

from wamlab.jupyter.exercise import attempt
from wamlab.jupyter.exercises_communication import EXERCISES


def test_every_exercise_has_a_solution():
    assert SOLUTIONS.keys() == EXERCISES.keys()


@pytest.mark.parametrize("name", list(EXERCISES))
def test_the_solution_solves_it(name):
    outcome = attempt(name, SOLUTIONS[name])
    assert outcome.solved, outcome.text


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("wait-ms", lambda n, ranks, rate, hidden: 8e-6 * n * (ranks - 1) / ranks / rate),
        ("choose-mesh", lambda links, hosts: [len(set(hosts)), len(hosts) // len(set(hosts))]),
        ("low-rank-share", lambda rows, columns, rank: rank / min(rows, columns)),
        ("error-feedback", lambda g, e, keep: [g * (g.abs() >= g.abs().topk(keep).values[-1]), e]),
        ("equal-bytes", lambda budget, compressed: (1 - budget) / (1 - compressed)),
    ],
)
def test_a_near_miss_does_not(name, wrong):
    assert not attempt(name, wrong).solved
