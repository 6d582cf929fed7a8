"""Near misses are not taken for solutions of notebook 05's exercises."""

import pytest
import torch

from wamlab.jupyter.exercise import attempt


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("frames-decoded", lambda keys, wanted: max(wanted) + 1),
        (
            "frames-decoded",
            lambda keys, wanted: max(wanted) - max(k for k in keys if k <= wanted[0]),
        ),
        ("nearest-frame", lambda times, asked: (asked / times[1]).round().long()),
        ("nearest-frame", lambda times, asked: torch.searchsorted(times, asked)),
        ("decode-cores", lambda rate, views, ms: rate * ms / 1000),
    ],
)
def test_a_near_miss_does_not(name, wrong):
    assert not attempt(name, wrong).solved
