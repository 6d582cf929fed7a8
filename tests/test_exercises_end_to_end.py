"""Near misses are not taken for solutions of notebook 06's exercises."""

import pytest

from wamlab.jupyter.exercise import attempt


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
