"""Blocks by dynamics: made-up motions with their truth, and golden intervals of real clips."""

import numpy as np
import pytest
from test_bvh import real

from wamlab.motion.segments import (
    Block,
    ballistic_g,
    block_ids,
    contacts,
    derivative,
    dynamics_score,
    runs,
    segment,
)
from wamlab.motion.skeleton import CANONICAL, FEET, INDEX, masses, to_canonical
from wamlab.motion.synthetic import make

GOLDEN = {
    "cmu_131_03_hop": [
        Block("support", 0, 298),
        Block("take-off", 298, 313),
        Block("flight", 313, 351),
        Block("landing", 351, 390),
        Block("support", 390, 453),
        Block("balance", 453, 520),
    ],
    "fair1_jumping": [
        Block("support", 0, 270),
        Block("take-off", 270, 290),
        Block("flight", 290, 341),
        Block("landing", 341, 417),
        Block("support", 417, 654),
    ],
    "cmu_12_01_walk": [Block("support", 0, 523)],
}


def assert_near(found, wanted, frames):
    assert [b.kind for b in found] == [b.kind for b in wanted]
    far = [abs(a - b) for f, w in zip(found, wanted) for a, b in zip(f[1:], w[1:])]
    assert max(far) <= frames, (found, wanted)


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_intervals(name):
    clip, _ = real(name)
    assert_near(segment(to_canonical(clip)[0].positions(), 1 / clip.dt), GOLDEN[name], 3)


@pytest.mark.parametrize("seed", range(6))
def test_the_truth_is_found(seed):
    made = make(seed)
    assert_near(segment(made.clip.positions(), 120.0), made.blocks, 6)


def test_a_kick_is_found_and_its_pivot_foot_is_no_flight():
    kinds = {b.kind for b in segment(make(4).clip.positions(), 120.0)}
    assert "kick" in kinds


@pytest.mark.parametrize("rate", [60.0, 119.88, 240.0])
def test_rules_are_in_seconds(rate):
    made = make(0, rate=rate)
    assert_near(segment(made.clip.positions(), rate), made.blocks, 0.05 * rate)


def test_a_wrong_unit_has_no_flight():
    place = make(0).clip.positions()
    assert "flight" not in {b.kind for b in segment(place / 2.54, 120.0)}


def test_free_fall():
    clip, made = make(0).clip, make(0)
    flight = next(b for b in made.blocks if b.kind == "flight")
    height = clip.root_pos[flight.first : flight.last, 2]
    assert ballistic_g(height, 120.0) == pytest.approx(-1.0, abs=1e-9)
    assert ballistic_g(height[:2], 120.0) == 0.0


def test_blocks_cover_a_clip_without_short_ones():
    for seed in range(8):
        place = make(seed).clip.positions()
        blocks = segment(place, 120.0)
        assert [b.first for b in blocks[1:]] == [b.last for b in blocks[:-1]]
        assert (blocks[0].first, blocks[-1].last) == (0, len(place))
        assert min(b.last - b.first for b in blocks) >= 12
        assert block_ids(blocks, len(place))[-1] == len(blocks) - 1


def test_contact_and_standing_feet():
    made = make(0)
    place = made.clip.positions()
    down = contacts(place, 120.0)
    flight = next(b for b in made.blocks if b.kind == "flight")
    assert not down[flight.first + 2 : flight.last - 2].any()
    assert down[: flight.first - 12].all()
    moved = np.abs(np.diff(place[: flight.first, list(FEET)], axis=0))
    assert moved.max() < 1e-12


def test_derivative_is_exact_for_cubics():
    t = np.arange(20) / 30
    np.testing.assert_allclose(derivative(t**3, 30.0)[2:-2], 3 * t[2:-2] ** 2, atol=1e-12)
    assert derivative(t[:3], 30.0) == pytest.approx(1.0)


def test_runs_and_scores():
    assert runs(np.array([1, 1, 0, 1], bool)) == [(0, 2), (3, 4)]
    assert runs(np.zeros(3, bool)) == []
    place = make(0).clip.positions()
    rest, jump = (dynamics_score(place[a:b], 120.0) for a, b in ((0, 40), (110, 190)))
    assert jump[0] > 3 * rest[0]
    assert jump[1] > jump[0]


def test_masses():
    assert masses(70.0).sum() == pytest.approx(70.0)
    assert len(masses()) == len(CANONICAL) == len(INDEX)
