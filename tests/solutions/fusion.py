"""Solutions of the exercises of notebook 03."""

import torch


def norm_bytes(tokens, width, itemsize):
    whole, column, weight = (n * itemsize for n in (tokens * width, tokens, width))
    return 7 * whole + 6 * column + weight, 2 * whole + weight


def distinct(time):
    rows = torch.tensor(sorted(set(time.tolist())))
    return rows, (time[:, None] == rows).int().argmax(1)


def segment_sums(grad, segment, rows):
    return torch.stack([grad[segment == g].sum(0) for g in range(rows)])


def graph_gain(kernels, launch_us, busy_ms):
    host_ms = kernels * launch_us / 1000
    return 1.0 if host_ms < busy_ms else host_ms / busy_ms


def gradient_after(replays, gradient, existed, zeroed):
    held = gradient
    if zeroed:
        held = 0.0
    for _ in range(replays):
        held = held + gradient if existed else gradient
    return held


SOLUTIONS = {
    "norm-bytes": norm_bytes,
    "distinct": distinct,
    "segment-sums": segment_sums,
    "graph-gain": graph_gain,
    "gradient-after": gradient_after,
}
