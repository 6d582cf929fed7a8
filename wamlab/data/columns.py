"""A data set's low-dimensional columns as flat memory-mapped arrays, converted once.

Every table is read once, in order; each numeric column becomes one .npy file of all frames, each
text column numbers and a list of texts, and images that stand in the tables (LIBERO's PNGs) one
file of their bytes with offsets. Afterwards a row is an array index, and all workers share
the pages. The conversion shows a progress bar, goes on where it was interrupted, and is done again
when a table or meta file has changed.
"""

import hashlib
import json
import os
import shutil
import time
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from tqdm import tqdm

from wamlab.config import save_json
from wamlab.data import metadata
from wamlab.data.metadata import DatasetError, Episodes, Info, VideoTable
from wamlab.ffmpeg import cache_dir, locked

FORMAT = 1  # part of the fingerprint: a new layout converts anew
REBUILT = ("index", "frame_index", "episode_index")  # follow from the episode table
SAVE_EVERY_S = 2.0
READ_AHEAD = 4  # tables of one episode; on a network disk the waiting is what costs


@dataclass
class Columns:
    """The converted columns, opened read-only; pickling sends the folder, not the data.

    `arrays` are [N] or [N, D]; `texts` are the words of text columns; an image column is an offset
    array [N + 1] into a file of bytes.
    """

    folder: Path
    episodes: Episodes = field(init=False)
    arrays: dict[str, np.ndarray] = field(init=False)
    images: dict[str, tuple[np.ndarray, np.ndarray]] = field(init=False)
    texts: dict[str, list[str]] = field(init=False)

    def __post_init__(self) -> None:
        layout = json.loads((self.folder / "layout.json").read_text())
        files = [_file(c) for c in layout["columns"]]
        self.arrays = {
            c: _load(self.folder / f"{f}.npy")
            for c, f in zip(layout["columns"], files)
            if layout["columns"][c]["kind"] != "image"
        }
        self.images = {
            c: (_load(self.folder / f"{f}.npy"), _load_bytes(self.folder / f"{f}.bin"))
            for c, f in zip(layout["columns"], files)
            if layout["columns"][c]["kind"] == "image"
        }
        self.texts = layout["texts"]
        self.episodes = _load_episodes(self.folder, layout["cameras"])

    def __getstate__(self) -> dict[str, Any]:
        return {"folder": self.folder}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.folder = state["folder"]
        self.__post_init__()

    def image(self, column: str, row: int) -> bytes:
        """Return one encoded image."""
        offsets, data = self.images[column]
        return data[offsets[row] : offsets[row + 1]].tobytes()


def open_columns(info: Info, *, progress: bool) -> Columns:
    """Open the flat columns, converting the tables first if that was not done.

    Args:
        info: of the data set; they are kept in its `.wamlab`, or where that cannot be written, in
            the user's cache.
        progress: show a bar while converting.

    Raises:
        DatasetError: a table is missing, unreadable, or does not fit the episode table.
    """
    base = default_cache(info.root)
    text = json.dumps([FORMAT, metadata.fingerprint(info)])
    folder = base / f"columns-{hashlib.sha256(text.encode()).hexdigest()[:16]}"
    if not folder.is_dir():
        base.mkdir(parents=True, exist_ok=True)
        (base / ".gitignore").write_text("*\n")
        with locked(base / "lock"):  # one process converts, the others then find it done
            if not folder.is_dir():
                _Conversion(info, folder.with_suffix(".partial"), progress=progress).run()
                folder.with_suffix(".partial").rename(folder)
                for old in base.glob("columns-*"):
                    if old != folder:
                        shutil.rmtree(old, ignore_errors=True)
    return Columns(folder)


def default_cache(root: Path) -> Path:
    """Return where the converted columns of a data set are kept."""
    if os.access(root, os.W_OK):
        return root / ".wamlab"
    name = hashlib.sha256(str(root.resolve()).encode()).hexdigest()[:16]
    return cache_dir() / "lerobot" / name


