"""Writes LeRobot data sets, v2.1 (one file an episode) and v3.0 (many episodes a file).

Small on purpose: it serves the toy world and tests. Each episode's video is encoded on its own, as
DROID's are (H.264 ultrafast, a keyframe every 250 frames, no B-frames), and v3.0 files are joined
without decoding, so both versions of the same episodes hold the same pixels.
"""

import io
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from wamlab.config import ConfigError, save_json
from wamlab.data.embodiment import Embodiment
from wamlab.data.normalize import Statistics, relative_rows

CHUNK = 1000
PATHS = {
    "v2.1": {
        "data_path": "data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet",
        "video_path": "videos/chunk-{episode_chunk:03d}/{video_key}/"
        "episode_{episode_index:06d}.mp4",
    },
    "v3.0": {
        "data_path": "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet",
        "video_path": "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4",
    },
}


@dataclass(frozen=True)
class Clip:
    """An encoded video: the mp4's bytes and its frames' shape (H, W, 3)."""

    data: bytes
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Episode:
    """One recorded episode.

    Args:
        task: what was to be done, in words.
        columns: [T, D] each by column name, or [T] of numbers or words for a column that is not
            packed (extra language columns).
        views: uint8 [T, H, W, 3] each, or a clip, by the column name of the camera.
    """

    task: str
    columns: Mapping[str, np.ndarray]
    views: Mapping[str, np.ndarray | Clip]


