"""Near misses are not taken for solutions of notebook 03's exercises."""

import pytest
import torch

from wamlab.jupyter.exercise import attempt


def last_one_wins(grad, segment, rows):
    found = torch.zeros(rows, grad.shape[1], dtype=grad.dtype)
    found[segment] += grad
    return found


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("norm-bytes", lambda t, w, i: (7 * t * w * i, 2 * t * w * i)),
        ("distinct", lambda t: (t, torch.arange(len(t)))),
        ("segment-sums", last_one_wins),
        ("segment-sums", lambda g, s, r: torch.stack([g[s == i].mean(0) for i in range(r)])),
        ("graph-gain", lambda k, u, b: (k * u / 1e3 + b) / b),
        ("gradient-after", lambda n, g, existed, zeroed: n * g),
    ],
)
def test_a_near_miss_does_not(name, wrong):
    assert not attempt(name, wrong).solved
