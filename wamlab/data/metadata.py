"""What a LeRobot data set says about itself: meta/ of v2.0, v2.1 and v3.0, and where its files lie.

Everything here reads small files and touches no table of frames and no video.
"""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from wamlab.data.meta_files import (
    COUNT,
    LENGTH,
    OBJECT,
    RATE,
    SECONDS,
    TEXT,
    WHOLE,
    WHOLES,
    DatasetError,
    need,
    numbered_lines,
    optional,
    pattern,
    read_object,
    read_parquet,
    typed,
)
from wamlab.data.meta_files import read_json as read_json
from wamlab.data.meta_files import read_schema as read_schema

VERSIONS = ("v2.0", "v2.1", "v3.0")


@dataclass(frozen=True, kw_only=True)
class Info:
    """meta/info.json. `video_path` is None when images stand in the tables."""

    root: Path
    version: str
    fps: float
    features: Mapping[str, Mapping[str, Any]]
    data_path: str
    video_path: str | None
    chunks_size: int
    total_episodes: int | None
    total_frames: int | None

    @property
    def shared_files(self) -> bool:
        """Whether a file holds several episodes (v3.0)."""
        return self.version == "v3.0"

    def image_features(self) -> list[str]:
        """Return the names of all cameras, in videos or in the tables."""
        return [k for k, f in self.features.items() if f.get("dtype") in ("video", "image")]

    def frame_hw(self, key: str) -> tuple[int, int]:
        """Return a camera's height and width in pixels, whatever order its shape is written in.

        Raises:
            DatasetError: the shape is not that of an image.
        """
        feature = self.features[key]
        shape, names = list(feature.get("shape") or ()), feature.get("names")
        if len(shape) != 3:
            raise DatasetError(f"{self.root}/meta/info.json: {key} has shape {shape}, not 3 axes")
        if isinstance(names, list) and "height" in names[:3] and "width" in names[:3]:
            return shape[names.index("height")], shape[names.index("width")]
        return tuple(shape[1:]) if shape[0] in (1, 3) and shape[2] > 4 else tuple(shape[:2])


@dataclass(frozen=True, kw_only=True)
class VideoTable:
    """Where each episode of one camera stands: file numbers int64 [E] and seconds float64 [E]."""

    chunk: np.ndarray
    file: np.ndarray
    start_s: np.ndarray
    end_s: np.ndarray


@dataclass(frozen=True, kw_only=True)
class Episodes:
    """The episode table, in the order of the frames.

    `ids`, `lengths`, `data_chunk`, `data_file` are int64 [E]; `offsets` int64 [E + 1] are the rows
    in the flat columns; `videos` is empty for v2 data sets, whose file names follow from the id.
    """

    ids: np.ndarray
    lengths: np.ndarray
    data_chunk: np.ndarray
    data_file: np.ndarray
    offsets: np.ndarray
    videos: Mapping[str, VideoTable]

    def __len__(self) -> int:
        return len(self.ids)

    def table_starts(self) -> np.ndarray:
        """Return the episodes at which a new table begins, and the number of episodes."""
        moved = (np.diff(self.data_chunk) != 0) | (np.diff(self.data_file) != 0)
        return np.concatenate([[0], np.flatnonzero(moved) + 1, [len(self)]])


@dataclass(frozen=True)
class VideoSpan:
    """One episode of one camera: a file, and the part of it (`end_s` None = to its end)."""

    path: Path
    start_s: float = 0.0
    end_s: float | None = None


def read_info(root: str | Path) -> Info:
    """Read meta/info.json.

    Raises:
        DatasetError: there is none, a field is missing, or the version is not known.
    """
    root = Path(root)
    path = root / "meta/info.json"
    if not path.is_file():
        what = (
            "no such folder" if not root.is_dir() else "not a LeRobot data set: no meta/info.json"
        )
        raise DatasetError(f"{root}: {what}")
    values = read_object(path)
    needed = ("codebase_version", "fps", "features", "data_path")
    absent = [k for k in needed if k not in values]
    if absent:
        raise DatasetError(f"{path}: no {', '.join(absent)}; it has {', '.join(values)}")
    version = str(values["codebase_version"])
    if version not in VERSIONS:
        raise DatasetError(f"{path}: LeRobot {version}: wamlab reads {', '.join(VERSIONS)}")
    return Info(
        root=root,
        version=version,
        fps=need(values, "fps", RATE, f"{path}"),
        features=_features(values["features"], path),
        data_path=pattern(need(values, "data_path", TEXT, f"{path}"), _DATA, f"{path}: data_path"),
        video_path=_video_path(values, version, path),
        chunks_size=optional(values, "chunks_size", COUNT, f"{path}", 1000),
        total_episodes=values.get("total_episodes"),
        total_frames=values.get("total_frames"),
    )


_DATA = {"episode_chunk": 0, "episode_index": 0, "chunk_index": 0, "file_index": 0}


