"""Exercises that check themselves: yours, expected, largest error; hints in three steps.

`check(name, fn)` prints and never raises, so that a notebook with unsolved exercises runs through.
"""

import dataclasses
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from wamlab.config import unknown_name
from wamlab.jupyter import (
    exercises_bring_your_own,
    exercises_closed_loop,
    exercises_communication,
    exercises_end_to_end,
    exercises_fusion,
    exercises_machine,
    exercises_model,
    exercises_motion,
    exercises_profile,
    exercises_sharding,
    exercises_video,
)
from wamlab.jupyter._exercise import Exercise

EXERCISES: dict[str, Exercise] = {
    **exercises_bring_your_own.EXERCISES,
    **exercises_closed_loop.EXERCISES,
    **exercises_communication.EXERCISES,
    **exercises_end_to_end.EXERCISES,
    **exercises_fusion.EXERCISES,
    **exercises_machine.EXERCISES,
    **exercises_model.EXERCISES,
    **exercises_motion.EXERCISES,
    **exercises_profile.EXERCISES,
    **exercises_sharding.EXERCISES,
    **exercises_video.EXERCISES,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of an attempt: `solved`, and the `text` that a reader sees."""

    solved: bool
    text: str


def check(name: str, fn: Callable[..., Any]) -> None:
    """Run `fn` against the specification of exercise `name` and print the outcome; never raises."""
    print(attempt(name, fn).text)


def task(name: str) -> None:
    """Print what an exercise asks for."""
    print(EXERCISES[name].task if name in EXERCISES else _unknown(name))


def hint(name: str, step: int = 1) -> None:
    """Print hint 1, 2 or 3 of an exercise; each says more than the one before."""
    if name not in EXERCISES:
        print(_unknown(name))
        return
    hints = EXERCISES[name].hints
    step = min(max(int(step), 1), len(hints))
    print(f"hint {step} of {len(hints)}: {hints[step - 1]}")


def attempt(name: str, fn: Callable[..., Any]) -> Outcome:
    """Return the outcome of `fn` on every case of an exercise.

    Args:
        name: a key of EXERCISES.
        fn: the reader's function, called as the specification is.

    Returns:
        Outcome; an unknown name, an exception or a wrong type is an unsolved outcome that says so.
    """
    if name not in EXERCISES:
        return Outcome(solved=False, text=_unknown(name))
    exercise = EXERCISES[name]
    worst = 0.0
    for number, (mine, theirs) in enumerate(zip(exercise.inputs(), exercise.inputs()), 1):
        expected = exercise.spec(*theirs)
        try:
            yours = fn(*mine)
        except Exception as error:  # whatever the reader's code does, the notebook goes on
            return _unsolved(name, f"case {number}: your function raised {_where(error)}")
        if yours is None or yours is ...:
            return _unsolved(name, "not solved yet: your function returns nothing")
        error = _error(yours, expected)
        if not error <= exercise.tolerance:
            return _unsolved(name, _comparison(number, yours, expected, error))
        worst = max(worst, error)
    text = f"✓ {name}: solved. Largest relative error {worst:.1e}, allowed {exercise.tolerance:.0e}"
    return Outcome(solved=True, text=text)


def _unknown(name: str) -> str:
    return unknown_name(name, EXERCISES, "exercise")


def _unsolved(name: str, why: str) -> Outcome:
    return Outcome(solved=False, text=f"✗ {name}: {why}\n  hint({name!r}, 1) says more")


def _where(error: Exception) -> str:
    line = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} (line {line.lineno}: {line.line})"


def _comparison(number: int, yours: Any, expected: Any, error: float) -> str:
    size = "not comparable" if error == float("inf") else f"{error:.2e}"
    lines = (f"yours     {_short(yours)}", f"expected  {_short(expected)}")
    return f"case {number}\n  " + "\n  ".join([*lines, f"largest relative error  {size}"])


def _short(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        first = ", ".join(f"{v:.4g}" for v in value.detach().flatten()[:6].tolist())
        more = ", ..." if value.numel() > 6 else ""
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}: [{first}{more}]"
    text = repr(value)
    return text if len(text) <= 100 else text[:97] + "..."


def _error(yours: Any, expected: Any) -> float:
    """Return the error relative to the largest expected magnitude; inf if not comparable."""
    if isinstance(expected, str | bool) or expected is None:
        return 0.0 if yours == expected else float("inf")
    if isinstance(expected, Mapping):
        if not isinstance(yours, Mapping) or yours.keys() != expected.keys():
            return float("inf")
        return max((_error(yours[k], expected[k]) for k in expected), default=0.0)
    if isinstance(expected, Sequence):
        if not isinstance(yours, Sequence) or len(yours) != len(expected):
            return float("inf")
        return max((_error(y, e) for y, e in zip(yours, expected)), default=0.0)
    return _tensor_error(yours, expected)


def _tensor_error(yours: Any, expected: Any) -> float:
    try:
        yours_64 = torch.as_tensor(yours).detach().to("cpu", torch.float64)
        expected_64 = torch.as_tensor(expected).detach().to("cpu", torch.float64)
    except (TypeError, ValueError, RuntimeError):
        return float("inf")
    if yours_64.shape != expected_64.shape:
        return float("inf")
    if expected_64.numel() == 0:
        return 0.0
    scale = expected_64.abs().max().clamp(min=1e-30)
    error = ((yours_64 - expected_64).abs().max() / scale).item()
    return error if error == error else float("inf")
