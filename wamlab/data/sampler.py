"""Which samples a training step sees: a pure function of (seed, step), for any number of ranks.

Strategies, as values:
- Steps ("step"): every sample of the data set once an epoch, in random order (step-granular).
- Shards ("shard"): the public code's order: a shard of consecutive samples is drawn, a tenth of
  it is used in random order, then the next shard.
- Unions ("union"): m random starts of one episode stand side by side, so that their frames can be
  decoded as one union.

Nothing is stored: a permutation is computed where it is needed (a Feistel network with cycle
walking), so 30 million samples cost no memory.
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from wamlab.config import ConfigError, lookup
from wamlab.data.windows import Mixture, WindowDataset

_DECK = 1000  # draws of a mixture that hold the weights exactly
_GOLDEN, _MIX_1, _MIX_2 = (
    np.uint64(0x9E3779B97F4A7C15),
    np.uint64(0xBF58476D1CE4E5B9),
    np.uint64(0x94D049BB133111EB),
)


def share_of(global_batch: int, micro_batch: int, world_size: int) -> int:
    """Return how many samples of a step a rank takes, a multiple of `micro_batch`.

    Args:
        global_batch: samples of a step over all ranks.
        micro_batch: samples that a rank takes at once.
        world_size: ranks.

    Raises:
        ConfigError: the batch sizes do not divide.
    """
    share, rest = divmod(global_batch, world_size)
    if rest or micro_batch < 1 or share % micro_batch:
        raise ConfigError(
            f"global_batch {global_batch} must be a multiple of {world_size} ranks times "
            f"micro_batch {micro_batch}"
        )
    return share


def mix(*values: np.ndarray | int) -> np.ndarray:
    """Return 64 random bits that depend on all the values (SplitMix64's finaliser), uint64."""
    with np.errstate(over="ignore"):
        bits = np.uint64(0)
        for value in values:
            bits = (bits ^ np.asarray(value).astype(np.uint64)) + _GOLDEN
            bits = (bits ^ (bits >> np.uint64(30))) * _MIX_1
            bits = (bits ^ (bits >> np.uint64(27))) * _MIX_2
            bits = bits ^ (bits >> np.uint64(31))
        return np.asarray(bits)


def permuted(places: np.ndarray, size: np.ndarray | int, *key: np.ndarray | int) -> np.ndarray:
    """Return where a random permutation of 0..size-1 sends each place.

    Args:
        places: int64 [N], 0 <= place < size.
        size: int64 [N] or one number.
        key: what the permutation depends on, [N] or one number each.

    Returns:
        int64 [N].
    """
    size = np.broadcast_to(np.asarray(size, np.uint64), np.shape(places))
    x = np.asarray(places).astype(np.uint64)
    bits = np.ceil(np.log2(np.maximum(size, np.uint64(2)).astype(np.float64)) / 2)
    half = np.maximum(bits, 1).astype(np.uint64)
    keys = [np.broadcast_to(mix(r, *key), x.shape) for r in range(4)]
    walking = np.ones(x.shape, bool)
    # the network's own range is at most four times as wide, on average twice: walk until inside
    while walking.any():
        x[walking] = _feistel(x[walking], half[walking], [k[walking] for k in keys])
        walking = x >= size
    return x.astype(np.int64)


def _feistel(x: np.ndarray, half: np.ndarray, keys: list[np.ndarray]) -> np.ndarray:
    low_bits = (np.uint64(1) << half) - np.uint64(1)
    left, right = x >> half, x & low_bits
    for key in keys:
        left, right = right, left ^ (mix(right, key) & low_bits)
    return (left << half) | right


@dataclass(frozen=True, kw_only=True)
class Steps:
    """Every sample once an epoch, in random order."""

    group: ClassVar[int] = 1  # samples that stand together

    def ids(self, places: np.ndarray, data: WindowDataset, seed: int) -> np.ndarray:
        """Return the sample at each place of the endless order, int64 [N].

        Args:
            places: int64 [N], 0 or more.
            data: whose samples are ordered.
            seed: of the order.
        """
        size = len(data)
        return permuted(places % size, size, seed, places // size)


@dataclass(frozen=True, kw_only=True)
class Shards:
    """A tenth of a shard of consecutive samples, then the next shard.

    Args:
        shard: samples a shard.
        share: of a shard that is used before it is dropped.
        streams: shards in use at once; the public code has one a worker of each rank.
    """

    shard: int = 10_000
    share: float = 0.1
    streams: int = 1
    group: ClassVar[int] = 1

    def __post_init__(self) -> None:
        if self.shard < 1 or not 0 < self.share <= 1 or self.streams < 1:
            raise ConfigError(f"shards need shard >= 1, 0 < share <= 1, streams >= 1, got {self}")

    def ids(self, places: np.ndarray, data: WindowDataset, seed: int) -> np.ndarray:
        """Return the sample at each place of the endless order, int64 [N]."""
        shard = min(self.shard, len(data))
        used = max(round(shard * self.share), 1)
        stream, place = places % self.streams, places // self.streams
        turn = place // used
        # a uniform draw of a sample draws its shard in proportion to the shard's length
        chosen = (mix(seed, 1, stream, turn) % np.uint64(len(data))).astype(np.int64) // shard
        first = chosen * shard
        size = np.minimum(shard, len(data) - first)
        within = place % used % size
        return first + permuted(within, size, seed, 2, stream, turn)


@dataclass(frozen=True, kw_only=True)
class Unions:
    """Starts of one episode side by side, so that their frames are decoded together.

    Args:
        starts: m, samples that share one decoding.
    """

    starts: int = 4

    def __post_init__(self) -> None:
        if self.starts < 1:
            raise ConfigError(f"unions need starts >= 1, got {self.starts}")

    @property
    def group(self) -> int:
        """Samples that stand together."""
        return self.starts

    def ids(self, places: np.ndarray, data: WindowDataset, seed: int) -> np.ndarray:
        """Return the sample at each place of the endless order, int64 [N]."""
        low, high = data.index.episode_bounds
        group, member = places // self.starts, places % self.starts
        sample = (mix(seed, 3, group) % np.uint64(len(data))).astype(np.int64)
        episode = np.searchsorted(high, sample, side="right")
        first, size = low[episode], (high - low)[episode]
        return first + permuted(member % size, size, seed, 4, group)


Strategy = Steps | Shards | Unions
STRATEGIES: dict[str, type[Strategy]] = {"step": Steps, "shard": Shards, "union": Unions}


class Sampler:
    """The endless order of a training run.

    In a mixture every 1,000 draws hold each part exactly in proportion to its weight, in random
    order, and each part goes through its own order at its own pace.

    Args:
        data: one data set, or a mixture.
        seed: of the run.
        strategy: a key of STRATEGIES, or a value with its own settings.

    Raises:
        ConfigError: unknown strategy, or a part of the mixture with a weight under 0.1 %.
    """

    def __init__(
        self, data: WindowDataset | Mixture, *, seed: int, strategy: str | Strategy = "step"
    ) -> None:
        self.data, self.seed = data, seed
        if isinstance(strategy, str):
            strategy = lookup(STRATEGIES, strategy, "sampling strategy")()
        self.strategy = strategy
        if isinstance(data, Mixture):
            self._deck = _shares(data.weights)

    def ids_of_step(self, step: int, global_batch: int) -> np.ndarray:
        """Return the samples of one optimizer step of the whole run, int64 [global_batch]."""
        places = step * global_batch + np.arange(global_batch, dtype=np.int64)
        if not isinstance(self.data, Mixture):
            return self.strategy.ids(places, self.data, self.seed)
        part, own = self._parts(places)
        ids = np.empty_like(places)
        for number, data in enumerate(self.data.parts):
            mine = part == number
            base = self.data.ends[number] - self.data.lengths[number]
            ids[mine] = base + self.strategy.ids(own[mine], data, self.seed + number)
        return ids

    def _parts(self, places: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the part that each place draws from, and the place in that part's own order."""
        group = self.strategy.group
        unit, member = places // group, places % group
        part, own = np.empty_like(places), np.empty_like(places)
        for turn in np.unique(unit // _DECK):
            deck = self._deck[permuted(np.arange(_DECK), _DECK, self.seed, 5, turn)]
            inside = unit // _DECK == turn
            part[inside] = deck[unit[inside] % _DECK]
            for number in np.unique(part[inside]):
                before = np.cumsum(deck == number) - (deck == number)
                mine = inside & (part == number)
                count = turn * np.count_nonzero(self._deck == number) + before[unit[mine] % _DECK]
                own[mine] = count * group + member[mine]
        return part, own


def _shares(weights: np.ndarray) -> np.ndarray:
    """Return the parts of a thousand draws, in order, each as often as its weight says."""
    exact = weights * _DECK
    counts = np.floor(exact).astype(np.int64)
    short = np.argsort(counts - exact, kind="stable")[: _DECK - counts.sum()]
    counts[short] += 1
    if (counts == 0).any():
        raise ConfigError(
            f"a part of a mixture needs a weight of at least {1 / _DECK:.1%} of the whole, "
            f"got {', '.join(f'{w:.3%}' for w in weights)}"
        )
    return np.repeat(np.arange(len(weights)), counts)
