"""Training samples: which frames, states and actions belong to a start, and reading them.

A sample is K blocks of H steps around its start frame i: anchors lie a multiple of H away from i,
two before it and the rest from it on, moved inwards near the ends of an episode or where the task
in words changes. Its 8K + 1 frames are H/8 steps apart, from the first anchor to the last one + H,
so a block's frames and its actions span the same time. Starts that give all K blocks are found once
for the whole data set; so every sample has the same shapes and none is rejected.
"""

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch

from wamlab.config import ConfigError
from wamlab.data import metadata
from wamlab.data.cache import DecoderCache
from wamlab.data.lerobot import LeRobotDataset
from wamlab.data.metadata import DatasetError, VideoSpan

_PART = 1_000_000  # frames looked at together, to bound memory


@dataclass(frozen=True)
class WindowIndex:
    """All valid starts, as runs of consecutive frames.

    Args:
        starts: int64 [R], first row (in the flat columns) of each run.
        ends: int64 [R], how many starts there are up to and including each run.
        offsets: int64 [E + 1], first row of each episode.
        labels: the task of each row, one array for each language column.
        horizon: H.
        blocks: K.
    """

    starts: np.ndarray
    ends: np.ndarray
    offsets: np.ndarray
    labels: tuple[np.ndarray, ...]
    horizon: int
    blocks: int

    @classmethod
    def build(
        cls,
        offsets: np.ndarray,
        labels: Sequence[np.ndarray],
        *,
        horizon: int,
        blocks: int,
        skip: Sequence[int] | np.ndarray = (),
    ) -> "WindowIndex":
        """Find the valid starts of a data set.

        Args:
            offsets: int64 [E + 1], first row of each episode.
            labels: int [N] each.
            horizon: H, steps a block.
            blocks: K.
            skip: sorted rows that may not be a start.
        """
        starts, counts, skip = [], [], np.asarray(skip, np.int64)
        for first, last in _episode_parts(np.asarray(offsets)):
            own = np.asarray(offsets[first : last + 1])
            rows = slice(int(own[0]), int(own[-1]))
            parts = [np.asarray(label[rows]) for label in labels]
            near = slice(*np.searchsorted(skip, [own[0], own[-1]]))
            run, count = _valid_runs(own - own[0], parts, skip[near] - own[0], (horizon, blocks))
            starts.append(run + own[0])
            counts.append(count)
        ends = np.cumsum(np.concatenate(counts))
        return cls(np.concatenate(starts), ends, offsets, tuple(labels), horizon, blocks)

    def __len__(self) -> int:
        return int(self.ends[-1]) if len(self.ends) else 0

    def locate(self, index: int) -> tuple[int, int, int]:
        """Return where a sample lies.

        Args:
            index: 0..len-1.

        Returns:
            Episode (its place in the table), first anchor counted from the episode's start, and the
            row of the start frame in the flat columns.

        Raises:
            IndexError: no such sample.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        run = int(np.searchsorted(self.ends, index, side="right"))
        before = int(self.ends[run - 1]) if run else 0
        row = int(self.starts[run]) + index - before
        episode = int(np.searchsorted(self.offsets, row, side="right")) - 1
        start, stop = int(self.offsets[episode]), int(self.offsets[episode + 1])
        low, high = self._reach(row, start, stop)
        first = max(low, min(-(self.blocks // 2), high - self.blocks + 1))
        return episode, row + first * self.horizon - start, row

    @cached_property
    def episode_bounds(self) -> tuple[np.ndarray, np.ndarray]:
        """The first sample of each episode and the one after its last, int64 [E] each."""
        episode = np.searchsorted(self.offsets, self.starts, side="right") - 1
        count = np.bincount(
            episode, np.diff(self.ends, prepend=0), minlength=len(self.offsets) - 1
        ).astype(np.int64)
        high = np.cumsum(count)
        return high - count, high

    def _reach(self, row: int, start: int, stop: int) -> tuple[int, int]:
        """Return the lowest and highest usable anchor, in blocks from the start frame."""
        low, high = 0, 0
        while -low < self.blocks and self._same(row, row + (low - 1) * self.horizon, start, stop):
            low -= 1
        while high < self.blocks and self._same(row, row + (high + 1) * self.horizon, start, stop):
            high += 1
        while row + (high + 1) * self.horizon >= stop:  # the anchor's block must end inside
            high -= 1
        return low, high

    def _same(self, row: int, other: int, start: int, stop: int) -> bool:
        return start <= other < stop and all(label[row] == label[other] for label in self.labels)


def _episode_parts(offsets: np.ndarray) -> list[tuple[int, int]]:
    """Cut the episodes into parts of about a million frames."""
    marks = np.arange(0, offsets[-1], _PART)
    cuts = np.unique([*np.searchsorted(offsets, marks), len(offsets) - 1])
    return list(zip(cuts[:-1].tolist(), cuts[1:].tolist()))


def _valid_runs(
    offsets: np.ndarray, labels: list[np.ndarray], skip: np.ndarray, shape: tuple[int, int]
) -> tuple[np.ndarray, np.ndarray]:
    """Return the first row and the length of each run of valid starts."""
    lengths, (horizon, blocks) = np.diff(offsets), shape
    simple = lengths >= (blocks + 1) * horizon  # then every frame of one label is a valid start
    for label in labels:
        changes = np.flatnonzero(label[1:] != label[:-1]) + 1
        inside = changes[~np.isin(changes, offsets)]
        simple[np.searchsorted(offsets, inside, side="right") - 1] = False
    simple[np.searchsorted(offsets, skip, side="right") - 1] = False
    starts, counts = [offsets[:-1][simple]], [lengths[simple]]
    for episode in np.flatnonzero(~simple & (lengths > blocks * horizon)):
        rows = slice(offsets[episode], offsets[episode + 1])
        valid = _valid_starts([label[rows] for label in labels], lengths[episode], horizon, blocks)
        valid[skip[(skip >= rows.start) & (skip < rows.stop)] - rows.start] = False
        edges = np.flatnonzero(np.diff(np.concatenate([[False], valid, [False]]).astype(np.int8)))
        starts.append(edges[::2] + offsets[episode])
        counts.append(edges[1::2] - edges[::2])
    start, count = np.concatenate(starts), np.concatenate(counts)
    order = np.argsort(start)
    return start[order], count[order]


def _valid_starts(labels: list[np.ndarray], length: int, horizon: int, blocks: int) -> np.ndarray:
    """Return bool [T]: which frames of one episode have K usable anchors around them."""
    frames = np.arange(length)
    anchors = np.zeros(length, np.int64)
    for direction in (-1, 1):
        going = np.ones(length, bool)
        for step in range(0 if direction == 1 else 1, blocks + 1):
            other = frames + direction * step * horizon
            going &= (other >= 0) & (other < length)
            there = np.clip(other, 0, length - 1)
            for label in labels:
                going &= label[there] == label
            anchors += going & (other + horizon < length)
    return anchors >= blocks


class WindowDataset:
    """Samples of one data set, by number.

    Args:
        dataset: the episodes.
        open_video: gives a decoder for a part of a file and keeps it as long as it likes; default
            opens and closes one of "pyav-naive" a call, as the public code does.
        map_views: reads the views of a sample, `map` one after the other; a thread pool's map at
            the same time.

    Raises:
        DatasetError: no episode is long enough for one sample.
    """

    def __init__(
        self,
        dataset: LeRobotDataset,
        *,
        open_video: Callable[[VideoSpan], Any] | None = None,
        map_views: Callable = map,
    ) -> None:
        self.dataset, self.embodiment, self.map_views = dataset, dataset.embodiment, map_views
        self.open_video = open_video or DecoderCache("pyav-naive", size=0)
        self.index = self._index()
        if not len(self.index):
            need = self.embodiment.blocks * self.embodiment.horizon + 1
            raise DatasetError(
                f"{dataset.root}: no sample: one needs {need} frames of one task in an episode, "
                f"the longest has {int(np.max(dataset.episodes.lengths))}"
            )

    def __len__(self) -> int:
        return len(self.index)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return one sample, see `sample`."""
        return self.sample(index)

    def sample(self, index: int, *, paraphrase: int = 0) -> dict[str, Any]:
        """Return one sample.

        Args:
            index: 0..len-1, also its `sample_id`.
            paraphrase: which language column to take the task from, modulo their number.

        Returns:
            `views` uint8 [V, T, 3, h, w]; `state` f32 [K, 64] and `state_mask` bool; `action` f32
            [K*H, 32] and `action_mask` bool; `has_real_action` bool; `prompt` str; `sample_id` and
            `embodiment_id` int64.
        """
        return self.samples([index], paraphrases=[paraphrase])[0]

    def samples(
        self,
        indices: Sequence[int],
        *,
        paraphrases: Sequence[int] | None = None,
        videos: bool = True,
    ) -> list[dict[str, Any]]:
        """Return several samples, each frame of an episode decoded once however many share it.

        Args:
            indices: as in `sample`, in any order.
            paraphrases: as in `sample`, one each.
            videos: False leaves out `views` and opens no video.
        """
        paraphrases = paraphrases if paraphrases is not None else [0] * len(indices)
        places = [self.index.locate(i) for i in indices]
        found: list[dict[str, Any]] = [
            self._numbers(i, p, place) for i, p, place in zip(indices, paraphrases, places)
        ]
        if not videos:
            return found
        offsets = np.array(self.embodiment.frame_offsets())
        for episode in dict.fromkeys(place[0] for place in places):
            members = [n for n, place in enumerate(places) if place[0] == episode]
            steps = np.stack([places[n][1] + offsets for n in members])
            union, where = np.unique(steps, return_inverse=True)
            views = self._views(episode, union)
            for n, own in zip(members, where.reshape(steps.shape)):
                found[n]["views"] = views[:, torch.from_numpy(own)]
        return found

    def _index(self) -> WindowIndex:
        """Return the valid starts, found on the first use and kept beside the columns."""
        e, data = self.embodiment, self.dataset
        labels = tuple(data.columns.arrays[column] for column in data.language)
        shape = {"horizon": e.horizon, "blocks": e.blocks}
        name = hashlib.sha256(json.dumps([shape, data.language]).encode()).hexdigest()[:16]
        path = data.columns.folder / f"starts-{name}.npy"
        if not path.is_file():
            skip = metadata.read_step_filter(data.info, data.episodes)
            built = WindowIndex.build(data.episodes.offsets, labels, skip=skip, **shape)
            partial = path.with_suffix(f".{os.getpid()}")
            with partial.open("wb") as file:
                np.save(file, np.stack([built.starts, built.ends]))
            partial.replace(path)
        starts, ends = np.load(path, mmap_mode="r").view(np.ndarray)
        return WindowIndex(starts, ends, data.episodes.offsets, labels, **shape)

    def _numbers(self, index: int, paraphrase: int, place: tuple[int, int, int]) -> dict[str, Any]:
        """Return all of a sample but its pictures."""
        episode, anchor, row = place
        e, data = self.embodiment, self.dataset
        anchors = data.rows(episode, anchor + e.horizon * np.arange(e.blocks))
        steps = data.rows(episode, anchor + np.arange(e.blocks * e.horizon))
        state_KS = data.state(anchors)
        action_KHA = data.action(steps).reshape(e.blocks, e.horizon, -1)
        state_mask, action_mask = data.codec.masks()
        action = data.codec.encode_action(action_KHA, state_KS)
        return {
            "state": torch.from_numpy(data.codec.encode_state(state_KS)),
            "state_mask": torch.from_numpy(np.tile(state_mask, (e.blocks, 1))),
            "action": torch.from_numpy(action),
            "action_mask": torch.from_numpy(np.tile(action_mask, (len(action), 1))),
            "has_real_action": torch.tensor(True),
            "prompt": e.prompt_text(data.instruction(row, paraphrase)),
            "sample_id": torch.tensor(index, dtype=torch.int64),
            "embodiment_id": torch.tensor(e.id, dtype=torch.int64),
        }

    def _views(self, episode: int, steps: np.ndarray) -> torch.Tensor:
        names = self.embodiment.views
        frames = partial(self.dataset.frames, episode, steps=steps, open_video=self.open_video)
        views = list(self.map_views(frames, names))
        if len({v.shape for v in views}) > 1:
            sizes = ", ".join(f"{n} {v.shape[-2]}x{v.shape[-1]}" for n, v in zip(names, views))
            raise DatasetError(
                f"{self.dataset.root}: the views of a sample must have one size, got {sizes}: "
                "re-encode them with `wamlab transcode`"
            )
        return torch.stack([v.contiguous() for v in views])


