"""Made-up motions whose truth is known: jumps, kicks and balances of a person of 19 joints.

The pelvis rises and falls piecewise: a cubic spring on the ground, free fall in flight. The feet
are placed by two-link inverse kinematics, so a standing foot stands still; trunk and arms swing in
band-limited sums of sines, with a burst after each impact. `python -m wamlab.motion.synthetic OUT`
writes BVH files; equal seeds give equal files.
"""

import argparse
import dataclasses
import itertools
from pathlib import Path
from typing import NamedTuple

import numpy as np
from scipy.spatial.transform import Rotation

from wamlab.motion.bvh import write_bvh
from wamlab.motion.segments import Block, G, one_of_a_kind
from wamlab.motion.skeleton import CANONICAL, CANONICAL_TREE, INDEX, Clip, masses

THIGH, SHIN, ANKLE, HIP_DROP = 0.42, 0.41, 0.08, 0.06  # m; ANKLE above the floor
STAND, STRETCHED = 0.94, 0.965  # pelvis heights
_OFFSETS = {"spine": (0, 0, 0.12), "chest": (0, 0, 0.22), "neck": (0, 0, 0.22)}
_OFFSETS |= {"head": (0, 0, 0.12), "shoulder": (0, 0.18, 0.17), "elbow": (0, 0, -0.28)}
_OFFSETS |= {"wrist": (0, 0, -0.25), "hip": (0, 0.09, -HIP_DROP), "knee": (0, 0, -THIGH)}
_OFFSETS |= {"ankle": (0, 0, -SHIN), "toe": (0.14, 0, -0.06), "pelvis": (0, 0, 0)}


class Phase(NamedTuple):
    """A stretch of time: pelvis height and travel, how far each foot is from where it stands."""

    kind: str
    z: np.ndarray  # [n]
    x: np.ndarray  # [n], travelled in this phase
    feet: np.ndarray  # [n, 2, 2]: left, right; forward and up
    shift: float = 0.0  # how far both standing feet move on


@dataclasses.dataclass(frozen=True, eq=False)
class Made:
    """A clip with its truth: the blocks, and the centre of mass [T, 3] in m."""

    clip: Clip
    blocks: list[Block]
    com: np.ndarray


def offsets() -> np.ndarray:
    """Return the joints' places in their parents' frames, float64 [J, 3], m."""
    side = {"left": 1, "right": -1}
    return np.array(
        [
            np.array(_OFFSETS[n.rpartition("_")[2]]) * (1, side.get(n.partition("_")[0], 1), 1)
            for n in CANONICAL
        ]
    )


def make(seed: int, *, rate: float = 120.0, events: int = 2) -> Made:
    """Make one clip of `events` jumps, kicks or balances with rests between them.

    Args:
        seed: decides everything.
        rate: frames a second.
        events: at least 1; the first of every second seed is a jump.
    """
    rng = np.random.default_rng(seed)
    phases = [_rest(rng, rate)]
    for number in range(events):
        kinds = [_jump] if number == 0 and seed % 2 == 0 else [_jump, _kick, _balance]
        phases += kinds[rng.integers(len(kinds))](rng, rate)
        phases.append(_rest(rng, rate))
    edges = np.cumsum([0, *(len(p.z) for p in phases)])
    blocks = [Block(p.kind, int(a), int(b)) for p, a, b in zip(phases, edges, edges[1:])]
    clip = _pose(phases, blocks, rng, rate)
    com = np.einsum("j,tji->ti", masses(1.0), clip.positions())
    return Made(clip, one_of_a_kind(blocks), com)


def _hermite(start: tuple[float, float], end: tuple[float, float], n: int, dt: float) -> np.ndarray:
    """Return the cubic from (place, speed) to (place, speed), the last point left out."""
    s, span = np.arange(n) / n, n * dt
    (p0, v0), (p1, v1) = start, end
    return (
        p0 * (2 * s**3 - 3 * s**2 + 1)
        + v0 * span * (s**3 - 2 * s**2 + s)
        + p1 * (3 * s**2 - 2 * s**3)
        + v1 * span * (s**3 - s**2)
    )


