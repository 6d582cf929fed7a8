"""Is a gated compressor worth having? Five gates at equal bytes, two optimizers, several seeds.

The task is a small one in which gradients do change with what moves: predict the next velocity of a
point that turns, slows down and is kicked, in batches that are calm for a while and then are not.
A gate chooses which (bucket, step) pairs travel as the KEEP largest entries, with error feedback.
The arm "random" sends as many bytes without choosing; a gate is worth having only if it beats that.
Bytes are counted, not saved: an all-reduce also sends zeros.
"""

import dataclasses
import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from wamlab.dist import rank
from wamlab.measure import Record, stamp
from wamlab.train.communication import training_group
from wamlab.train.compression import Compression, replicate
from wamlab.train.optimizations import Ddp

PAST, BATCH, HIDDEN = 8, 16, 64  # frames that are seen, samples a rank, width
KEEP, SHARE = 0.05, 0.5  # entries that travel, (bucket, step) pairs that are compressed
BUDGET = 1.0 - SHARE + SHARE * 2 * KEEP  # a value and its place for each entry
CALM, WILD, SPELL = 0.02, 0.3, 40  # kicks a frame, steps that a spell lasts on average
ARMS: dict[str, Ddp] = {
    "dense": Ddp(),
    "always": Ddp(wire="topk", keep=BUDGET / 2),
    "random": Ddp(wire="topk", keep=KEEP, gate="random", share=SHARE),
    "high change": Ddp(wire="topk", keep=KEEP, gate="high", share=SHARE),
    "low change": Ddp(wire="topk", keep=KEEP, gate="low", share=SHARE),
    "by activity": Ddp(wire="topk", keep=KEEP, gate="activity", share=SHARE),
}
GATES = ("high change", "low change", "by activity")
OPTIMIZERS = ("sgd", "adamw")


@dataclasses.dataclass(frozen=True, kw_only=True)
class JudgeConfig:
    """Which runs to make; each (arm, optimizer, seed) is one."""

    arms: tuple[str, ...] = tuple(ARMS)
    optimizers: tuple[str, ...] = OPTIMIZERS
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    steps: int = 600


class Predictor(nn.Module):
    """A small network that predicts the next velocity, with a loss as trainers call it."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        sizes = [2 * PAST, HIDDEN, HIDDEN, HIDDEN, 2]
        layers = [nn.Linear(a, b) for a, b in itertools.pairwise(sizes)]
        self.layers = nn.Sequential(*(m for layer in layers for m in (layer, nn.Tanh())))[:-1]

    def loss(self, batch: Tensor, draws: object = None) -> dict[str, Tensor]:
        """Return the loss of velocities [B, PAST + 1, 2], and how much they change."""
        predicted = self.layers(batch[:, :-1].flatten(1))
        activity = batch.diff(dim=1).norm(dim=-1).mean()
        return {"loss": (predicted - batch[:, -1]).square().mean(), "activity": activity}


def moving_points(count: int, kicks: float, generator: torch.Generator) -> Tensor:
    """Return velocities [count, PAST + 1, 2] of points that turn, slow down and are kicked.

    Args:
        count: points.
        kicks: chance of a kick in each frame.
        generator: of the random numbers.
    """
    turn = torch.empty(count).uniform_(-0.6, 0.6, generator=generator)
    turning = torch.stack([turn.cos(), -turn.sin(), turn.sin(), turn.cos()], -1).view(-1, 2, 2)
    velocity, frames = torch.randn(count, 2, generator=generator), []
    for _ in range(PAST + 1):
        frames.append(velocity)
        kick = torch.randn(count, 2, generator=generator)
        hit = torch.rand(count, 1, generator=generator) < kicks
        velocity = 0.95 * (turning @ velocity[..., None])[..., 0] + kick * hit
    return torch.stack(frames, 1)


def judge(config: JudgeConfig) -> list[Record]:
    """Make all runs on this run's ranks; a target of `launch` for two of them."""
    torch.set_num_threads(1)
    with training_group(torch.device("cpu")):
        return [
            _run(arm, optimizer, seed, config.steps)
            for seed in config.seeds
            for optimizer in config.optimizers
            for arm in config.arms
        ]


