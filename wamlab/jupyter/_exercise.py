"""What an exercise is. The tables of exercises are the `exercises_*.py` beside this file.

To add exercises: write `wamlab/jupyter/exercises_TOPIC.py` with a dict `EXERCISES: dict[str,
Exercise]` and add it to the line in `exercise.py` that merges the tables.
"""

import dataclasses
from collections.abc import Callable
from typing import Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Exercise:
    """One task for the reader: a specification to be matched, never an answer to be read.

    Attributes:
        task: what to write, in a sentence or two; names arguments, shapes and units.
        spec: the specification; the reader's function must return the same.
        inputs: makes the cases, a list of argument tuples; seeded, and fresh at every call.
        hints: three steps, from a nudge to nearly the formula.
        tolerance: largest allowed error, relative to the largest expected magnitude of a case.
    """

    task: str
    spec: Callable[..., Any]
    inputs: Callable[[], list[tuple]]
    hints: tuple[str, str, str]
    tolerance: float = 1e-6