def _frames(seconds: float, rate: float) -> int:
    return max(2, round(seconds * rate))


def _still(kind: str, z: np.ndarray, x: np.ndarray | None = None, shift: float = 0.0) -> Phase:
    return Phase(kind, z, np.zeros(len(z)) if x is None else x, np.zeros((len(z), 2, 2)), shift)


def _rest(rng: np.random.Generator, rate: float) -> Phase:
    return _still("support", np.full(_frames(rng.uniform(0.3, 0.6), rate), STAND))


def _jump(rng: np.random.Generator, rate: float) -> list[Phase]:
    dt, flight_n = 1 / rate, _frames(rng.uniform(0.3, 0.45), rate)
    speed = G * flight_n * dt / 2
    low, soft = STAND - rng.uniform(0.15, 0.25, 2)
    forward = rng.uniform(0, 0.8)
    push_n = _frames(2.2 * (STRETCHED - low) / speed, rate)
    catch_n = _frames(2.2 * (STRETCHED - soft) / speed, rate)
    t = np.arange(flight_n) * dt
    push_x = forward * push_n * dt / 2
    catch_x = forward * catch_n * dt / 2
    air = np.zeros((flight_n, 2, 2))
    height = STRETCHED + speed * t - G * t**2 / 2
    travel = push_x + forward * flight_n * dt + catch_x
    air[:, :, 0] = (travel * _smooth(flight_n))[:, None]
    tuck = rng.uniform(0.0, 0.15) * np.sin(np.pi * t / (flight_n * dt)) ** 2
    air[:, :, 1] = (height - STRETCHED + tuck)[:, None]
    down, crouch_n, rise_n = (STRETCHED, -speed), _frames(0.4, rate), _frames(0.4, rate)
    push = _hermite((0, 0), (push_x, forward), push_n, dt)
    catch = _hermite((0, forward), (catch_x, 0), catch_n, dt)
    return [
        _still("support", _hermite((STAND, 0), (low, 0), crouch_n, dt)),
        _still("take-off", _hermite((low, 0), (STRETCHED, speed), push_n, dt), push, push_x),
        Phase("flight", height, forward * t, air, forward * flight_n * dt),
        _still("landing", _hermite(down, (soft, 0), catch_n, dt), catch, catch_x),
        _still("landing", _hermite((soft, 0), (STAND, 0), rise_n, dt)),
    ]


def _smooth(n: int) -> np.ndarray:
    s = np.arange(n) / n
    return 3 * s**2 - 2 * s**3


def _lifted(kind: str, reach: tuple[float, float], frames: list[int], foot: int) -> list[Phase]:
    up, hold, down = frames
    share = np.concatenate([_smooth(up), np.ones(hold), 1 - _smooth(down)])
    feet = np.zeros((len(share), 2, 2))
    feet[:, foot] = share[:, None] * reach
    return [Phase(kind, np.full(len(share), STAND), np.zeros(len(share)), feet)]


def _kick(rng: np.random.Generator, rate: float) -> list[Phase]:
    reach = (rng.uniform(0.5, 0.6), STAND - ANKLE + rng.uniform(0.05, 0.15))
    frames = [_frames(s, rate) for s in (rng.uniform(0.2, 0.3), 0.1, 0.35)]
    return _lifted("kick", reach, frames, int(rng.integers(2)))


def _balance(rng: np.random.Generator, rate: float) -> list[Phase]:
    reach = (rng.uniform(-0.3, -0.1), rng.uniform(0.15, 0.35))
    frames = [_frames(s, rate) for s in (0.3, rng.uniform(0.6, 1.0), 0.3)]
    return _lifted("balance", reach, frames, int(rng.integers(2)))


def _walked(phases: list[Phase]) -> tuple[np.ndarray, np.ndarray]:
    """Return how far the pelvis [T] and each foot [T, 2] have travelled, m."""
    x, feet, at, stand = [], [], 0.0, 0.0
    for before, phase, after in zip([phases[0], *phases], phases, [*phases[1:], phases[-1]]):
        x.append(at + phase.x)
        feet.append(stand + phase.feet[..., 0])
        at += phase.shift
        if phase.kind == "flight":  # the feet come down where the pelvis will come to rest
            stand += before.shift + phase.shift + after.shift
    return np.concatenate(x), np.concatenate(feet)


