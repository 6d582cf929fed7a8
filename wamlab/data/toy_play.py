"""The toy world played by its expert while it is pushed about: raw material for a corpus.

What is recorded is the expert's own next action, also while a push carries the arm away: so the
data shows the way back from mistakes that a policy will make. Imports no torch, so that many
processes may play.
"""

from dataclasses import dataclass, field, replace

import numpy as np

from wamlab.config import ConfigError, lookup
from wamlab.data.embodiment import EMBODIMENTS, Embodiment
from wamlab.data.toy_env import Expert, ToyConfig, ToyWorld


@dataclass(frozen=True, kw_only=True)
class ToyPlayConfig:
    """What is played and what is kept of it.

    Args:
        world: the table.
        embodiment: as whom the arm is read, "toy" or "toy-small".
        episodes: how many; episode i has seed `seed` + i.
        seed: of the first episode.
        blocks: K, blocks a sample.
        every: steps from one sample's start to the next one's in an episode.
        speed_m: of the expert, see `Expert`.
        push_rad: standard deviation of what a push adds to the joints' targets.
        push_share: of the steps at which a push begins.
        push_memory: how much of a push is left one step later, 0 to 1.
    """

    world: ToyConfig = field(default_factory=lambda: ToyConfig(rig="small"))
    embodiment: str = "toy-small"
    episodes: int = 100
    seed: int = 0
    blocks: int = 1
    every: int = 6
    speed_m: float = 0.03
    push_rad: float = 0.06
    push_share: float = 0.03
    push_memory: float = 0.8

    def __post_init__(self) -> None:
        step = self.robot.frame_offsets()[1]
        if self.every % step or self.every < step:
            raise ConfigError(
                f"every must be a multiple of the {step} steps between frames, got {self.every}"
            )

    @property
    def robot(self) -> Embodiment:
        """The robot, with samples of so many blocks."""
        return robot_of(self.embodiment, self.blocks)


@dataclass(frozen=True)
class Play:
    """One episode: states [T, 8], the expert's actions [T, 8], and the frames of every n-th step as
    views uint8 [V, T/n, h, w, 3]."""

    states: np.ndarray
    actions: np.ndarray
    views: np.ndarray
    task: str


def play(seed: int, *, config: ToyPlayConfig) -> Play:
    """Let the expert play one episode while it is pushed."""
    world, rng = ToyWorld(config.world), np.random.default_rng([seed, 0x72])
    world.reset(seed)
    robot = config.robot
    expert, rows, views, push = Expert(world, speed_m=config.speed_m), [], [], np.zeros(7)
    frame_step = robot.frame_offsets()[1]
    rest = config.blocks * robot.horizon + 1  # so that samples reach to the end of the task
    while rest > 0:
        assert len(rows) < 1500, f"the expert did not solve seed {seed}"
        if len(rows) % frame_step == 0:
            drawn = world.render()
            views.append([drawn[name] for name in robot.views])
        done = expert.done and world.success()
        rest -= done
        action = expert()
        rows.append((world.state(), action))
        push = config.push_memory * push
        if rng.random() < config.push_share and not done:
            push = push + rng.normal(0, config.push_rad, 7)
        world.step(action + np.array([*push, 0.0]))
    states, actions = (np.stack(c).astype(np.float32) for c in zip(*rows))
    return Play(states, actions, np.stack(views, axis=1), world.task)


def robot_of(name: str, blocks: int) -> Embodiment:
    """Return a robot of EMBODIMENTS whose samples have another number of blocks."""
    return replace(lookup(EMBODIMENTS, name, "embodiment"), blocks=blocks)
