"""What to keep in a cache of training samples, and the best that any policy could do.

Training is a special reader: under uniform epochs every sample is as likely as any other to come
next, and no guess can keep more than the cache's share of the data; and the sampler's seed tells
the future. A policy here is a value for each resident; the smallest value goes first.
"""

import heapq
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from wamlab.config import ConfigError, lookup

NEVER = float("inf")


class Trace(NamedTuple):
    """Which sample is read when, and what is known about the samples."""

    ids: np.ndarray  # int64 [A]
    sizes: np.ndarray  # float64 [N], bytes
    weights: np.ndarray  # float64 [N], the sampler's probabilities, or a guess at them

    def next_use(self) -> np.ndarray:
        """Return for each access when its sample is read again, float64 [A]; NEVER if not."""
        following = np.full(len(self.ids), NEVER)
        last: dict[int, int] = {}
        for at in range(len(self.ids) - 1, -1, -1):
            key = int(self.ids[at])
            following[at] = last.get(key, NEVER)
            last[key] = at
        return following


class Policy(NamedTuple):
    """`value(trace, horizon)` makes what a sample is worth after access `at`.

    Without `admit` a new sample always enters; with it, only over a less valuable resident.
    `arrival` values a sample once, when it enters.
    """

    value: Callable[[Trace, int], Callable[[int, int], float]]
    admit: bool = True
    arrival: bool = False


class Outcome(NamedTuple):
    """What a policy did after the warm-up."""

    hit_rate: float
    byte_miss: float  # bytes read from the slow tier over bytes asked for
    evictions: int


def _recent(trace: Trace, horizon: int) -> Callable[[int, int], float]:
    return lambda key, at: at


def _frequent(trace: Trace, horizon: int) -> Callable[[int, int], float]:
    counts = np.zeros(len(trace.sizes))

    def value(key: int, at: int) -> float:
        counts[key] += 1
        return counts[key] / trace.sizes[key]

    return value


def _weighted(trace: Trace, horizon: int) -> Callable[[int, int], float]:
    worth = (trace.weights / trace.sizes).tolist()
    return lambda key, at: worth[key]


def _pinned(trace: Trace, horizon: int) -> Callable[[int, int], float]:
    worth = np.random.default_rng(0).random(len(trace.sizes)).tolist()
    return lambda key, at: worth[key]


def _belady(trace: Trace, horizon: int) -> Callable[[int, int], float]:
    following = trace.next_use().tolist()
    return lambda key, at: -following[at]


def _lookahead(trace: Trace, horizon: int) -> Callable[[int, int], float]:
    following = trace.next_use().tolist()
    return lambda key, at: -following[at] if following[at] <= at + horizon else -NEVER


POLICIES: dict[str, Policy] = {
    "lru": Policy(_recent, admit=False),
    "fifo": Policy(_recent, admit=False, arrival=True),
    "lfu": Policy(_frequent),
    "motion": Policy(_weighted),  # the sampler's own weights: P(reuse) x cost / bytes
    "pinned": Policy(_pinned),  # any fixed set of samples
    "lookahead": Policy(_lookahead),  # Belady over the next draws, which the seed tells
    "belady": Policy(_belady),  # the bound: it knows everything
}


def simulate(
    trace: Trace, capacity: float, policy: str, *, warmup: int = 0, horizon: int = 4096
) -> Outcome:
    """Replay a trace through a cache.

    Args:
        trace: the accesses.
        capacity: bytes.
        policy: a key of POLICIES.
        warmup: first accesses that are not counted.
        horizon: draws that "lookahead" sees.

    Raises:
        ConfigError: an unknown policy, or a capacity that holds no sample.
    """
    rule = lookup(POLICIES, policy, "eviction policy")
    if capacity < trace.sizes.min():
        raise ConfigError(f"a cache of {capacity:g} bytes holds none of the samples")
    cache = _Cache(capacity, trace.sizes.tolist(), rule.admit)
    value, ids = rule.value(trace, horizon), trace.ids.tolist()
    hits, missed, asked = 0, 0.0, 0.0
    for at, key in enumerate(ids):
        if policy == "lookahead" and at + horizon < len(ids):
            cache.raise_to(ids[at + horizon], -(at + horizon))
        worth = value(key, at)
        hit = key in cache.worth
        if at >= warmup:
            hits, asked = hits + hit, asked + trace.sizes[key]
            missed += 0.0 if hit else trace.sizes[key]
        if not hit:
            cache.insert(key, worth)
        elif not rule.arrival:
            cache.revalue(key, worth)
    counted = max(len(ids) - warmup, 1)
    return Outcome(hits / counted, missed / max(asked, 1e-30), cache.evictions)


class _Cache:
    """Residents with their values; the least valuable is found by a heap with stale entries."""

    def __init__(self, capacity: float, sizes: Sequence[float], admit: bool) -> None:
        self.free, self.sizes, self.admit = capacity, sizes, admit
        self.worth: dict[int, float] = {}
        self.heap: list[tuple[float, int]] = []
        self.evictions = 0

    def revalue(self, key: int, worth: float) -> None:
        self.worth[key] = worth
        heapq.heappush(self.heap, (worth, key))

    def raise_to(self, key: int, worth: float) -> None:
        """A use came into sight: it counts if none was in sight before."""
        if self.worth.get(key) == -NEVER:
            self.revalue(key, worth)

    def insert(self, key: int, worth: float) -> None:
        freed, out = self.free, []
        while freed < self.sizes[key] and (least := self._least()) is not None:
            if self.admit and self.worth[least] >= worth:
                break
            heapq.heappop(self.heap)
            out.append((self.worth.pop(least), least))
            freed += self.sizes[least]
        if freed < self.sizes[key]:  # not worth its place: what was taken out goes back
            for old, other in out:
                self.revalue(other, old)
            return
        self.free = freed - self.sizes[key]
        self.evictions += len(out)
        self.revalue(key, worth)

    def _least(self) -> int | None:
        while self.heap and self.worth.get(self.heap[0][1]) != self.heap[0][0]:
            heapq.heappop(self.heap)
        return self.heap[0][1] if self.heap else None


def make_trace(kind: str, count: int, accesses: int, *, seed: int = 0, alpha: float = 1.0) -> Trace:
    """Return a trace of equal samples with heavy-tailed dynamics scores.

    Args:
        kind: "sequential" or "shuffled" epochs, or "weighted": drawn in proportion to score^alpha.
        count: samples.
        accesses: length.
        seed: of scores and draws.
        alpha: 0 is uniform.
    """
    rng = np.random.default_rng(seed)
    scores = rng.pareto(1.0, count) + 0.1
    weights = scores**alpha / (scores**alpha).sum()
    epochs = -(-accesses // count)
    draws: dict[str, Callable[[], np.ndarray]] = {
        "sequential": lambda: np.tile(np.arange(count), epochs),
        "shuffled": lambda: np.concatenate([rng.permutation(count) for _ in range(epochs)]),
        "weighted": lambda: rng.choice(count, accesses, p=weights),
    }
    return Trace(lookup(draws, kind, "trace")()[:accesses], np.ones(count), weights)


def unbiased_weights(probabilities: np.ndarray) -> np.ndarray:
    """Return 1 / (N p_i): the loss weights that make weighted sampling estimate the plain mean."""
    return 1 / (len(probabilities) * np.asarray(probabilities, float))
