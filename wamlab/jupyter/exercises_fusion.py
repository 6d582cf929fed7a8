"""Exercises of notebook 03: what a norm moves, distinct times and their gradient, graphs."""

import torch
from torch import Tensor

from wamlab.jupyter._exercise import Exercise


def _norm_bytes(tokens: int, width: int, itemsize: int) -> tuple[int, int]:
    row, one = tokens * width * itemsize, tokens * itemsize
    square, mean, add, root = 2 * row, row + one, 2 * one, 2 * one
    scale, weigh = 2 * row + one, 2 * row + width * itemsize
    by_hand = square + mean + add + root + scale + weigh
    return by_hand, 2 * row + width * itemsize


def _distinct(time_T: Tensor) -> tuple[Tensor, Tensor]:
    return torch.unique(time_T, return_inverse=True)


def _distinct_inputs() -> list[tuple]:
    times = [[0.0] * 3 + [999.8] * 2 + [12.5] * 4, [7.0], [3.0, 1.0, 2.0, 1.0]]
    return [(torch.tensor(t),) for t in times]


def _segment_sums(grad_TD: Tensor, segment_T: Tensor, rows: int) -> Tensor:
    return grad_TD.new_zeros(rows, grad_TD.shape[1]).index_add(0, segment_T, grad_TD)


def _segment_inputs() -> list[tuple]:
    generator = torch.Generator().manual_seed(3)
    grad = torch.randn(9, 4, generator=generator, dtype=torch.float64)
    cases = [([0, 0, 0, 1, 1, 2, 2, 2, 2], 3), ([2, 0, 2, 0, 2, 0, 2, 0, 2], 4), ([0] * 9, 1)]
    return [(grad, torch.tensor(segment), rows) for segment, rows in cases]


def _graph_gain(kernels: int, launch_us: float, busy_ms: float) -> float:
    return max(kernels * launch_us / 1e3, busy_ms) / busy_ms


def _gradient_after(replays: int, gradient: float, existed: bool, zeroed: bool) -> float:
    if not existed:
        return gradient
    return gradient * (replays + (0 if zeroed else 1))


EXERCISES: dict[str, Exercise] = {
    "norm-bytes": Exercise(
        task="norm_bytes(tokens, width, itemsize): bytes read and written by y = x * rsqrt(mean("
        "x * x) + eps) * weight, x [tokens, width]. Return a pair: six operations one after the "
        "other (x * x, mean, + eps, rsqrt, x * that, * weight), where x * x reads x once; and all "
        "of it in one pass.",
        spec=_norm_bytes,
        inputs=lambda: [(1000, 3072, 4), (244, 128, 4), (16000, 3072, 2), (7, 5, 8)],
        hints=(
            "Write down for each operation what it reads and what it writes: a whole activation "
            "[tokens, width], one number a token, or the weight.",
            "x * x: 2 activations. mean: 1 activation and 1 column. + eps and rsqrt: 2 columns "
            "each. x * that: 2 activations and 1 column. * weight: 2 activations and the weight.",
            "By hand 7 activations, 6 columns and the weight; fused 2 activations and the weight.",
        ),
    ),
    "distinct": Exercise(
        task="distinct(time): one time a token, float [T]. Return (rows, segment): the distinct "
        "times in ascending order, and int64 [T], which of them each token has, so that "
        "rows[segment] equals time.",
        spec=_distinct,
        inputs=_distinct_inputs,
        hints=(
            "PyTorch has one function that returns both.",
            "torch.unique sorts by default.",
            "torch.unique(time, return_inverse=True)",
        ),
    ),
    "segment-sums": Exercise(
        task="segment_sums(grad, segment, rows): the gradient [T, D] that reached each token's "
        "shift, and int64 [T], the row of the table that the token had read. Return the table's "
        "own gradient [rows, D]; a row that nobody read has gradient 0.",
        spec=_segment_sums,
        inputs=_segment_inputs,
        hints=(
            "A value that was read many times collects the sum of all the gradients.",
            "Go over the rows: which tokens read row g? segment == g.",
            "torch.stack([grad[segment == g].sum(0) for g in range(rows)])",
        ),
        tolerance=1e-12,
    ),
    "graph-gain": Exercise(
        task="graph_gain(kernels, launch_us, busy_ms): a step starts that many kernels, the host "
        "needs launch_us microseconds for each, the GPU computes for busy_ms milliseconds in all, "
        "and the host runs ahead of it. How many times as fast is the step as one CUDA graph, "
        "whose replay costs the host nothing?",
        spec=_graph_gain,
        inputs=lambda: [(3517, 30.0, 69.0), (3517, 30.0, 924.0), (500, 10.0, 5.0), (10, 5.0, 9.0)],
        hints=(
            "Host and GPU work at the same time: the step takes as long as the slower of the two.",
            "With the graph only the GPU's time is left.",
            "max(kernels * launch_us / 1000, busy_ms) / busy_ms",
        ),
    ),
    "gradient-after": Exercise(
        task="gradient_after(replays, gradient, existed, zeroed): a recorded forward and backward "
        "gives a bias the same `gradient` each time. What does bias.grad hold after `replays` "
        "replays, if a bias.grad existed at capture (then the recording adds to it) or not (then "
        "it writes)? One run before the replays left `gradient` there; `zeroed` says whether "
        "bias.grad was zeroed in place after it.",
        spec=_gradient_after,
        inputs=lambda: [
            (n, 0.25, existed, zeroed)
            for n in (1, 4)
            for existed in (False, True)
            for zeroed in (False, True)
        ],
        hints=(
            "A recording that writes does not care what was there: only the last replay counts.",
            "A recording that adds counts every replay, and what the run before had left.",
            "gradient if not existed, else gradient * (replays + (0 if zeroed else 1)).",
        ),
        tolerance=1e-9,
    ),
}
