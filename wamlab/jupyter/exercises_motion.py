"""Exercises of notebook 08: free fall, aliases, what a cache can hold, a Jacobian, a mask."""

from collections.abc import Sequence

import torch

from wamlab.jupyter._exercise import Exercise


def _takeoff_speed(flight_s: float, gravity: float) -> float:
    return gravity * flight_s / 2


def _alias_hz(signal_hz: float, rate_hz: float) -> float:
    return abs(signal_hz - rate_hz * round(signal_hz / rate_hz))


def _pinned_hits(order: Sequence[int], pinned: Sequence[int]) -> float:
    kept = set(pinned)
    return sum(i in kept for i in order) / len(order)


def _point_jacobian(point: torch.Tensor, joint: torch.Tensor, axes: torch.Tensor) -> torch.Tensor:
    return torch.linalg.cross(axes, (point - joint)[:, None].expand(3, 3), dim=0)


def _mask(block: Sequence[int]) -> torch.Tensor:
    b, t = torch.as_tensor(block), len(block)
    clean = b[None, :] <= b[:, None]
    past, own = b[None, :] < b[:, None], b[None, :] == b[:, None]
    nothing = torch.zeros(t, t, dtype=torch.bool)
    return torch.cat([torch.cat([clean, nothing], 1), torch.cat([past, own], 1)])


def _points() -> list[tuple]:
    draw = torch.Generator().manual_seed(0)
    cases = []
    for _ in range(3):
        q, _ = torch.linalg.qr(torch.randn(3, 3, generator=draw, dtype=torch.float64))
        point, joint = torch.randn(2, 3, generator=draw, dtype=torch.float64)
        cases.append((point, joint, q * torch.det(q)))
    return cases


def _orders() -> list[tuple]:
    draw = torch.Generator().manual_seed(0)
    epochs = [torch.randperm(10, generator=draw).tolist() for _ in range(3)]
    return [([i for e in epochs for i in e], [1, 4]), ([0, 0, 0, 1], [0]), ([5, 6, 7], [1])]


EXERCISES: dict[str, Exercise] = {
    "takeoff-speed": Exercise(
        task="takeoff_speed(flight_s, gravity): the vertical speed in m/s at take-off of a jump "
        "that is `flight_s` seconds in the air and lands at the height it left; `gravity` in "
        "m/s^2.",
        spec=_takeoff_speed,
        inputs=lambda: [(0.316, 9.81), (0.43, 9.81), (1.0, 1.62)],
        hints=(
            "Up and down take the same time.",
            "At the top the speed is zero: gravity has taken it away in half of the flight.",
            "gravity times half of the flight time.",
        ),
    ),
    "alias-hz": Exercise(
        task="alias_hz(signal_hz, rate_hz): at which frequency a sine of `signal_hz` appears in "
        "samples taken `rate_hz` times a second without a filter (0 to half the rate).",
        spec=_alias_hz,
        inputs=lambda: [(115.0, 120.0), (233.0, 120.0), (7.0, 120.0), (1000.0, 120.0)],
        hints=(
            "115 Hz at 120 samples a second: from sample to sample it lacks 1/24 of a turn.",
            "Whole turns between two samples cannot be seen: take away the nearest multiple of "
            "the rate.",
            "The distance from the signal's frequency to the nearest multiple of the rate.",
        ),
    ),
    "pinned-hits": Exercise(
        task="pinned_hits(order, pinned): the share of the reads in `order` (a list of sample "
        "numbers) that a cache answers which holds the samples `pinned`, and only ever those.",
        spec=_pinned_hits,
        inputs=_orders,
        hints=(
            "No sample ever enters or leaves.",
            "Count the reads whose sample is among the pinned ones.",
            "In whole epochs that is the cache's share of the data, in whatever order.",
        ),
    ),
    "point-jacobian": Exercise(
        task="point_jacobian(point, joint, axes): how fast a point moves when its joint turns: "
        "float64 [3, 3] whose column c is the velocity in m/s for 1 rad/s about the joint's own "
        "axis c. `point` and `joint` are places [3] in m, `axes` [3, 3] has the joint's axes in "
        "the world as its columns.",
        spec=_point_jacobian,
        inputs=_points,
        hints=(
            "A point on the axis does not move; one far from it moves fast, across the lever.",
            "The velocity is axis × lever.",
            "Column c: the cross product of axes[:, c] and point - joint.",
        ),
        tolerance=1e-9,
    ),
    "block-mask": Exercise(
        task="block_mask(block): who sees whom, bool [2 T, 2 T] (row: who sees), in the sequence "
        "[clean | noisy] of T frames each; `block` lists each frame's block. A clean frame sees "
        "the clean frames of its block and of those before; a noisy one sees the clean frames of "
        "the blocks before its own, and the noisy ones of its own.",
        spec=_mask,
        inputs=lambda: [([0, 0, 1],), ([0, 1, 1, 2, 2, 2],), ([0, 0, 0],)],
        hints=(
            "Four squares of T by T: clean-clean, clean-noisy, noisy-clean, noisy-noisy.",
            "Compare block[:, None] of the one who sees with block[None, :] of the one seen.",
            "≤ in the first square, nothing in the second, < in the third, = in the fourth.",
        ),
    ),
}
