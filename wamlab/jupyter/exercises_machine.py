"""Exercises of notebook 00: what a machine can do, and what ranks must agree on."""

import torch

from wamlab.jupyter._exercise import Exercise


def _roofline(flops: float, byte_count: float, peak_flops: float, peak_bandwidth: float) -> float:
    return max(flops / peak_flops, byte_count / peak_bandwidth)


def _allreduce_bytes(numel: int, itemsize: int, world_size: int) -> float:
    return 2 * (world_size - 1) / world_size * numel * itemsize


def _rank_share(ids: torch.Tensor, rank: int, world_size: int) -> torch.Tensor:
    return ids.chunk(world_size)[rank]


EXERCISES: dict[str, Exercise] = {
    "roofline-seconds": Exercise(
        task="roofline_seconds(flops, bytes, peak_flops, peak_bandwidth): the least time in "
        "seconds that an operation can take where arithmetic and memory traffic overlap fully.",
        spec=_roofline,
        inputs=lambda: [
            (2 * 1024**3, 3 * 4 * 1024**2, 1e11, 2e10),
            (1024**2, 3 * 4 * 1024**2, 1e11, 2e10),
            (4e12, 1e9, 989e12, 4.8e12),
        ],
        hints=(
            "Arithmetic and traffic both must happen. How long does each take alone?",
            "They overlap, so the longer one hides the shorter one.",
            "The larger of flops / peak_flops and bytes / peak_bandwidth.",
        ),
    ),
    "allreduce-bytes": Exercise(
        task="allreduce_bytes(numel, itemsize, world_size): bytes that each rank sends in a ring "
        "all-reduce of numel elements of itemsize bytes.",
        spec=_allreduce_bytes,
        inputs=lambda: [(1000, 4, 2), (1_000_000, 2, 8), (64, 4, 1)],
        hints=(
            "A ring all-reduce is a reduce-scatter followed by an all-gather.",
            "In each of the two, a rank passes on a chunk of 1/world_size, world_size - 1 times.",
            "Twice (world_size - 1) / world_size times the buffer's size.",
        ),
    ),
    "rank-share": Exercise(
        task="rank_share(ids, rank, world_size): the contiguous part of the global batch's sample "
        "ids (an int64 tensor whose length world_size divides) that a rank trains on.",
        spec=_rank_share,
        inputs=lambda: [(torch.arange(8) * 3, r, n) for n in (1, 2, 4) for r in range(n)],
        hints=(
            "With 8 ids and 2 ranks, rank 0 takes the first 4.",
            "Each rank takes len(ids) // world_size ids; where does rank r start?",
            "ids[rank * n : (rank + 1) * n] with n = len(ids) // world_size.",
        ),
    ),
}
