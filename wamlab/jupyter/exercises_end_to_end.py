"""Exercises of notebook 06: what speed-ups add up to, and when two runs are the same training."""

from collections.abc import Sequence

from wamlab.jupyter._exercise import Exercise


def _amdahl(share: float, factor: float) -> float:
    return 1.0 / ((1.0 - share) + share / factor)


def _loss_difference(losses: Sequence[float], baseline: Sequence[float]) -> float:
    return max(abs(a - b) / abs(b) for a, b in zip(losses, baseline))


def _days(samples: float, samples_per_s_per_gpu: float, gpus: int) -> float:
    return samples / (samples_per_s_per_gpu * gpus) / 86_400


EXERCISES: dict[str, Exercise] = {
    "amdahl": Exercise(
        task="amdahl(share, factor): the speed-up of a whole step when a part that takes `share` "
        "of it (0..1) becomes `factor` times faster and nothing overlaps.",
        spec=_amdahl,
        inputs=lambda: [(0.5, 2.0), (0.9, 10.0), (0.25, 1e9), (0.0, 3.0)],
        hints=(
            "Take a step of one second. How long does the untouched part take afterwards?",
            "New time: what was left alone, plus the part's time divided by the factor.",
            "1 / ((1 - share) + share / factor).",
        ),
    ),
    "loss-difference": Exercise(
        task="loss_difference(losses, baseline): the largest relative difference between two runs' "
        "losses of the same global step, relative to the baseline's loss.",
        spec=_loss_difference,
        inputs=lambda: [([1.0, 0.5], [1.0, 0.5]), ([1.0, 0.52, 0.3], [1.01, 0.5, 0.3])],
        hints=(
            "Compare step by step: step 3 of one run with step 3 of the other.",
            "|a - b| / |b| at each step, where b is the baseline's.",
            "The maximum of that over the steps; a mean would hide one bad step.",
        ),
    ),
    "days": Exercise(
        task="days(samples, samples_per_s_per_gpu, gpus): the days that a training run of so many "
        "samples takes.",
        spec=_days,
        inputs=lambda: [(19e6, 1.1, 8), (19e6, 4.44, 8), (1e6, 12.0, 2)],
        hints=(
            "How many samples does the whole machine train a second?",
            "Seconds = samples / (rate of one GPU x GPUs).",
            "Divide the seconds by 24 x 3600.",
        ),
    ),
}