def _features(values: Any, path: Path) -> dict[str, dict[str, Any]]:
    """Return the features, of which dtype and shape are what they must be."""
    for name, feature in typed(values, OBJECT, f"{path}: features").items():
        where = f"{path}: features.{name}"
        typed(feature, OBJECT, where)
        if "dtype" in feature:
            need(feature, "dtype", TEXT, where)
        optional(feature, "shape", WHOLES, where, [])
    return values


def _video_path(values: dict[str, Any], version: str, path: Path) -> str | None:
    text = optional(values, "video_path", TEXT, f"{path}", None)
    if not text:
        return text
    numbers = ("chunk_index", "file_index") if version == "v3.0" else tuple(_DATA)[:2]
    known = {"video_key": "camera", **dict.fromkeys(numbers, 0)}
    return pattern(text, known, f"{path}: video_path")


def read_episodes(info: Info) -> Episodes:
    """Read the episode table, v2 (JSON lines) or v3 (Parquet).

    Raises:
        DatasetError: it is missing, lacks a column, or holds no episode.
    """
    if info.shared_files:
        found = _read_episodes_v3(info)
    else:
        rows = sorted(_episode_rows(info.root / "meta/episodes.jsonl"))
        ids, lengths = np.array(rows, np.int64).reshape(-1, 2).T
        found = _table(ids, lengths, ids // info.chunks_size, ids, {})
    if not len(found):
        raise DatasetError(f"{info.root}: no episode")
    return found


def _episode_rows(path: Path) -> Iterator[tuple[int, int]]:
    for where, row in numbered_lines(path):
        absent = [k for k in ("episode_index", "length") if k not in row]
        if absent:
            raise DatasetError(f"{where}: no {', '.join(absent)}; it has {', '.join(row)}")
        yield need(row, "episode_index", WHOLE, where), need(row, "length", LENGTH, where)


def _read_episodes_v3(info: Info) -> Episodes:
    paths = sorted((info.root / "meta/episodes").glob("chunk-*/file-*.parquet"))
    if not paths:
        raise DatasetError(f"{info.root}/meta/episodes: no chunk-*/file-*.parquet")
    cameras = [k for k, f in info.features.items() if f.get("dtype") == "video"]
    names = ["episode_index", "length", "dataset_from_index", "data/chunk_index", "data/file_index"]
    parts = ("chunk_index", "file_index", "from_timestamp", "to_timestamp")
    names += [f"videos/{k}/{p}" for k in cameras for p in parts]
    tables = [_number_columns(read_parquet(p, names), p) for p in paths]
    values = {n: np.concatenate([t[n] for t in tables]) for n in names}
    order = np.argsort(values["dataset_from_index"], kind="stable")
    values = {n: v[order] for n, v in values.items()}
    videos = {}
    for key in cameras:
        chunk, file, start, end = (values[f"videos/{key}/{p}"] for p in parts)
        videos[key] = VideoTable(chunk=chunk, file=file, start_s=start, end_s=end)
    ids, lengths = values["episode_index"], values["length"]
    return _table(ids, lengths, values["data/chunk_index"], values["data/file_index"], videos)


def _number_columns(table: pa.Table, path: Path) -> dict[str, np.ndarray]:
    """Return the columns of an episode table: seconds float64 [E], all others int64 [E]."""
    found = {}
    for name, column in zip(table.column_names, table.columns):
        if not (pa.types.is_integer(column.type) or pa.types.is_floating(column.type)):
            raise DatasetError(f"{path}: column {name} holds {column.type}: must be numbers")
        values = column.to_numpy()
        seconds = name.endswith("_timestamp")
        kind = SECONDS if seconds else LENGTH if name == "length" else WHOLE
        ends = (values.min().item(), values.max().item()) if len(values) else ()
        broken = column.null_count or any(kind.read(v) is None for v in ends)
        if broken or (not seconds and (values % 1).any()):
            row = next(n for n, v in enumerate(column.to_pylist()) if kind.read(v) is None)
            typed(column[row].as_py(), kind, f"{path}: {name} of row {row}")
        found[name] = values.astype(np.float64 if seconds else np.int64)
    return found


def _table(
    ids: np.ndarray, lengths: np.ndarray, chunk: np.ndarray, file: np.ndarray, videos: dict
) -> Episodes:
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    return Episodes(
        ids=ids, lengths=lengths, data_chunk=chunk, data_file=file, offsets=offsets, videos=videos
    )


def read_tasks(info: Info) -> dict[int, str]:
    """Read the task table: task index -> words.

    Raises:
        DatasetError: it is missing, or has no column of text.
    """
    if not info.shared_files:
        rows = numbered_lines(info.root / "meta/tasks.jsonl")
        return {need(r, "task_index", WHOLE, w): need(r, "task", TEXT, w) for w, r in rows}
    path = info.root / "meta/tasks.parquet"
    table = read_parquet(path)
    # the text is a column "task", or the table's index, which pandas stores under its own name
    text = [
        f.name
        for f in table.schema
        if pa.types.is_string(f.type) or pa.types.is_large_string(f.type)
    ]
    if "task_index" not in table.column_names or not text:
        raise DatasetError(
            f"{path}: needs task_index and a column of text; it has {', '.join(table.column_names)}"
        )
    name = "task" if "task" in text else text[0]
    pairs = zip(table["task_index"].to_pylist(), table[name].to_pylist())
    return {
        typed(index, WHOLE, f"{path}: task_index of row {row}"): typed(
            words, TEXT, f"{path}: {name} of row {row}"
        )
        for row, (index, words) in enumerate(pairs)
    }


def read_step_filter(info: Info, episodes: Episodes) -> np.ndarray:
    """Return the rows, in the flat columns, that may not be a start, int64 sorted.

    meta/step_filter.jsonl names them by episode (idle stretches, for example); episodes that it
    does not name, or all when there is no such file, may start anywhere.

    Raises:
        DatasetError: it names an episode or a step that does not exist.
    """
    path = info.root / "meta/step_filter.jsonl"
    if not path.is_file():
        return np.zeros(0, np.int64)
    places = {int(number): place for place, number in enumerate(episodes.ids)}
    found = []
    for where, row in numbered_lines(path):
        number = need(row, "episode_index", WHOLE, where)
        steps = np.array(need(row, "step_indices", WHOLES, where), np.int64)
        if number not in places:
            raise DatasetError(f"{path}: no episode {number} among the {len(episodes)}")
        length = int(episodes.lengths[places[number]])
        if len(steps) and not 0 <= steps.min() <= steps.max() < length:
            raise DatasetError(
                f"{path}: episode {number} has steps {steps.min()} to {steps.max()}, "
                f"but {length} frames"
            )
        found.append(steps + int(episodes.offsets[places[number]]))
    return np.unique(np.concatenate(found)) if found else np.zeros(0, np.int64)


def read_modality(info: Info) -> dict[str, dict[str, dict[str, Any]]]:
    """Read meta/modality.json; empty when there is none.

    Raises:
        DatasetError: a part is not what it must be.
    """
    path = info.root / "meta/modality.json"
    values = read_object(path) if path.is_file() else {}
    for group in ("state", "action", "video", "annotation"):
        for name, own in typed(values.get(group, {}), OBJECT, f"{path}: {group}").items():
            where = f"{path}: {group}.{name}"
            optional(typed(own, OBJECT, where), "original_key", TEXT, where, None)
            if group in ("state", "action"):
                start, end = (need(own, k, WHOLE, where) for k in ("start", "end"))
                if start >= end:
                    raise DatasetError(f"{where}: end is {end}: must be above start, {start}")
    return values


def read_embodiment_tag(root: Path) -> str | None:
    """Return the robot that meta/embodiment.json names; None when there is no such file.

    Raises:
        DatasetError: the file names none.
    """
    path = root / "meta/embodiment.json"
    return need(read_object(path), "embodiment_tag", TEXT, f"{path}") if path.is_file() else None


def table_path(info: Info, episodes: Episodes, episode: int) -> Path:
    """Return the table that holds an episode, given by its place in the episode table."""
    return info.root / info.data_path.format(
        episode_chunk=int(episodes.data_chunk[episode]),
        episode_index=int(episodes.ids[episode]),
        chunk_index=int(episodes.data_chunk[episode]),
        file_index=int(episodes.data_file[episode]),
    )


def video_span(info: Info, episodes: Episodes, episode: int, key: str) -> VideoSpan:
    """Return the file, and the part of it, that shows an episode from one camera.

    Args:
        info, episodes: of the data set.
        episode: its place in the episode table.
        key: the camera's feature name.

    Raises:
        DatasetError: the data set has no videos.
    """
    if info.video_path is None:
        raise DatasetError(f"{info.root}/meta/info.json: no video_path, {key} is not a video")
    if not info.shared_files:
        number = int(episodes.ids[episode])
        name = info.video_path.format(
            episode_chunk=number // info.chunks_size, episode_index=number, video_key=key
        )
        return VideoSpan(info.root / name)
    table = episodes.videos[key]
    name = info.video_path.format(
        video_key=key, chunk_index=int(table.chunk[episode]), file_index=int(table.file[episode])
    )
    return VideoSpan(info.root / name, float(table.start_s[episode]), float(table.end_s[episode]))


def fingerprint(info: Info) -> list[tuple[str, int, int]]:
    """Return (path, bytes, modification time) of every file that the flat columns come from."""
    found = []
    for folder in ("meta", "data"):
        found += _stat_tree(str(info.root / folder), folder)
    return sorted(f for f in found if f[0].endswith((".json", ".jsonl", ".parquet")))


def _stat_tree(path: str, name: str) -> list[tuple[str, int, int]]:
    found = []
    if not os.path.isdir(path):
        return found
    with os.scandir(path) as entries:
        for entry in entries:
            inner = f"{name}/{entry.name}"
            if entry.is_dir():
                found += _stat_tree(entry.path, inner)
            else:
                stat = entry.stat()
                found.append((inner, stat.st_size, stat.st_mtime_ns))
    return found
