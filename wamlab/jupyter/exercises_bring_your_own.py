"""The exercise of bringing your own model: when a faster step has paid for its start."""

from wamlab.jupyter._exercise import Exercise


def _break_even(wait_s: float, slow_ms: float, fast_ms: float) -> float:
    return wait_s * 1e3 / (slow_ms - fast_ms)


EXERCISES: dict[str, Exercise] = {
    "break-even": Exercise(
        task="break_even(wait_s, slow_ms, fast_ms): the number of steps, not rounded, after which "
        "a run that first waits `wait_s` seconds and then takes `fast_ms` a step has caught up "
        "with one that takes `slow_ms` from the start.",
        spec=_break_even,
        inputs=lambda: [(30.0, 120.0, 80.0), (95.0, 3866.1, 1911.2), (0.0, 2.0, 1.0)],
        hints=(
            "How many milliseconds does each step save?",
            "The wait is paid back when the savings of all steps so far reach it; mind the units.",
            "1000 * wait_s / (slow_ms - fast_ms).",
        ),
    ),
}
