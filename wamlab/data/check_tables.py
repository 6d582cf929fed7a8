"""Faults of a data set's tables: what `check_dataset` finds without opening a video."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from wamlab.data import metadata
from wamlab.data.metadata import DatasetError, Episodes, Info
from wamlab.data.normalize import Statistics

PICTURES = ("video", "image")
ONE_A_ROW = ("index", "frame_index", "episode_index", "timestamp")
GRID_S = 1e-4  # LeRobot's own tolerance on timestamps
FAR_S = 1e9  # 32 years: no time of an episode
OUTSIDE = 0.10  # share of rows beyond q01..q99 that is no longer chance; 2 % by definition
WIDE = 10.0  # how many times the data's whole range q01..q99 may span


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One fault of a data set.

    Args:
        file: the file at fault, relative to the data set.
        cause: what is wrong with it.
        episode: the episode concerned, if it is one.
        spoils: whether training on it would stop or learn something wrong.
    """

    file: str
    cause: str
    episode: int | None = None
    spoils: bool = True

    def __str__(self) -> str:
        which = "" if self.episode is None else f" (episode {self.episode})"
        return f"{self.file}{which}: {self.cause}"


class TableChecks:
    """Checks of all tables, one file at a time; keeps count of what the statistics leave out.

    Args:
        info, episodes: of the data set.
        tasks: the numbers that stand for a task; None when there is no task table.
        language: columns of task numbers.
        statistics: stored ones, by column.
        needed: columns that meta/info.json must list among the features.
    """

    def __init__(
        self,
        info: Info,
        episodes: Episodes,
        *,
        tasks: set[int] | None,
        language: tuple[str, ...],
        statistics: Mapping[str, Statistics],
        needed: set[str],
    ) -> None:
        self.info, self.episodes, self.tasks, self.language = info, episodes, tasks, language
        self.needed = needed
        self.columns: set[str] | None = None
        self.ranges = {name: _Range(found) for name, found in statistics.items()}

    def misfits(self) -> Iterator[Fault]:
        """Yield the columns that are no features, and the statistics that do not fit the rows."""
        for column in sorted((self.columns or set()) - set(self.info.features)):
            cause = f"features lists no {column!r}, which the tables have"
            yield Fault(file="meta/info.json", cause=cause, spoils=column in self.needed)
        for name, found in self.ranges.items():
            for cause in found.misfits():
                yield Fault(file="meta/stats.json", cause=f"{name}: {cause}")

    def table(self, first: int, last: int) -> Iterator[Fault]:
        """Yield the faults of the table that holds the episodes at places [first, last)."""
        path = metadata.table_path(self.info, self.episodes, first)
        name = str(path.relative_to(self.info.root))
        one = int(self.episodes.ids[first]) if last - first == 1 else None
        expected = int(self.episodes.lengths[first:last].sum())
        try:
            table = metadata.read_parquet(path)
        except DatasetError as error:
            what = "episode has no table" if one is not None else "no table"
            cause = f"{what} ({expected} frames expected): {_short(error, path)}"
            yield Fault(file=name, episode=one, cause=cause)
            return
        self.columns = self.columns or set(table.column_names)
        for column in sorted(self.columns - set(table.column_names)):
            yield Fault(file=name, episode=one, cause=f"no column {column!r}, as other tables have")
        if len(table) != expected:
            cause = f"{len(table)} rows, {expected} frames expected by meta/"
            yield Fault(file=name, episode=one, cause=cause)
            return
        arrays = {}
        for column in table.column_names:
            array, cause = _numbers(column, table[column], self.info.features.get(column, {}))
            if cause:
                yield Fault(file=name, episode=one, cause=cause)
            if array is None:
                continue
            if column in self.ranges:
                self.ranges[column].add(array)
            if column in (*ONE_A_ROW, *self.language) and array.ndim > 1:
                if array.shape[1] != 1:
                    cause = f"{column} has {array.shape[1]} values a row, 1 expected"
                    yield Fault(file=name, episode=one, cause=cause)
                    continue
                array = array[:, 0]
            arrays[column] = array
        start = int(self.episodes.offsets[first])
        for place in range(first, last):
            rows = slice(*(int(o) - start for o in self.episodes.offsets[place : place + 2]))
            for cause, spoils in self._episode({k: a[rows] for k, a in arrays.items()}, place):
                number = int(self.episodes.ids[place])
                yield Fault(file=name, episode=number, cause=cause, spoils=spoils)

    def _episode(self, arrays: dict[str, np.ndarray], place: int) -> Iterator[tuple[str, bool]]:
        length = int(self.episodes.lengths[place])
        expected = {
            "frame_index": np.arange(length),
            "episode_index": np.full(length, self.episodes.ids[place]),
            "index": int(self.episodes.offsets[place]) + np.arange(length),
        }
        for name, values in expected.items():
            wrong = np.flatnonzero(arrays[name] != values) if name in arrays else ()
            if len(wrong):
                row = int(wrong[0])
                cause = f"{name} is {arrays[name][row]} at row {row}, {values[row]} expected"
                yield cause, name != "index"  # readers rebuild it
        if "timestamp" in arrays:
            cause = _off_grid(arrays["timestamp"].astype(np.float64), self.info.fps)
            if cause:
                yield cause, True
        for name in self.language:
            if name in arrays and self.tasks is not None:
                unknown = sorted(set(np.unique(arrays[name]).tolist()) - self.tasks)
                if unknown:
                    cause = f"{name} {unknown[0]} is none of the {len(self.tasks)} tasks in meta/"
                    yield cause, True


