"""Faults of a data set's meta/: every file of it is read, and each value is what it must be."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from wamlab.config import ConfigError, UserError
from wamlab.data import metadata
from wamlab.data.check_tables import PICTURES, Fault, is_number
from wamlab.data.meta_files import OBJECT, numbered_lines, read_json, read_object, typed
from wamlab.data.metadata import Episodes, Info
from wamlab.data.normalize import Statistics

OTHERS = ("video", "image", "string", "language")  # dtypes of features that are no numbers
STATISTICS, RELATIVE = "meta/stats.json", "meta/relative_stats_dreamzero.json"


def fault_of(error: UserError, root: Path, default: str) -> Fault:
    """Return the fault that an error names; `default` is its file if the message names none."""
    head, _, cause = str(error).partition(": ")
    place, _, line = head.partition(", line ")
    if not cause or not Path(place).is_relative_to(root):
        return Fault(file=default, cause=str(error))
    cause = f"line {line}: {cause}" if line else cause
    return Fault(file=str(Path(place).relative_to(root)), cause=cause)


class MetaChecks:
    """meta/ as it was read, and what is wrong with it.

    `info` and `episodes` are None where they cannot be read, `tasks` where there is no task table;
    `statistics` are those of the columns of numbers.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.faults: list[Fault] = []
        self.statistics: dict[str, Statistics] = {}
        self.tasks: set[int] | None = None
        self.modality: dict[str, dict[str, dict[str, Any]]] = {}
        self.episodes: Episodes | None = None
        self.info: Info | None = self._try(metadata.read_info, root)
        self._try(metadata.read_embodiment_tag, root)
        if self.info is not None:
            self._features()
            self.episodes = self._try(metadata.read_episodes, self.info)
            tasks = self._try(metadata.read_tasks, self.info)
            self.tasks = None if tasks is None else set(tasks)
            self.modality = self._try(metadata.read_modality, self.info) or {}
            self._keys()
            if self.episodes is not None:
                self._try(metadata.read_step_filter, self.info, self.episodes)
            self._statistics(STATISTICS)
            self._statistics(RELATIVE)
        for path in sorted((root / "meta").glob("*.json*")):
            self._try(_read_whole, path)

    def _try(self, read: Callable[..., Any], *args: Any) -> Any:
        """Return what a reader gives; None, and a fault, if it refuses."""
        try:
            return read(*args)
        except UserError as error:
            self._add(fault_of(error, self.root, "meta"))
            return None

    def _add(self, fault: Fault) -> None:
        if fault not in self.faults:  # a file may be read twice
            self.faults.append(fault)

    def _features(self) -> None:
        """Add the features whose type nobody knows, and the cameras without a size."""
        for name, feature in self.info.features.items():
            kind = feature.get("dtype", "")
            if kind not in OTHERS and not is_number(kind):
                cause = f"features.{name}: dtype {kind!r} is no type of LeRobot"
                cause = cause if kind else f"features.{name}: no dtype"
                self._add(Fault(file="meta/info.json", cause=cause, spoils=False))
            if kind == "video":
                self._try(self.info.frame_hw, name)

    def _keys(self) -> None:
        """Add the columns and cameras that meta/modality.json names and nobody has."""
        for group in ("state", "action", "video", "annotation"):
            for name, own in self.modality.get(group, {}).items():
                key = own.get("original_key")
                if key and key not in self.info.features:
                    cause = f"{group}.{name}: original_key is {key!r}, which is no feature"
                    spoils = group in ("state", "action")  # others are needed by some robots only
                    self._add(Fault(file="meta/modality.json", cause=cause, spoils=spoils))

    def _statistics(self, name: str) -> None:
        """Read a file of statistics by column or part."""
        path = self.root / name
        stored = self._try(read_object, path) if path.is_file() else None
        for column, values in (stored or {}).items():
            if self._try(typed, values, OBJECT, f"{path}: {column}") is None:
                continue
            feature = self.info.features.get(column, {})
            if name == STATISTICS and ("q01" not in values or feature.get("dtype") in PICTURES):
                continue
            try:
                statistics = Statistics.from_json(values, column)
            except ConfigError as error:
                self._add(Fault(file=name, cause=str(error)))
                continue
            wrong = [k for k, x in vars(statistics).items() if not np.isfinite(x).all()]
            for number in wrong:
                self._add(Fault(file=name, cause=f"{column}: {number} is not finite"))
            for cause in () if wrong else _contradictions(statistics):
                self._add(Fault(file=name, cause=f"{column}: {cause}"))
            if name == STATISTICS and not wrong:
                self.statistics[column] = statistics


def _contradictions(s: Statistics) -> Iterator[str]:
    """Yield how six numbers cannot be of the same rows."""
    pairs = {"std is below 0": (0 * s.std, s.std), "q01 is above q99": (s.q01, s.q99)}
    room = 0.01 * np.abs(s.max - s.min) + 1e-6  # quantiles of many episodes are estimates
    pairs |= {"min is above max": (s.min, s.max), "q99 is above max": (s.q99, s.max + room)}
    pairs |= {"q01 is below min": (s.min - room, s.q01)}
    for words, (low, high) in pairs.items():
        wrong = np.flatnonzero(low > high)
        if len(wrong):
            yield f"{words} in dimension {wrong[0]}"


def _read_whole(path: Path) -> None:
    if path.suffix == ".json":
        read_json(path)
    else:
        for _ in numbered_lines(path):
            pass
