"""Closed loop: a policy acts in a world, sees what came of it, and acts again.

A batch of episodes goes in step: every policy call serves all of them. Between two calls each world
runs through its chunk on its own, in this process or in others, and gives back the frames that were
seen on the way. An episode ends when its task is done or its steps are used up; it then keeps its
place in the batch, so that no result depends on which other episodes ended when.
"""

import math
import multiprocessing
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from wamlab.config import ConfigError
from wamlab.data.embodiment import FRAMES_PER_BLOCK
from wamlab.data.toy_env import ToyConfig
from wamlab.evaluate.policy import Policy
from wamlab.evaluate.worlds import Moment, advance, begin

Z_95 = 1.959964  # two-sided 95 % of the normal distribution


@dataclass(frozen=True, kw_only=True)
class ClosedLoopConfig:
    """What is played.

    Args:
        world: the table.
        episodes: how many; episode i has seed `seed` + i.
        seed: of the first episode, far from those of training data.
        batch: episodes that go in step.
        max_steps: control steps an episode may take.
        execute: steps of a chunk that are carried out before the next one; null: all of them.
        workers: processes that move and draw the worlds.
    """

    world: ToyConfig = field(default_factory=ToyConfig)
    episodes: int = 200
    seed: int = 1_000_000
    batch: int = 50
    max_steps: int = 360
    execute: int | None = None
    workers: int = 1

    def __post_init__(self) -> None:
        for name in ("episodes", "batch", "max_steps", "workers"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be 1 or more, got {getattr(self, name)}")


@dataclass(frozen=True, kw_only=True)
class EpisodeResult:
    """One episode: `steps` it took, or all there were where it failed."""

    seed: int
    task: str
    success: bool
    steps: int


@dataclass(frozen=True, kw_only=True)
class ClosedLoopResult:
    """All episodes, and how long they took."""

    episodes: tuple[EpisodeResult, ...]
    seconds: float

    @property
    def successes(self) -> int:
        """Episodes that reached their goal."""
        return sum(bool(e.success) for e in self.episodes)

    @property
    def success_rate(self) -> float:
        """Share of the episodes that reached their goal."""
        return self.successes / len(self.episodes)

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 % interval of the success rate, see `wilson`."""
        return wilson(self.successes, len(self.episodes))

    def to_json(self) -> dict[str, Any]:
        """Return the fields of a record of scope `closed_loop`."""
        low, high = self.interval
        return {
            "success_rate": self.success_rate,
            "success_low": low,
            "success_high": high,
            "episodes": len(self.episodes),
            "mean_steps": float(np.mean([e.steps for e in self.episodes])),
            "seconds": self.seconds,
        }


def wilson(successes: int, trials: int) -> tuple[float, float]:
    """Return the interval that holds the true success rate in 95 % of all experiments.

    Source: E. B. Wilson, "Probable inference, the law of succession, and statistical inference",
    Journal of the American Statistical Association 22, 1927.

    Raises:
        ConfigError: there was no trial, or there were more successes than trials.
    """
    if not 0 <= successes <= trials or trials < 1:
        raise ConfigError(f"{successes} successes of {trials} trials: no rate")
    rate, share = successes / trials, Z_95 * Z_95 / trials
    middle = (rate + share / 2) / (1 + share)
    reach = Z_95 / (1 + share) * math.sqrt(rate * (1 - rate) / trials + share / (4 * trials))
    return max(0.0, middle - reach), min(1.0, middle + reach)


def closed_loop(
    policy: Policy,
    config: ClosedLoopConfig = ClosedLoopConfig(),
    *,
    watch: Callable[[Sequence[Moment]], None] | None = None,
    pool: Any = None,
) -> ClosedLoopResult:
    """Play episodes.

    Args:
        policy: who acts.
        config: what is played.
        watch: called with all moments of a batch, at its start and after every chunk; every frame
            is then drawn.
        pool: of processes that is there already, see `worker_pool`; null starts one.

    Raises:
        ConfigError: `execute` does not fit the policy's chunk.
    """
    execute = config.execute or policy.horizon
    if not 1 <= execute <= policy.horizon:
        raise ConfigError(f"execute {execute} of a chunk of {policy.horizon} steps")
    every = policy.horizon // FRAMES_PER_BLOCK if policy.remembers or watch else 0
    if pool is None and config.workers > 1:
        with worker_pool(config.workers) as pool:
            return closed_loop(policy, config, watch=watch, pool=pool)
    run = map if pool is None else pool.imap
    results: list[EpisodeResult] = []
    start = time.perf_counter()
    for first in range(0, config.episodes, config.batch):
        seeds = range(first, min(first + config.batch, config.episodes))
        moments = list(run(partial(begin, config.world), [config.seed + i for i in seeds]))
        policy.reset()
        while True:
            if watch:
                watch(moments)
            if all(m.done or m.steps >= config.max_steps for m in moments):
                break
            chunks = policy.infer_batch([m.observation() for m in moments])
            tasks = [(m, c[:execute], every, config.max_steps) for m, c in zip(moments, chunks)]
            moments = list(run(advance, tasks))
        results += [
            EpisodeResult(seed=config.seed + i, task=m.world.task, success=m.done, steps=m.steps)
            for i, m in zip(seeds, moments)
        ]
    return ClosedLoopResult(episodes=tuple(results), seconds=time.perf_counter() - start)


def worker_pool(workers: int) -> Any:
    """Return a pool of processes for worlds, none of which imports torch."""
    return multiprocessing.get_context("spawn").Pool(workers)
