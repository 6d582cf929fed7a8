"""A ray caster for the toy world: capsules, boxes, balls and plates on a table, in numpy.

Every primitive is intersected only inside the screen rectangle that its bounding spheres cover,
with a depth buffer, so a view of 180x320 takes a few milliseconds on one core. Shadows fall
straight down, which is what lets a single view show how high the gripper is.

Coordinates: metres, z up, the table top is z = 0. Cameras look along their third axis, image rows
run along the second. Rays and points are kept as three planes, [3, h, w] or [3, N], float32.
"""

import math
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

LIGHT = (0.352, 0.252, 0.902)
TABLE = (-0.12, 0.92, -0.5, 0.5)  # x from, x to, y from, y to
_FAR = np.float32(1e3)
Spheres = list[tuple[np.ndarray, float]]
Color = tuple[int, int, int]


@dataclass(frozen=True)
class Capsule:
    """A cylinder with round ends from `a` to `b`."""

    a: np.ndarray
    b: np.ndarray
    radius: float
    color: Color

    def spheres(self) -> Spheres:
        """Return its two ends; the shadow is what they sweep."""
        return [(self.a, self.radius), (self.b, self.radius)]

    def distance(self, o: np.ndarray, d: np.ndarray) -> np.ndarray:
        """Return distances [h, w] along unit rays, a large number where the ray misses."""
        axis, oa = self.b - self.a, o - self.a
        length = float(np.linalg.norm(axis)) + 1e-9
        axis = axis / length
        d_axis, o_axis = _dot(d, axis), float(oa @ axis)
        a = 1 - d_axis * d_axis + np.float32(1e-9)
        b = _dot(d, oa) - d_axis * np.float32(o_axis)
        disc = b * b - a * np.float32(oa @ oa - o_axis**2 - self.radius**2)
        t = (-b - np.sqrt(np.maximum(disc, 0))) / a
        along = np.float32(o_axis) + t * d_axis
        t[~((disc >= 0) & (along >= 0) & (along <= length) & (t > 1e-3))] = _FAR
        for end in (self.a, self.b):
            np.minimum(t, _sphere_distance(o - end, d, self.radius), out=t)
        return t

    def normals(self, points: np.ndarray) -> np.ndarray:
        """Return unit normals [3, N] at points on the surface."""
        axis = (self.b - self.a).astype(np.float32)
        offset = points - self.a.astype(np.float32)[:, None]
        share = np.clip(_dot(offset, axis) / (axis @ axis + np.float32(1e-12)), 0, 1)
        return (offset - share * axis[:, None]) / np.float32(self.radius)


@dataclass(frozen=True)
class _Centered:
    """What stands around a centre; `radius` is how far it reaches, for a cube along its axes."""

    center: np.ndarray
    radius: float
    color: Color

    def spheres(self) -> Spheres:
        """Return the sphere around it."""
        return [(self.center, self.radius)]


class Ball(_Centered):
    """A ball."""

    def distance(self, o: np.ndarray, d: np.ndarray) -> np.ndarray:
        """Return distances [h, w] along unit rays, a large number where the ray misses."""
        return _sphere_distance(o - self.center, d, self.radius)

    def normals(self, points: np.ndarray) -> np.ndarray:
        """Return unit normals [3, N] at points on the surface."""
        return (points - self.center.astype(np.float32)[:, None]) / np.float32(self.radius)


class Box(_Centered):
    """A cube with sides along the axes; `radius` is half a side."""

    def spheres(self) -> Spheres:
        """Return the sphere around the cube."""
        return [(self.center, self.radius * 3**0.5)]

    def distance(self, o: np.ndarray, d: np.ndarray) -> np.ndarray:
        """Return distances [h, w] along unit rays, a large number where the ray misses."""
        d = np.where(np.abs(d) < 1e-6, np.float32(1e-6), d)
        middle = (self.center - o).astype(np.float32)[:, None, None] / d
        reach = np.float32(self.radius) / np.abs(d)
        t_in, t_out = (middle - reach).max(0), (middle + reach).min(0)
        return np.where((t_in <= t_out) & (t_in > 1e-3), t_in, _FAR)

    def normals(self, points: np.ndarray) -> np.ndarray:
        """Return unit normals [3, N] at points on the surface."""
        offset = points - self.center.astype(np.float32)[:, None]
        face = np.abs(offset).argmax(0)
        return np.eye(3, dtype=np.float32)[:, face] * np.sign(offset)


