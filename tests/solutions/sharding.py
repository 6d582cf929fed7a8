"""Solutions of notebook 04's exercises."""


def state_bytes(parameters, ranks, stage):
    weights = 4 / (ranks if stage >= 3 else 1)
    gradients = 4 / (ranks if stage >= 2 else 1)
    moments = 8 / (ranks if stage >= 1 else 1)
    return parameters * (weights + gradients + moments)


def micro_weights(sizes):
    return [size / sum(sizes) for size in sizes]


def wire_bytes(parameters, ranks, micro_batches, deferred):
    gathered = 2 * (2 * parameters) * micro_batches
    scattered = 4 * parameters * (1 if deferred else micro_batches)
    return (ranks - 1) / ranks * (gathered + scattered)


SOLUTIONS = {
    "state-bytes": state_bytes,
    "micro-weights": micro_weights,
    "wire-bytes": wire_bytes,
}
