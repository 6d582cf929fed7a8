"""Samples that are encoded already, as plain tensors: training without video or encoders.

A corpus is a folder: `corpus.safetensors`, a row a sample, and `corpus.json`, which says of which
robot, with its statistics and prompts. The loader has `Loader`'s interface and order of samples.

Shapes: N samples, K blocks, H steps a block, L prompts.
"""

import json
import time
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from wamlab.config import save_json
from wamlab.data.codec import Codec
from wamlab.data.metadata import DatasetError
from wamlab.data.sampler import Sampler, Strategy, share_of
from wamlab.data.toy_play import robot_of

WORDS = ("prompt_embedding", "prompt_length")
LABELS = ("episode", "prompt")  # read on the host
NEEDED = ("latents", "clip_feature", "state", "action", *LABELS)


@dataclass(frozen=True, eq=False)
class Corpus:
    """Encoded samples of one robot.

    Args:
        tensors: `latents` [N, ...] and `clip_feature` [N, ...] as the encoders gave them; `state`
            f32 [N, K, 64] and `action` f32 [N, K*H, 32] as the model sees them; `episode` int64
            [N], not falling; `prompt` int64 [N].
        prompts: the full prompts that `prompt` counts.
        words: `prompt_embedding` [P, L, D] and `prompt_length` int64 [P] of them.
        codec: the robot and its statistics.
        meta: what else was noted about how it was made.
    """

    tensors: dict[str, Tensor]
    prompts: tuple[str, ...]
    words: dict[str, Tensor]
    codec: Codec
    meta: dict[str, Any]

    def __post_init__(self) -> None:
        needed, there = (*NEEDED, *WORDS), {**self.tensors, **self.words}
        missing = [name for name in needed if name not in there]
        if missing:
            raise DatasetError(f"a corpus needs {', '.join(needed)}; {', '.join(missing)} missing")
        lengths = {name: len(t) for name, t in self.tensors.items()}
        if len(set(lengths.values())) > 1:
            raise DatasetError(f"the tensors of a corpus have as many rows each, got {lengths}")

    def __len__(self) -> int:
        return len(self.tensors["latents"])

    @property
    def index(self) -> Any:
        """What a sampling strategy asks of a data set: where the samples of each episode lie."""
        _, counts = torch.unique_consecutive(self.tensors["episode"], return_counts=True)
        high = counts.cumsum(0).numpy()
        return SimpleNamespace(episode_bounds=(high - counts.numpy(), high))

    def to(self, device: torch.device | str) -> "Corpus":
        """Return the corpus with what the model reads on a device."""
        moved = {n: t if n in LABELS else t.to(device) for n, t in self.tensors.items()}
        embedding = self.words["prompt_embedding"].to(device)
        return replace(self, tensors=moved, words={**self.words, "prompt_embedding": embedding})

    def batch(self, ids: np.ndarray) -> dict[str, Any]:
        """Return samples, int64 [B], as a model's `encode` takes them, where the corpus lies."""
        device = self.tensors["latents"].device
        rows_B = torch.from_numpy(ids).to(device)
        rows = {n: t[rows_B] for n, t in self.tensors.items() if n not in LABELS}
        prompt_B = self.tensors["prompt"][ids]
        state_mask, action_mask = (torch.from_numpy(m).to(device) for m in self.codec.masks())
        return rows | {
            "state_mask": state_mask.expand(rows["state"].shape),
            "action_mask": action_mask.expand(rows["action"].shape),
            "has_real_action": torch.ones_like(rows_B, dtype=torch.bool),
            "prompt_embedding": self.words["prompt_embedding"][prompt_B.to(device)],
            "prompt_length": self.words["prompt_length"][prompt_B],  # on the host, as encoded
            "sample_id": rows_B,
        }

    def save(self, folder: Path) -> None:
        """Write the corpus; the json, without which there is none, last."""
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {n: t.contiguous() for n, t in {**self.tensors, **self.words}.items()}
        save_file(tensors, folder / "corpus.safetensors")
        robot = self.codec.embodiment
        values = {"embodiment": robot.name, "blocks": robot.blocks, "prompts": self.prompts}
        values |= {"statistics": self.codec.to_json(), "meta": self.meta}
        save_json(values, folder / "corpus.json")

    @classmethod
    def load(cls, folder: Path) -> "Corpus":
        """Read a corpus.

        Raises:
            DatasetError: there is none, or it is not whole.
        """
        path = folder / "corpus.json"
        if not path.is_file():
            raise DatasetError(f"{folder}: no corpus.json, so no corpus")
        values = json.loads(path.read_text())
        robot = robot_of(values["embodiment"], values["blocks"])
        codec = Codec.from_json(robot, values["statistics"])
        tensors = load_file(folder / "corpus.safetensors")
        words = {name: tensors.pop(name) for name in WORDS if name in tensors}
        return cls(tensors, tuple(values["prompts"]), words, codec, values["meta"])


class CorpusLoader:
    """An endless iterator over a rank's micro-batches of a corpus that lies on the device.

    Args:
        corpus: on the device where batches are wanted.
        global_batch, micro_batch, seed, rank, world_size, start_step: as `Loader`'s.
        strategy: a key of STRATEGIES, or a strategy with its own settings.
    """

    def __init__(
        self,
        corpus: Corpus,
        *,
        global_batch: int,
        micro_batch: int,
        seed: int,
        rank: int = 0,
        world_size: int = 1,
        start_step: int = 0,
        strategy: str | Strategy = "step",
    ) -> None:
        share = share_of(global_batch, micro_batch, world_size)
        self.corpus, self.global_batch, self.micro_batch = corpus, global_batch, micro_batch
        self.sampler = Sampler(corpus, seed=seed, strategy=strategy)
        self.wait_s = 0.0
        self._own = slice(rank * share, (rank + 1) * share)
        self._step, self._ids = start_step, np.empty(0, np.int64)

    def ids_of_step(self, step: int) -> np.ndarray:
        """Return the samples of one step over all ranks, int64 [global_batch]."""
        return self.sampler.ids_of_step(step, self.global_batch)

    def __iter__(self) -> "CorpusLoader":
        return self

    def __next__(self) -> dict[str, Any]:
        start = time.perf_counter()
        if not len(self._ids):
            self._ids = self.ids_of_step(self._step)[self._own]
            self._step += 1
        now, self._ids = self._ids[: self.micro_batch], self._ids[self.micro_batch :]
        batch = self.corpus.batch(now)
        self.wait_s += time.perf_counter() - start
        return batch

    def close(self) -> None:
        """Do nothing: there is no worker to end."""
