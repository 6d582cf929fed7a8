"""Reads and writes BVH files: pybvh parses, this module holds the contract.

A BVH file says neither its unit nor which way is up; nothing here is guessed in silence. A first
pass over the lines finds what is wrong with a file and where, and takes the freedoms out of it that
pybvh does not know (lower-case keywords, position channels of inner joints).
"""

import dataclasses
import re
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pybvh
from pybvh.bvhnode import BvhEndSite, BvhJoint, BvhRoot

from wamlab.config import UserError
from wamlab.motion.skeleton import CANONICAL, Clip, Tree, canonical_joints

# joints that tell a source -> metres a unit, the axis that points up
SOURCES: dict[str, tuple[tuple[str, ...], float, str]] = {
    "CMU": (("LHipJoint", "RHipJoint", "LThumb", "RThumb"), 0.056444, "+y"),
    "wamlab": (CANONICAL, 0.01, "+z"),  # what `write_bvh` makes of a canonical clip
}
UNITS: dict[str, float] = {"m": 1.0, "inch": 0.0254, "cm": 0.01, "CMU": 0.056444, "mm": 0.001}
STANDING_M = (1.0, 2.2)  # heights of people; no two units share a number of units
KEYWORDS = {"root": "ROOT", "joint": "JOINT", "offset": "OFFSET", "channels": "CHANNELS"}
TO_Z_UP: dict[str, np.ndarray] = {  # rows: where the new x, y, z come from
    "+x": np.array([[0, 1, 0], [0, 0, 1], [1, 0, 0]]),
    "-x": np.array([[0, -1, 0], [0, 0, 1], [-1, 0, 0]]),
    "+y": np.array([[0, 0, 1], [1, 0, 0], [0, 1, 0]]),
    "-y": np.array([[0, 0, -1], [1, 0, 0], [0, -1, 0]]),
    "+z": np.eye(3, dtype=int),
    "-z": np.diag([1, -1, -1]),
}


class BVHError(UserError):
    """A BVH file that cannot be read as it stands: file, line, what is wrong."""

    def __init__(self, path: str | Path, line: int | None, why: str) -> None:
        self.path, self.line = Path(path), line
        where = f"{path}, line {line}" if line else f"{path}"
        super().__init__(f"{where}: {why}")


class BVHWarning(UserWarning):
    """Something that the format does not say was estimated."""


@dataclasses.dataclass
class _Scan:
    """What the first pass found."""

    header: list[str] = dataclasses.field(default_factory=list)
    joints: list[str] = dataclasses.field(default_factory=list)
    offsets: list[list[float]] = dataclasses.field(default_factory=list)
    channels: list[list[str]] = dataclasses.field(default_factory=list)
    rows: list[list[str]] = dataclasses.field(default_factory=list)
    values: np.ndarray | None = None  # the rows as numbers
    frames: tuple[int, int] = (0, 0)  # how many are promised, and in which line
    dt: float = 0.0


def read_bvh(
    path: str | Path,
    unit_m: float | None = None,
    up: str | None = None,
    drop_tpose: bool | str = "auto",
) -> Clip:
    """Read a BVH file into metres with +Z up; the rate stays as the file has it.

    Args:
        path: the file.
        unit_m: metres a unit; None takes the source's, or an estimate with a warning.
        up: "+x" to "-z"; None as for the unit.
        drop_tpose: drop frame 0; "auto" where the pose jumps after it (over ten medians).

    Raises:
        BVHError: a faulty file, or a unit that cannot be told.
    """
    path = Path(path)
    scan = _scan(path)
    bvh = _parse(path, scan)
    nodes = [n for n in bvh.nodes if not n.is_end_site()]
    place = {id(n): i for i, n in enumerate(nodes)}
    root_pos, local_rot = bvh.to_rotmat()
    clip = Clip(
        names=tuple(n.name for n in nodes),
        tree=Tree(tuple(place[id(n.parent)] if n.parent else -1 for n in nodes)),
        offsets=np.array([n.offset for n in nodes]),
        local_rot=local_rot,
        root_pos=root_pos,
        dt=scan.dt,
        end_sites=tuple((place[id(n.parent)], n.offset) for n in bvh.nodes if n.is_end_site()),
        translations=_translations(path, scan),
        meta={"path": path.name},
    )
    if drop_tpose is True or (drop_tpose == "auto" and _starts_in_tpose(clip)):
        clip = clip.frames(1, len(clip))
        clip.meta["tpose_dropped"] = True
    return _to_convention(clip, path, unit_m, up)


def _scan(path: Path) -> _Scan:
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except FileNotFoundError:
        raise BVHError(path, None, "no such file") from None
    except UnicodeDecodeError:
        raise BVHError(path, None, "not a text file, so not BVH") from None
    scan, inside_end, numbers = _Scan(), False, []
    for number, line in enumerate(lines, 1):
        words = line.split()
        if not words:
            scan.header.append("")  # pybvh counts lines too
            continue
        if scan.dt:
            scan.rows.append(words)
            numbers.append(number)
            continue
        words[0] = KEYWORDS.get(words[0].lower(), words[0])
        inside_end = words[0].lower() == "end" or (inside_end and words[0] != "}")
        try:
            scan.header.append(" ".join(_scan_header(number, words, scan, inside_end)))
        except (ValueError, IndexError) as error:
            raise BVHError(path, number, str(error)) from None
    if not scan.dt:
        raise BVHError(path, len(lines), "the file ends before 'Frame Time:'")
    _check_rows(path, scan, numbers)
    return scan


