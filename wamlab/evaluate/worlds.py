"""Worlds between two calls of a policy; imports no torch, so that many processes may move them."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from wamlab.data.toy_env import ToyConfig, ToyWorld


@dataclass(frozen=True, kw_only=True)
class Moment:
    """A robot after a chunk: its world, the frames of each view since the last moment uint8
    [T, H, W, 3], the steps it has taken, and whether its task is done."""

    world: ToyWorld
    views: dict[str, np.ndarray]
    steps: int
    done: bool

    def observation(self) -> dict[str, Any]:
        """Return what a policy is shown."""
        return {"views": self.views, "state": self.world.state(), "prompt": self.world.task}


def begin(config: ToyConfig, seed: int) -> Moment:
    """Return the first moment of an episode."""
    world = ToyWorld(config)
    world.reset(seed)
    views = {name: view[None] for name, view in world.render().items()}
    return Moment(world=world, views=views, steps=0, done=False)


def advance(task: tuple[Moment, np.ndarray, int, int]) -> Moment:
    """Carry out actions until the task is done.

    Args:
        task: the moment; the actions [n, E]; steps from one kept frame to the next, 0 keeps the
            last one alone; steps that an episode may take.
    """
    moment, actions, every, most = task
    if moment.done or moment.steps >= most:
        return moment
    world, steps, frames, done = moment.world, moment.steps, [], False
    for number, action in enumerate(actions, 1):
        world.step(action)
        steps, done = steps + 1, world.success()
        ends = done or steps == most or number == len(actions)
        if ends or (every and number % every == 0):
            frames.append(world.render())
        if done or steps == most:
            break
    wanted = -(-len(actions) // every) if every else 1  # as many as of those that go on
    frames += [frames[-1]] * (wanted - len(frames))
    views = {name: np.stack([f[name] for f in frames]) for name in frames[0]}
    return Moment(world=world, views=views, steps=steps, done=done)
