"""Exercises of notebook 07: what a link costs, which mesh, what is left out, what a gate sends."""

from collections.abc import Sequence

import torch
from torch import Tensor

from wamlab.jupyter._exercise import Exercise
from wamlab.train.topology import plan_groups


def _wait_ms(numel: int, ranks: int, gb_per_s: float, hidden_ms: float) -> float:
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


def _equal_bytes(budget: float, compressed: float) -> float:
    return min(1.0, (1.0 - budget) / (1.0 - compressed))


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
    "wait-ms": Exercise(
        task="wait_ms(numel, ranks, gb_per_s, hidden_ms): milliseconds that an all-reduce of "
        "`numel` fp32 gradients keeps a rank waiting, when it sends at gb_per_s and `hidden_ms` of "
        "the transfer lie behind the backward. A ring sends 2 (ranks - 1) / ranks of the bytes.",
        spec=_wait_ms,
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
        task="choose_mesh(links, hosts): [replicate, shard] for a machine's ranks; links[a][b] is "
        "the bandwidth in GB/s. Shard inside islands of equal size whose slowest link is at "
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
        task="error_feedback(gradient, error, keep): [sent, new_error] of a step that sends `keep` "
        "entries, the largest in magnitude (others zero), of what has to be sent, and holds the "
        "rest back.",
        spec=_feedback,
        inputs=_gradients,
        hints=(
            "What has to be sent is the gradient and what was held back before.",
            "whole.abs().topk(keep) finds the entries; keep them, set the others to zero.",
            "new_error = whole - sent: the two always add up to the whole.",
        ),
    ),
    "equal-bytes": Exercise(
        task="equal_bytes(budget, compressed): the share of buckets that a gate must compress so "
        "that all together send `budget` of the dense bytes, when a compressed one sends "
        "`compressed` of them (both are shares of 1). 1 where even that is too much.",
        spec=_equal_bytes,
        inputs=lambda: [(0.55, 0.1), (1.0, 0.1), (0.1, 0.1), (0.05, 0.1), (0.6, 0.5)],
        hints=(
            "With a share s compressed, s * compressed + (1 - s) travels.",
            "Solve that for s; what is sent falls from 1 to `compressed` as s rises to 1.",
            "min(1, (1 - budget) / (1 - compressed)).",
        ),
    ),
}
