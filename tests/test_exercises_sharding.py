"""Near misses are not taken for solutions of notebook 04's exercises."""

import pytest

from wamlab.jupyter.exercise import attempt


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
