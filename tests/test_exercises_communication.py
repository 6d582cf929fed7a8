"""Near misses are not taken for solutions of notebook 07's exercises."""

import pytest

from wamlab.jupyter.exercise import attempt


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
