"""Exercises of notebook 07: what a link costs, which mesh, what is left out, what is exposed."""

from collections.abc import Sequence

import torch
from torch import Tensor

from wamlab.jupyter._exercise import Exercise
from wamlab.trace import Interval, intersect, length
from wamlab.train.topology import plan_groups


def _exposed_ms(numel: int, ranks: int, gb_per_s: float, hidden_ms: float) -> float:
    wire = 2 * (ranks - 1) / ranks * 4 * numel
    return max(0.0, wire / (gb_per_s * 1e9) * 1e3 - hidden_ms)


def _mesh(links: Sequence[Sequence[float]], hosts: Sequence[str]) -> list[int]:
    plan = plan_groups(links, hosts, [0] * len(hosts))
    return [plan.replicate, plan.shard]


def _low_rank_share(rows: int, columns: int, rank: int) -> float:
    return rank * (rows + columns) / (rows * columns)


def _feedback(gradient: Tensor, error: Tensor, keep: int) -> list[Tensor]:
    whole = gradient + error
    least = whole.abs().topk(keep).values[-1]
    sent = whole * (whole.abs() >= least)
    return [sent, whole - sent]


def _exposed(communication: Sequence[Interval], compute: Sequence[Interval]) -> float:
    return length(communication) - length(intersect(communication, compute))


def _machines() -> list[tuple[list[list[float]], list[str]]]:
    def links(groups: int, size: int, inside: float, between: float) -> list[list[float]]:
        ranks = range(groups * size)
        return [[inside if a // size == b // size else between for b in ranks] for a in ranks]

    return [
        (links(1, 8, 450.0, 0.0), ["a"] * 8),
        (links(2, 4, 450.0, 25.0), ["a"] * 4 + ["b"] * 4),
        (links(4, 2, 100.0, 20.0), ["a"] * 8),
        (links(2, 4, 50.0, 40.0), ["a"] * 8),
    ]


def _gradients() -> list[tuple[Tensor, Tensor, int]]:
    generator = torch.Generator().manual_seed(0)
    made = [torch.randn(2, 12, generator=generator) for _ in range(3)]
    return [(gradient, error, keep) for (gradient, error), keep in zip(made, (1, 3, 12))]


EXERCISES: dict[str, Exercise] = {
    "exposed-ms": Exercise(
        task="exposed_ms(numel, ranks, gb_per_s, hidden_ms): milliseconds that an all-reduce of "
        "`numel` fp32 gradients keeps a rank waiting, when it sends at gb_per_s and `hidden_ms` of "
        "the transfer lie behind the backward. A ring sends 2 (ranks - 1) / ranks of the bytes.",
        spec=_exposed_ms,
        inputs=lambda: [
            (10**6, 2, 1.0, 0.0),
            (10**6, 2, 1.0, 3.0),
            (5 * 10**9, 8, 215.0, 50.0),
            (10**6, 4, 0.0125, 200.0),
            (10**6, 2, 1.0, 9.0),
        ],
        hints=(
            "Bytes over bandwidth, in milliseconds; then take off what is hidden.",
            "4 bytes a gradient; 1 GB/s is 10^6 bytes a millisecond.",
            "max(0, 2 * (ranks - 1) / ranks * 4 * numel / (gb_per_s * 1e6) - hidden_ms).",
        ),
    ),
    "choose-mesh": Exercise(
        task="choose_mesh(links, hosts): [replicate, shard] for the ranks of a machine. links[a][b] "
        "is the bandwidth in GB/s. Shard inside islands of equal size whose slowest link is at "
        "least twice as fast as the fastest link between islands; where there are none, [1, all].",
        spec=_mesh,
        inputs=_machines,
        hints=(
            "Two ranks are of one island when their link is more than half as fast as the best.",
            "Grow an island from rank 0: add every rank that a fast link joins to one in it.",
            "One island, or islands of different sizes: [1, len(hosts)]. Else [number, size].",
        ),
    ),
    "low-rank-share": Exercise(
        task="low_rank_share(rows, columns, rank): the share of a matrix's numbers that PowerSGD "
        "sends: `rank` columns of its height and `rank` rows of its width.",
        spec=_low_rank_share,
        inputs=lambda: [(128, 512, 1), (3072, 14336, 4), (64, 64, 2)],
        hints=(
            "A column has as many numbers as the matrix has rows.",
            "rank * rows numbers for the columns, rank * columns for the rows.",
            "rank * (rows + columns) / (rows * columns).",
        ),
    ),
    "error-feedback": Exercise(
        task="feedback(gradient, error, keep): [sent, new_error] of one step that sends the `keep` "
        "largest entries (by magnitude, zeros elsewhere) of what has to be sent, and remembers the "
        "rest.",
        spec=_feedback,
        inputs=_gradients,
        hints=(
            "What has to be sent is the gradient and what was held back before.",
            "whole.abs().topk(keep) finds the entries; keep them, set the others to zero.",
            "new_error = whole - sent: the two always add up to the whole.",
        ),
    ),
    "exposed-time": Exercise(
        task="exposed(communication, compute): how long a collective runs while nothing is "
        "computed, from two lists of (start, end). Intervals of one list may overlap each other.",
        spec=_exposed,
        inputs=lambda: [
            ([(0, 10)], [(4, 6)]),
            ([(0, 10), (5, 12)], [(2, 3), (2, 4), (11, 20)]),
            ([(0, 1), (2, 3)], [(0, 3)]),
        ],
        hints=(
            "An instant counts once, however many intervals cover it.",
            "All boundaries cut time into pieces; each piece is covered or not.",
            "Add up the pieces that some communication covers and no compute does.",
        ),
    ),
}
