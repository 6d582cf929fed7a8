"""A ray caster for the toy world: capsules, boxes, balls and plates on a table, in numpy.

Every primitive is intersected only inside the screen rectangle that its bounding spheres cover,
with a depth buffer, so a view of 180x320 takes a few milliseconds on one core. Shadows fall
straight down, which is what lets a single view show how high the gripper is.

Coordinates: metres, z up, the table top is z = 0. Cameras look along their third axis, image rows
run along the second.
"""

from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

LIGHT = np.array([0.35, 0.25, 0.9], np.float32) / np.float32(np.linalg.norm([0.35, 0.25, 0.9]))
TABLE = (-0.12, 0.92, -0.5, 0.5)  # x from, x to, y from, y to
_FAR = np.float32(1e3)


@dataclass(frozen=True)
class Capsule:
    """A cylinder with round ends from `a` to `b`."""

    a: np.ndarray
    b: np.ndarray
    radius: float
    color: tuple[float, float, float]

    def spheres(self) -> list[tuple[np.ndarray, float]]:
        """Return bounding spheres, used for the screen rectangle and the shadow."""
        return [(self.a, self.radius), (self.b, self.radius)]

    def distance(self, o: np.ndarray, d_HW3: np.ndarray) -> np.ndarray:
        """Return distances [H, W] along unit rays, a large number where the ray misses."""
        axis = (self.b - self.a).astype(np.float32)
        length = np.float32(np.linalg.norm(axis)) + np.float32(1e-9)
        axis = axis / length
        oa = (o - self.a).astype(np.float32)
        d_axis, o_axis = d_HW3 @ axis, oa @ axis
        a = 1 - d_axis * d_axis + np.float32(1e-9)
        b = d_HW3 @ oa - d_axis * o_axis
        disc = b * b - a * (oa @ oa - o_axis * o_axis - np.float32(self.radius**2))
        t = (-b - np.sqrt(np.maximum(disc, 0))) / a
        along = o_axis + t * d_axis
        t = np.where((disc >= 0) & (along >= 0) & (along <= length) & (t > 1e-3), t, _FAR)
        for end in (self.a, self.b):
            t = np.minimum(t, _sphere_distance(o - end, d_HW3, self.radius))
        return t

    def normals(self, points_N3: np.ndarray) -> np.ndarray:
        """Return unit normals [N, 3] at points on the surface."""
        axis = (self.b - self.a).astype(np.float32)
        from_a = points_N3 - self.a.astype(np.float32)
        share = np.clip(from_a @ axis / (axis @ axis + np.float32(1e-12)), 0, 1)
        return (from_a - share[:, None] * axis) / np.float32(self.radius)


@dataclass(frozen=True)
class Sphere:
    """A ball."""

    center: np.ndarray
    radius: float
    color: tuple[float, float, float]

    def spheres(self) -> list[tuple[np.ndarray, float]]:
        """Return the ball itself."""
        return [(self.center, self.radius)]

    def distance(self, o: np.ndarray, d_HW3: np.ndarray) -> np.ndarray:
        """Return distances [H, W] along unit rays, a large number where the ray misses."""
        return _sphere_distance(o - self.center, d_HW3, self.radius)

    def normals(self, points_N3: np.ndarray) -> np.ndarray:
        """Return unit normals [N, 3] at points on the surface."""
        return (points_N3 - self.center.astype(np.float32)) / np.float32(self.radius)


@dataclass(frozen=True)
class Box:
    """A cube with sides along the axes."""

    center: np.ndarray
    half: float
    color: tuple[float, float, float]

    def spheres(self) -> list[tuple[np.ndarray, float]]:
        """Return the sphere around the cube."""
        return [(self.center, self.half * 3**0.5)]

    def distance(self, o: np.ndarray, d_HW3: np.ndarray) -> np.ndarray:
        """Return distances [H, W] along unit rays, a large number where the ray misses."""
        d = np.where(np.abs(d_HW3) < 1e-6, np.float32(1e-6), d_HW3)
        middle = (self.center - o).astype(np.float32) / d
        reach = np.float32(self.half) / np.abs(d)
        t_in, t_out = (middle - reach).max(-1), (middle + reach).min(-1)
        return np.where((t_in <= t_out) & (t_in > 1e-3), t_in, _FAR)

    def normals(self, points_N3: np.ndarray) -> np.ndarray:
        """Return unit normals [N, 3] at points on the surface."""
        offset = points_N3 - self.center.astype(np.float32)
        face = np.abs(offset).argmax(-1)
        return np.eye(3, dtype=np.float32)[face] * np.sign(offset)


