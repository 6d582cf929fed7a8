"""Every fault of a data set in one pass, before the first training step.

Tables are read and videos are scanned by their packets; no frame is decoded, except with
`checksums`, which compares every frame with what was stored for it.
"""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Literal

import numpy as np
from tqdm import tqdm

from wamlab.config import ConfigError, UserError
from wamlab.data import metadata
from wamlab.data.check_meta import MetaChecks, fault_of
from wamlab.data.check_tables import OUTSIDE, Fault, TableChecks
from wamlab.data.check_video import (
    check_overlaps,
    check_videos_of,
    compare_checksums,
    frame_checksums,
    read_checksums,
    write_checksums,
)
from wamlab.data.container import VideoError
from wamlab.data.embodiment import Embodiment, Part
from wamlab.data.frame_times import frame_times
from wamlab.data.lerobot import LeRobotDataset, find_root
from wamlab.data.metadata import DatasetError, VideoSpan
from wamlab.data.normalize import Statistics, relative_rows
from wamlab.data.windows import WindowDataset

RELATIVE_EPISODES = 200  # enough to see whether relative statistics fit


def check_dataset(
    root: str | Path,
    embodiment: Embodiment | None = None,
    *,
    checksums: Literal["compare", "write"] | None = None,
    threads: int | None = None,
    progress: bool = True,
) -> list[Fault]:
    """Find every fault of a data set.

    Args:
        root: its folder, or its hub id.
        embodiment: the robot to train as; None checks the data set alone.
        checksums: decode every frame and compare its checksum with the stored one, or store it.
        threads: files scanned at the same time; default the number of cores.
        progress: show a bar.

    Returns:
        The faults, those of meta/ first, then tables, videos, statistics and the embodiment.

    Raises:
        DatasetError: there is no data set at `root`.
        ConfigError: `threads` is below 0.
    """
    if threads is not None and threads < 0:
        raise ConfigError(f"threads is {threads}: must be 1 or more, or left out for all cores")
    check = _Check(find_root(root), embodiment, threads or os.cpu_count() or 1)
    if not check.open():
        return check.faults
    total = len(check.groups) + len(check.episodes) * bool(check.keys)
    with tqdm(total=total, desc="checking", unit="file", disable=None if progress else True) as bar:
        check.tables(bar)
        check.videos(bar)
    if checksums:
        check.checksums(write=checksums == "write", progress=progress)
    if embodiment is not None:
        check.embodied(progress)
    return check.faults


class _Check:
    """One data set under examination."""

    def __init__(self, root: Path, embodiment: Embodiment | None, threads: int) -> None:
        self.root, self.embodiment, self.threads = root, embodiment, threads
        self.faults: list[Fault] = []

    def open(self) -> bool:
        """Read meta/; return whether anything else can be checked."""
        meta = MetaChecks(self.root)
        info, episodes, modality = meta.info, meta.episodes, meta.modality
        self.faults += meta.faults
        if info is None or episodes is None:
            return False
        self.info, self.episodes = info, episodes
        self._check_totals()
        self.checks = TableChecks(
            info,
            episodes,
            tasks=meta.tasks,
            language=_language_columns(self.embodiment, modality),
            statistics=meta.statistics,
            needed=_needed_columns(self.embodiment, modality),
        )
        self.keys = [k for k, f in info.features.items() if f.get("dtype") == "video"]
        self.groups = list(pairwise(episodes.table_starts().tolist()))
        return True

    def _check_totals(self) -> None:
        found = {"episodes": len(self.episodes), "frames": int(self.episodes.offsets[-1])}
        for what, count in found.items():
            said = getattr(self.info, f"total_{what}")
            if said is not None and said != count:
                cause = f"total_{what} is {said}, the episode table has {count}"
                self.faults.append(Fault(file="meta/info.json", cause=cause, spoils=False))
        ids, counts = np.unique(self.episodes.ids, return_counts=True)
        for number in ids[counts > 1]:
            cause = "stands twice in the episode table"
            self.faults.append(Fault(file="meta", episode=int(number), cause=cause))
        for place in np.flatnonzero(self.episodes.lengths <= 0):
            cause = f"length {self.episodes.lengths[place]}"
            self.faults.append(
                Fault(file="meta", episode=int(self.episodes.ids[place]), cause=cause)
            )

    def tables(self, bar: tqdm) -> None:
        """Check every table, then features and statistics against what was read."""
        for first, last in self.groups:
            self.faults += self.checks.table(first, last)
            bar.update()
        self.faults += self.checks.misfits()

    def videos(self, bar: tqdm) -> None:
        """Check every episode's videos, several at a time."""
        if not self.keys:
            return
        if self.info.video_path is None:
            cause = f"no video_path, but features of dtype video: {', '.join(self.keys)}"
            self.faults.append(Fault(file="meta/info.json", cause=cause))
            return
        self.faults += check_overlaps(self.info, self.episodes, self.keys)

        def one(place: int) -> list[Fault]:
            return check_videos_of(self.info, self.episodes, place, self.keys)

        with ThreadPoolExecutor(self.threads) as pool:
            for found in pool.map(one, range(len(self.episodes))):
                self.faults += found
                bar.update()

    def _files(self) -> dict[str, list[tuple[int, VideoSpan]]]:
        """Return each video file with the (episode, part) that it holds."""
        files: dict[str, list[tuple[int, VideoSpan]]] = {}
        for place, number in enumerate(self.episodes.ids.tolist()):
            for key in self.keys if self.info.video_path else ():
                span = metadata.video_span(self.info, self.episodes, place, key)
                name = str(span.path.relative_to(self.root))
                files.setdefault(name, []).append((number, span))
        return files

    def checksums(self, *, write: bool, progress: bool) -> None:
        """Decode every frame; store or compare its checksum."""
        files = self._files()
        try:
            stored = {} if write else read_checksums(self.root)
        except DatasetError as error:
            self.faults.append(fault_of(error, self.root, "meta"))
            return
        kept: dict[str, list[str]] = {}

        def one(name: str) -> tuple[str, list[str] | str]:
            try:
                return name, frame_checksums(self.root / name)
            except VideoError as error:
                return name, str(error).removeprefix(f"{self.root / name}: ")

        bar = tqdm(
            total=len(files), desc="decoding", unit="file", disable=None if progress else True
        )
        with ThreadPoolExecutor(self.threads) as pool, bar:
            for name, found in pool.map(one, files):
                bar.update()
                if isinstance(found, str):
                    known = any(f.file == name for f in self.faults)
                    if not known:
                        self.faults.append(Fault(file=name, episode=files[name][0][0], cause=found))
                elif write:
                    kept[name] = found
                else:
                    fault = compare_checksums(name, found, stored.get(name), files[name])
                    self.faults += [fault] if fault else []
        if write:
            write_checksums(self.root, kept)

    def embodied(self, progress: bool) -> None:
        """Check what the embodiment needs: columns, cameras, sizes, rate, samples, statistics."""
        if any(f.spoils for f in self.faults):
            return  # opening it would only repeat the first of them
        robot = self.embodiment
        if abs(robot.fps - self.info.fps) > 1e-3:
            cause = f"{self.info.fps:g} fps, embodiment {robot.name!r} is made for {robot.fps:g}"
            self.faults.append(Fault(file="meta/info.json", cause=cause, spoils=False))
        try:
            data = LeRobotDataset(self.root, robot, progress=progress)
            WindowDataset(data)
        except UserError as error:
            self.faults.append(fault_of(error, self.root, "."))
            return
        self.faults += _view_sizes(data)
        self.faults += _relative_misfits(data)


