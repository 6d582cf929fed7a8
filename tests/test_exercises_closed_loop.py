"""Near misses are not taken for solutions of notebook 06's exercises, second half."""

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