@dataclass(frozen=True)
class Disc:
    """A flat plate just above the table, with a darker rim."""

    center: np.ndarray
    radius: float
    color: tuple[float, float, float]

    def spheres(self) -> list[tuple[np.ndarray, float]]:
        """Return the sphere around the plate."""
        return [(self.center, self.radius)]

    def distance(self, o: np.ndarray, d_HW3: np.ndarray) -> np.ndarray:
        """Return distances [H, W] along unit rays, a large number where the ray misses."""
        dz = np.where(np.abs(d_HW3[..., 2]) < 1e-6, np.float32(1e-6), d_HW3[..., 2])
        t = np.float32(self.center[2] - o[2]) / dz
        xy = (o - self.center)[:2].astype(np.float32) + t[..., None] * d_HW3[..., :2]
        inside = (xy * xy).sum(-1) <= np.float32(self.radius**2)
        return np.where(inside & (t > 1e-3), t, _FAR)

    def normals(self, points_N3: np.ndarray) -> np.ndarray:
        """Return normals [N, 3] at points on the plate, shorter on the rim, which darkens it."""
        r = np.linalg.norm((points_N3 - self.center.astype(np.float32))[:, :2], axis=1)
        up = np.where(r > 0.8 * self.radius, np.float32(0.55), np.float32(1))
        return np.stack([np.zeros_like(up), np.zeros_like(up), up], axis=1)


Primitive = Capsule | Sphere | Box | Disc


@dataclass(frozen=True, eq=False)
class Camera:
    """A pinhole camera.

    Args:
        position: [3] metres.
        rotation: [3, 3], columns are the image's right, the image's down and the viewing direction.
        height, width: pixels.
        focal: pixels.
    """

    position: np.ndarray
    rotation: np.ndarray
    height: int
    width: int
    focal: float
    rays_HW3: np.ndarray = field(init=False, repr=False)  # noqa: N815 (a shape suffix)

    def __post_init__(self) -> None:
        local = _local_rays(self.height, self.width, self.focal)
        rays = local @ self.rotation.T.astype(np.float32)
        object.__setattr__(self, "rays_HW3", rays)
        object.__setattr__(self, "position", self.position.astype(np.float32))

    @classmethod
    def look_at(
        cls, position: tuple[float, float, float], target: tuple[float, float, float], **size: float
    ) -> "Camera":
        """Return a camera at `position` that looks at `target` with the horizon level."""
        forward = np.subtract(target, position)
        forward = forward / np.linalg.norm(forward)
        right = np.cross(forward, [0.0, 0.0, 1.0])
        right = right / np.linalg.norm(right)
        rotation = np.stack([right, np.cross(forward, right), forward], axis=1)
        return cls(np.array(position), rotation, **size)

    def rectangle(self, spheres: list[tuple[np.ndarray, float]]) -> tuple[slice, slice]:
        """Return the rows and columns that may show the spheres."""
        low, high = np.full(2, np.inf), np.full(2, -np.inf)
        for center, radius in spheres:
            x, y, z = (center - self.position) @ self.rotation
            if z < -radius:
                continue
            if z < 1.5 * radius:
                return slice(0, self.height), slice(0, self.width)
            reach = self.focal * radius * 1.5 / (z - radius) + 1
            pixel = np.array([y, x]) / z * self.focal + [self.height / 2, self.width / 2]
            low, high = np.minimum(low, pixel - reach), np.maximum(high, pixel + reach)
        size = (self.height, self.width)
        first = [int(min(max(v, 0), n)) for v, n in zip(low, size)]
        last = [int(min(max(v + 1, 0), n)) for v, n in zip(high, size)]
        return slice(first[0], last[0]), slice(first[1], last[1])


