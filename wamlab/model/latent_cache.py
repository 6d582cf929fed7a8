"""Latents and image features of un-augmented samples, computed once and kept on disk.

A cache is a folder: `meta.json`, and for each kind of output one memory-mapped array with a row a
sample. Row numbers are sample ids, so ranks and workers need no lock; ids past the size limit are
simply not kept. A row counts once its flag is written, after its values.
"""

import dataclasses
import json
import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from wamlab.config import UserError, save_json

FORMAT = "wamlab-latents-1"
_STORED = {torch.float32: np.float32, torch.bfloat16: np.int16}  # bf16 as its bits


class LatentCacheError(UserError):
    """A latent cache of other encoders, other data or another size, or a broken one."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kind:
    """One output: its shape without the batch, and the dtype it is kept in."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes a sample."""
        return math.prod(self.shape) * self.dtype.itemsize


class LatentCache:
    """Encoder outputs by sample id.

    Args:
        folder: where the cache lies.
        meta: what must be equal for a cached row to be right: encoders' fingerprints, video size.

    Raises:
        LatentCacheError: there is no cache, or it was made with other `meta`.
    """

    def __init__(self, folder: str | Path, meta: Mapping[str, str]) -> None:
        self.folder = Path(folder)
        found = _read_meta(self.folder)
        for name, value in meta.items():
            if found["meta"].get(name) != value:
                raise LatentCacheError(
                    f"{folder} was made with another {name}: {found['meta'].get(name)}, wanted is "
                    f"{value}; make a new one with `wamlab encode-latents`"
                )
        self.rows: int = found["rows"]
        self.kinds = {
            name: Kind(shape=tuple(k["shape"]), dtype=getattr(torch, k["dtype"]))
            for name, k in found["kinds"].items()
        }
        self._arrays = {n: self._map(n, _STORED[k.dtype], k.shape) for n, k in self.kinds.items()}
        self._flags = self._map("flags", np.uint8, ())

    @classmethod
    def create(
        cls,
        folder: str | Path,
        meta: Mapping[str, str],
        kinds: Mapping[str, Kind],
        *,
        samples: int,
        max_gib: float,
    ) -> "LatentCache":
        """Open the cache in `folder`, made new if there is none.

        Args:
            folder: where it lies.
            meta: as for the class.
            kinds: the outputs to keep.
            samples: of the data set.
            max_gib: the largest size on disk; ids that do not fit are not kept.

        Raises:
            LatentCacheError: a cache of something else lies there.
        """
        folder = Path(folder)
        if not (folder / "meta.json").is_file():
            row = sum(kind.nbytes for kind in kinds.values()) + 1
            rows = min(samples, int(max_gib * 2**30 / row))
            folder.mkdir(parents=True, exist_ok=True)
            for name, kind in kinds.items():
                _allocate(folder / f"{name}.bin", rows * kind.nbytes)
            _allocate(folder / "flags.bin", rows)
            plain = {
                name: {"shape": kind.shape, "dtype": str(kind.dtype).removeprefix("torch.")}
                for name, kind in kinds.items()
            }
            values = {"format": FORMAT, "meta": dict(meta), "rows": rows, "kinds": plain}
            save_json(values, folder / "meta.json")
        return cls(folder, meta)

    def _map(self, name: str, dtype: type, shape: tuple[int, ...]) -> np.ndarray:
        path, size = self.folder / f"{name}.bin", (self.rows, *shape)
        expected = math.prod(size) * np.dtype(dtype).itemsize
        if not path.is_file() or path.stat().st_size != expected:
            raise LatentCacheError(
                f"{path} is missing or not of {expected} bytes: delete the cache"
            )
        if not expected:
            return np.zeros(size, dtype)
        return np.memmap(path, dtype, "r+", shape=size)

    def has(self, ids: Tensor) -> bool:
        """Whether every sample of int64 [B] is kept."""
        ids = ids.cpu().numpy()
        return bool((ids < self.rows).all() and self._flags[ids].all())

    def missing(self) -> np.ndarray:
        """Return the ids, int64, that fit and are not kept yet."""
        return np.flatnonzero(np.asarray(self._flags) == 0)

    def get(self, ids: Tensor, device: torch.device | str) -> dict[str, Tensor]:
        """Return the outputs of samples int64 [B], on `device`.

        Raises:
            LatentCacheError: one of them is not kept.
        """
        if not self.has(ids):
            raise LatentCacheError(f"{self.folder} lacks some of the samples {ids.tolist()}")
        rows = ids.cpu().numpy()
        out = {}
        for name, kind in self.kinds.items():
            values = torch.from_numpy(self._arrays[name][rows])
            out[name] = values.view(kind.dtype).to(device, non_blocking=True)
        return out

    def put(self, ids: Tensor, outputs: Mapping[str, Tensor]) -> None:
        """Keep the outputs of samples int64 [B], as far as they fit."""
        ids = ids.cpu().numpy()
        fit = np.flatnonzero(ids < self.rows)
        for name, kind in self.kinds.items():
            values = outputs[name].detach().to("cpu", kind.dtype).contiguous()
            plain = values.view(torch.int16) if kind.dtype == torch.bfloat16 else values
            self._arrays[name][ids[fit]] = plain.numpy()[fit]
        self._flags[ids[fit]] = 1


def _allocate(path: Path, size: int) -> None:
    with path.open("wb") as file:
        file.truncate(size)  # sparse: the disk is used row by row


def _read_meta(folder: Path) -> dict:
    path = folder / "meta.json"
    try:
        found = json.loads(path.read_text())
    except FileNotFoundError:
        raise LatentCacheError(
            f"no latent cache in {folder}; make it with `wamlab encode-latents`"
        ) from None
    except json.JSONDecodeError as error:
        raise LatentCacheError(f"{path} is not JSON: {error}") from error
    if found.get("format") != FORMAT:
        raise LatentCacheError(f"{path} is not of a latent cache ({FORMAT})")
    return found
