"""Statistics of low-dimensional columns, and normalisations with their inverses.

A dimension that never changes has no range to divide by; every mode says what it does then, so that
no NaN can arise.
"""

import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from wamlab.config import ConfigError, lookup

MAX_ROWS = 2_000_000  # quantiles need all rows at once; beyond this every n-th is taken


@dataclass(frozen=True, kw_only=True)
class Statistics:
    """Six numbers a dimension, each float64 [D]."""

    mean: np.ndarray
    std: np.ndarray
    min: np.ndarray
    max: np.ndarray
    q01: np.ndarray
    q99: np.ndarray

    @classmethod
    def of(cls, values_ND: np.ndarray) -> "Statistics":
        """Compute the statistics of rows.

        Args:
            values_ND: [N, D], N > 0.
        """
        x = np.asarray(values_ND[:: -(-len(values_ND) // MAX_ROWS)], np.float64)
        q01, q99 = np.quantile(x, [0.01, 0.99], axis=0)
        return cls(mean=x.mean(0), std=x.std(0), min=x.min(0), max=x.max(0), q01=q01, q99=q99)

    @classmethod
    def from_json(cls, values: Mapping[str, Any], where: str) -> "Statistics":
        """Read the entry of one column in a stats.json.

        Raises:
            ConfigError: one of the six is missing, not made of numbers, or longer than another.
        """
        names = [f.name for f in fields(cls)]
        missing = [n for n in names if n not in values]
        if missing:
            raise ConfigError(f"{where} has no {', '.join(missing)}; it has {', '.join(values)}")
        found = {n: _numbers(values[n], f"{where}: {n}") for n in names}
        widths = {n: len(x) for n, x in found.items()}
        if len(set(widths.values())) > 1:
            text = ", ".join(f"{n} {width}" for n, width in widths.items())
            raise ConfigError(f"{where} has six lists of different lengths: {text}")
        return cls(**found)

    def to_json(self) -> dict[str, list[float]]:
        """Return the entry for a stats.json."""
        return {f.name: getattr(self, f.name).tolist() for f in fields(self)}

    def __getitem__(self, dims: slice) -> "Statistics":
        """Return the statistics of a slice of the dimensions."""
        return Statistics(**{f.name: getattr(self, f.name)[dims] for f in fields(self)})


def _numbers(values: Any, where: str) -> np.ndarray:
    """Return float64 [D] of a number or a list of numbers."""
    try:
        found = np.asarray(values)
    except ValueError:  # lists of uneven lengths
        found = None
    if found is None or found.dtype.kind not in "biuf":
        raise ConfigError(f"{where} is {reprlib.repr(values)}: must be a list of numbers")
    return np.atleast_1d(found.astype(np.float64)).ravel()


@dataclass(frozen=True)
class Normalization:
    """Two functions of (values [..., D], statistics) that undo each other inside their range."""

    forward: Callable[[np.ndarray, Statistics], np.ndarray]
    inverse: Callable[[np.ndarray, Statistics], np.ndarray]


def normalize(values: np.ndarray, statistics: Statistics, mode: str) -> np.ndarray:
    """Return float32 normalised values [..., D]; `mode` is a key of NORMALIZATIONS."""
    forward = lookup(NORMALIZATIONS, mode, "normalization").forward
    return forward(np.asarray(values, np.float64), statistics).astype(np.float32)


def denormalize(values: np.ndarray, statistics: Statistics, mode: str) -> np.ndarray:
    """Return float32 values in their own units, the inverse of `normalize`."""
    inverse = lookup(NORMALIZATIONS, mode, "normalization").inverse
    return inverse(np.asarray(values, np.float64), statistics).astype(np.float32)


def _to_range(x: np.ndarray, low: np.ndarray, high: np.ndarray, still: np.ndarray) -> np.ndarray:
    """Map [low, high] to [-1, 1] and clip; a dimension without a range becomes `still`."""
    width = high - low
    scaled = 2.0 * (x - low) / np.where(width == 0, 1.0, width) - 1.0
    return np.clip(np.where(width == 0, still, scaled), -1.0, 1.0)


def _from_range(y: np.ndarray, low: np.ndarray, high: np.ndarray, still: np.ndarray) -> np.ndarray:
    return np.where(high == low, still, (y + 1.0) / 2.0 * (high - low) + low)


def _largest(s: Statistics) -> np.ndarray:
    return np.maximum(np.abs(s.min), np.abs(s.max))


def _divide(x: np.ndarray, by: np.ndarray, still: np.ndarray | float) -> np.ndarray:
    return np.where(by == 0, still, x / np.where(by == 0, 1.0, by))


NORMALIZATIONS: dict[str, Normalization] = {
    "q99": Normalization(
        lambda x, s: _to_range(x, s.q01, s.q99, x), lambda y, s: _from_range(y, s.q01, s.q99, y)
    ),
    "min_max": Normalization(
        lambda x, s: _to_range(x, s.min, s.max, np.zeros_like(x)),
        lambda y, s: _from_range(y, s.min, s.max, s.min),
    ),
    "mean_std": Normalization(
        lambda x, s: _divide(x - s.mean, s.std, x),
        lambda y, s: np.where(s.std == 0, y, y * s.std + s.mean),
    ),
    "scale": Normalization(lambda x, s: _divide(x, _largest(s), 0.0), lambda y, s: y * _largest(s)),
    "binary": Normalization(
        lambda x, s: np.where(x > 0.5, 1.0, 0.0), lambda y, s: np.where(y > 0.5, 1.0, 0.0)
    ),
    "none": Normalization(lambda x, s: x, lambda y, s: y),
}


def relative_rows(
    action_TD: np.ndarray, state_TD: np.ndarray, horizon: int, *, every: int = 1
) -> np.ndarray:
    """Return every action of an episode minus the state at its block's start, for every start.

    Args:
        action_TD, state_TD: [T, D] in the same units.
        horizon: H, steps a block.
        every: take each n-th start only.

    Returns:
        [(T - H + 1) * H, D]: start i of 0..T-H, step j of 0..H-1 gives action[i+j] - state[i].
    """
    starts = np.arange(0, max(len(action_TD) - horizon + 1, 0), every)
    steps = starts[:, None] + np.arange(horizon)
    return (action_TD[steps] - state_TD[starts][:, None]).reshape(-1, action_TD.shape[1])
