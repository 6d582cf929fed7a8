"""Episodes in step: success, determinism, processes, and the interval of a rate."""

import numpy as np
import pytest

from wamlab.config import ConfigError
from wamlab.data.embodiment import EMBODIMENTS
from wamlab.data.toy_env import Expert, ToyConfig, ToyWorld
from wamlab.evaluate.closed_loop import ClosedLoopConfig, closed_loop, wilson
from wamlab.evaluate.policy import Policy
from wamlab.evaluate.worlds import advance, begin

EASY = ToyConfig(objects=1, plates=1, rig="small")
FAST = {"world": EASY, "episodes": 3, "max_steps": 120}


class Cheat(Policy):
    """The expert, by a copy of each world that it keeps in step."""

    embodiment = EMBODIMENTS["toy"]

    def __init__(self, seeds: list[int], batch: int, *, remembers: bool = False) -> None:
        self.seeds, self.batch, self.remembers = iter(seeds), batch, remembers
        self.frames = []

    def reset(self) -> None:
        worlds = [ToyWorld(EASY) for _ in range(self.batch)]
        self.robots = []
        for world, seed in zip(worlds, self.seeds):
            world.reset(seed)
            self.robots.append((world, Expert(world, speed_m=0.03)))

    def fork(self) -> "Cheat":
        raise NotImplementedError

    def infer_batch(self, observations) -> list[np.ndarray]:
        self.frames.append({o["views"]["wrist_image_left"].shape[0] for o in observations})
        chunks = []
        for (world, expert), observation in zip(self.robots, observations):
            if not world.success():
                np.testing.assert_array_equal(observation["state"], world.state())
            assert observation["prompt"] == world.task
            chunk = []
            for _ in range(self.horizon):
                chunk.append(expert())
                if not world.success():
                    world.step(chunk[-1])
            chunks.append(np.stack(chunk))
        return chunks


class Still(Cheat):
    """Does nothing."""

    def infer_batch(self, observations) -> list[np.ndarray]:
        return [np.tile(o["state"], (self.horizon, 1)) for o in observations]


def test_whoever_knows_the_world_succeeds_and_whoever_stands_still_does_not():
    config = ClosedLoopConfig(**FAST, seed=5, batch=2)
    found = closed_loop(Cheat([5, 6, 7], 2), config)
    assert found.success_rate == 1.0
    assert [e.seed for e in found.episodes] == [5, 6, 7]
    assert all(e.task.startswith("put the") and 30 < e.steps < 120 for e in found.episodes)
    found = closed_loop(Still([5, 6, 7], 2), config)
    assert found.successes == 0
    assert {e.steps for e in found.episodes} == {120}


def test_processes_change_nothing():
    alone = closed_loop(Cheat([5, 6, 7], 3), ClosedLoopConfig(**FAST, seed=5))
    spread = closed_loop(Cheat([5, 6, 7], 3), ClosedLoopConfig(**FAST, seed=5, workers=2))
    assert alone.episodes == spread.episodes


def test_a_policy_that_remembers_is_shown_every_frame_and_all_robots_show_as_many():
    policy = Cheat([5, 6, 7], 3, remembers=True)
    seen = []
    closed_loop(policy, ClosedLoopConfig(**FAST, seed=5), watch=seen.append)
    assert policy.frames == [{1}] + [{8}] * (len(policy.frames) - 1)
    assert len(seen) == len(policy.frames) + 1
    assert all(m.done for m in seen[-1])
    blind = Cheat([5, 6, 7], 3)
    closed_loop(blind, ClosedLoopConfig(**FAST, seed=5))
    assert set.union(*blind.frames) == {1}


def test_a_world_stops_where_its_task_is_done_and_stays_there():
    moment = begin(EASY, 5)
    expert = Expert(moment.world, speed_m=0.03)
    for _ in range(200):
        moment = advance((moment, expert()[None], 0, 300))
        if moment.done:
            break
    assert moment.done
    after = advance((moment, np.zeros((24, 8)), 3, 300))
    assert after is moment
    begun = begin(EASY, 5)
    short = advance((begun, np.tile(begun.world.state(), (24, 1)), 3, 10))
    assert (short.steps, len(short.views["wrist_image_left"])) == (10, 8)


def test_wilsons_interval():
    for successes, trials in ((180, 200), (1, 7), (25, 50)):
        rate = successes / trials
        for edge in wilson(successes, trials):  # a true rate that the found one is 1.96 sigma from
            away = abs(rate - edge) / (edge * (1 - edge) / trials) ** 0.5
            assert away == pytest.approx(1.959964, abs=1e-6)
    assert wilson(0, 10)[0] == 0.0
    assert wilson(10, 10)[1] == pytest.approx(1.0)
    rng = np.random.default_rng(0)
    for rate in (0.1, 0.5, 0.9):
        draws = rng.binomial(50, rate, 2000)
        held = np.mean([low <= rate <= high for low, high in (wilson(int(k), 50) for k in draws)])
        assert 0.93 < held < 0.98


def test_what_makes_no_sense_is_refused():
    with pytest.raises(ConfigError, match="3 successes of 2 trials: no rate"):
        wilson(3, 2)
    with pytest.raises(ConfigError, match="episodes must be 1 or more, got 0"):
        ClosedLoopConfig(episodes=0)
    with pytest.raises(ConfigError, match="execute 25 of a chunk of 24 steps"):
        closed_loop(Still([1], 1), ClosedLoopConfig(**FAST, execute=25))
