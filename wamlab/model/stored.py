"""A checkpoint on disk, opened and checked but not yet read.

`open_checkpoint` takes a file, a folder or a hub id and returns a `Checkpoint`: every tensor's
name, shape, dtype and place. It has then proved that the files are whole and that index and shards
agree both ways, so that all else can be decided before any parameter changes. Values are read one
tensor at a time with plain file reads: a memory map would count towards resident memory, up
to the size of the file.
"""

import json
import math
import pickle
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from wamlab.config import UserError

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
PTH_SUFFIXES = (".pth", ".pt", ".bin")
HUB_PATTERNS = ("*.safetensors", "*.json", "*.yaml", "*.yml")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(/[\w./-]+)?")
_LFS = b"version https://git-lfs"
_REMAP_BYTES = 512 * 2**20  # a mapped .pth counts as resident: map it anew after this much


class CheckpointError(UserError):
    """A checkpoint that is broken or does not fit; nothing was changed."""


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """What is known of a tensor before it is read.

    Args:
        file: the file that holds it.
        dtype: its dtype on disk.
        shape: its shape.
        offset: where its bytes start (safetensors only).
    """

    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int = 0

    @property
    def nbytes(self) -> int:
        """Return its size in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


class _File(Protocol):
    tensors: dict[str, StoredTensor]

    def read(self, name: str) -> Tensor: ...


class Checkpoint:
    """An opened checkpoint.

    Args:
        root: its folder, where its configuration files lie.
        files: the opened files; no tensor name may stand in two of them.
    """

    def __init__(self, root: Path, files: Iterable[_File]) -> None:
        self.root = root
        self._file_of = {name: file for file in files for name in file.tensors}
        self.tensors = {name: file.tensors[name] for name, file in self._file_of.items()}

    def read(self, name: str) -> Tensor:
        """Return one tensor on the CPU, in the dtype it was stored in."""
        return self._file_of[name].read(name)

    def under(self, prefix: str) -> dict[str, str]:
        """Return {name without the prefix: stored name} of the tensors under `prefix`."""
        return {n.removeprefix(prefix): n for n in self.tensors if n.startswith(prefix)}


def open_checkpoint(source: str | Path, *, revision: str | None = None) -> Checkpoint:
    """Open a checkpoint and check its files against each other.

    Args:
        source: a .safetensors, .safetensors.index.json or .pth file; a folder that holds
            one checkpoint; a hub id "owner/name" or a file of it, "owner/name/folder/file.pth"
            (needs `huggingface_hub`).
        revision: the hub's branch, tag or commit.

    Raises:
        CheckpointError: missing, truncated or stray files, a Git-LFS pointer, an index that
            disagrees with its shards.
    """
    path = locate(source, revision=revision)
    if path.is_dir():
        path = _only_checkpoint_in(path)
    _refuse_pointer(path)
    if path.name.endswith(".safetensors.index.json"):
        return Checkpoint(path.parent, _open_shards(path))
    return Checkpoint(path.parent, [_open_file(path)])


def locate(source: str | Path, *, revision: str | None = None) -> Path:
    """Return the local path of a checkpoint, fetched from the hub if `source` is no path here.

    Raises:
        CheckpointError: neither a path nor a hub id, or the hub refuses it.
    """
    path = Path(source).expanduser()
    if path.exists():
        return path
    hub_id = str(source)
    if not _HUB_ID.fullmatch(hub_id):
        raise CheckpointError(f"no such checkpoint: {source} (a path, or a hub id 'owner/name')")
    try:
        import huggingface_hub
    except ImportError as error:
        raise CheckpointError(
            f"{source} is not a path here; to fetch it from the hub: pip install 'wamlab[hub]'"
        ) from error
    owner, name, *file = hub_id.split("/", 2)
    repo = f"{owner}/{name}"
    try:
        if file:
            return Path(huggingface_hub.hf_hub_download(repo, file[0], revision=revision))
        return Path(
            huggingface_hub.snapshot_download(
                repo, revision=revision, allow_patterns=list(HUB_PATTERNS)
            )
        )
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{source} is neither a path here nor readable from the hub: {error}"
        ) from error


def _only_checkpoint_in(folder: Path) -> Path:
    for pattern in ("*.safetensors.index.json", "*.safetensors", *(f"*{s}" for s in PTH_SUFFIXES)):
        found = sorted(folder.glob(pattern))
        if len(found) == 1:
            return found[0]
        if found:
            names = ", ".join(p.name for p in found)
            raise CheckpointError(
                f"{folder} holds {names} and no single index that names them: give the file itself"
            )
    raise CheckpointError(
        f"{folder} holds no checkpoint (*.safetensors, *.safetensors.index.json or *.pth)"
    )


def _open_file(path: Path) -> _File:
    if path.suffix == ".safetensors":
        return _SafetensorsFile(path)
    if path.suffix in PTH_SUFFIXES:
        return _PthFile(path)
    raise CheckpointError(
        f"{path} is not a checkpoint: allowed are .safetensors, .safetensors.index.json, "
        + ", ".join(PTH_SUFFIXES)
    )


def _open_shards(index: Path) -> list[_File]:
    weight_map = _read_weight_map(index)
    shards, problems = {}, []
    for name in sorted(set(weight_map.values())):
        if (index.parent / name).is_file():
            shards[name] = _SafetensorsFile(index.parent / name)
        else:
            absent = [t for t, file in weight_map.items() if file == name]
            problems.append(f"shard {name} is missing and with it {some(absent)}")
    for tensor, file in weight_map.items():
        if file in shards and tensor not in shards[file].tensors:
            problems.append(f"the index puts {tensor} into {file}, which does not hold it")
    for name, shard in shards.items():
        extra = [t for t in shard.tensors if weight_map.get(t) != name]
        if extra:
            problems.append(f"{name} holds {some(extra)}, which the index does not put there")
    for stray in sorted(index.parent.glob("*-of-*.safetensors")):
        if stray.name not in weight_map.values() and _stem(stray.name) == _stem(index.name):
            problems.append(f"shard {stray.name} is not in the index")
    if problems:
        raise CheckpointError(f"{index} and its shards disagree: " + "; ".join(problems))
    return list(shards.values())


def _stem(name: str) -> str:
    return re.sub(r"(-\d+-of-\d+)?\.safetensors(\.index\.json)?$", "", name)


def _read_weight_map(index: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(index.read_bytes())["weight_map"]
        plain = all(isinstance(f, str) and Path(f).name == f for f in weight_map.values())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index} is not a safetensors index: {error!r}") from error
    if not weight_map or not plain:
        raise CheckpointError(f"{index} must map tensor names to the names of files beside it")
    return weight_map


class _SafetensorsFile:
    def __init__(self, path: Path) -> None:
        _refuse_pointer(path)
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or 8 + length > size:
                raise CheckpointError(f"{path} is truncated: {size} bytes, its header needs more")
            header_bytes = file.read(length)
        try:
            header = json.loads(header_bytes)
            header.pop("__metadata__", None)
            self.tensors = {n: self._entry(path, 8 + length, e) for n, e in header.items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{path} has no valid safetensors header: {error!r}") from error
        end = max((t.offset + t.nbytes for t in self.tensors.values()), default=8 + length)
        if end != size:
            what = "is truncated" if size < end else "has bytes after its last tensor"
            lost = [n for n, t in self.tensors.items() if t.offset + t.nbytes > size]
            raise CheckpointError(
                f"{path} {what}: {size} bytes, its header announces {end}"
                + (f"; cut are {some(lost)}" if lost else "")
            )

    @staticmethod
    def _entry(path: Path, base: int, entry: dict[str, Any]) -> StoredTensor:
        begin, end = entry["data_offsets"]
        tensor = StoredTensor(
            file=path,
            dtype=DTYPES[entry["dtype"]],
            shape=tuple(entry["shape"]),
            offset=base + begin,
        )
        if tensor.nbytes != end - begin or begin < 0:
            raise ValueError(f"shape {entry['shape']} does not fill bytes {begin}..{end}")
        return tensor

    def read(self, name: str) -> Tensor:
        entry = self.tensors[name]
        value = torch.empty(entry.shape, dtype=entry.dtype, device="cpu")
        with entry.file.open("rb") as file:
            file.seek(entry.offset)
            got = file.readinto(value.reshape(-1).view(torch.uint8).numpy())
        if got != entry.nbytes:
            raise CheckpointError(f"{entry.file} changed while {name} was being read")
        return value


class _PthFile:
    def __init__(self, path: Path) -> None:
        _refuse_pointer(path)
        self._path, self._taken = path, 0
        self._mapped = self._map()
        self.tensors = {
            name: StoredTensor(file=path, dtype=value.dtype, shape=tuple(value.shape))
            for name, value in self._mapped.items()
        }

    def _map(self) -> dict[str, Tensor]:
        try:
            values = torch.load(self._path, map_location="cpu", mmap=True, weights_only=True)
        except (RuntimeError, pickle.UnpicklingError, EOFError, OSError) as error:
            raise CheckpointError(
                f"{self._path} cannot be read as a file of tensors alone (truncated, written by "
                f"torch before 1.6, or it holds other objects): {error}"
            ) from error
        for wrapper in ("state_dict", "model", "module"):
            if isinstance(values, dict) and isinstance(values.get(wrapper), dict):
                values = values[wrapper]
        tensors = isinstance(values, dict) and all(isinstance(v, Tensor) for v in values.values())
        if not tensors or not values:
            raise CheckpointError(f"{self._path} must hold a dict of tensors")
        return values

    def read(self, name: str) -> Tensor:
        if self._taken > _REMAP_BYTES:
            self._mapped, self._taken = self._map(), 0
        self._taken += self.tensors[name].nbytes
        return self._mapped[name]


def _refuse_pointer(path: Path) -> None:
    if not path.is_file():
        raise CheckpointError(f"no such checkpoint file: {path}")
    with path.open("rb") as file:
        head = file.read(len(_LFS))
    if head == _LFS:
        raise CheckpointError(
            f"{path} is a Git-LFS pointer, not the weights: run `git lfs pull` in its folder"
        )
    if not head:
        raise CheckpointError(f"{path} is empty")


def some(names: Iterable[str], limit: int = 8) -> str:
    """Return a list of names for a message, cut to the first few."""
    names = sorted(names)
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