def _scan_header(number: int, words: list[str], scan: _Scan, inside_end: bool) -> Sequence[str]:
    """Note what a header line says; return the words for pybvh."""
    key = words[0]
    if key == "ROOT" and scan.joints:
        raise ValueError(f"a second ROOT {' '.join(words[1:])!r}: one skeleton a file")
    if key in ("ROOT", "JOINT"):
        scan.joints.append("_".join(words[1:]))
        if scan.joints[-1] in scan.joints[:-1] or not scan.joints[-1]:
            raise ValueError(f"joint name {scan.joints[-1]!r} is empty or taken")
        return key, scan.joints[-1]
    if key == "OFFSET" and not inside_end:
        scan.offsets.append([float(w) for w in words[1:]])
    if key == "CHANNELS" and not inside_end:
        kinds = [w.capitalize() for w in words[2:]]
        if len(kinds) != int(words[1]):
            raise ValueError(f"CHANNELS {words[1]} lists {len(kinds)} names")
        scan.channels.append(kinds)
        if len(scan.channels) > 1:
            kinds = [k for k in kinds if k.endswith("rotation")]
        return "CHANNELS", str(len(kinds)), *kinds
    if key.lower() == "frames:":
        scan.frames = (int(words[1]), number)
        return "Frames:", words[1]
    if key.lower() == "frame":
        scan.dt = float(words[2])
        if not (0 < scan.dt < float("inf")):
            raise ValueError(f"Frame Time {words[2]} is no positive number of seconds")
        return "Frame", "Time:", words[2]
    return ["End", "Site"] if key.lower() == "end" else words


def _check_rows(path: Path, scan: _Scan, numbers: list[int]) -> None:
    names = [f"{j} {c}" for j, kinds in zip(scan.joints, scan.channels) for c in kinds]
    for number, row in zip(numbers, scan.rows):
        if len(row) != len(names):
            raise BVHError(path, number, f"{len(row)} values, the channels ask for {len(names)}")
    promised, line = scan.frames
    if len(scan.rows) != promised:
        raise BVHError(path, line, f"promises {promised} frames, {len(scan.rows)} follow")
    scan.values = np.zeros((promised, len(names)))
    for at, (number, row) in enumerate(zip(numbers, scan.rows)):
        try:
            scan.values[at] = row
        except ValueError as error:
            raise BVHError(path, number, str(error)) from None
    bad = np.argwhere(~np.isfinite(scan.values))
    if len(bad):
        at, column = bad[0]
        why = f"{scan.rows[at][column]} in {names[column]}: drop or repair the frame"
        raise BVHError(path, numbers[at], why)


def _parse(path: Path, scan: _Scan) -> pybvh.Bvh:
    kinds = [(j, c) for j, names in enumerate(scan.channels) for c in names]
    keep = [i for i, (j, c) in enumerate(kinds) if not j or c.endswith("rotation")]
    rows = (" ".join([row[i] for i in keep]) for row in scan.rows)
    with tempfile.TemporaryDirectory() as folder:
        plain = Path(folder) / "plain.bvh"
        plain.write_text("\n".join([*scan.header, *rows]) + "\n")
        try:
            return pybvh.read_bvh_file(plain, world_up="+y")
        except ValueError as error:
            line = re.search(r"at line (\d+)", str(error))
            why = str(error).replace(str(plain), path.name)
            raise BVHError(path, int(line[1]) if line else None, why) from error


def _translations(path: Path, scan: _Scan) -> np.ndarray | None:
    """Return the local translations of a file whose inner joints have position channels."""
    kinds = [(j, c) for j, names in enumerate(scan.channels) for c in names]
    moving = sorted({j for j, c in kinds if j and c.endswith("position")})
    if not moving:
        return None
    values, offsets = scan.values, np.array(scan.offsets)
    bone = np.linalg.norm(offsets[1:], axis=1).mean()
    local = np.repeat(offsets[None], len(values), 0)
    for joint in moving:
        for column, (j, name) in enumerate(kinds):
            if j == joint and name.endswith("position"):
                local[:, j, "XYZ".index(name[0])] = values[:, column]
        far = np.linalg.norm(np.median(local[:, joint], 0) - offsets[joint])
        if far > 0.25 * max(bone, np.linalg.norm(offsets[joint])):
            raise BVHError(
                path,
                None,
                f"joint {scan.joints[joint]!r} has position channels that lie {far:.3g} units from "
                "its OFFSET: they are no local translations (absolute positions?); export the file "
                "with rotations alone",
            )
    return local


