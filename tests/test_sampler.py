from types import SimpleNamespace

import numpy as np
import pytest

from wamlab.config import ConfigError
from wamlab.data.sampler import STRATEGIES, Sampler, Shards, Steps, Unions, permuted
from wamlab.data.windows import Mixture, WindowIndex


class Data:
    """As much of a WindowDataset as a sampler looks at."""

    def __init__(self, lengths, horizon=8, blocks=2) -> None:
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        labels = [np.zeros(offsets[-1], np.int64)]
        self.index = WindowIndex.build(offsets, labels, horizon=horizon, blocks=blocks)
        self.embodiment = SimpleNamespace(name="x", blocks=blocks, horizon=horizon, views=("a",))

    def __len__(self) -> int:
        return len(self.index)


DATA = Data([40, 17, 3, 90, 33])


@pytest.mark.parametrize("size", [1, 2, 3, 7, 64, 100, 1000, 4097])
def test_a_permutation_is_one(size):
    where = permuted(np.arange(size), size, 5, 6)
    assert sorted(where.tolist()) == list(range(size))
    if size > 50:
        assert (where != permuted(np.arange(size), size, 5, 7)).any()
        assert abs(np.corrcoef(where, np.arange(size))[0, 1]) < 0.35


def test_permutations_of_several_sizes_at_once():
    sizes = np.repeat([5, 900], [5, 900])
    places = np.concatenate([np.arange(5), np.arange(900)])
    where = permuted(places, sizes, sizes)
    assert sorted(where[:5].tolist()) == list(range(5))
    assert sorted(where[5:].tolist()) == list(range(900))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_order_depends_on_seed_and_step_alone(strategy):
    def order(batch: int, steps: int, seed: int = 3) -> list[int]:
        sampler = Sampler(DATA, seed=seed, strategy=strategy)
        # asked backwards, to show that nothing is remembered
        return np.concatenate(
            [sampler.ids_of_step(s, batch) for s in reversed(range(steps))][::-1]
        ).tolist()

    assert order(4, 60) == order(8, 30) == order(240, 1)
    assert order(4, 60) != order(4, 60, seed=4)
    assert all(0 <= i < len(DATA) for i in order(4, 60))


def test_step_sampling_sees_every_sample_once_an_epoch():
    sampler = Sampler(DATA, seed=0)
    n = len(DATA)
    ids = sampler.ids_of_step(0, 3 * n).reshape(3, n)
    assert (np.sort(ids, 1) == np.arange(n)).all()
    assert (ids[0] != ids[1]).any()
    neighbours = np.abs(np.diff(ids[0])) <= 1
    assert neighbours.mean() < 0.1


def test_shard_sampling_uses_a_tenth_of_a_shard_then_the_next():
    data = Data([300] * 30)
    sampler = Sampler(data, seed=1, strategy=Shards(shard=1000, share=0.1))
    ids = sampler.ids_of_step(0, 5000).reshape(50, 100)
    shards = ids // 1000
    assert (shards == shards[:, :1]).all()
    assert all(len(set(turn)) == 100 for turn in ids)
    assert len(np.unique(shards)) == 9  # drawn again and again, not once each
    streams = Sampler(data, seed=1, strategy=Shards(shard=1000, share=0.1, streams=4))
    ids = streams.ids_of_step(0, 400).reshape(100, 4)
    assert (ids // 1000 == ids[:1] // 1000).all()


def test_shards_are_drawn_in_proportion_to_their_length():
    data = Data([300] * 5)  # 1,500 samples: shards of 1,000 and 500
    ids = Sampler(data, seed=2, strategy=Shards(shard=1000, share=0.01)).ids_of_step(0, 20_000)
    assert (ids < 1000).mean() == pytest.approx(2 / 3, abs=0.05)


def test_a_union_takes_different_starts_of_one_episode():
    low, high = DATA.index.episode_bounds
    ids = Sampler(DATA, seed=5, strategy=Unions(starts=4)).ids_of_step(0, 4000).reshape(-1, 4)
    episode = np.searchsorted(high, ids, side="right")
    assert (episode == episode[:, :1]).all()
    assert all(len(set(group)) == min(4, (high - low)[e]) for group, e in zip(ids, episode[:, 0]))
    share = np.bincount(episode[:, 0], minlength=5) / len(ids)
    np.testing.assert_allclose(share, (high - low) / len(DATA), atol=0.05)


@pytest.mark.parametrize("strategy", [Steps(), Shards(shard=50), Unions(starts=4)])
def test_a_mixture_holds_its_weights_exactly_and_each_part_its_own_order(strategy):
    parts = [DATA, Data([50, 60])]
    both = Mixture(parts, [4, 1])
    sampler = Sampler(both, seed=7, strategy=strategy)
    ids = sampler.ids_of_step(0, 2000 * strategy.group)
    second = ids >= len(DATA)
    assert second.mean() == 0.2
    for number, mine in ((0, ~second), (1, second)):
        own = ids[mine] - (len(DATA) if number else 0)
        alone = strategy.ids(np.arange(len(own)), parts[number], 7 + number)
        assert own.tolist() == alone.tolist()
    again = np.concatenate([sampler.ids_of_step(s, 50) for s in range(40 * strategy.group)])
    assert again.tolist() == ids.tolist()


def test_a_mixture_without_weights_goes_by_length():
    both = Mixture([DATA, Data([50, 60])])
    share = (Sampler(both, seed=0).ids_of_step(0, 1000) < len(DATA)).mean()
    assert share == pytest.approx(len(DATA) / len(both), abs=1e-3)


def test_bad_settings_are_refused():
    with pytest.raises(ConfigError, match=r"unknown sampling strategy 'steps'.*mean 'step'"):
        Sampler(DATA, seed=0, strategy="steps")
    with pytest.raises(ConfigError, match=r"share <= 1.*share=2"):
        Shards(share=2.0)
    with pytest.raises(ConfigError, match=r"starts >= 1"):
        Unions(starts=0)
    with pytest.raises(ConfigError, match=r"at least 0.1% of the whole, got 99.990%, 0.010%"):
        Sampler(Mixture([DATA, DATA], [9999, 1]), seed=0)
