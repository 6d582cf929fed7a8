"""Solutions of the exercises of notebook 08."""

import torch


def takeoff_speed(flight_s, gravity):
    return gravity * flight_s / 2


def alias_hz(signal_hz, rate_hz):
    rest = signal_hz % rate_hz
    return min(rest, rate_hz - rest)


def pinned_hits(order, pinned):
    return sum(1 for sample in order if sample in pinned) / len(order)


def point_jacobian(point, joint, axes):
    lever = point - joint
    return torch.stack([torch.linalg.cross(axes[:, c], lever) for c in range(3)], dim=1)


def block_mask(block):
    block = torch.tensor(block)
    me, other = block[:, None], block[None, :]
    return torch.cat(
        [
            torch.cat([other <= me, torch.zeros_like(other == me)], dim=1),
            torch.cat([other < me, other == me], dim=1),
        ]
    )


SOLUTIONS = {
    "takeoff-speed": takeoff_speed,
    "alias-hz": alias_hz,
    "pinned-hits": pinned_hits,
    "point-jacobian": point_jacobian,
    "block-mask": block_mask,
}
