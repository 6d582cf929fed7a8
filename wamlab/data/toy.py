"""Data sets of the toy world (`toy_env.py`): the scripted expert recorded, encoded, written.

python -m wamlab.data.toy OUT --episodes 6
"""

import argparse
import multiprocessing
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
from tqdm import tqdm

from wamlab.data.embodiment import EMBODIMENTS
from wamlab.data.lerobot_write import Episode, encode_video, write_dataset
from wamlab.data.toy_arm import forward, rot_z, rotation_vector
from wamlab.data.toy_env import GRIPPER_YAW, Expert, ToyConfig, ToyWorld
from wamlab.data.toy_render import RIGS

VIEW_KEYS = {"droid": "observation.images.", "libero": ""}
COLUMNS = {"droid": ("observation.state", "action"), "libero": ("state", "actions")}
NOISE_RAD = 0.01  # standard deviation of what is added to the joints' targets
_JOINTS = [*(f"joint_{i}" for i in range(7)), "gripper"]
_POSE = ["x", "y", "z", "turn_x", "turn_y", "turn_z"]
NAMES = {
    "droid": (_JOINTS, _JOINTS),
    "libero": ([*_POSE, "finger_left", "finger_right"], [*_POSE, "gripper"]),
}


def form(rig: str) -> str:
    """Return in whose form a rig's data sets are written, "droid" or "libero"."""
    return "libero" if rig == "libero" else "droid"


def _cartesian(
    state: np.ndarray, pose: tuple[np.ndarray, np.ndarray], action: np.ndarray
) -> tuple[list[float], list[float]]:
    """Return LIBERO's form: state of position, turn and two fingers; action of steps and gripper.

    A turn is the rotation vector from straight down; a step is in units of 0.05 m and 0.5 rad.
    """
    _, _, goal, goal_hand = forward(action[:7].astype(np.float64))
    down = rot_z(GRIPPER_YAW) @ np.diag([1.0, -1.0, -1.0])
    finger = 0.04 * (1.0 - float(state[7]))
    turn, goal_turn = (rotation_vector(h @ down.T) for h in (pose[1], goal_hand))
    steps = [*(goal - pose[0]) / 0.05, *(goal_turn - turn) / 0.5]
    return [*pose[0], *turn, finger, -finger], [*steps, 2.0 * float(action[7]) - 1.0]


def record(seed: int, *, config: ToyConfig, least: int = 128) -> Episode:
    """Record the expert solving one task.

    The arm is shaken, so that the data show how to come back; the recorded action is the expert's
    own.

    Args:
        seed: lays the table and shakes the arm.
        config: the world.
        least: frames an episode has at least; the arm rests until then.

    Returns:
        The episode in the form of the rig: DROID's joints, or LIBERO's Cartesian steps.
    """
    world, rng = ToyWorld(config), np.random.default_rng([seed, 0x71])
    world.reset(seed)
    expert, rows, views = Expert(world), [], []
    while not (expert.done and world.success()) or len(rows) < least:
        if len(rows) > 600:
            raise AssertionError(f"the expert did not solve seed {seed}")
        state, pose, action = world.state(), (world.tool, world.hand), expert()
        views.append(world.render())
        row = _cartesian(state, pose, action) if config.rig == "libero" else (state, action)
        rows.append(row)
        world.step(action + np.array([*rng.normal(0, NOISE_RAD, 7), 0.0]))
    columns = [np.stack(c).astype(np.float32) for c in zip(*rows)]
    return Episode(
        world.task,
        dict(zip(COLUMNS[form(config.rig)], columns)),
        {VIEW_KEYS[form(config.rig)] + k: np.stack([v[k] for v in views]) for k in views[0]},
    )


def record_encoded(seed: int, *, config: ToyConfig, fps: int) -> Episode:
    """Record one episode and encode its views, see `record`."""
    episode = record(seed, config=config)
    clips = {name: encode_video(frames, fps) for name, frames in episode.views.items()}
    return replace(episode, views=clips)


def write_toy(
    root: Path,
    *,
    episodes: int,
    version: str = "v2.1",
    rig: str = "droid",
    seed: int = 0,
    workers: int = 1,
) -> None:
    """Write a data set of toy episodes.

    Args:
        root: an empty or new folder.
        episodes: how many.
        version: "v2.1" or "v3.0".
        rig: "droid" (three views, joints, 15 fps), "small" (the same with a quarter of the pixels)
            or "libero" (two views, Cartesian, 10 fps).
        seed: the first episode's; each following one adds 1.
        workers: processes that record and encode; the data set does not depend on it.
    """
    fps = 10 if rig == "libero" else 15
    make = partial(record_encoded, config=ToyConfig(rig=rig), fps=fps)
    numbers = range(seed, seed + episodes)
    with (
        multiprocessing.get_context("spawn").Pool(workers) if workers > 1 else nullcontext() as pool
    ):
        made = pool.imap(make, numbers) if pool else map(make, numbers)
        write_dataset(
            tqdm(made, total=episodes, desc="toy episodes", disable=None),
            root=Path(root),
            version=version,
            fps=fps,
            embodiment=EMBODIMENTS["libero" if rig == "libero" else "toy"],
            names=dict(zip(COLUMNS[form(rig)], NAMES[form(rig)])),
        )


def main() -> None:
    """Write a data set from the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m wamlab.data.toy", description="Write a data set of toy episodes."
    )
    parser.add_argument("root", type=Path, metavar="OUT")
    parser.add_argument("--episodes", type=int, default=6)
    parser.add_argument("--version", default="v2.1", choices=("v2.1", "v3.0"))
    parser.add_argument("--rig", default="droid", choices=tuple(RIGS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=1)
    write_toy(**vars(parser.parse_args()))


if __name__ == "__main__":
    main()
