"""Training steps on random numbers of the true shapes, for what communication costs in them.

Latents and features come ready made and stay the same, so that a step is the DiT's forward,
backward, exchange and update; the samples' noise and times differ from step to step as in training.
"""

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from wamlab.dist import device as pick_device
from wamlab.dist import print0
from wamlab.draws import Draws
from wamlab.measure import Record
from wamlab.model.dit import MODEL_SIZES, DiTConfig
from wamlab.model.wam import WAMConfig, WorldActionModel
from wamlab.train.bench_dit import FRAMES, LATENTS
from wamlab.train.communication import training_group
from wamlab.train.config import TrainConfig
from wamlab.train.optim import OptimConfig
from wamlab.train.trainer import Trainer
from wamlab.train.wait import balance

BLOCKS = 4  # of a sample's latent frames
KINDS = 64  # different samples
TAIL = 40  # last losses whose mean is a run's final loss


@dataclasses.dataclass(frozen=True, kw_only=True)
class CommCase:
    """One timed run."""

    name: str
    size: str = "tiny"
    layers: int | None = None
    micro_batch: int = 1
    optimizations: tuple[str | dict[str, Any], ...] = ()
    steps: int = 12
    warmup_steps: int = 4
    wait_steps: int = 20
    lr: float = 1e-3
    seed: int = 0
    scope: str = "communication"


@dataclasses.dataclass(frozen=True, kw_only=True)
class CommPlan:
    """Runs to make one after the other on the same ranks."""

    cases: tuple[CommCase, ...]
    device: str = "auto"
    timeout_s: float = 300.0


class RandomBatches:
    """A loader whose samples are random numbers, and functions of their id.

    Args:
        size: of the DiT whose inputs they are.
        split: what a Trainer gives its loader.
        seconds: what reading a sample costs, by id and rank; nothing by default.
        balanced: share each global batch out so that ranks pay about the same.
    """

    def __init__(
        self,
        size: str,
        split: dict[str, Any],
        *,
        seconds: Callable[[int, int], float] | None = None,
        balanced: bool = False,
    ) -> None:
        self.split, self.seconds, self.balanced = split, seconds, balanced
        self.shape, self.wait_s = (MODEL_SIZES[size], LATENTS[size]), 0.0
        self._kept: dict[tuple[int, ...], dict[str, Tensor]] = {}

    def ids_of_step(self, step: int) -> list[int]:
        """Return the samples of one step in the order in which ranks take their shares."""
        batch, world = self.split["global_batch"], self.split["world_size"]
        ids = list(range(step * batch, (step + 1) * batch))
        if not self.balanced:
            return ids
        return [ids[i] for i in balance([self.seconds(i, 0) for i in ids], world)]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        batch, world, rank = (self.split[k] for k in ("global_batch", "world_size", "rank"))
        share, step = batch // world, self.split["start_step"]
        while True:
            ids = self.ids_of_step(step)[rank * share :][:share]
            for start in range(0, share, self.split["micro_batch"]):
                before = time.perf_counter()
                found = self._samples(ids[start : start + self.split["micro_batch"]])
                self.wait_s += time.perf_counter() - before
                yield found
            step += 1

    def _samples(self, ids: Sequence[int]) -> dict[str, Any]:
        if self.seconds:
            time.sleep(sum(self.seconds(i, self.split["rank"]) for i in ids))
        kinds = tuple(i % KINDS for i in ids)
        device = self.split["device"]
        if kinds not in self._kept:
            made = Draws(7, 0, torch.tensor(kinds, device=device))
            self._kept[kinds] = random_sample(*self.shape, made, len(kinds))
        return {**self._kept[kinds], "sample_id": torch.tensor(ids, device=device)}

    def close(self) -> None:
        """Nothing is open."""


def random_sample(
    config: DiTConfig, latent_hw: tuple[int, int], draws: Draws, count: int
) -> dict[str, Tensor]:
    """Return `count` encoded samples for a DiT, without their ids."""
    height, width = latent_hw
    latent = (config.out_dim, FRAMES, height, width)
    actions = BLOCKS * config.num_action_per_block
    latents = draws.normal("latents", latent)
    device = latents.device
    found = {
        "latents": latents,
        "clip_feature": draws.normal("clip", (257, config.clip_dim)),
        "prompt_embedding": draws.normal("prompt", (config.text_len, config.text_dim)).bfloat16(),
        "prompt_length": torch.full((count,), 100, device=device),
        "state": draws.normal("state", (BLOCKS, config.max_state_dim)),
        "action": draws.uniform("action", (actions, config.action_dim)) * 2 - 1,
        "action_mask": torch.ones(
            count, actions, config.action_dim, dtype=torch.bool, device=device
        ),
        "has_real_action": torch.ones(count, dtype=torch.bool, device=device),
    }
    if config.concat_first_frame_latent:
        found["y"] = draws.normal("y", (4 + config.out_dim, *latent[1:]))
    return found


def measure(plan: CommPlan) -> list[Record]:
    """Make the plan's runs on these ranks; a target of `launch`."""
    device = pick_device(plan.device)
    if device.type == "cpu":
        torch.set_num_threads(1)
    with training_group(device, plan.timeout_s):
        return [_run(case, device) for case in plan.cases]


def build(case: CommCase, device: torch.device, **loader: Any) -> Trainer:
    """Return the trainer of one case; `loader` goes to RandomBatches."""
    world = torch.distributed.get_world_size()
    sizes = {"vae": "tiny", "text": "tiny", "image": "tiny"}  # nothing is encoded
    config = TrainConfig(
        name=case.name,
        model=WAMConfig(size=case.size, layers=case.layers, seed=case.seed, **sizes),
        data=None,
        device=device.type,
        precision="bf16" if device.type == "cuda" else "fp32",
        optimizations=("shortcuts", "micro_batch", *case.optimizations),
        optim=OptimConfig(lr=case.lr, schedule="constant"),
        steps=case.steps,
        warmup_steps=case.warmup_steps,
        wait_steps=case.wait_steps,
        global_batch=case.micro_batch * world,
        seed=case.seed,
    )
    with device:
        model = WorldActionModel(config.model)
    model.set_option("skip_unused_y", True)
    return Trainer(config, model, lambda data, **split: RandomBatches(case.size, split, **loader))


def _run(case: CommCase, device: torch.device) -> Record:
    trainer = build(case, device)
    record = trainer.fit()
    last = record.losses[-TAIL:]
    extra = {**record.extra, "final_loss": sum(last) / len(last), "seed": case.seed}
    print0(f"{case.name}, seed {case.seed}: {record.step_ms.median:.0f} ms a step")
    return dataclasses.replace(
        record, scope=case.scope, dimension="communication", encoders="none", extra=extra
    )