def _starts_in_tpose(clip: Clip) -> bool:
    if len(clip) < 4:
        return False
    turn = clip.local_rot[:-1].swapaxes(-1, -2) @ clip.local_rot[1:]
    cosine = (np.trace(turn, axis1=-2, axis2=-1) - 1) / 2
    angle_T = np.arccos(np.clip(cosine, -1, 1)).mean(-1)
    return bool(angle_T[0] > 10 * np.median(angle_T[1:]) and angle_T[0] > np.radians(1))


def _to_convention(clip: Clip, path: Path, unit_m: float | None, up: str | None) -> Clip:
    source = next((n for n, (have, *_) in SOURCES.items() if set(have) <= set(clip.names)), None)
    _, known_unit, known_up = SOURCES[source] if source else (None, None, None)
    up_from = "given" if up else "table" if source else "estimate"
    unit_from = "given" if unit_m else "table" if source else "estimate"
    up = up or known_up or _estimate_up(clip)
    if up not in TO_Z_UP:
        raise BVHError(path, None, f"up={up!r} is none of {', '.join(TO_Z_UP)}")
    turned = _turn(clip, TO_Z_UP[up].astype(float))
    unit_m = unit_m or known_unit or _estimate_unit(turned, path)
    if "estimate" in (up_from, unit_from):
        warnings.warn(
            f"{path.name}: taken as {up} up with {unit_m:g} m a unit (up: {up_from}, unit: "
            f"{unit_from}); give unit_m and up to decide it",
            BVHWarning,
            stacklevel=3,
        )
    moved = turned.translations
    return dataclasses.replace(
        turned,
        offsets=turned.offsets * unit_m,
        root_pos=turned.root_pos * unit_m,
        end_sites=tuple((j, o * unit_m) for j, o in turned.end_sites),
        translations=moved if moved is None else moved * unit_m,
        meta=clip.meta | {"unit_m": unit_m, "unit": unit_from, "up": up, "up_from": up_from},
    )


def _turn(clip: Clip, turn_33: np.ndarray) -> Clip:
    local = clip.local_rot.copy()
    local[:, 0] = turn_33 @ local[:, 0]
    return dataclasses.replace(clip, local_rot=local, root_pos=clip.root_pos @ turn_33.T)


def _estimate_up(clip: Clip) -> str:
    """Return the axis along which the body is longest, pointing from the feet to the head."""
    place = clip.positions()
    axis = int(np.median(np.ptp(place, axis=1), axis=0).argmax())
    found = dict(zip(CANONICAL, canonical_joints(clip.names)))
    head, feet = found["head"], found["left_ankle"]
    rises = place[:, head, axis] - place[:, feet, axis] if head and feet else place[:, 0, axis]
    return f"{'+' if np.median(rises) >= 0 else '-'}{'xyz'[axis]}"


def _estimate_unit(clip: Clip, path: Path) -> float:
    height = float(np.percentile(np.ptp(clip.positions()[..., 2], axis=1), 90))
    low, high = STANDING_M
    for unit_m in UNITS.values():
        if low <= height * unit_m <= high:
            return unit_m
    raise BVHError(
        path,
        None,
        f"a body {height:.3g} units high fits no unit of {', '.join(UNITS)}: give unit_m",
    )


def write_bvh(clip: Clip, path: str | Path, unit_m: float = 0.01) -> None:
    """Write a clip with +Z up and Euler angles ZYX, six decimals of a unit or degree.

    `read_bvh(path, unit_m, up="+z")` gives it back.

    Args:
        clip: what to write.
        path: must end in .bvh.
        unit_m: metres a unit in the file.

    Raises:
        BVHError: the clip has local translations, which pybvh cannot write.
    """
    if clip.translations is not None:
        raise BVHError(path, None, "local translations of inner joints cannot be written")
    nodes: list = []
    for name, parent, offset in zip(clip.names, clip.tree.parents, clip.offsets / unit_m):
        above = nodes[parent] if parent >= 0 else None
        if above is None:
            nodes.append(BvhRoot(name, offset * 0, list("XYZ"), list("ZYX"), [], None))
        else:
            nodes.append(BvhJoint(name, offset, list("ZYX"), [], above))
            above.children = [*above.children, nodes[-1]]
    for joint, offset in clip.end_sites:
        tip = BvhEndSite(f"{clip.names[joint]}_end", offset / unit_m, nodes[joint])
        nodes[joint].children = [*nodes[joint].children, tip]
    order = _depth_first(nodes[0])
    joints = [nodes.index(n) for n in order if not n.is_end_site()]
    angles = pybvh.rotations.rotmat_to_euler(clip.local_rot[:, joints], "ZYX")
    bvh = pybvh.Bvh(order, clip.root_pos / unit_m, angles, clip.dt, world_up="+z")
    pybvh.write_bvh_file(bvh, path)


def _depth_first(node: BvhRoot | BvhJoint | BvhEndSite) -> list:
    children = [] if node.is_end_site() else node.children
    return [node, *(below for child in children for below in _depth_first(child))]