@dataclass(kw_only=True)
class Writer:
    """Collects episodes; `close` writes meta/.

    Args:
        root: a folder that does not exist yet, or is empty.
        version: "v2.1" or "v3.0".
        fps: frames a second.
        embodiment: its parts become meta/modality.json and the relative statistics.
        names: the dimensions' names of each packed column, whose statistics are written too.
        images: store views as PNG bytes in the tables, as LIBERO does, instead of videos.
        episodes_per_file: (v3.0) episodes that share a file.
    """

    root: Path
    version: str
    fps: int
    embodiment: Embodiment
    names: Mapping[str, Sequence[str]]
    images: bool = False
    episodes_per_file: int = 3
    episodes: list[dict[str, Any]] = field(default_factory=list)
    tasks: list[str] = field(default_factory=list)
    views: dict[str, tuple[int, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.version not in PATHS:
            raise ConfigError(f"writes LeRobot {' or '.join(PATHS)}, not {self.version!r}")
        self.root = Path(self.root)
        if self.root.is_dir() and any(self.root.iterdir()):
            raise ConfigError(f"{self.root} is not empty: name a new folder")
        self._columns: dict[str, list[np.ndarray]] = {name: [] for name in self.names}
        self._tables: list[pa.Table] = []
        self._videos: dict[str, list[bytes]] = {}

    def add(self, episode: Episode) -> None:
        """Write one episode (its file may follow later)."""
        number, length = len(self.episodes), len(next(iter(episode.columns.values())))
        if episode.task not in self.tasks:
            self.tasks.append(episode.task)
        start = sum(e["length"] for e in self.episodes)
        self.episodes.append(
            {"episode_index": number, "tasks": [episode.task], "length": length}
            | {"dataset_from_index": start, "dataset_to_index": start + length}
        )
        for name, rows in self._columns.items():
            rows.append(np.asarray(episode.columns[name], np.float32))
        self._tables.append(self._table(episode, number, start))
        plain = (c for c in episode.columns if c not in self.names)
        self._plain = {c: str(self._tables[-1].schema.field(c).type) for c in plain}
        for key, frames in episode.views.items():
            self.views[key] = frames.shape[-3:]
            if not self.images:
                clip = frames if isinstance(frames, Clip) else encode_video(frames, self.fps)
                self._videos.setdefault(key, []).append(clip.data)
        per_file = self.episodes_per_file if self.version == "v3.0" else 1
        if len(self._tables) == per_file:
            self._flush()

    def close(self) -> None:
        """Write what is left and meta/."""
        if self._tables:
            self._flush()
        meta = self.root / "meta"
        save_json(self._info(), meta / "info.json")
        save_json(self._modality(), meta / "modality.json")
        save_json({"embodiment_tag": self.embodiment.name}, meta / "embodiment.json")
        stats = {k: Statistics.of(np.concatenate(v)).to_json() for k, v in self._columns.items()}
        save_json(stats, meta / "stats.json")
        save_json(self._relative(), meta / "relative_stats_dreamzero.json")
        if self.version == "v3.0":
            self._close_v3()
        else:
            self._close_v2()

    def _table(self, episode: Episode, number: int, start: int) -> pa.Table:
        steps = np.arange(len(next(iter(episode.columns.values()))), dtype=np.int64)
        columns: dict[str, Any] = {k: _cells(v) for k, v in episode.columns.items()}
        if self.images:
            for key, frames in episode.views.items():
                cells = [
                    {"bytes": encode_png(f), "path": f"frame_{t:06d}.png"}
                    for t, f in enumerate(frames)
                ]
                columns[key] = pa.array(
                    cells, pa.struct({"bytes": pa.binary(), "path": pa.string()})
                )
        task = self.tasks.index(episode.task)
        return pa.table(
            columns
            | {
                "timestamp": (steps / self.fps).astype(np.float32),
                "frame_index": steps,
                "episode_index": np.full_like(steps, number),
                "index": steps + start,
                "task_index": np.full_like(steps, task),
            }
        )

    def _flush(self) -> None:
        """Write the collected episodes as one table and one video a view."""
        last = len(self.episodes)
        members = self.episodes[last - len(self._tables) : last]
        number = members[0]["episode_index"]
        if self.version == "v3.0":
            file = number // self.episodes_per_file
            where = {"chunk_index": file // CHUNK, "file_index": file % CHUNK}
        else:
            where = {"episode_chunk": number // CHUNK, "episode_index": number}
        paths = PATHS[self.version]
        path = self.root / paths["data_path"].format(**where)
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.concat_tables(self._tables), path)
        for key, clips in self._videos.items():
            path = self.root / paths["video_path"].format(video_key=key, **where)
            path.parent.mkdir(parents=True, exist_ok=True)
            joined = clips[0] if len(clips) == 1 else join_videos(clips, self.fps)
            path.write_bytes(joined)
        if self.version == "v3.0":
            self._locate(members, where)
        self._tables, self._videos = [], {}

    def _locate(self, members: list[dict[str, Any]], where: Mapping[str, int]) -> None:
        first = members[0]["dataset_from_index"]
        for row in members:
            row |= {f"data/{k}": v for k, v in where.items()}
            for key in self._videos:
                row |= {f"videos/{key}/{k}": v for k, v in where.items()}
                row[f"videos/{key}/from_timestamp"] = (row["dataset_from_index"] - first) / self.fps
                row[f"videos/{key}/to_timestamp"] = (row["dataset_to_index"] - first) / self.fps

    def _info(self) -> dict[str, Any]:
        paths = dict(PATHS[self.version])
        total = sum(e["length"] for e in self.episodes)
        count = len(self.episodes)
        info = {
            "codebase_version": self.version,
            "robot_type": self.embodiment.name,
            "total_episodes": count,
            "total_frames": total,
            "total_tasks": len(self.tasks),
            "chunks_size": CHUNK,
            "fps": self.fps,
            "splits": {"train": f"0:{count}"},
            "data_path": paths["data_path"],
            "video_path": None if self.images else paths["video_path"],
        }
        if self.version == "v3.0":
            info |= {"data_files_size_in_mb": 100, "video_files_size_in_mb": 200}
        else:
            videos = 0 if self.images else count * len(self.views)
            info |= {"total_videos": videos, "total_chunks": -(-count // CHUNK)}
        return info | {"features": self._features()}

    def _features(self) -> dict[str, Any]:
        features: dict[str, Any] = {
            k: {"dtype": "float32", "shape": [len(n)], "names": list(n)}
            for k, n in self.names.items()
        }
        for key, shape in self.views.items():
            features[key] = {
                "dtype": "image" if self.images else "video",
                "shape": list(shape),
                "names": ["height", "width", "channels"],
            }
            if not self.images:
                features[key]["info"] = {
                    "video.fps": self.fps,
                    "video.height": shape[0],
                    "video.width": shape[1],
                    "video.channels": 3,
                    "video.codec": "h264",
                    "video.pix_fmt": "yuv420p",
                    "has_audio": False,
                }
        whole = {"shape": [1], "names": None}
        features |= {k: {"dtype": kind} | whole for k, kind in self._plain.items()}
        features["timestamp"] = {"dtype": "float32"} | whole
        for key in ("frame_index", "episode_index", "index", "task_index"):
            features[key] = {"dtype": "int64"} | whole
        return features

    def _modality(self) -> dict[str, Any]:
        def parts(which: str) -> dict[str, Any]:
            return {
                p.name: {"original_key": p.column, "start": p.start, "end": p.end}
                for p in getattr(self.embodiment, which)
            }

        video = {
            name: {"original_key": key} for name, key in zip(self.embodiment.views, self.views)
        }
        words = {
            c.removeprefix("annotation."): {"original_key": c} for c in self.embodiment.language
        }
        return {
            "state": parts("state"),
            "action": parts("action"),
            "video": video,
            "annotation": words,
        }

    def _relative(self) -> dict[str, Any]:
        """Return the statistics of (action minus the state at the block's anchor) by part."""
        states = {p.name: p for p in self.embodiment.state}
        found = {}
        for part in self.embodiment.action:
            if part.relative:
                state = states[part.name]
                actions, anchors = self._columns[part.column], self._columns[state.column]
                rows = [
                    relative_rows(
                        a[:, part.start : part.end],
                        s[:, state.start : state.end],
                        self.embodiment.horizon,
                    )
                    for a, s in zip(actions, anchors)
                ]
                found[part.name] = Statistics.of(np.concatenate(rows)).to_json()
        return found

    def _close_v2(self) -> None:
        keep = ("episode_index", "tasks", "length")
        _write_lines(
            self.root / "meta/episodes.jsonl", [{k: e[k] for k in keep} for e in self.episodes]
        )
        tasks = [{"task_index": i, "task": t} for i, t in enumerate(self.tasks)]
        _write_lines(self.root / "meta/tasks.jsonl", tasks)
        stats = [
            {"episode_index": e, "stats": self._episode_stats(e)} for e in range(len(self.episodes))
        ]
        _write_lines(self.root / "meta/episodes_stats.jsonl", stats)

    def _close_v3(self) -> None:
        path = self.root / "meta/episodes/chunk-000/file-000.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        rows = []
        for row in self.episodes:
            stats = self._episode_stats(row["episode_index"])
            flat = {f"stats/{k}/{n}": v for k, s in stats.items() for n, v in s.items()}
            rows.append(row | flat)
        pq.write_table(pa.Table.from_pylist(rows), path)
        # the text is the table's index in LeRobot's own files, which pandas stores under this name
        tasks = {"task_index": range(len(self.tasks)), "__index_level_0__": self.tasks}
        pq.write_table(
            pa.table({k: list(v) for k, v in tasks.items()}), self.root / "meta/tasks.parquet"
        )

    def _episode_stats(self, number: int) -> dict[str, Any]:
        found = {}
        for name, rows in self._columns.items():
            stats = Statistics.of(rows[number]).to_json()
            found[name] = {k: stats[k] for k in ("min", "max", "mean", "std")} | {
                "count": [len(rows[number])]
            }
        return found


def write_dataset(episodes: Iterable[Episode], **settings: Any) -> None:
    """Write a whole data set; `settings` are the fields of `Writer`."""
    writer = Writer(**settings)
    for episode in episodes:
        writer.add(episode)
    writer.close()


def encode_video(frames_THW3: np.ndarray, fps: int) -> Clip:
    """Return an mp4 as DROID's are: H.264 ultrafast, crf 23, a keyframe every 250 frames, no Bs.

    Args:
        frames_THW3: uint8 [T, H, W, 3] RGB, height and width even.
        fps: frames a second.
    """
    buffer = io.BytesIO()
    # one thread: x264 cuts a frame into one slice a thread, so more would change the pixels
    options = {"preset": "ultrafast", "tune": "zerolatency", "crf": "23", "threads": "1"}
    with av.open(buffer, "w", format="mp4") as container:
        stream = container.add_stream("libx264", rate=Fraction(fps), options=options)
        stream.height, stream.width = frames_THW3.shape[1:3]
        stream.pix_fmt, stream.gop_size = "yuv420p", 250
        for image in frames_THW3:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(image, format="rgb24")))
        container.mux(stream.encode(None))
    return Clip(buffer.getvalue(), frames_THW3.shape[1:])


def join_videos(clips: Sequence[bytes], fps: int) -> bytes:
    """Return one mp4 that shows the clips one after the other; packets are copied, not decoded."""
    buffer = io.BytesIO()
    with av.open(io.BytesIO(clips[0])) as first, av.open(buffer, "w", format="mp4") as container:
        out = container.add_stream_from_template(first.streams.video[0])
        shown = 0
        for clip in clips:
            with av.open(io.BytesIO(clip)) as source:
                stream = source.streams.video[0]
                offset = round(Fraction(shown, fps) / stream.time_base)
                for packet in source.demux(stream):
                    if packet.size:
                        packet.pts, packet.dts = packet.pts + offset, packet.dts + offset
                        packet.stream = out
                        container.mux(packet)
                        shown += 1
    return buffer.getvalue()


def _cells(values: np.ndarray) -> pa.Array:
    """Return a column: lists of float32 for [T, D], plain cells for [T]."""
    if np.ndim(values) == 1:
        return pa.array(values)
    return pa.array(list(np.asarray(values, np.float32)), pa.list_(pa.float32()))


def encode_png(image_HW3: np.ndarray) -> bytes:
    """Return the PNG file of one uint8 [H, W, 3] image."""
    codec = av.CodecContext.create("png", "w")
    codec.height, codec.width = image_HW3.shape[:2]
    codec.pix_fmt, codec.time_base = "rgb24", Fraction(1, 1)
    frame = av.VideoFrame.from_ndarray(image_HW3, format="rgb24")
    return b"".join(bytes(p) for p in [*codec.encode(frame), *codec.encode(None)])


def _write_lines(path: Path, rows: Iterable[Any]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
