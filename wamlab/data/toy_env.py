"""The toy world: an arm reaches, grasps and places coloured objects on a table.

`reset(seed)` lays the table and names the task, `step(action)` moves the arm, `render()` draws the
views and `success()` tells whether the task is done. Everything follows from the seed. States and
actions have DROID's meaning: seven joints in radians and a gripper, 0 open and 1 closed; an action
is the joint position to go to and the gripper's command.
"""

import math
from dataclasses import dataclass, field
from functools import cache

import numpy as np

from wamlab.config import ConfigError, check_name, lookup
from wamlab.data.toy_arm import SHOULDER_M, forward, inverse
from wamlab.data.toy_render import RIGS, Ball, Box, Camera, Capsule, Plate, Primitive, render

COLORS = {
    "red": (214, 48, 49),
    "green": (46, 160, 67),
    "blue": (40, 98, 214),
    "yellow": (236, 196, 40),
    "purple": (142, 68, 173),
    "white": (232, 232, 236),
}
SHAPES = ("cube", "ball")
HALF_M, PLATE_M, PLATE_TOP_M = 0.030, 0.075, 0.006
X_M, Y_M = (0.34, 0.62), (-0.28, 0.28)  # where things may stand
GRIPPER_YAW = math.pi  # keeps every wrist joint away from its turning point
GRASPED_AT, OPEN_BELOW, FULL_AT = 0.5, 0.45, 0.6  # gripper positions
REACH_M = 0.035  # how far from the tool point an object may be grasped
FOLLOW, MOST_RAD, GRIP_RATE, FALL_M = 0.6, 0.12, 0.2, 0.05  # per control step


@dataclass(frozen=True, kw_only=True)
class ToyConfig:
    """What stands on the table and which cameras look at it.

    Args:
        objects: things to grasp, 1 to 6.
        plates: plates to put them on, 1 to 3.
        shapes, colors: what objects may be; no two of them are alike.
        plate_colors: what plates may be; no two of them are alike.
        rig: a key of RIGS.
    """

    objects: int = 2
    plates: int = 2
    shapes: tuple[str, ...] = SHAPES
    colors: tuple[str, ...] = tuple(COLORS)
    plate_colors: tuple[str, ...] = tuple(COLORS)
    rig: str = "droid"

    def __post_init__(self) -> None:
        if not 1 <= self.objects <= 6 or not 1 <= self.plates <= 3:
            raise ConfigError(
                f"toy world: 1 to 6 objects and 1 to 3 plates, got {self.objects} and {self.plates}"
            )
        for color in (*self.colors, *self.plate_colors):
            lookup(COLORS, color, "toy color")
        for shape in self.shapes:
            check_name(shape, SHAPES, "toy shape")
        kinds = len(self.shapes) * len(self.colors)
        if self.objects > kinds or self.plates > len(self.plate_colors):
            raise ConfigError(
                f"toy world: {self.objects} objects of {kinds} kinds and {self.plates} plates of "
                f"{len(self.plate_colors)} colors: no two may be alike"
            )
        lookup(RIGS, self.rig, "toy camera rig")


@dataclass
class Thing:
    """An object on the table; `height` is its centre's height at rest."""

    shape: str
    color: str
    position: np.ndarray


