"""A LeRobot data set (v2.0, v2.1, v3.0) as one robot's episodes.

Tables are converted once into flat memory-mapped columns (`wamlab.data.columns`); this class says
which columns, dimensions, cameras and words an embodiment takes from them.
"""

import io
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from wamlab.config import ConfigError, save_json
from wamlab.data import metadata
from wamlab.data.codec import Codec
from wamlab.data.columns import Columns, open_columns
from wamlab.data.embodiment import Embodiment, Part
from wamlab.data.meta_files import OBJECT, need, optional, read_object
from wamlab.data.metadata import DatasetError, VideoSpan
from wamlab.data.normalize import MAX_ROWS, Statistics, relative_rows

RELATIVE_EPISODES, RELATIVE_SEED = 10_000, 42  # how many episodes relative statistics are taken of


class LeRobotDataset:
    """Episodes on disk; opening it converts the tables on the first use.

    Args:
        root: the data set's folder, or its id on the Hugging Face hub.
        embodiment: the robot; meta/modality.json of the data set, if any, replaces its slices.
        progress: show a bar while converting.

    Raises:
        DatasetError: the data set lacks what the embodiment needs: file, column, what is there.
    """

    def __init__(
        self,
        root: str | Path,
        embodiment: Embodiment,
        *,
        progress: bool = True,
    ) -> None:
        self.root = find_root(root)
        self.info = metadata.read_info(self.root)
        self.modality = metadata.read_modality(self.info)
        self.columns: Columns = open_columns(self.info, progress=progress)
        self.embodiment = replace(
            embodiment,
            state=tuple(self._resolve("state", p) for p in embodiment.state),
            action=tuple(self._resolve("action", p) for p in embodiment.action),
        )
        self.views = {name: self._camera(name) for name in embodiment.views}
        self.language = tuple(self._language(name) for name in embodiment.language)
        if "timestamp" in self.columns.arrays:
            self._need_one_a_row("timestamp")
        if "timestamp" in self.columns.texts:
            raise DatasetError(f"{self.root}: timestamp holds texts: must be seconds")
        self.tasks = metadata.read_tasks(self.info)
        self.codec = Codec(
            self.embodiment,
            tuple(self._statistics(p) for p in self.embodiment.state),
            tuple(self._action_statistics(p) for p in self.embodiment.action),
        )

    @property
    def episodes(self) -> metadata.Episodes:
        """The episode table."""
        return self.columns.episodes

    def __len__(self) -> int:
        """Number of frames."""
        return int(self.episodes.offsets[-1])

    def rows(self, episode: int, steps: Sequence[int] | np.ndarray) -> np.ndarray:
        """Return the rows, in the flat columns, of an episode's steps.

        A step before the start is the first frame and one past the end the last: a history at the
        start of an episode repeats its first frame, and nothing of a neighbour is ever read.

        Args:
            episode: its place in the episode table.
            steps: int [T], counted from the episode's start.
        """
        start = int(self.episodes.offsets[episode])
        length = int(self.episodes.lengths[episode])
        return start + np.clip(np.asarray(steps, np.int64), 0, length - 1)

    def state(self, rows: np.ndarray) -> np.ndarray:
        """Return float32 [T, S] of the embodiment's state parts, in its own units."""
        return self._read(self.embodiment.state, rows)

    def action(self, rows: np.ndarray) -> np.ndarray:
        """Return float32 [T, A] of the embodiment's action parts, in its own units."""
        return self._read(self.embodiment.action, rows)

    def timestamps(self, episode: int, steps: Sequence[int] | np.ndarray) -> np.ndarray:
        """Return the seconds, from the episode's start, of some of its steps, float64 [T]."""
        rows = self.rows(episode, steps)
        if "timestamp" in self.columns.arrays:
            return self.columns.arrays["timestamp"][rows].astype(np.float64)
        return (rows - int(self.episodes.offsets[episode])) / self.info.fps

    def instruction(self, row: int, paraphrase: int = 0) -> str:
        """Return the task of a frame in words.

        Args:
            row: in the flat columns.
            paraphrase: which of the embodiment's language columns, counted modulo their number; an
                empty one gives way to the next.

        Raises:
            DatasetError: the index stands for no task.
        """
        count = len(self.language)
        texts = (self._words(row, self.language[(paraphrase + n) % count]) for n in range(count))
        return next((t for t in texts if t.strip()), "")

    def _words(self, row: int, column: str) -> str:
        value = int(self.columns.arrays[column][row])
        if column in self.columns.texts:
            return self.columns.texts[column][value]
        if value not in self.tasks:
            raise DatasetError(
                f"{self.root}: frame {row} has {column} {value}, which is none of the "
                f"{len(self.tasks)} tasks in meta/"
            )
        return self.tasks[value]

    def prompts(self) -> list[str]:
        """Return every full prompt that a sample can carry, without repeats."""
        found: dict[str, None] = {}
        for column in self.language:
            texts = self.columns.texts.get(column) or self.tasks.values()
            found |= dict.fromkeys(self.embodiment.prompt_text(t) for t in texts)
        return list(found)

    def video(self, episode: int, view: str) -> VideoSpan:
        """Return the file, and the part of it, that shows an episode from one view."""
        return metadata.video_span(self.info, self.episodes, episode, self.views[view])

    def frames(
        self, episode: int, view: str, steps: np.ndarray, open_video: Callable[[VideoSpan], Any]
    ) -> torch.Tensor:
        """Return the frames of some of an episode's steps.

        Args:
            episode: its place in the episode table.
            view: a name of the embodiment's views.
            steps: int [T].
            open_video: gives a decoder with `frames_at(timestamps_s)` for a part of a file.

        Returns:
            uint8 [T, 3, H, W].
        """
        key = self.views[view]
        if key not in self.columns.images:
            decoder = open_video(self.video(episode, view))
            return decoder.frames_at(self.timestamps(episode, steps))
        rows = self.rows(episode, steps)
        return torch.stack([_decode_image(self.columns.image(key, int(r))) for r in rows])

    def _read(self, parts: Sequence[Part], rows: np.ndarray) -> np.ndarray:
        arrays = self.columns.arrays
        values = [_two_axes(arrays[p.column][rows])[:, p.start : p.end] for p in parts]
        return np.concatenate(values, 1).astype(np.float32)

    def _resolve(self, which: str, part: Part) -> Part:
        """Return the part with the data set's own column and slice."""
        listed = self.modality.get(which)
        if listed is not None:
            if part.name not in listed:
                raise DatasetError(
                    f"{self.root}/meta/modality.json: no {which} {part.name!r}, which embodiment "
                    f"needs; it has {', '.join(listed)}"
                )
            own = listed[part.name]
            default = "observation.state" if which == "state" else "action"
            column = own.get("original_key") or default
            part = replace(part, column=column, start=int(own["start"]), end=int(own["end"]))
        self._need(part.column, f"{which} {part.name!r}")
        if part.column in self.columns.texts:
            raise DatasetError(
                f"{self.root}: {which} {part.name!r} is of {part.column}, which holds texts"
            )
        width = _two_axes(self.columns.arrays[part.column][:1]).shape[1]
        if part.end > width:
            raise DatasetError(
                f"{self.root}: {which} {part.name!r} is dimensions {part.start} to {part.end} of "
                f"{part.column}, which has {width}"
            )
        return part

    def _need(self, column: str, what: str) -> None:
        if column not in self.columns.arrays:
            path = metadata.table_path(self.info, self.episodes, 0)
            raise DatasetError(
                f"{path}: no column {column!r}, needed for {what}; "
                f"it has {', '.join(self.columns.arrays)}"
            )

    def _camera(self, name: str) -> str:
        own = self.modality.get("video", {}).get(name, {}).get("original_key")
        known = self.info.image_features()
        for key in filter(None, (own, f"observation.images.{name}", name)):
            if key in known:
                return key
        raise DatasetError(
            f"{self.root}/meta/info.json: no camera {name!r}; it has {', '.join(known) or 'none'}"
        )

    def _language(self, name: str) -> str:
        listed = self.modality.get("annotation", {})
        own = listed.get(name.removeprefix("annotation."), {}).get("original_key")
        column = own or name
        self._need(column, "the task in words")
        self._need_one_a_row(column)
        return column

    def _need_one_a_row(self, column: str) -> None:
        array = self.columns.arrays[column]
        if array.ndim > 1:
            raise DatasetError(
                f"{self.root}: {column} holds lists of {array.shape[1]} values, not one value a row"
            )

    def _statistics(self, part: Part) -> Statistics:
        """Return the statistics of a part as it stands in the tables."""
        path = self.root / "meta/stats.json"
        values = read_object(path) if path.is_file() else {}
        stored = optional(values, part.column, OBJECT, f"{path}", {})
        if "q01" in stored and "q99" in stored:
            statistics = _from_file(stored, f"{path}: {part.column}")
            width = _two_axes(self.columns.arrays[part.column][:1]).shape[1]
            if len(statistics.mean) != width:
                raise DatasetError(
                    f"{path}: {part.column} has statistics of {len(statistics.mean)} dimensions, "
                    f"the column has {width}"
                )
            return statistics[part.start : part.end]
        whole = self._computed(part.column, lambda: _two_axes(self.columns.arrays[part.column]))
        return whole[part.start : part.end]

    def _action_statistics(self, part: Part) -> Statistics:
        if not part.relative:
            return self._statistics(part)
        state = next(p for p in self.embodiment.state if p.name == part.name)
        if state.width != part.width:
            raise DatasetError(
                f"{self.root}: {part.name!r} is relative, but has {part.width} dimensions in the "
                f"action and {state.width} in the state"
            )
        path = self.root / "meta/relative_stats_dreamzero.json"
        stored = read_object(path) if path.is_file() else {}
        if part.name in stored:
            values = need(stored, part.name, OBJECT, f"{path}")
            statistics = _from_file(values, f"{path}: {part.name}")
            if len(statistics.mean) != part.width:
                raise DatasetError(
                    f"{path}: {part.name} has statistics of {len(statistics.mean)} dimensions, "
                    f"the part has {part.width}"
                )
            return statistics
        name = (
            f"relative {part.name} {part.column}[{part.start}:{part.end}] {self.embodiment.horizon}"
        )
        return self._computed(name, lambda: self._relative(part))

    def _relative(self, part: Part) -> np.ndarray:
        """Return the relative actions of up to 10,000 random episodes, [N, D], about 2 million."""
        state = next(p for p in self.embodiment.state if p.name == part.name)
        count = len(self.episodes)
        chosen = np.random.default_rng(RELATIVE_SEED).permutation(count)[:RELATIVE_EPISODES]
        total = np.maximum(self.episodes.lengths[chosen] - self.embodiment.horizon + 1, 0).sum()
        every = -(-int(total) * self.embodiment.horizon // MAX_ROWS) or 1
        found = []
        for episode in np.sort(chosen):
            rows = slice(*(int(o) for o in self.episodes.offsets[episode : episode + 2]))
            found.append(
                relative_rows(
                    _two_axes(self.columns.arrays[part.column][rows])[:, part.start : part.end],
                    _two_axes(self.columns.arrays[state.column][rows])[:, state.start : state.end],
                    self.embodiment.horizon,
                    every=every,
                )
            )
        rows = np.concatenate(found)
        if not len(rows):
            raise DatasetError(
                f"{self.root}: no episode has {self.embodiment.horizon} frames, "
                f"so {part.name!r} has no relative statistics"
            )
        return rows

    def _computed(self, name: str, values: Callable[[], np.ndarray]) -> Statistics:
        """Return statistics from the cache, computing them on the first use."""
        path = self.columns.folder / "statistics.json"
        known = json.loads(path.read_text()) if path.is_file() else {}
        if name not in known:
            known[name] = Statistics.of(values()).to_json()
            save_json(known, path)
        return Statistics.from_json(known[name], f"{path}: {name}")


def find_root(root: str | Path) -> Path:
    """Return the folder of a data set, fetching it when it is named by a hub id.

    Raises:
        DatasetError: no such folder, and not a hub id or no huggingface_hub to fetch it with.
    """
    path = Path(root)
    if path.is_dir():
        return path
    if str(root).count("/") != 1 or str(root).startswith((".", "/", "~")):
        raise DatasetError(f"{root}: no such folder")
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise DatasetError(
            f"{root}: no such folder; if it is meant as a hub id: pip install 'wamlab[hub]'"
        ) from error
    try:
        return Path(snapshot_download(str(root), repo_type="dataset"))
    except Exception as error:  # the hub's client raises errors of several libraries
        reason = str(error).strip().splitlines()[0]
        raise DatasetError(
            f"{root}: no such folder, and as a hub id it cannot be fetched: {reason}"
        ) from error


def _from_file(values: dict, where: str) -> Statistics:
    try:
        return Statistics.from_json(values, where)
    except ConfigError as error:
        raise DatasetError(str(error)) from error


def _two_axes(x: np.ndarray) -> np.ndarray:
    return x[:, None] if x.ndim == 1 else x


def _decode_image(data: bytes) -> torch.Tensor:
    with Image.open(io.BytesIO(data)) as image:
        return torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1)
