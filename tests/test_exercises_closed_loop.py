"""Near misses are not taken for solutions of the exercises of the closed loop."""

import pytest

from wamlab.jupyter.exercise import attempt


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