def _language_columns(robot: Embodiment | None, modality: dict) -> tuple[str, ...]:
    """Return the columns of task numbers or words."""
    found = {"task_index"}
    for name in robot.language if robot else ():
        own = modality.get("annotation", {}).get(name.removeprefix("annotation."), {})
        found.add(own.get("original_key") or name)
    return tuple(sorted(found))


def _needed_columns(robot: Embodiment | None, modality: dict) -> set[str]:
    """Return the columns without which nobody can train: of the robot, of modality.json."""
    found = {"observation.state", "action"}
    for group in ("state", "action"):
        found |= {p.column for p in getattr(robot, group, ())}
        found |= {own.get("original_key") for own in modality.get(group, {}).values()}
    return found - {None}


def _view_sizes(data: LeRobotDataset) -> Iterator[Fault]:
    videos = [view for view, key in data.views.items() if key not in data.columns.images]
    for place, number in enumerate(data.episodes.ids.tolist()):
        times = [frame_times(data.video(place, view).path) for view in videos]
        sizes = {f"{t.height}x{t.width}" for t in times}
        if len(sizes) > 1:
            cause = f"its views have different sizes: {', '.join(sorted(sizes))}"
            yield Fault(file="videos", episode=number, cause=cause)


def _relative_misfits(data: LeRobotDataset) -> Iterator[Fault]:
    """Yield relative statistics that are those of the absolute action, or otherwise do not fit."""
    name = "meta/relative_stats_dreamzero.json"
    if not (data.root / name).is_file():
        return
    for part, statistics in zip(data.embodiment.action, data.codec.action):
        if not part.relative:
            continue
        absolute, relative = _rows(data, part)
        if not len(relative):
            continue
        outside = (relative < statistics.q01 - 1e-6) | (relative > statistics.q99 + 1e-6)
        if _distance(statistics, absolute) < 0.5 * _distance(statistics, relative):
            cause = f"{part.name}: these are the statistics of the absolute action"
        elif outside.mean(0).max() > OUTSIDE:
            share = f"{outside.mean(0).max():.0%}"
            cause = f"{part.name}: {share} of the relative actions lie outside q01..q99"
        else:
            continue
        yield Fault(file=name, cause=cause)


def _distance(statistics: Statistics, rows: np.ndarray) -> float:
    q01, q99 = np.quantile(rows, [0.01, 0.99], axis=0)
    return float(np.abs(q01 - statistics.q01).sum() + np.abs(q99 - statistics.q99).sum())


def _rows(data: LeRobotDataset, part: Part) -> tuple[np.ndarray, np.ndarray]:
    """Return the absolute and the relative actions of some episodes, [N, D] each."""
    state = next(p for p in data.embodiment.state if p.name == part.name)
    places = np.random.default_rng(0).permutation(len(data.episodes))[:RELATIVE_EPISODES]
    absolute, relative = [], []
    for place in places:
        rows = slice(*(int(o) for o in data.episodes.offsets[place : place + 2]))
        action, anchor = (
            data.columns.arrays[p.column][rows].reshape(rows.stop - rows.start, -1)
            for p in (part, state)
        )
        action = action[:, part.start : part.end]
        absolute.append(action)
        anchor = anchor[:, state.start : state.end]
        relative.append(relative_rows(action, anchor, data.embodiment.horizon, every=8))
    return np.concatenate(absolute), np.concatenate(relative)
