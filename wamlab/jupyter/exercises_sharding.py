"""Exercises of notebook 04: what a rank holds, how losses are weighted, what travels."""

from collections.abc import Sequence

from wamlab.jupyter._exercise import Exercise


def _state_bytes(parameters: int, ranks: int, stage: int) -> float:
    shards = [ranks if stage >= needed else 1 for needed in (3, 2, 1)]
    weights, gradients, moments = (1 / n for n in shards)
    return parameters * (4 * weights + 4 * gradients + 8 * moments)


def _micro_weights(sizes: Sequence[int]) -> list[float]:
    return [size / sum(sizes) for size in sizes]


def _wire_bytes(parameters: int, ranks: int, micro_batches: int, deferred: bool) -> float:
    share = (ranks - 1) / ranks
    gathers = 2 * 2 * parameters * micro_batches
    scatters = 4 * parameters * (1 if deferred else micro_batches)
    return share * (gathers + scatters)


EXERCISES: dict[str, Exercise] = {
    "state-bytes": Exercise(
        task="state_bytes(parameters, ranks, stage): bytes that one rank holds of fp32 weights, "
        "fp32 gradients and AdamW's two fp32 moments, under ZeRO stage 0 (all whole), 1 (moments "
        "sharded), 2 (gradients too) or 3 (weights too, as FSDP2 does).",
        spec=_state_bytes,
        inputs=lambda: [(1000, ranks, stage) for ranks in (1, 2, 8) for stage in range(4)],
        hints=(
            "16 bytes a parameter in all: 4 + 4 + 8.",
            "Each stage divides one further part by the number of ranks.",
            "Moments from stage 1, gradients from stage 2, weights from stage 3.",
        ),
    ),
    "micro-weights": Exercise(
        task="micro_weights(sizes): the factor of each micro-batch's mean loss, so that the sum of "
        "the weighted losses is the mean over all samples, whatever the sizes.",
        spec=_micro_weights,
        inputs=lambda: [([4],), ([1, 1, 1, 1],), ([4, 4, 2],), ([7, 1],)],
        hints=(
            "A mean over 4 samples stands for 4 samples.",
            "1 / len(sizes) is right only if all sizes are equal.",
            "Its own size over the sum of all sizes.",
        ),
    ),
    "wire-bytes": Exercise(
        task="wire_bytes(parameters, ranks, micro_batches, deferred): bytes that a rank sends in "
        "one step of FSDP2: bf16 weights gathered for the forward and again for the backward of "
        "each micro-batch, fp32 gradients scattered after each micro-batch, or once a step when "
        "deferred. A ring sends (ranks - 1) / ranks of a tensor for either collective.",
        spec=_wire_bytes,
        inputs=lambda: [
            (1000, ranks, micro, deferred)
            for ranks in (2, 8)
            for micro in (1, 4)
            for deferred in (False, True)
        ],
        hints=(
            "Two gathers of 2 bytes and one scatter of 4 bytes a parameter and micro-batch.",
            "Deferring saves scatters, not gathers.",
            "share * parameters * (4 * micro_batches + 4 * (1 or micro_batches)).",
        ),
    ),
}