def _pose(phases: list[Phase], blocks: list[Block], rng: np.random.Generator, rate: float) -> Clip:
    z = np.concatenate([p.z for p in phases])
    x_T, feet_x = _walked(phases)
    lift = np.concatenate([p.feet[..., 1] for p in phases])
    angles = _swing(z, blocks, rng, rate)
    for side, name in enumerate(("left", "right")):
        reach = feet_x[:, side] - x_T, ANKLE + lift[:, side] - (z - HIP_DROP)
        for joint, angle in zip(("hip", "knee", "ankle"), _leg(*reach)):
            angles[:, INDEX[f"{name}_{joint}"], 1] = angle
    rot = Rotation.from_euler("ZYX", angles[..., ::-1].reshape(-1, 3)).as_matrix()
    local = rot.reshape(*angles.shape[:2], 3, 3)
    yaw = rng.uniform(-np.pi, np.pi)
    turn = Rotation.from_euler("z", yaw).as_matrix()
    local[:, 0] = turn @ local[:, 0]
    root = np.stack([x_T * np.cos(yaw), x_T * np.sin(yaw), z], -1)
    meta = {"unit_m": 0.01, "source": "synthetic"}
    return Clip(CANONICAL, CANONICAL_TREE, offsets(), local, root, 1 / rate, meta=meta)


def _leg(dx: np.ndarray, dz: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return hip, knee and ankle pitch that put a flat foot's ankle at (dx, dz) from the hip."""
    reach = np.clip(np.hypot(dx, dz), 0.2, 0.9995 * (THIGH + SHIN))
    line = np.arctan2(-dx, -dz)
    bend = np.arccos((THIGH**2 + reach**2 - SHIN**2) / (2 * THIGH * reach))
    knee = np.pi - np.arccos((THIGH**2 + SHIN**2 - reach**2) / (2 * THIGH * SHIN))
    hip = line - bend  # the knee stands in front of the line
    return hip, knee, -(hip + knee)


def _swing(z: np.ndarray, blocks: list[Block], rng: np.random.Generator, rate: float) -> np.ndarray:
    """Return roll, pitch and yaw of every joint, float64 [T, J, 3]; the legs are still zero."""
    t = np.arange(len(z)) / rate
    angles = np.zeros((len(z), len(CANONICAL), 3))
    burst = np.zeros(len(z))
    for before, block in itertools.pairwise(blocks):
        if before.kind == "flight":
            since = np.clip(t - block.first / rate, 0, None)
            burst += np.exp(-since / 0.08) * np.sin(2 * np.pi * 8 * since)
    crouch = np.clip(STAND - z, 0, None)
    sizes = {"spine": 0.04, "chest": 0.05, "neck": 0.06, "head": 0.08, "shoulder": 0.3}
    sizes |= {"elbow": 0.25, "wrist": 0.1}
    for name, joint in INDEX.items():
        size = sizes.get(name.rpartition("_")[2], 0.0)
        hz, phase = rng.uniform(0.2, 2.0, (3, 3)), rng.uniform(0, 2 * np.pi, (3, 3))
        waves = np.sin(2 * np.pi * hz * t[:, None, None] + phase).sum(-1) / 3
        angles[:, joint] = size * waves
        if name in ("spine", "chest", "neck"):
            angles[:, joint, 1] += 0.6 * crouch + 0.08 * burst
        if name.endswith("shoulder"):
            angles[:, joint, 1] += 2.0 * crouch
        if name.endswith("elbow"):
            angles[:, joint, 1] -= 0.4
    return angles


def main() -> None:
    """Write clips as BVH files."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--clips", type=int, default=6)
    parser.add_argument("--rate", type=float, default=60.0, help="frames a second")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    for seed in range(args.seed, args.seed + args.clips):
        write_bvh(make(seed, rate=args.rate).clip, args.out / f"synthetic_{seed:03d}.bvh")


if __name__ == "__main__":
    main()
