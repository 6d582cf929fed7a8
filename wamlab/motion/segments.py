"""Cuts a motion into blocks by its dynamics: take-off, flight, landing, kick, balance, support.

No learning: contact, ballistic flight and the pelvis's speed decide. Positions come at the file's
own rate, in metres with +Z up; durations are seconds, so that a rule means the same at any rate.
"""

import itertools
from typing import NamedTuple

import numpy as np
from scipy.signal import butter, sosfiltfilt

from wamlab.motion.skeleton import FEET, INDEX

G = 9.81
KINDS = ("support", "take-off", "flight", "landing", "kick", "balance")
LOW_PASS_HZ = 12.0
CONTACT_HEIGHT_M, CONTACT_SPEED = 0.05, 0.6  # above the joint's own lowest height; m/s
CONTACT_GAP_S = 0.034  # shorter lifts are noise: 4 frames at 120 Hz
FLIGHT_S, FLIGHT_G = 0.15, (-1.4, -0.7)  # the pelvis is not the centre of mass: not -1 exactly
LANDING_S, STILL_SPEED, STILL_S = 0.8, 0.1, 0.1
KICK_S = 0.05  # an ankle above the pelvis for 6 frames at 120 Hz
BALANCE_S, BALANCE_SPEED = 0.5, 0.5
SHORTEST_S = 0.1


class Block(NamedTuple):
    """Frames [first, last) of one kind."""

    kind: str
    first: int
    last: int


def low_pass(x: np.ndarray, rate: float, cut_hz: float = LOW_PASS_HZ, order: int = 2) -> np.ndarray:
    """Return x [T, ...] without what lies above `cut_hz`, zero phase (it sees the future)."""
    sos = butter(order, cut_hz, fs=rate, output="sos")
    return sosfiltfilt(sos, x, axis=0, padlen=min(len(x) - 1, 3 * (2 * len(sos) + 1)))


def derivative(x: np.ndarray, rate: float) -> np.ndarray:
    """Return dx/dt by the five-point stencil (np.gradient at the two frames of either end)."""
    slope = np.gradient(x, axis=0)
    if len(x) >= 5:
        slope[2:-2] = (x[:-4] - 8 * x[1:-3] + 8 * x[3:-1] - x[4:]) / 12
    return slope * rate


def runs(mask_T: np.ndarray) -> list[tuple[int, int]]:
    """Return the half-open intervals in which a bool array is True."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], mask_T.astype(int), [0]])))
    return [(int(a), int(b)) for a, b in edges.reshape(-1, 2)]


def contacts(place_TJ3: np.ndarray, rate: float) -> np.ndarray:
    """Return which feet's joints touch the floor: bool [T, 4], in the order of FEET."""
    place = low_pass(place_TJ3[:, list(FEET)], rate)
    speed = np.linalg.norm(derivative(place, rate), axis=-1)
    height = place[..., 2] - np.percentile(place[..., 2], 5, axis=0)
    down = (height < CONTACT_HEIGHT_M) & (speed < CONTACT_SPEED)
    for foot in range(down.shape[1]):
        for first, last in runs(~down[:, foot]):
            inner = first > 0 and last < len(down)
            if inner and last - first <= round(CONTACT_GAP_S * rate):
                down[first:last, foot] = True
    return down


def ballistic_g(height_T: np.ndarray, rate: float) -> float:
    """Return the vertical acceleration of a quadratic fit, in g; -1 in free fall."""
    if len(height_T) < 3:
        return 0.0
    t = np.arange(len(height_T)) / rate
    return float(2 * np.polyfit(t, height_T, 2)[0] / G)


def segment(place_TJ3: np.ndarray, rate: float) -> list[Block]:
    """Return the blocks of a clip, one after the other over all frames.

    Args:
        place_TJ3: canonical joint positions at the file's rate, m, +Z up.
        rate: frames a second.
    """
    down = contacts(place_TJ3, rate)
    feet_T2 = np.stack([down[:, :2].any(1), down[:, 2:].any(1)], 1)
    place = low_pass(place_TJ3, rate)
    pelvis, rise = place[:, 0], derivative(place[:, 0, 2], rate)
    kinds = np.zeros(len(place), int)
    _mark_balance(kinds, feet_T2, pelvis, rate)
    _mark_kicks(kinds, place, feet_T2, rate)
    for first, last in runs(~feet_T2.any(1)):
        g = ballistic_g(pelvis[first:last, 2], rate)
        if last - first < FLIGHT_S * rate or not FLIGHT_G[0] <= g <= FLIGHT_G[1]:
            continue
        kinds[_takeoff(rise, first) : first] = KINDS.index("take-off")
        kinds[first:last] = KINDS.index("flight")
        kinds[last : _landed(rise, last, rate)] = KINDS.index("landing")
    return _joined(_blocks(kinds), max(1, round(SHORTEST_S * rate)))