def _short(error: Exception, path: Any) -> str:
    return str(error).removeprefix(f"{path}: ")


def _numbers(
    name: str, column: pa.ChunkedArray, feature: dict[str, Any]
) -> tuple[np.ndarray | None, str | None]:
    """Return a numeric column as [T] or [T, D], and what is wrong with it."""
    if feature.get("dtype") in PICTURES:
        empty = sum(not _has_bytes(cell) for cell in column) if len(column) else 0
        return None, f"{empty} images of {name} have no bytes" if empty else None
    if column.null_count:
        return None, f"{name} has {column.null_count} empty cells"
    array = column.combine_chunks()
    width = None
    if pa.types.is_list(array.type) or pa.types.is_fixed_size_list(array.type):
        widths = np.unique(array.value_lengths().to_numpy(zero_copy_only=False))
        if len(widths) > 1:
            return None, f"{name} has rows of {widths[0]} to {widths[-1]} values"
        width, array = int(widths[0]) if len(widths) else 0, array.flatten()
    if not (pa.types.is_integer(array.type) or pa.types.is_floating(array.type)):
        said = feature.get("dtype", "")
        wrong = is_number(said) and not (pa.types.is_boolean(array.type) and said == "bool")
        return None, f"{name} holds {array.type}, meta/info.json says {said}" if wrong else None
    values = array.to_numpy(zero_copy_only=False)
    values = values if width is None else values.reshape(-1, width)
    shape = list(feature.get("shape") or [])
    here = 1 if width is None else width
    if shape and int(np.prod(shape)) != here:
        return values, f"{name} has {here} values a row, meta/info.json says {shape}"
    broken = np.argwhere(~np.isfinite(values)) if values.dtype.kind == "f" else ()
    if len(broken):
        return values, f"{name} is not finite at row {broken[0][0]} ({len(broken)} values)"
    return values, None


def is_number(dtype: str) -> bool:
    """Return whether a feature's dtype is one of numbers."""
    try:
        return np.dtype(dtype or "O").kind in "biuf"
    except TypeError:
        return False


def _has_bytes(cell: pa.Scalar) -> bool:
    value = cell.as_py()
    return bool(value.get("bytes") if isinstance(value, dict) else value)


def _off_grid(seconds: np.ndarray, fps: float) -> str | None:
    """Return how an episode's timestamps leave the grid of 1/fps seconds, or None."""
    far = np.flatnonzero(~(np.abs(seconds) < FAR_S))
    if len(far) or not len(seconds):
        return f"timestamp is {seconds[far[0]]:g} s at row {far[0]}" if len(far) else None
    back = np.flatnonzero(~(np.diff(seconds) > 0))
    if len(back):
        row = int(back[0]) + 1
        return f"timestamp goes from {seconds[row - 1]:g} to {seconds[row]:g} s at row {row}"
    off = seconds - np.arange(len(seconds)) / fps
    tolerance = GRID_S + np.spacing(np.float32(seconds[-1]))
    if np.abs(off).max() <= tolerance:
        return None
    shift = round(off[0] * fps)
    if shift and np.abs(off - shift / fps).max() <= tolerance:
        return f"timestamps are shifted by {shift} frame{'s' * (abs(shift) > 1)}"
    row = int(np.argmax(np.abs(off) > tolerance))
    return f"timestamp {seconds[row]:.6g} s at row {row} is not on the grid: {row / fps:.6g} s"


class _Range:
    """How the rows of one column lie to its stored statistics."""

    def __init__(self, statistics: Statistics) -> None:
        self.statistics, self.rows = statistics, 0
        width = len(statistics.mean)
        self.outside, self.other_widths = np.zeros(width), set()
        self.low, self.high = np.full(width, np.inf), np.full(width, -np.inf)

    def add(self, values: np.ndarray) -> None:
        x = values.reshape(len(values), -1)
        if x.shape[1] != len(self.outside):
            self.other_widths.add(x.shape[1])
        if x.shape[1] != len(self.outside) or not len(x):
            return
        s = self.statistics
        self.rows += len(x)
        self.outside += ((x < s.q01 - 1e-6) | (x > s.q99 + 1e-6)).sum(0)
        self.low, self.high = np.minimum(self.low, x.min(0)), np.maximum(self.high, x.max(0))

    def misfits(self) -> Iterator[str]:
        """Yield how the statistics do not fit the rows."""
        for width in sorted(self.other_widths):
            yield f"statistics of {len(self.outside)} dimensions, the column has {width}"
        if not self.rows:
            return
        share = self.outside / self.rows
        if share.max() > OUTSIDE:
            worst = int(share.argmax())
            yield (
                f"the statistics do not fit the data: {share[worst]:.0%} of dimension {worst} "
                "lies outside q01..q99 (2 % expected)"
            )
        spread, seen = self.statistics.q99 - self.statistics.q01, self.high - self.low
        wide = np.flatnonzero((spread > WIDE * seen) & (seen > 1e-6))  # at rest is no misfit
        if len(wide):
            yield (
                f"the statistics do not fit the data: q01..q99 of dimension {wide[0]} spans "
                f"{spread[wide[0]]:.3g}, the data {seen[wide[0]]:.3g}"
            )