class Mixture:
    """Several data sets as one, the numbers of one after those of the other.

    Args:
        parts: data sets whose samples have the same number of blocks, steps, views.
        weights: how often each is drawn, relative to the others; None = by length.

    Raises:
        ConfigError: the parts do not fit together, or a weight is not positive.
    """

    def __init__(
        self, parts: Sequence[WindowDataset], weights: Sequence[float] | None = None
    ) -> None:
        self.parts = tuple(parts)
        self.lengths = np.array([len(p) for p in parts], np.int64)
        weights = self.lengths if weights is None else weights
        if len(weights) != len(self.parts) or min(weights, default=0) <= 0:
            raise ConfigError(
                f"a mixture of {len(self.parts)} data sets takes as many positive weights, "
                f"got {list(weights)}"
            )
        self.weights = np.asarray(weights, np.float64) / np.sum(weights)
        shapes = {(e.blocks, e.horizon, len(e.views)) for e in (p.embodiment for p in parts)}
        if len(shapes) > 1:
            each = ", ".join(
                f"{e.name} {e.blocks} x {e.horizon} x {len(e.views)}"
                for e in (p.embodiment for p in parts)
            )
            raise ConfigError(
                f"the data sets of a mixture need the same blocks x steps x views, got {each}"
            )
        self.ends = np.cumsum(self.lengths)

    def __len__(self) -> int:
        return int(self.ends[-1])

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return one sample; its `sample_id` is its number in the mixture."""
        return self.samples([index])[0]

    def samples(
        self,
        indices: Sequence[int],
        *,
        paraphrases: Sequence[int] | None = None,
        videos: bool = True,
    ) -> list[dict[str, Any]]:
        """Return several samples, see `WindowDataset.samples`."""
        paraphrases = list(paraphrases) if paraphrases is not None else [0] * len(indices)
        numbers = np.asarray(indices, np.int64)
        which = np.searchsorted(self.ends, numbers, side="right")
        found: list[Any] = [None] * len(numbers)
        for part in np.unique(which):
            places = np.flatnonzero(which == part)
            base = int(self.ends[part] - self.lengths[part])
            own = self.parts[part].samples(
                (numbers[places] - base).tolist(),
                paraphrases=[paraphrases[p] for p in places],
                videos=videos,
            )
            for place, sample in zip(places, own):
                found[place] = sample | {"sample_id": sample["sample_id"] + base}
        return found