@dataclass
class ToyWorld:
    """The environment; `reset` first.

    Args:
        config: what is on the table.
    """

    config: ToyConfig = field(default_factory=ToyConfig)

    def reset(self, seed: int) -> np.ndarray:
        """Lay the table anew and return the state, float32 [8]."""
        rng = np.random.default_rng([seed, 0x70])
        spots = _spots(rng, self.config.objects + self.config.plates)
        colors = self.config.plate_colors
        plates = rng.permutation(len(colors))[: self.config.plates]
        kinds = [(s, c) for s in self.config.shapes for c in self.config.colors]
        order = rng.permutation(len(kinds))[: self.config.objects]
        self.plates = [
            Thing("plate", colors[c], np.array([*spots.pop(), PLATE_TOP_M])) for c in plates
        ]
        self.objects = [Thing(*kinds[k], np.array([*spots.pop(), HALF_M])) for k in order]
        start = np.array([0.40, 0.0, 0.30]) + rng.uniform(-0.04, 0.04, 3)
        self.joints = inverse(start, GRIPPER_YAW, swivel_of(start))
        self.gripper = 0.0
        self.held: Thing | None = None
        self._pose = forward(self.joints)
        target, plate = self.objects[0], self.plates[0]
        self.task = f"put the {target.color} {target.shape} on the {plate.color} plate"
        return self.state()

    def state(self) -> np.ndarray:
        """Return seven joints in radians and the gripper, float32 [8]."""
        return np.array([*self.joints, self.gripper], np.float32)

    @property
    def tool(self) -> np.ndarray:
        """The point between the fingertips, [3] metres."""
        return self._pose[2]

    @property
    def hand(self) -> np.ndarray:
        """The hand's rotation, [3, 3]."""
        return self._pose[3]

    def step(self, action: np.ndarray) -> np.ndarray:
        """Advance one control step.

        Args:
            action: [8], seven joint positions to go to in radians and the gripper's command.

        Returns:
            the new state, float32 [8].

        Raises:
            ConfigError: the action has another shape or is not finite.
        """
        action = np.asarray(action, np.float64)
        if action.shape != (8,) or not np.isfinite(action).all():
            raise ConfigError(f"toy world: an action is 8 finite numbers, got {action!r}")
        self.joints = self.joints + np.clip(
            FOLLOW * (action[:7] - self.joints), -MOST_RAD, MOST_RAD
        )
        self._pose = forward(self.joints)
        self._move_gripper(float(min(max(action[7], 0.0), 1.0)))
        self._move_objects()
        return self.state()

    def success(self) -> bool:
        """Tell whether the named object lies on the named plate."""
        thing, plate = self.objects[0], self.plates[0]
        away = float(np.linalg.norm(thing.position[:2] - plate.position[:2]))
        rests = abs(thing.position[2] - (HALF_M + PLATE_TOP_M)) < 1e-6
        return bool(self.held is None and rests and away < PLATE_M)

    def render(self) -> dict[str, np.ndarray]:
        """Return every view of the rig, uint8 [H, W, 3] each."""
        scene, fixed = self._scene(), _fixed_cameras(self.config.rig)
        return {
            view.name: render(fixed[view.name], scene, static=True)
            if view.name in fixed
            else render(Camera.on_wrist(view, *self._pose[1:]), scene, static=False)
            for view in RIGS[self.config.rig]
        }

    def _move_gripper(self, command: float) -> None:
        before = self.gripper
        most = FULL_AT if self.held else 1.0
        self.gripper = min(before + min(max(command - before, -GRIP_RATE), GRIP_RATE), most)
        if self.held is None and before < GRASPED_AT <= self.gripper:
            near = [o for o in self.objects if np.linalg.norm(o.position - self.tool) < REACH_M]
            self.held = min(
                near, key=lambda o: np.linalg.norm(o.position - self.tool), default=None
            )
            if self.held is not None:
                self._grip = self.hand.T @ (self.held.position - self.tool)
        elif self.held is not None and self.gripper < OPEN_BELOW:
            self.held = None

    def _move_objects(self) -> None:
        for thing in self.objects:
            rest = HALF_M + PLATE_TOP_M * any(
                np.linalg.norm(thing.position[:2] - p.position[:2]) < PLATE_M for p in self.plates
            )
            if thing is self.held:
                thing.position = self.tool + self.hand @ self._grip
                thing.position[2] = max(thing.position[2], rest)
            else:
                thing.position[2] = max(thing.position[2] - FALL_M, rest)

    def _scene(self) -> list[Primitive]:
        elbow, wrist, tool, hand = self._pose
        grey, dark, tip = (206, 208, 214), (92, 98, 110), (40, 42, 48)
        palm = wrist + 0.055 * hand[:, 2]
        scene: list[Primitive] = [Plate(p.position, PLATE_M, COLORS[p.color]) for p in self.plates]
        for o in self.objects:
            kind = Box if o.shape == "cube" else Ball
            scene.append(kind(o.position, HALF_M, COLORS[o.color]))
        scene += [
            Capsule(np.array([0.0, 0.0, 0.0]), SHOULDER_M, 0.06, dark),
            Capsule(SHOULDER_M, elbow, 0.045, grey),
            Capsule(elbow, wrist, 0.038, grey),
            Capsule(wrist, palm, 0.034, dark),
        ]
        spread = 0.045 - 0.032 * self.gripper
        for side in (-1, 1):
            offset = side * spread * hand[:, 1]
            scene.append(Capsule(palm + offset, tool + offset, 0.008, tip))
        return scene