def _run(arm: str, optimizer: str, seed: int, steps: int) -> Record:
    model = Predictor(seed)
    ddp = dataclasses.replace(ARMS[arm], bucket_mb=0.01)  # four buckets
    hook = Compression(ddp, dict(model.named_parameters()), steps, seed)
    loss_of = replicate(model, ddp, hook)
    step_of = _optimizer(optimizer, model)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(step_of, steps)
    seen = moving_points(2048, (CALM + WILD) / 2, torch.Generator().manual_seed(987))
    losses = []
    for step, kicks in enumerate(_spells(seed, steps)):
        generator = torch.Generator().manual_seed((seed * 100_003 + step) * 97 + rank())
        hook.step = step
        found = loss_of(moving_points(BATCH, kicks, generator), None)
        found["loss"].backward()
        activity = found["activity"].detach()
        torch.distributed.all_reduce(activity)
        hook.note_activity(activity)
        hook.observe()
        step_of.step()
        schedule.step()
        model.zero_grad(set_to_none=True)
        if step % 50 == 49 or step == steps - 1:
            with torch.no_grad():
                losses.append(model.loss(seen)["loss"].item())
    return stamp(
        Record(
            name=arm,
            scope="compression",
            dimension="communication",
            world_size=torch.distributed.get_world_size(),
            device="cpu",
            losses=tuple(losses),
            extra={
                "optimizer": optimizer,
                "seed": seed,
                "steps": steps,
                "final_loss": losses[-1],
                "wire_bytes_share": hook.sent_bytes / hook.dense_bytes,
            },
        )
    )


def _optimizer(name: str, model: nn.Module) -> torch.optim.Optimizer:
    if name == "sgd":
        return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95))


def _spells(seed: int, steps: int) -> list[float]:
    """Return each step's chance of a kick: calm and wild spells of random length."""
    generator = torch.Generator().manual_seed(seed + 10_000)
    changes = torch.rand(steps, generator=generator) < 1 / SPELL
    return [WILD if on % 2 else CALM for on in changes.cumsum(0).tolist()]


def verdicts(records: Sequence[Record]) -> list[dict[str, Any]]:
    """Judge every arm of each optimizer against the dense and the random one, seed by seed.

    Returns:
        One row an arm and optimizer: `final_loss` and its standard deviation `spread` over seeds,
        `bytes`, `parity` (within two standard deviations of dense), and for gates `gain` over
        random (share of its loss, positive is better), its standard error, and `worth_having`:
        the gain is positive by two of them.
    """
    losses: dict[tuple[str, str], dict[int, float]] = {}
    sent: dict[tuple[str, str], list[float]] = {}
    for r in records:
        key = (r.extra["optimizer"], r.name)
        losses.setdefault(key, {})[r.extra["seed"]] = r.extra["final_loss"]
        sent.setdefault(key, []).append(r.extra["wire_bytes_share"])
    rows = []
    for (optimizer, arm), mine in losses.items():
        row = {"optimizer": optimizer, "arm": arm, "bytes": statistics.mean(sent[optimizer, arm])}
        row |= {"final_loss": statistics.mean(mine.values()), "spread": _spread(mine)}
        row |= {"seeds": len(mine), "parity": None, "gain": None, "error": None}
        row["worth_having"] = None
        dense = losses.get((optimizer, "dense"))
        if dense and len(dense) > 1:
            far = row["final_loss"] - statistics.mean(dense.values())
            row["parity"] = far <= 2 * _spread(dense)
        random = losses.get((optimizer, "random"))
        if random and arm in GATES:
            row |= _against(mine, random)
        rows.append(row)
    return rows


def _spread(by_seed: Mapping[int, float]) -> float:
    return statistics.stdev(by_seed.values()) if len(by_seed) > 1 else math.nan


def _against(mine: Mapping[int, float], random: Mapping[int, float]) -> dict[str, Any]:
    gains = [1 - mine[seed] / random[seed] for seed in mine if seed in random]
    if len(gains) < 2:
        return {"gain": gains[0] if gains else None}
    gain, error = statistics.mean(gains), statistics.stdev(gains) / math.sqrt(len(gains))
    return {"gain": gain, "error": error, "worth_having": gain > 2 * error}