def block_ids(blocks: list[Block], frames: int) -> np.ndarray:
    """Return which block each frame belongs to: int64 [T]."""
    ids = np.zeros(frames, np.int64)
    for number, block in enumerate(blocks):
        ids[block.first : block.last] = number
    return ids


def dynamics_score(place_TJ3: np.ndarray, rate: float) -> tuple[float, float]:
    """Return a window's mean over joints of RMS acceleration and its 99th percentile, m/s^2."""
    a = derivative(derivative(low_pass(place_TJ3, rate), rate), rate)
    size_TJ = np.linalg.norm(a, axis=-1)
    return float(np.sqrt((size_TJ**2).mean(0)).mean()), float(np.percentile(size_TJ, 99))


def _mark_balance(kinds: np.ndarray, feet_T2: np.ndarray, pelvis: np.ndarray, rate: float) -> None:
    speed = np.linalg.norm(derivative(pelvis[:, :2], rate), axis=-1)
    for foot in (0, 1):
        alone = feet_T2[:, foot] & ~feet_T2[:, 1 - foot]
        for first, last in runs(alone):
            if last - first >= BALANCE_S * rate and speed[first:last].mean() < BALANCE_SPEED:
                kinds[first:last] = KINDS.index("balance")


def _mark_kicks(kinds: np.ndarray, place: np.ndarray, feet_T2: np.ndarray, rate: float) -> None:
    for side, name in enumerate(("left", "right")):
        high = place[:, INDEX[f"{name}_ankle"], 2] > place[:, 0, 2]
        stance = ~feet_T2[:, side]
        for first, last in runs(high):
            if last - first < round(KICK_S * rate):
                continue
            around = [r for r in runs(stance) if r[0] <= first and last <= r[1]] or [(first, last)]
            kinds[slice(*around[0])] = KINDS.index("kick")


def _takeoff(rise: np.ndarray, first: int) -> int:
    still = np.flatnonzero(rise[:first] <= 0)
    return int(still[-1]) + 1 if len(still) else 0


def _landed(rise: np.ndarray, first: int, rate: float) -> int:
    hold, most = max(1, round(STILL_S * rate)), round(LANDING_S * rate)
    still = np.abs(rise) < STILL_SPEED
    for frame in range(first, min(first + most, len(rise))):
        if still[frame : frame + hold].all():
            return frame
    return min(first + most, len(rise))


def _blocks(kinds: np.ndarray) -> list[Block]:
    edges = [0, *(np.flatnonzero(np.diff(kinds)) + 1).tolist(), len(kinds)]
    return [Block(KINDS[kinds[a]], a, b) for a, b in itertools.pairwise(edges)]


def _joined(blocks: list[Block], shortest: int) -> list[Block]:
    """Join blocks that are too short to the longer neighbour, the shortest first."""
    while len(blocks) > 1:
        at = min(range(len(blocks)), key=lambda i: blocks[i].last - blocks[i].first)
        if blocks[at].last - blocks[at].first >= shortest:
            break
        near = [i for i in (at - 1, at + 1) if 0 <= i < len(blocks)]
        keep = max(near, key=lambda i: blocks[i].last - blocks[i].first)
        first, last = min(at, keep), max(at, keep)
        merged = Block(blocks[keep].kind, blocks[first].first, blocks[last].last)
        blocks = [*blocks[:first], merged, *blocks[last + 1 :]]
    return one_of_a_kind(blocks)


def one_of_a_kind(blocks: list[Block]) -> list[Block]:
    """Return the blocks with neighbours of the same kind made one."""
    same: list[Block] = []
    for block in blocks:
        if same and same[-1].kind == block.kind:
            block = Block(block.kind, same.pop().first, block.last)
        same.append(block)
    return same