@cache
def _fixed_cameras(rig: str) -> dict[str, Camera]:
    return {v.name: Camera.fixed(v) for v in RIGS[rig] if v.position is not None}


class Expert:
    """The scripted solution: a policy of the world's true state that also recovers from a push.

    Args:
        world: what it acts in, and sees all of.
        speed_m: the tool's target runs at most so many metres ahead of it.
    """

    def __init__(self, world: ToyWorld, *, speed_m: float = 0.014) -> None:
        self.world, self.speed_m = world, speed_m
        self.phase = 0

    @property
    def done(self) -> bool:
        """Whether the arm is back above the table after placing."""
        return self.phase == 8

    def __call__(self) -> np.ndarray:
        """Return the next action, float32 [8]."""
        world = self.world
        if 3 <= self.phase <= 5 and world.held is not world.objects[0]:
            self.phase = 0  # dropped or missed
        goal, grip = self._goal()
        gap = goal - world.tool
        arrived = float(np.linalg.norm(gap)) < (0.008 if self.phase in (1, 5) else 0.02)
        # an object that was grasped off its middle stays beside the tool, however high
        arrived |= self.phase == 3 and abs(float(gap[2])) < 0.004
        if self._finished(arrived):
            self.phase += 1
            goal, grip = self._goal()
            gap = goal - world.tool
        reach = max(float(np.linalg.norm(gap)), 1e-9)
        target = world.tool + gap * min(1.0, self.speed_m / reach)
        joints = inverse(target, GRIPPER_YAW, swivel_of(target))
        return np.array([*joints, grip], np.float32)

    def _finished(self, arrived: bool) -> bool:
        if self.phase == 2:
            return self.world.gripper >= GRASPED_AT
        if self.phase == 6:
            return self.world.gripper < 0.1
        return arrived and self.phase < 8

    def _goal(self) -> tuple[np.ndarray, float]:
        thing, plate = self.world.objects[0].position, self.world.plates[0].position
        over = {0: (thing, 0.15), 1: (thing, 0.028), 2: (thing, 0.028), 3: (thing, 0.19)}
        over |= {4: (plate, 0.19), 5: (plate, 0.045), 6: (plate, 0.045), 7: (plate, 0.19)}
        if self.phase == 8:
            return np.array([0.40, 0.0, 0.30]), 0.0
        place, height = over[self.phase]
        return np.array([place[0], place[1], height]), float(2 <= self.phase <= 5)


def swivel_of(tool: np.ndarray) -> float:
    """Return the elbow's swivel for a tool point, radians; smooth, so that joints never jump."""
    return 0.5 + float(tool[1])


def _spots(rng: np.random.Generator, count: int) -> list[np.ndarray]:
    """Return places on the table at least 0.13 m apart, [2] metres each."""
    while True:
        spots: list[np.ndarray] = []
        for spot in rng.uniform([X_M[0], Y_M[0]], [X_M[1], Y_M[1]], (64, 2)):
            if all(np.linalg.norm(spot - s) >= 0.13 for s in spots):
                spots.append(spot)
        if len(spots) >= count:
            return spots[:count]
