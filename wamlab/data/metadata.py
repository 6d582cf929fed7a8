"""What a LeRobot data set says about itself: meta/ of v2.0, v2.1 and v3.0, and where its files lie.

Everything here reads small files and touches no table of frames and no video.
"""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from wamlab.config import UserError

VERSIONS = ("v2.0", "v2.1", "v3.0")


class DatasetError(UserError):
    """A data set that cannot be used as it is: file, what is there, what was needed."""


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
        shape, names = list(feature.get("shape", ())), feature.get("names")
        if len(shape) != 3:
            raise DatasetError(f"{self.root}/meta/info.json: {key} has shape {shape}, not 3 axes")
        if isinstance(names, list) and {"height", "width"} <= set(names):
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


def _read_text(path: Path) -> str:
    if not path.is_file():
        raise DatasetError(f"{path}: missing")
    text = path.read_text()
    if text.startswith("version https://git-lfs"):
        raise DatasetError(f"{path}: a Git-LFS pointer, not the file: run `git lfs pull`")
    return text


def read_json(path: Path) -> Any:
    """Read a JSON file.

    Raises:
        DatasetError: missing, a Git-LFS pointer, or not JSON.
    """
    try:
        return json.loads(_read_text(path))
    except json.JSONDecodeError as error:
        raise DatasetError(f"{path}: not valid JSON: {error}") from error


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Read a file of one JSON object a line.

    Raises:
        DatasetError: missing, a Git-LFS pointer, or a line that is not JSON.
    """
    lines = [line for line in _read_text(path).splitlines() if line.strip()]
    try:
        return json.loads("[" + ",".join(lines) + "]")
    except json.JSONDecodeError as error:
        raise DatasetError(f"{path}: not one JSON object a line: {error}") from error


def read_parquet(path: Path, columns: list[str] | None = None) -> pa.Table:
    """Read a table, or some of its columns, on this thread alone.

    Raises:
        DatasetError: missing, empty, a Git-LFS pointer, not Parquet, or without a column.
    """
    with _parquet(path) as file:
        absent = set(columns or ()) - set(file.schema_arrow.names)
        if absent:
            raise DatasetError(
                f"{path}: no column {', '.join(sorted(absent))}; "
                f"it has {', '.join(file.schema_arrow.names)}"
            )
        return file.read(columns=columns, use_threads=False)


def read_schema(path: Path) -> pa.Schema:
    """Return a table's columns and types.

    Raises:
        DatasetError: missing, empty, a Git-LFS pointer, or not Parquet.
    """
    with _parquet(path) as file:
        return file.schema_arrow


@contextmanager
def _parquet(path: Path) -> Iterator[pq.ParquetFile]:
    try:
        with pq.ParquetFile(path) as file:
            yield file
    except FileNotFoundError as error:
        raise DatasetError(f"{path}: missing") from error
    except (pa.ArrowException, OSError) as error:
        raise DatasetError(f"{path}: {_table_fault(path, error)}") from error


def _table_fault(path: Path, error: Exception) -> str:
    with path.open("rb") as file:
        head = file.read(64)
    if not head:
        return "empty (0 bytes): copy it again"
    if head.startswith(b"version https://git-lfs"):
        return "a Git-LFS pointer, not the table: run `git lfs pull`"
    return f"not a readable Parquet file ({str(error).splitlines()[0]})"


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
    values = read_json(path)
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
        fps=float(values["fps"]),
        features=values["features"],
        data_path=values["data_path"],
        video_path=values.get("video_path"),
        chunks_size=int(values.get("chunks_size", 1000)),
        total_episodes=values.get("total_episodes"),
        total_frames=values.get("total_frames"),
    )


def read_episodes(info: Info) -> Episodes:
    """Read the episode table, v2 (JSON lines) or v3 (Parquet).

    Raises:
        DatasetError: it is missing, lacks a column, or holds no episode.
    """
    if info.shared_files:
        found = _read_episodes_v3(info)
    else:
        rows = read_lines(info.root / "meta/episodes.jsonl")
        for number, row in enumerate(rows, 1):
            absent = [k for k in ("episode_index", "length") if k not in row]
            if absent:
                raise DatasetError(
                    f"{info.root}/meta/episodes.jsonl, line {number}: no {', '.join(absent)}; "
                    f"it has {', '.join(row)}"
                )
        rows.sort(key=lambda r: r["episode_index"])
        ids = np.array([r["episode_index"] for r in rows], np.int64)
        lengths = np.array([r["length"] for r in rows], np.int64)
        found = _table(ids, lengths, ids // info.chunks_size, ids, {})
    if not len(found):
        raise DatasetError(f"{info.root}: no episode")
    return found


def _read_episodes_v3(info: Info) -> Episodes:
    paths = sorted((info.root / "meta/episodes").glob("chunk-*/file-*.parquet"))
    if not paths:
        raise DatasetError(f"{info.root}/meta/episodes: no chunk-*/file-*.parquet")
    cameras = [k for k, f in info.features.items() if f.get("dtype") == "video"]
    names = ["episode_index", "length", "dataset_from_index", "data/chunk_index", "data/file_index"]
    parts = ("chunk_index", "file_index", "from_timestamp", "to_timestamp")
    names += [f"videos/{k}/{p}" for k in cameras for p in parts]
    table = pa.concat_tables([read_parquet(p, names) for p in paths])
    values = {n: table[n].to_numpy() for n in names}
    order = np.argsort(values["dataset_from_index"], kind="stable")
    values = {n: v[order] for n, v in values.items()}
    videos = {}
    for key in cameras:
        chunk, file, start, end = (values[f"videos/{key}/{p}"] for p in parts)
        videos[key] = VideoTable(chunk=chunk, file=file, start_s=start, end_s=end)
    ids, lengths = values["episode_index"], values["length"]
    return _table(ids, lengths, values["data/chunk_index"], values["data/file_index"], videos)


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
        rows = read_lines(info.root / "meta/tasks.jsonl")
        return {int(r["task_index"]): r["task"] for r in rows}
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
    return dict(zip(table["task_index"].to_pylist(), table[name].to_pylist()))


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
    for row in read_lines(path):
        number, steps = int(row["episode_index"]), np.array(row["step_indices"], np.int64)
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
    """Read meta/modality.json; empty when there is none."""
    path = info.root / "meta/modality.json"
    return read_json(path) if path.is_file() else {}


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
