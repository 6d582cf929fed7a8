"""Skeletons and clips: names, tree, forward kinematics, and the canonical 19 joints.

Conventions of the whole track: metres, seconds, radians, kilograms, newton metres; right-handed,
+Z up; rotations are 3x3 matrices of a joint in its parent's frame.

Shapes: B clips, T frames, J joints; a trailing 3 or 33 is a vector or a rotation matrix.
"""

import dataclasses
import functools
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from wamlab.config import UserError

SIDES = ("shoulder", "elbow", "wrist", "hip", "knee", "ankle", "toe")
TRUNK = ("pelvis", "spine", "chest", "neck", "head")
CANONICAL: tuple[str, ...] = TRUNK + tuple(f"{s}_{j}" for s in ("left", "right") for j in SIDES)
INDEX: dict[str, int] = {name: i for i, name in enumerate(CANONICAL)}
_ABOVE = {"spine": "pelvis", "chest": "spine", "neck": "chest", "head": "neck"}
_ABOVE |= {"shoulder": "chest", "elbow": "shoulder", "wrist": "elbow"}
_ABOVE |= {"hip": "pelvis", "knee": "hip", "ankle": "knee", "toe": "ankle"}
FEET = tuple(INDEX[f"{s}_{j}"] for s in ("left", "right") for j in ("ankle", "toe"))

# lower-case names without separators, the most telling first: "leftshoulder" is a collar bone where
# there is also a "leftarm", and the shoulder where there is not
ALIASES: dict[str, tuple[str, ...]] = {
    "pelvis": ("pelvis", "hips", "hip", "root"),
    "spine": ("lowerback", "spine", "abdomen", "torso"),
    "chest": ("spine3", "chest2", "spine2", "chest", "spine1"),
    "neck": ("lowerneck", "neck"),
    "head": ("head",),
    "shoulder": ("arm", "uparm", "upperarm", "shoulder"),
    "elbow": ("forearm", "elbow", "lowerarm"),
    "wrist": ("hand", "wrist"),
    "hip": ("upleg", "thigh", "hip"),
    "knee": ("leg", "shin", "knee"),
    "ankle": ("foot", "ankle"),
    "toe": ("toebase", "toe"),
}
# shares of the body's mass, lumped where a segment begins (after de Leva 1996, men, rounded)
MASS: dict[str, float] = {"pelvis": 0.112, "spine": 0.163, "chest": 0.160, "head": 0.069}
MASS |= {"shoulder": 0.027, "elbow": 0.016, "wrist": 0.006, "hip": 0.142, "knee": 0.043}
MASS |= {"ankle": 0.009, "toe": 0.005, "neck": 0.0}


class SkeletonError(UserError):
    """A skeleton that lacks what is asked of it."""


@dataclasses.dataclass(frozen=True)
class Tree:
    """A joint tree whose parents stand before their children; equal parents, equal tree."""

    parents: tuple[int, ...]

    def __post_init__(self) -> None:
        for joint, parent in enumerate(self.parents):
            if not (-1 <= parent < joint) or (parent < 0) != (joint == 0):
                raise SkeletonError(
                    f"joint {joint} has parent {parent}: joint 0 is the only root, with parent -1, "
                    "and every parent stands before its children"
                )

    def __len__(self) -> int:
        return len(self.parents)

    @functools.cached_property
    def levels(self) -> tuple[tuple[int, ...], ...]:
        """Joints by their distance from the root: a level is computed at once."""
        depth = [0]
        for parent in self.parents[1:]:
            depth.append(depth[parent] + 1)
        return tuple(
            tuple(j for j, d in enumerate(depth) if d == level) for level in range(max(depth) + 1)
        )

    @functools.cached_property
    def ancestors(self) -> np.ndarray:
        """bool [J, J]: row k is True where j is a strict ancestor of k."""
        mask = np.zeros((len(self), len(self)), bool)
        for joint, parent in enumerate(self.parents[1:], 1):
            mask[joint] = mask[parent]
            mask[joint, parent] = True
        return mask


def fk(rot: Tensor, root: Tensor, offsets: Tensor, tree: Tree) -> tuple[Tensor, Tensor]:
    """Forward kinematics, differentiable and batched over all leading dimensions.

    Args:
        rot: [..., J, 3, 3] local rotations.
        root: [..., 3] root position, m; takes the place of the root's offset.
        offsets: [..., J, 3] joint positions in their parents' frames, m; broadcast.
        tree: who hangs on whom.

    Returns:
        Positions [..., J, 3] in m and world rotations [..., J, 3, 3].
    """
    offsets = offsets.expand(*rot.shape[:-3], len(tree), 3)
    world, place = rot[..., :1, :, :], root[..., None, :]
    steps, back = _walk(tree, rot.device)
    for above, here in steps:
        parent = world[..., above, :, :]
        bone = (parent @ offsets[..., here, :, None])[..., 0]
        place = torch.cat([place, place[..., above, :] + bone], -2)
        world = torch.cat([world, parent @ rot[..., here, :, :]], -3)
    return place[..., back, :], world[..., back, :, :]


@functools.cache
def _walk(tree: Tree, device: torch.device) -> tuple[list[tuple[Tensor, Tensor]], Tensor]:
    """Return, level by level, where the parents stand among the joints done so far and which joints
    come next; then how to put all into the tree's order."""
    steps, order = [], list(tree.levels[0])
    for level in tree.levels[1:]:
        above = [order.index(tree.parents[j]) for j in level]
        steps.append((torch.tensor(above, device=device), torch.tensor(level, device=device)))
        order += level
    return steps, torch.tensor([order.index(j) for j in range(len(tree))], device=device)