class _Conversion:
    """One pass over the tables into a folder that can be continued."""

    def __init__(self, info: Info, folder: Path, *, progress: bool) -> None:
        self.info, self.folder, self.progress = info, folder, progress
        self.episodes = metadata.read_episodes(info)
        self.groups = self.episodes.table_starts()
        self.state: dict[str, Any] = {"done": 0, "texts": {}, "columns": {}, "bytes": {}}

    def run(self) -> None:
        """Convert what is left, then write the layout."""
        self.folder.mkdir(exist_ok=True)
        saved = self.folder / "progress.json"
        if not saved.is_file():
            self._create()
        self.state = json.loads(saved.read_text())
        bar = tqdm(
            total=len(self.groups) - 1,
            initial=self.state["done"],
            desc=f"reading {self.info.root.name}",
            unit="table",
            disable=None if self.progress else True,
        )
        with ExitStack() as stack, bar:
            self._open(stack)
            last = time.monotonic()
            for number, table in self._tables(self.state["done"]):
                self._convert(number, table)
                bar.update()
                if time.monotonic() - last > SAVE_EVERY_S:
                    self._save(number + 1)
                    last = time.monotonic()
            self._save(len(self.groups) - 1)
        layout = {k: self.state[k] for k in ("columns", "texts")}
        save_json(layout | {"cameras": list(self.episodes.videos)}, self.folder / "layout.json")

    def _create(self) -> None:
        """Make empty arrays for the columns that the first table has."""
        path = metadata.table_path(self.info, self.episodes, 0)
        schema = metadata.read_schema(path)
        frames = int(self.episodes.offsets[-1])
        for column in schema:
            spec = _spec(column, self.info, path)
            if spec is None:
                continue
            self.state["columns"][column.name] = spec
            extra = 1 if spec["kind"] == "image" else 0
            shape = (frames + extra, *([spec["width"]] if "width" in spec else []))
            array = np.lib.format.open_memmap(
                self.folder / f"{_file(column.name)}.npy", "w+", spec["dtype"], shape
            )
            array.flush()
        _save_episodes(self.folder, self.episodes)
        save_json(self.state, self.folder / "progress.json")

    def _open(self, stack: ExitStack) -> None:
        self.arrays, self.blobs = {}, {}
        for name, spec in self.state["columns"].items():
            self.arrays[name] = np.load(self.folder / f"{_file(name)}.npy", mmap_mode="r+")
            if spec["kind"] == "image":
                path = self.folder / f"{_file(name)}.bin"
                path.touch()
                os.truncate(path, self.state["bytes"].get(name, 0))
                self.blobs[name] = stack.enter_context(path.open("ab"))

    def _tables(self, done: int) -> Iterator[tuple[int, Future]]:
        """Yield the numbers and tables that are left; small files are read ahead in threads."""
        ahead = 1 if self.info.shared_files else READ_AHEAD
        waiting: deque[tuple[int, Future]] = deque()
        with ThreadPoolExecutor(ahead) as pool:
            for number in range(done, len(self.groups) - 1):
                path = metadata.table_path(self.info, self.episodes, self.groups[number])
                waiting.append((number, pool.submit(metadata.read_parquet, path)))
                if len(waiting) > ahead:
                    yield waiting.popleft()
            yield from waiting

    def _convert(self, number: int, read: Future) -> None:
        first, last = self.groups[number], self.groups[number + 1]
        path = metadata.table_path(self.info, self.episodes, first)
        start, stop = (int(self.episodes.offsets[e]) for e in (first, last))
        try:
            table = read.result()
        except DatasetError as error:
            which = (
                f"episode {self.episodes.ids[first]} has no table: " if last - first == 1 else ""
            )
            raise DatasetError(f"{which}{error} (frames expected: {stop - start})") from error
        self._check(table, path, first, last)
        for name, spec in self.state["columns"].items():
            if name not in table.column_names:
                has = ", ".join(table.column_names)
                raise DatasetError(
                    f"{path}: no column {name!r}, which the first table has; it has {has}"
                )
            own = table.schema.field(name).type
            if _kind(own) != spec["kind"] or (_list_of(own) is None) == ("width" in spec):
                raise DatasetError(f"{path}: {name} holds {own}, which the first table does not")
            self._fill(name, spec, table[name].combine_chunks(), slice(start, stop), path)

    def _check(self, table: pa.Table, path: Path, first: int, last: int) -> None:
        lengths = self.episodes.lengths[first:last]
        ids = self.episodes.ids[first:last]
        if len(table) != lengths.sum():
            raise DatasetError(
                f"{path}: {len(table)} rows, but meta/ counts {lengths.sum()} frames for "
                f"episode{'s' if last - first > 1 else ''} {', '.join(map(str, ids[:8]))}"
            )
        if self.info.shared_files and "episode_index" in table.column_names:
            kind = table["episode_index"].type
            if not pa.types.is_integer(kind):
                raise DatasetError(f"{path}: episode_index holds {kind}: must be whole numbers")
            found = table["episode_index"].to_numpy()
            wrong = np.flatnonzero(found != np.repeat(ids, lengths))
            if len(wrong):
                raise DatasetError(
                    f"{path}: row {wrong[0]} is of episode {found[wrong[0]]}, but meta/episodes "
                    f"puts episode {np.repeat(ids, lengths)[wrong[0]]} there"
                )

    def _fill(self, name: str, spec: dict, column: pa.Array, rows: slice, path: Path) -> None:
        array = self.arrays[name]
        if spec["kind"] != "image" and column.null_count:
            raise DatasetError(f"{path}: {name} has {column.null_count} empty cells")
        if spec["kind"] == "text":
            known = self.state["texts"].setdefault(name, [])
            encoded = column.dictionary_encode()
            number = {t: i for i, t in enumerate(known)}
            for text in encoded.dictionary.to_pylist():
                if text not in number:
                    number[text] = len(known)
                    known.append(text)
            table = np.array([number[t] for t in encoded.dictionary.to_pylist()])
            array[rows] = table[encoded.indices.to_numpy(zero_copy_only=False)]
        elif spec["kind"] == "image":
            self._fill_images(name, column, rows, path)
        elif "width" in spec:
            widths = pc.unique(pc.list_value_length(column)).to_pylist()
            if widths != [spec["width"]]:
                raise DatasetError(
                    f"{path}: {name} has {' or '.join(map(str, widths))} values a row, "
                    f"not {spec['width']} as the first table"
                )
            flat = column.flatten().to_numpy(zero_copy_only=False)
            array[rows] = flat.reshape(-1, spec["width"])
        else:
            array[rows] = column.to_numpy(zero_copy_only=False)

    def _fill_images(self, name: str, column: pa.Array, rows: slice, path: Path) -> None:
        data = column.field("bytes") if pa.types.is_struct(column.type) else column
        if data.null_count:
            raise DatasetError(f"{path}: {data.null_count} images of {name} have no bytes")
        offset = self.blobs[name].tell()
        for row, image in zip(range(rows.start, rows.stop), data):
            offset += self.blobs[name].write(image.as_buffer())
            self.arrays[name][row + 1] = offset

    def _save(self, done: int) -> None:
        """Make what was converted so far durable, then say so."""
        for array in self.arrays.values():
            array.flush()
        for name, blob in self.blobs.items():
            blob.flush()
            self.state["bytes"][name] = blob.tell()
        self.state["done"] = done
        save_json(self.state, self.folder / "progress.json")