class Plate(_Centered):
    """A flat disc just above the table, with a darker rim."""

    def distance(self, o: np.ndarray, d: np.ndarray) -> np.ndarray:
        """Return distances [h, w] along unit rays, a large number where the ray misses."""
        dz = np.where(np.abs(d[2]) < 1e-6, np.float32(1e-6), d[2])
        t = np.float32(self.center[2] - o[2]) / dz
        x, y = (np.float32((o - self.center)[i]) + t * d[i] for i in (0, 1))
        inside = x * x + y * y <= np.float32(self.radius**2)
        return np.where(inside & (t > 1e-3), t, _FAR)

    def normals(self, points: np.ndarray) -> np.ndarray:
        """Return normals [3, N] at points on the plate, shorter on the rim, which darkens it."""
        x, y = (points[i] - np.float32(self.center[i]) for i in (0, 1))
        rim = x * x + y * y > np.float32((0.8 * self.radius) ** 2)
        up = np.where(rim, np.float32(0.55), np.float32(1))
        return np.stack([np.zeros_like(up), np.zeros_like(up), up])


Primitive = Capsule | Ball | Box | Plate


@dataclass(frozen=True)
class View:
    """One camera of a rig; a wrist camera has no position of its own.

    Args:
        name: of the video.
        size: height and width, pixels.
        focal: pixels.
        position: metres; None = on the wrist.
        target: the point that a fixed camera looks at.
    """

    name: str
    size: tuple[int, int]
    focal: float
    position: tuple[float, float, float] | None = None
    target: tuple[float, float, float] = (0.40, 0.0, 0.13)


RIGS: dict[str, tuple[View, ...]] = {
    "droid": (
        View("exterior_image_1_left", (180, 320), 330.0, (1.10, 0.62, 0.78)),
        View("exterior_image_2_left", (180, 320), 330.0, (1.10, -0.62, 0.78)),
        View("wrist_image_left", (180, 320), 190.0),
    ),
    "small": (
        View("exterior_image_1_left", (90, 160), 165.0, (1.10, 0.62, 0.78)),
        View("exterior_image_2_left", (90, 160), 165.0, (1.10, -0.62, 0.78)),
        View("wrist_image_left", (90, 160), 95.0),
    ),
    "libero": (
        View("image", (256, 256), 300.0, (1.30, 0.0, 0.72)),
        View("wrist_image", (256, 256), 190.0),
    ),
}


@dataclass(frozen=True, eq=False)
class Camera:
    """A pinhole camera.

    Args:
        view: its size and focal length.
        position: [3] metres.
        rotation: [3, 3], columns are the image's right, its down and the viewing direction.
    """

    view: View
    position: np.ndarray
    rotation: np.ndarray
    rays: np.ndarray = field(init=False, repr=False)

    def __post_init__(self) -> None:
        local = _local_rays(*self.view.size, self.view.focal)
        rays = (self.rotation.astype(np.float32) @ local).reshape(3, *self.view.size)
        object.__setattr__(self, "rays", rays)

    @classmethod
    def fixed(cls, view: View) -> "Camera":
        """Return the camera of a view with a position, the horizon level."""
        forward = np.subtract(view.target, view.position)
        forward = forward / np.linalg.norm(forward)
        right = np.cross(forward, [0.0, 0.0, 1.0])
        right = right / np.linalg.norm(right)
        rotation = np.stack([right, np.cross(forward, right), forward], axis=1)
        return cls(view, np.array(view.position), rotation)

    @classmethod
    def on_wrist(
        cls, view: View, wrist: np.ndarray, tool: np.ndarray, hand: np.ndarray
    ) -> "Camera":
        """Return the camera beside the wrist that looks between the fingertips."""
        position = wrist + 0.02 * hand[:, 2] + 0.085 * hand[:, 0]
        ahead = tool + 0.03 * hand[:, 2] - position
        ahead = ahead / np.linalg.norm(ahead)
        rotation = np.stack([hand[:, 1], np.cross(ahead, hand[:, 1]), ahead], axis=1)
        return cls(view, position, rotation)

    def rectangle(self, spheres: Spheres) -> tuple[slice, slice] | None:
        """Return the rows and columns that may show the spheres and all between them, or None."""
        size, focal = self.view.size, self.view.focal
        local = [(((c - self.position) @ self.rotation).tolist(), r) for c, r in spheres]
        low, high = [0, 0], list(size)
        for axis, half in ((1, size[0] / 2), (0, size[1] / 2)):  # rows follow y, columns x
            slant = math.hypot(focal, half)
            for side in (-1, 1):  # all of them beyond one side of what the camera sees
                if all(side * p[axis] * focal - p[2] * half > r * slant for p, r in local):
                    return None
            if any(p[2] < 1.02 * r for p, r in local):
                continue  # it touches the camera: anywhere
            ends = [edge for p, r in local for edge in _shadow_edges(p[axis], p[2], r)]
            low[1 - axis] = max(int(min(ends) * focal + half - 1), 0)
            high[1 - axis] = min(int(max(ends) * focal + half + 2), size[1 - axis])
        if high[0] <= low[0] or high[1] <= low[1]:
            return None
        return slice(low[0], high[0]), slice(low[1], high[1])


