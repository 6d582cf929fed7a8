"""A seven-joint arm with closed-form kinematics: spherical shoulder, elbow, spherical wrist.

The chain is Rz Ry Rz (shoulder), up by UPPER, Ry (elbow), up by FORE, Rz Ry Rz (wrist), up by HAND.
The gripper's tip is the tool point. With seven joints for six numbers one freedom is left, the
swivel of the elbow around the line from the shoulder to the wrist; the caller chooses it.
"""

import math

import numpy as np

SHOULDER_M = np.array([0.0, 0.0, 0.35])
UPPER_M, FORE_M, HAND_M = 0.42, 0.42, 0.15


def rot_y(angle: float) -> np.ndarray:
    """Return the rotation about y, [3, 3]."""
    c, s = math.cos(angle), math.sin(angle)
    return np.array([[c, 0.0, s], [0.0, 1.0, 0.0], [-s, 0.0, c]])


def rot_z(angle: float) -> np.ndarray:
    """Return the rotation about z, [3, 3]."""
    c, s = math.cos(angle), math.sin(angle)
    return np.array([[c, -s, 0.0], [s, c, 0.0], [0.0, 0.0, 1.0]])


def forward(joints: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return where the arm is.

    Args:
        joints: [7] radians.

    Returns:
        elbow [3], wrist [3] and tool point [3] in metres, and the hand's rotation [3, 3].
    """
    q = joints.tolist()
    upper = rot_z(q[0]) @ rot_y(q[1]) @ rot_z(q[2])
    elbow = SHOULDER_M + UPPER_M * upper[:, 2]
    fore = upper @ rot_y(q[3])
    wrist = elbow + FORE_M * fore[:, 2]
    hand = fore @ rot_z(q[4]) @ rot_y(q[5]) @ rot_z(q[6])
    return elbow, wrist, wrist + HAND_M * hand[:, 2], hand


def inverse(tool: np.ndarray, yaw: float, swivel: float) -> np.ndarray:
    """Return the joints that hold the gripper straight down at a point.

    Args:
        tool: [3] metres; a point out of reach is answered with the arm stretched towards it.
        yaw: radians, how the gripper is turned about the vertical.
        swivel: radians, how far the elbow leans out of the vertical plane.

    Returns:
        [7] radians, each in (-pi, pi].
    """
    to_wrist = tool + np.array([0.0, 0.0, HAND_M]) - SHOULDER_M
    distance = min(float(np.linalg.norm(to_wrist)), 0.999 * (UPPER_M + FORE_M))
    line = to_wrist / np.linalg.norm(to_wrist)
    along = (distance**2 + UPPER_M**2 - FORE_M**2) / (2 * distance)
    out = math.sqrt(max(UPPER_M**2 - along**2, 0.0))
    up = np.array([0.0, 0.0, 1.0]) - line[2] * line
    up = up / np.linalg.norm(up)
    side = np.cross(line, up)
    elbow = along * line + out * (math.cos(swivel) * up + math.sin(swivel) * side)
    upper_z = elbow / UPPER_M
    fore_z = (distance * line - elbow) / FORE_M
    bend = math.acos(min(max(float(upper_z @ fore_z), -1.0), 1.0))
    upper_x = fore_z - (fore_z @ upper_z) * upper_z
    upper_x = upper_x / np.linalg.norm(upper_x)
    upper = np.stack([upper_x, np.cross(upper_z, upper_x), upper_z], axis=1)
    hand = rot_z(yaw) @ np.diag([1.0, -1.0, -1.0])
    wrist = (upper @ rot_y(bend)).T @ hand
    return np.array([*_zyz(upper), bend, *_zyz(wrist)])


def rotation_vector(r: np.ndarray) -> np.ndarray:
    """Return axis times angle of a rotation under 90 degrees, [3] radians."""
    axis = np.array([r[2, 1] - r[1, 2], r[0, 2] - r[2, 0], r[1, 0] - r[0, 1]]) / 2
    return axis * np.arcsin(min(np.linalg.norm(axis), 1.0)) / max(np.linalg.norm(axis), 1e-9)


def _zyz(r: np.ndarray) -> tuple[float, float, float]:
    """Return a, b, c with Rz(a) Ry(b) Rz(c) = r and b in [0, pi]."""
    b = math.acos(min(max(float(r[2, 2]), -1.0), 1.0))
    return math.atan2(r[1, 2], r[0, 2]), b, math.atan2(r[2, 1], -r[2, 0])
