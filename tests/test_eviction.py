"""Cache policies: oracles, the bound, and why shuffled epochs defeat them all."""

import cachetools
import numpy as np
import pytest

from wamlab.config import ConfigError
from wamlab.data.eviction import POLICIES, Trace, make_trace, simulate, unbiased_weights

N, SHARE, ACCESSES = 1000, 0.2, 12000


def rates(kind, seed=0, **options):
    trace = make_trace(kind, N, ACCESSES, seed=seed, **options)
    return {p: simulate(trace, SHARE * N, p, warmup=3000).hit_rate for p in POLICIES}


def test_weighted_sampling_orders_the_policies():
    for seed in range(3):
        for alpha in (0.5, 1.0):
            found = rates("weighted", seed, alpha=alpha)
            assert found["belady"] > found["motion"] > found["lfu"] > found["lru"] > found["fifo"]
            assert found["lru"] > found["pinned"]


def test_no_policy_beats_the_share_of_the_cache_under_shuffled_epochs():
    found = rates("shuffled")
    assert abs(found["motion"] - found["pinned"]) < 0.01
    assert found["motion"] == pytest.approx(SHARE, abs=0.02)
    assert found["lru"] < 0.05
    assert found["fifo"] < 0.05


def test_sequential_epochs_are_the_worst_for_lru():
    found = rates("sequential")
    assert found["lru"] == found["fifo"] == 0
    assert found["belady"] == pytest.approx(SHARE, abs=0.02)


@pytest.mark.parametrize("kind", ["sequential", "shuffled", "weighted"])
def test_nothing_is_above_belady_and_lookahead_comes_close(kind):
    found = rates(kind)
    assert max(found.values()) <= found["belady"]
    assert found["lookahead"] > found["belady"] - 0.02


def test_a_short_horizon_sees_less():
    trace = make_trace("weighted", N, ACCESSES)
    far, near = (simulate(trace, SHARE * N, "lookahead", warmup=3000, horizon=h).hit_rate
                 for h in (4096, 50))  # fmt: skip
    assert near < far


def test_belady_is_the_best_of_all_choices_on_a_small_trace():
    """Every sequence of keep-or-drop choices of a cache of two, tried."""
    ids = np.array([0, 1, 2, 0, 3, 1, 0, 2, 2, 1])

    def best(at, held):
        if at == len(ids):
            return 0
        key = int(ids[at])
        if key in held:
            return 1 + best(at + 1, held)
        options = [held, *((held - {h}) | {key} for h in held)]
        if len(held) < 2:
            options = [held | {key}, held]
        return max(best(at + 1, frozenset(o)) for o in options)

    trace = Trace(ids, np.ones(4), np.ones(4) / 4)
    assert simulate(trace, 2, "belady").hit_rate == best(0, frozenset()) / len(ids)


@pytest.mark.parametrize(("policy", "oracle"), [("lru", "LRUCache"), ("fifo", "FIFOCache")])
def test_recency_agrees_with_cachetools(policy, oracle):
    trace = make_trace("weighted", 300, 4000, seed=3)
    cache, hits = getattr(cachetools, oracle)(60), 0
    for key in trace.ids.tolist():
        hits += cache.get(key) is not None
        if key not in cache:
            cache[key] = True
    assert simulate(trace, 60, policy).hit_rate == hits / len(trace.ids)


def test_bytes_count():
    """A large sample is not let in for what it pushes out, and never fits beyond the capacity."""
    sizes = np.array([1.0, 1.0, 10.0])
    trace = Trace(np.array([0, 1, 2, 0, 1, 2]), sizes, np.array([0.4, 0.4, 0.2]))
    found = simulate(trace, 2.0, "motion")
    assert found.hit_rate == pytest.approx(2 / 6)
    assert found.byte_miss == pytest.approx(22 / 24)
    assert found.evictions == 0
    assert simulate(trace, 2.0, "lru").hit_rate == pytest.approx(2 / 6)


def test_loss_weights_undo_weighted_sampling():
    """By enumeration: the expected weighted loss is the plain mean."""
    p = make_trace("weighted", 50, 10, alpha=1.0).weights
    losses = np.random.default_rng(1).random(50)
    assert (p * unbiased_weights(p) * losses).sum() == pytest.approx(losses.mean())


def test_what_is_refused():
    trace = make_trace("shuffled", 10, 20)
    with pytest.raises(ConfigError, match=r"unknown eviction policy 'lruu'.*did you mean 'lru'"):
        simulate(trace, 5, "lruu")
    with pytest.raises(ConfigError, match=r"a cache of 0\.5 bytes holds none"):
        simulate(trace, 0.5, "lru")
    with pytest.raises(ConfigError, match="unknown trace 'shuffle'"):
        make_trace("shuffle", 10, 20)