@dataclasses.dataclass(frozen=True, eq=False)
class Clip:
    """One recording of one skeleton.

    Attributes:
        names: of the J joints.
        tree: their parents.
        offsets: float64 [J, 3], m; row 0 is unused, `root_pos` takes its place.
        end_sites: (joint, float64 [3] in m) of each chain's tip.
        local_rot: float64 [T, J, 3, 3].
        root_pos: float64 [T, 3], m.
        dt: seconds a frame, as read.
        translations: float64 [T, J, 3] that take the offsets' place, or None.
        meta: where the clip came from and what was decided about it.
    """

    names: tuple[str, ...]
    tree: Tree
    offsets: np.ndarray
    local_rot: np.ndarray
    root_pos: np.ndarray
    dt: float
    end_sites: tuple[tuple[int, np.ndarray], ...] = ()
    translations: np.ndarray | None = None
    meta: dict[str, Any] = dataclasses.field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.root_pos)

    def pose(self) -> tuple[np.ndarray, np.ndarray]:
        """Return positions [T, J, 3] in m and world rotations [T, J, 3, 3]."""
        offsets = self.offsets if self.translations is None else self.translations
        arrays = (self.local_rot, self.root_pos, offsets)
        place, world = fk(*(torch.as_tensor(a) for a in arrays), self.tree)
        return place.numpy(), world.numpy()

    def positions(self) -> np.ndarray:
        """Return joint positions, float64 [T, J, 3], m."""
        return self.pose()[0]

    def frames(self, first: int, last: int) -> "Clip":
        """Return frames [first, last) as a clip."""
        moved = self.translations if self.translations is None else self.translations[first:last]
        cut = {"local_rot": self.local_rot[first:last], "root_pos": self.root_pos[first:last]}
        return dataclasses.replace(self, **cut, translations=moved)


def _parent_of(name: str) -> int:
    side, _, joint = name.rpartition("_")
    above = _ABOVE[joint]
    return INDEX[f"{side}_{above}" if f"{side}_{above}" in INDEX else above]


CANONICAL_TREE = Tree((-1, *(_parent_of(name) for name in CANONICAL[1:])))


def masses(total: float = 70.0) -> np.ndarray:
    """Return the mass of each canonical joint's point, kg [J], summing to `total`."""
    shares = np.array([MASS[n.rpartition("_")[2]] for n in CANONICAL])
    return total * shares / shares.sum()


def mirror_index() -> list[int]:
    """Return for each canonical joint the one on the other side."""
    other = {"left": "right", "right": "left"}
    sides = (n.split("_", 1) for n in CANONICAL)
    return [INDEX["_".join([other.get(s[0], s[0]), *s[1:]])] for s in sides]


def canonical_joints(names: Sequence[str]) -> list[int | None]:
    """Return for each canonical joint its index among `names`, None where there is no such."""
    plain = {_plain(name): i for i, name in reversed(list(enumerate(names)))}
    found: list[int | None] = []
    for name in CANONICAL:
        side, _, joint = name.rpartition("_")
        wanted = [f"{s}{a}" for s in (side, side[:1]) for a in ALIASES[joint]]
        free = [plain[w] for w in wanted if w in plain and plain[w] not in found]
        found.append(free[0] if free else None)
    return found


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower().rpartition(":")[2])


def to_canonical(clip: Clip) -> tuple[Clip, np.ndarray, float]:
    """Return the clip on the canonical skeleton.

    Joints between two canonical ones are dropped, so an offset is the mean bone in its parent's
    frame. A joint that the skeleton lacks stays at its parent and is invalid.

    Returns:
        The clip, bool [J] which joints are valid, and the mean position error of the valid ones, m.

    Raises:
        SkeletonError: pelvis, hips, knees or ankles are missing.
    """
    found = canonical_joints(clip.names)
    valid = np.array([i is not None for i in found])
    needed = ["pelvis", *(f"{s}_{j}" for s in ("left", "right") for j in ("hip", "knee", "ankle"))]
    lacking = [n for n in needed if not valid[INDEX[n]]]
    if lacking:
        raise SkeletonError(
            f"no joint for {', '.join(lacking)} among {', '.join(clip.names)}: add the skeleton's "
            "names to ALIASES in wamlab/motion/skeleton.py"
        )
    place, world = clip.pose()
    parents = CANONICAL_TREE.parents
    for j, i in enumerate(found):
        found[j] = found[parents[j]] if i is None else i
    place_TJ3, world_TJ33 = place[:, found], world[:, found]
    up = [max(p, 0) for p in parents]
    into = world_TJ33[:, up].swapaxes(-1, -2)
    local = into @ world_TJ33
    local[:, 0] = world_TJ33[:, 0]
    bones = (into @ (place_TJ3 - place_TJ3[:, up])[..., None])[..., 0]
    offsets = bones.mean(0)
    reduced = Clip(CANONICAL, CANONICAL_TREE, offsets, local, place_TJ3[:, 0], clip.dt)
    error = np.linalg.norm(reduced.positions() - place_TJ3, axis=-1)[:, valid].mean()
    meta = {**clip.meta, "retarget_error_m": float(error)}
    return dataclasses.replace(reduced, meta=meta), valid, float(error)
