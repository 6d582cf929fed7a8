"""Exercises of the closed loop: what a success rate says, and how soon it is reached."""

import math
from collections.abc import Sequence

from wamlab.evaluate.closed_loop import wilson
from wamlab.jupyter._exercise import Exercise


def _wilson(successes: int, trials: int) -> list[float]:
    return list(wilson(successes, trials))


def _time_to(seconds: Sequence[float], rates: Sequence[float], goal: float) -> float:
    return next((s for s, rate in zip(seconds, rates) if rate >= goal), math.inf)


def _reliability(success: float, decisions: int) -> float:
    return success ** (1.0 / decisions)


EXERCISES: dict[str, Exercise] = {
    "wilson": Exercise(
        task="wilson(successes, trials): the two ends [low, high] of the 95 % interval of a rate: "
        "the true rates p whose distance to the found one is 1.959964 standard deviations, "
        "sqrt(p (1 - p) / trials).",
        spec=_wilson,
        inputs=lambda: [(180, 200), (5, 50), (49, 50), (1, 3)],
        hints=(
            "Square |found - p| = z sqrt(p (1 - p) / n): a quadratic equation in p.",
            "(1 + z²/n) p² - (2 found + z²/n) p + found² = 0.",
            "(found + z²/2n ± z sqrt(found (1 - found) / n + z²/4n²)) / (1 + z²/n).",
        ),
        tolerance=1e-5,
    ),
    "time-to": Exercise(
        task="time_to(seconds, rates, goal): the training seconds at the first look whose success "
        "rate is at least `goal`; math.inf where none is.",
        spec=_time_to,
        inputs=lambda: [
            ([10.0, 20.0, 30.0, 40.0], [0.1, 0.7, 0.85, 0.9], 0.8),
            ([5.0, 9.0, 12.0], [0.9, 0.6, 0.9], 0.8),
            ([1.0, 2.0], [0.8, 0.9], 0.8),
        ],
        hints=(
            "Go through the looks in order of time.",
            "The rate may fall again after it was reached: the first look counts.",
            "next((s for s, r in zip(seconds, rates) if r >= goal), math.inf).",
        ),
    ),
    "reliability": Exercise(
        task="reliability(success, decisions): how often each of so many decisions in a row must "
        "be right for a task to succeed that often, if one wrong decision fails it.",
        spec=_reliability,
        inputs=lambda: [(0.9, 5), (0.5, 2), (0.97, 12), (1.0, 7)],
        hints=(
            "Two decisions, each right with probability r: how often are both right?",
            "success = r to the power of `decisions`.",
            "success ** (1 / decisions).",
        ),
    ),
}
