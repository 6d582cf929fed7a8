"""Between a robot's own numbers and what the model sees: relative actions, normalisation, padding.

A codec holds nothing but the embodiment and its statistics, so that it can be stored beside a
checkpoint and decode actions where there is no data set.

Shapes: K blocks, H steps a block, S and A the robot's own state and action widths.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from wamlab.config import ConfigError
from wamlab.data.embodiment import ACTION_DIM, STATE_DIM, Embodiment, Part
from wamlab.data.normalize import Statistics, denormalize, normalize


@dataclass(frozen=True)
class Codec:
    """Encodes states and actions for the model, and decodes its actions.

    Args:
        embodiment: whose parts are in the order of the model's vectors.
        state: statistics of each state part.
        action: statistics of each action part; for a relative part those of the relative action.
    """

    embodiment: Embodiment
    state: tuple[Statistics, ...]
    action: tuple[Statistics, ...]

    def encode_state(self, state: np.ndarray) -> np.ndarray:
        """Return normalised, zero-padded states, float32 [..., 64], from [..., S]."""
        columns = slices(self.embodiment.state)
        values = [
            normalize(state[..., columns[p.name]], s, p.normalization)
            for p, s in zip(self.embodiment.state, self.state)
        ]
        return _pad(np.concatenate(values, -1), STATE_DIM)

    def encode_action(self, action_KHA: np.ndarray, anchor_KS: np.ndarray) -> np.ndarray:
        """Return the model's targets.

        Args:
            action_KHA: [K, H, A], the robot's own actions of each block.
            anchor_KS: [K, S], the state at each block's anchor, what relative parts refer to.

        Returns:
            float32 [K * H, 32], in [-1, 1] where the normalisation bounds it, zero-padded.
        """
        columns, states = slices(self.embodiment.action), slices(self.embodiment.state)
        values = []
        for part, statistics in zip(self.embodiment.action, self.action):
            x = action_KHA[..., columns[part.name]]
            if part.relative:
                x = x - anchor_KS[:, None, states[part.name]]
            values.append(normalize(x, statistics, part.normalization))
        flat = np.concatenate(values, -1)
        return _pad(flat.reshape(-1, flat.shape[-1]), ACTION_DIM)

    def decode_action(self, values: np.ndarray, anchor_KS: np.ndarray) -> np.ndarray:
        """Return actions in the robot's own units, the inverse of `encode_action`.

        Args:
            values: [K * H, 32] as the model gives them.
            anchor_KS: [K, S], the state at each block's anchor.

        Returns:
            float32 [K, H, A].
        """
        columns, states = slices(self.embodiment.action), slices(self.embodiment.state)
        x_KHD = np.asarray(values).reshape(len(anchor_KS), -1, np.shape(values)[-1])
        found = []
        for part, statistics in zip(self.embodiment.action, self.action):
            x = denormalize(x_KHD[..., columns[part.name]], statistics, part.normalization)
            if part.relative:
                x = x + anchor_KS[:, None, states[part.name]]
            found.append(x)
        return np.concatenate(found, -1).astype(np.float32)

    def masks(self) -> tuple[np.ndarray, np.ndarray]:
        """Return which of the padded dimensions are real: state bool [64], action bool [32]."""
        state, action = (
            sum(p.width for p in parts) for parts in (self.embodiment.state, self.embodiment.action)
        )
        return np.arange(STATE_DIM) < state, np.arange(ACTION_DIM) < action

    def to_json(self) -> dict[str, Any]:
        """Return the statistics by part, for a file beside a checkpoint."""
        return {
            which: {
                p.name: s.to_json()
                for p, s in zip(getattr(self.embodiment, which), getattr(self, which))
            }
            for which in ("state", "action")
        }

    @classmethod
    def from_json(cls, embodiment: Embodiment, values: Mapping[str, Any]) -> "Codec":
        """Build a codec from `to_json`'s values.

        Raises:
            ConfigError: statistics of a part are missing or have another width.
        """
        found = {}
        for which in ("state", "action"):
            found[which] = tuple(
                _statistics(values.get(which, {}), which, part)
                for part in getattr(embodiment, which)
            )
        return cls(embodiment, **found)


def _statistics(values: Mapping[str, Any], which: str, part: Part) -> Statistics:
    if part.name not in values:
        have = ", ".join(values) or "none"
        raise ConfigError(f"no statistics of {which} {part.name!r}; there are {have}")
    statistics = Statistics.from_json(values[part.name], f"statistics of {which} {part.name!r}")
    if len(statistics.mean) != part.width:
        raise ConfigError(
            f"statistics of {which} {part.name!r} have {len(statistics.mean)} dimensions, "
            f"the part has {part.width}"
        )
    return statistics


def slices(parts: tuple[Part, ...]) -> dict[str, slice]:
    """Return where each part stands in the concatenated vector."""
    found, at = {}, 0
    for part in parts:
        found[part.name] = slice(at, at + part.width)
        at += part.width
    return found


def _pad(x: np.ndarray, width: int) -> np.ndarray:
    out = np.zeros((*x.shape[:-1], width), np.float32)
    out[..., : x.shape[-1]] = x
    return out
