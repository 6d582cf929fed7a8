"""Open loop: how far a policy's actions are from those recorded, on episodes held out of training.

At every chunk's start the policy sees what the robot saw; its actions are compared and not carried
out. The error is cheap and has no luck in it, but it does not say whether mistakes add up: that is
what the closed loop is for.

Shapes: N chunks, H steps of a chunk, A the robot's action width.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from wamlab.config import ConfigError
from wamlab.data.codec import slices
from wamlab.data.windows import WindowDataset
from wamlab.evaluate.policy import Policy


@dataclass(frozen=True, kw_only=True)
class OpenLoopResult:
    """Mean absolute errors by action part, in the robot's own units.

    Args:
        chunks: compared.
        error: of the policy.
        mean_error: of who plays, in every chunk, the mean of all the compared chunks.
        by_step: of the policy at each step of a chunk, float [H].
    """

    chunks: int
    error: dict[str, float]
    mean_error: dict[str, float]
    by_step: dict[str, list[float]]

    def to_json(self) -> dict[str, Any]:
        """Return the fields of a record of scope `open_loop`."""
        return {
            "chunks": self.chunks,
            "action_error": self.error,
            "mean_action_error": self.mean_error,
            "action_error_by_step": self.by_step,
        }


def open_loop(
    policy: Policy, data: WindowDataset, *, chunks: int = 64, batch: int = 8
) -> OpenLoopResult:
    """Compare actions on chunks spread evenly over a data set.

    Args:
        policy: who acts; every chunk is a new episode to it.
        data: of the policy's embodiment; `DataConfig.episodes` holds episodes out.
        chunks: at most so many.
        batch: observations a call.

    Raises:
        ConfigError: the data are of another robot.
    """
    robot = data.embodiment
    if (robot.name, robot.horizon) != (policy.embodiment.name, policy.horizon):
        raise ConfigError(
            f"{data.dataset.root} is read as {robot.name!r} with chunks of {robot.horizon}, the "
            f"policy acts for {policy.embodiment.name!r} with {policy.horizon}"
        )
    ids = np.unique(np.linspace(0, len(data) - 1, min(chunks, len(data))).astype(int))
    mine, theirs, anchors = [], [], []
    for first in range(0, len(ids), batch):
        found = [_moment(data, int(i)) for i in ids[first : first + batch]]
        policy.reset()
        mine += policy.infer_batch([observation for observation, _ in found])
        theirs += [actions for _, actions in found]
        anchors += [observation["state"] for observation, _ in found]
    return _compare(np.stack(mine), np.stack(theirs), np.stack(anchors), data)


def _moment(data: WindowDataset, index: int) -> tuple[dict[str, Any], np.ndarray]:
    """Return what the robot saw at a sample's first anchor, and what it then did [H, A]."""
    episode, anchor, row = data.index.locate(index)
    source, steps = data.dataset, np.array([anchor])
    views = {
        name: source.frames(episode, name, steps, data.open_video).permute(0, 2, 3, 1).numpy()
        for name in data.embodiment.views
    }
    observation = {
        "views": views,
        "state": source.state(source.rows(episode, steps))[0],
        "prompt": source.instruction(row),
    }
    rows = source.rows(episode, anchor + np.arange(data.embodiment.horizon))
    return observation, source.action(rows)


def _compare(
    mine_NHA: np.ndarray, theirs_NHA: np.ndarray, anchors_NS: np.ndarray, data: WindowDataset
) -> OpenLoopResult:
    codec = data.dataset.codec
    encoded = codec.encode_action(theirs_NHA, anchors_NS).reshape(*theirs_NHA.shape[:2], -1)
    mean = np.broadcast_to(encoded.mean(0), encoded.shape)
    plain = codec.decode_action(mean.reshape(-1, mean.shape[-1]), anchors_NS)
    error, mean_error, by_step = {}, {}, {}
    for name, own in slices(codec.embodiment.action).items():
        distance = np.abs(mine_NHA - theirs_NHA)[..., own]
        error[name] = float(distance.mean())
        mean_error[name] = float(np.abs(plain - theirs_NHA)[..., own].mean())
        by_step[name] = distance.mean((0, 2)).tolist()
    return OpenLoopResult(chunks=len(mine_NHA), error=error, mean_error=mean_error, by_step=by_step)