def _spec(column: pa.Field, info: Info, path: Path) -> dict[str, Any] | None:
    """Return how a column is kept, or None when it is not needed."""
    kind, inner = _kind(column.type), _list_of(column.type)
    if column.name in REBUILT or kind is None:
        return None
    if kind == "image":
        return {"kind": kind, "dtype": "int64"} if column.name in info.features else None
    if kind == "text":
        return {"kind": kind, "dtype": "int32"}
    if inner is None:
        return {"kind": kind, "dtype": _dtype(column.type)}
    cells = metadata.read_parquet(path, [column.name])[column.name]
    width = next((len(cell) for cell in cells if cell.is_valid), 0)
    return {"kind": kind, "dtype": _dtype(inner), "width": width}


def _kind(kind: pa.DataType) -> str | None:
    """Return "image", "text" or "number" for what a column holds; None for anything else."""
    if pa.types.is_struct(kind) or pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        return "image"
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return "text"
    return "number" if _is_number(_list_of(kind) or kind) else None


def _list_of(kind: pa.DataType) -> pa.DataType | None:
    """Return what a column's lists hold, or None when it holds no lists."""
    lists = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)
    return kind.value_type if any(fits(kind) for fits in lists) else None


def _is_number(kind: pa.DataType) -> bool:
    return pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)


def _dtype(kind: pa.DataType) -> str:
    return np.dtype(kind.to_pandas_dtype()).name


def _file(column: str) -> str:
    return column.replace("/", "_")


def _load(path: Path) -> np.ndarray:
    return np.load(path, mmap_mode="r").view(np.ndarray)  # np.memmap's own indexing is slow


def _load_bytes(path: Path) -> np.ndarray:
    return np.memmap(path, np.uint8, "r") if path.stat().st_size else np.zeros(0, np.uint8)


def _save_episodes(folder: Path, episodes: Episodes) -> None:
    for name in ("ids", "lengths", "data_chunk", "data_file", "offsets"):
        np.save(folder / f"episodes.{name}.npy", getattr(episodes, name))
    for number, table in enumerate(episodes.videos.values()):
        for name in ("chunk", "file", "start_s", "end_s"):
            np.save(folder / f"episodes.video{number}.{name}.npy", getattr(table, name))


def _load_episodes(folder: Path, cameras: list[str]) -> Episodes:
    def load(*names: str, prefix: str) -> Mapping[str, np.ndarray]:
        return {n: _load(folder / f"{prefix}.{n}.npy") for n in names}

    videos = {
        camera: VideoTable(
            **load("chunk", "file", "start_s", "end_s", prefix=f"episodes.video{number}")
        )
        for number, camera in enumerate(cameras)
    }
    own = load("ids", "lengths", "data_chunk", "data_file", "offsets", prefix="episodes")
    return Episodes(**own, videos=videos)