def _shadow_edges(x: float, z: float, radius: float) -> tuple[float, float]:
    """Return where the two tangents from the camera to a circle at (x, z) cross the line z = 1."""
    root = radius * math.sqrt(max(x * x + z * z - radius * radius, 0.0))
    depth = z * z - radius * radius
    return (x * z - root) / depth, (x * z + root) / depth


def render(camera: Camera, primitives: list[Primitive], *, static: bool) -> np.ndarray:
    """Draw the scene.

    Args:
        camera: where to look from.
        primitives: what stands on the table.
        static: the camera never moves, so its empty table is kept for the next frame.

    Returns:
        uint8 [H, W, 3].
    """
    kept_color, kept_depth, point, table = _kept_ground(camera) if static else _ground(camera)
    color, depth = kept_color.copy(), kept_depth.copy()
    origin = camera.position.astype(np.float32)[:, None]
    for primitive in primitives:
        _cast_shadow(camera, primitive, color, point, table)
    for primitive in primitives:
        where = camera.rectangle(primitive.spheres())
        if where is None:
            continue
        rays = camera.rays[:, *where]
        t = primitive.distance(camera.position, rays)
        seen = np.nonzero(t < depth[where])
        normals = primitive.normals(origin + t[seen] * rays[:, *seen])
        shade = 0.45 + 0.55 * np.clip(_dot(normals, LIGHT), 0, 1)
        color[where][seen] = shade[:, None] * np.array(primitive.color, np.float32)
        depth[where][seen] = t[seen]
    return color


def _cast_shadow(
    camera: Camera, primitive: Primitive, color: np.ndarray, point: np.ndarray, table: np.ndarray
) -> None:
    if isinstance(primitive, Plate):
        return
    ends = [center[:2] for center, _ in primitive.spheres()]
    where = camera.rectangle([(np.array([*e, 0.0]), primitive.radius) for e in ends])
    if where is None:
        return
    x, y = (point[i][where] - np.float32(ends[0][i]) for i in (0, 1))
    if len(ends) > 1:
        ax, ay = (np.float32(v) for v in ends[1] - ends[0])
        share = np.clip((x * ax + y * ay) / (ax * ax + ay * ay + np.float32(1e-9)), 0, 1)
        x, y = x - share * ax, y - share * ay
    dark = np.nonzero((x * x + y * y < np.float32(primitive.radius**2)) & table[where])
    color[where][dark] = color[where][dark] * np.float32(0.72)


def _dot(planes: np.ndarray, vector: np.ndarray) -> np.ndarray:
    x, y, z = (np.float32(v) for v in vector)
    return planes[0] * x + planes[1] * y + planes[2] * z


def _sphere_distance(oc: np.ndarray, d: np.ndarray, radius: float) -> np.ndarray:
    b = _dot(d, oc)
    disc = b * b - np.float32(oc @ oc - radius**2)
    t = -b - np.sqrt(np.maximum(disc, 0))
    return np.where((disc >= 0) & (t > 1e-3), t, _FAR)


@lru_cache(maxsize=8)
def _local_rays(height: int, width: int, focal: float) -> np.ndarray:
    y, x = np.mgrid[0:height, 0:width].astype(np.float32)
    rays = np.stack([x + 0.5 - width / 2, y + 0.5 - height / 2, np.full_like(x, focal)])
    return (rays / np.sqrt((rays * rays).sum(0))).reshape(3, -1)


def _ground(camera: Camera) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return colour, depth, the table plane's point under each pixel, and whether the table is."""
    dz = camera.rays[2]
    t = np.where(dz < -1e-3, np.float32(-camera.position[2]) / np.minimum(dz, -1e-3), _FAR)
    x, y = (np.float32(camera.position[i]) + t * camera.rays[i] for i in (0, 1))
    table = (x > TABLE[0]) & (x < TABLE[1]) & (y > TABLE[2]) & (y < TABLE[3]) & (t < _FAR)
    tile = (np.floor(x * 10).astype(np.int32) + np.floor(y * 10).astype(np.int32)) & 1
    color = np.array([[186, 164, 136], [196, 176, 150]], np.uint8)[tile]
    wall = np.clip(np.float32(88) + 30 * dz[~table], 40, 120)
    color[~table] = wall[:, None] * np.float32([0.9, 0.95, 1.05])
    return color, np.where(table, t, _FAR), np.stack([x, y]), table


_kept_ground = lru_cache(maxsize=8)(_ground)
