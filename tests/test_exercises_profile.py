"""Near misses are not taken for solutions of notebook 02's exercises."""

import pytest

from wamlab.jupyter.exercise import attempt


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
