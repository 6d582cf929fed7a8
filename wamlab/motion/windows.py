"""Training windows: from a folder of BVH files, parsed at every access or packed once.

`process` is the whole way from a file to arrays; the slow arm calls it for every window, the packed
arm once a file, so both give the same numbers. Packed arrays are plain .npy files, memory-mapped.
"""

import functools
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from wamlab.config import UserError, config_hash
from wamlab.motion.augment import Window
from wamlab.motion.bvh import read_bvh
from wamlab.motion.segments import KINDS, block_ids, contacts, dynamics_score, segment
from wamlab.motion.skeleton import to_canonical
from wamlab.motion.streams import Stream, read_at

ARRAYS = ("rot", "root", "contact", "kind", "block")  # one row a frame


class WindowError(UserError):
    """A folder of clips that gives no windows."""


def process(path: Path, rate: float) -> dict[str, np.ndarray]:
    """Read one BVH file into the arrays of a clip at the training rate.

    Labels are found at the file's own rate. Missing joints stand at their parents.

    Returns:
        `rot` float32 [T, J, 3, 3], `root` float32 [T, 3], `contact` bool [T, 4], `kind` and `block`
        int64 [T], and `offsets` float32 [J, 3].
    """
    clip, _, _ = to_canonical(read_bvh(path))
    place, own = clip.positions(), 1 / clip.dt
    blocks = segment(place, own)
    kinds = np.concatenate([np.full(b.last - b.first, KINDS.index(b.kind)) for b in blocks])
    times = np.arange(len(clip)) * clip.dt
    wanted = np.arange(int(times[-1] * rate + 1e-6) + 1) / rate
    found = {
        "rot": ("rotation", clip.local_rot),
        "root": ("position", clip.root_pos),
        "contact": ("contact", contacts(place, own)),
        "kind": ("contact", kinds),
        "block": ("contact", block_ids(blocks, len(clip))),
    }
    arrays = {
        name: read_at(Stream(kind=kind, times_s=times, values=values), wanted, rate)[0]
        for name, (kind, values) in found.items()
    }
    arrays["rot"], arrays["root"] = (arrays[n].astype(np.float32) for n in ("rot", "root"))
    return {**arrays, "offsets": clip.offsets.astype(np.float32)}


def pack(paths: Sequence[Path], out: Path, rate: float) -> Path:
    """Process every file once into a folder of .npy files under `out`, named after the work.

    Returns:
        The folder; what is already there is kept.
    """
    out = Path(out) / config_hash([rate, *([p.name, p.stat().st_size] for p in paths)])
    if not (out / "offsets.npy").is_file():
        clips = [process(path, rate) for path in paths]
        out.mkdir(parents=True, exist_ok=True)
        for name in ARRAYS:
            np.save(out / f"{name}.npy", np.concatenate([c[name] for c in clips]))
        np.save(out / "edges.npy", np.cumsum([0, *(len(c["root"]) for c in clips)]))
        np.save(out / "offsets.npy", np.stack([c["offsets"] for c in clips]))  # last: now whole
    return out


class Windows:
    """Windows of T frames, one every half window, from packed clips or parsed files.

    Args:
        paths: BVH files.
        frames: T.
        rate: training rate, Hz.
        packed: the folder under which packed arrays lie or shall lie.
        parse: parse the file again for every window, as naive code does.
    """

    def __init__(
        self,
        paths: Sequence[Path],
        frames: int,
        rate: float,
        *,
        packed: Path,
        parse: bool = False,
    ) -> None:
        self.paths, self.frames, self.rate, self.parse = list(paths), frames, rate, parse
        folder = pack(self.paths, packed, rate)
        self.edges, self.offsets = np.load(folder / "edges.npy"), np.load(folder / "offsets.npy")
        self.arrays = {n: np.load(folder / f"{n}.npy", mmap_mode="r") for n in ARRAYS}
        step = max(1, frames // 2)
        self.starts = [
            (clip, start)
            for clip, length in enumerate(np.diff(self.edges).tolist())
            for start in range(0, length - frames + 1, step)
        ]
        if not self.starts:
            longest = np.diff(self.edges).max(initial=0)
            raise WindowError(
                f"no clip has {frames} frames at {rate:g} Hz; the longest of {len(self.paths)} has "
                f"{longest}: ask for shorter windows"
            )

    def __len__(self) -> int:
        return len(self.starts)

    def batch(self, ids: Sequence[int]) -> Window:
        """Return windows as one batch; blocks are numbered from 0 in each."""
        return Window(*(torch.stack(x) for x in zip(*(self._one(i) for i in ids))))

    def _one(self, i: int) -> tuple[torch.Tensor, ...]:
        clip, start = self.starts[i]
        if self.parse:
            arrays, at = process(self.paths[clip], self.rate), start
            offsets = arrays["offsets"]
        else:
            arrays, at, offsets = self.arrays, int(self.edges[clip]) + start, self.offsets[clip]
        cut = {n: torch.from_numpy(np.array(arrays[n][at : at + self.frames])) for n in ARRAYS}
        cut["block"] = cut["block"] - cut["block"][0]
        return Window(offsets=torch.from_numpy(np.array(offsets)), **cut)

    @functools.cached_property
    def scores(self) -> np.ndarray:
        """The dynamics score of each window, m/s^2, float64 [N]."""
        found = []
        for first in range(0, len(self), 64):
            place = self.batch(range(first, min(first + 64, len(self)))).motion().place
            found += [dynamics_score(p, self.rate)[0] for p in place.double().numpy()]
        return np.array(found)


def bvh_files(folder: str | Path) -> list[Path]:
    """Return the folder's BVH files in order.

    Raises:
        WindowError: there are none.
    """
    paths = sorted(Path(folder).glob("*.bvh"))
    if not paths:
        raise WindowError(
            f"no .bvh file in {folder}: `python -m wamlab.motion.synthetic {folder}` makes some"
        )
    return paths