def render(camera: Camera, primitives: list[Primitive], *, static: bool) -> np.ndarray:
    """Draw the scene.

    Args:
        camera: where to look from.
        primitives: what stands on the table.
        static: the camera never moves, so its empty table may be kept for the next frame.

    Returns:
        uint8 [H, W, 3].
    """
    ground = _kept_ground(camera) if static else _ground(camera)
    color, depth, point_HW2, on_table = ground
    color, depth = color.copy(), depth.copy()
    for primitive in primitives:
        _cast_shadow(camera, primitive, color, point_HW2, on_table)
    for primitive in primitives:
        rows, columns = camera.rectangle(primitive.spheres())
        if rows.stop <= rows.start or columns.stop <= columns.start:
            continue
        rays = camera.rays_HW3[rows, columns]
        t = primitive.distance(camera.position, rays)
        seen = t < depth[rows, columns]
        normals = primitive.normals(camera.position + t[seen][:, None] * rays[seen])
        shade = 0.45 + 0.55 * np.clip(normals @ LIGHT, 0, 1)
        color[rows, columns][seen] = shade[:, None] * np.array(primitive.color, np.float32)
        depth[rows, columns][seen] = t[seen]
    return color.astype(np.uint8)


def _cast_shadow(
    camera: Camera, primitive: Primitive, color: np.ndarray, point_HW2: np.ndarray, on: np.ndarray
) -> None:
    if isinstance(primitive, Disc):
        return
    ends = [center for center, _ in primitive.spheres()]
    radius = primitive.half if isinstance(primitive, Box) else primitive.radius
    flat = [(np.array([p[0], p[1], 0.0]), radius) for p in ends]
    rows, columns = camera.rectangle(flat)
    if rows.stop <= rows.start or columns.stop <= columns.start:
        return
    a = ends[0][:2].astype(np.float32)
    axis = (ends[-1][:2] - ends[0][:2]).astype(np.float32)
    offset = point_HW2[rows, columns] - a
    if len(ends) > 1:
        share = np.clip(offset @ axis / (axis @ axis + np.float32(1e-9)), 0, 1)
        offset = offset - share[..., None] * axis
    dark = ((offset * offset).sum(-1) < radius * radius) & on[rows, columns]
    color[rows, columns][dark] *= np.float32(0.72)


def _sphere_distance(oc: np.ndarray, d_HW3: np.ndarray, radius: float) -> np.ndarray:
    b = d_HW3 @ oc.astype(np.float32)
    disc = b * b - np.float32(oc @ oc - radius**2)
    t = -b - np.sqrt(np.maximum(disc, 0))
    return np.where((disc >= 0) & (t > 1e-3), t, _FAR)


@lru_cache(maxsize=8)
def _local_rays(height: int, width: int, focal: float) -> np.ndarray:
    y, x = np.mgrid[0:height, 0:width].astype(np.float32)
    rays = np.stack([x + 0.5 - width / 2, y + 0.5 - height / 2, np.full_like(x, focal)], -1)
    return (rays / np.linalg.norm(rays, axis=-1, keepdims=True)).astype(np.float32)


def _ground(camera: Camera) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return colour, depth, the table plane's point under each pixel, and whether the table is."""
    dz = camera.rays_HW3[..., 2]
    t = np.where(dz < -1e-3, -camera.position[2] / np.minimum(dz, np.float32(-1e-3)), _FAR)
    point = camera.position[:2] + t[..., None] * camera.rays_HW3[..., :2]
    x, y = point[..., 0], point[..., 1]
    on = (t < _FAR) & (x > TABLE[0]) & (x < TABLE[1]) & (y > TABLE[2]) & (y < TABLE[3])
    checker = (np.floor(x * 10) + np.floor(y * 10)) % 2
    light, dark = np.float32([196, 176, 150]), np.float32([186, 164, 136])
    wood = np.where(checker[..., None] > 0, light, dark)
    wall = np.clip(np.float32(88) + 30 * dz[..., None], 40, 120) * np.float32([0.9, 0.95, 1.05])
    return np.where(on[..., None], wood, wall), np.where(on, t, _FAR), point, on


@lru_cache(maxsize=8)
def _kept_ground(camera: Camera) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    return _ground(camera)
