"""Solutions of the exercises of notebook 06."""


def amdahl(share, factor):
    return 1 / (1 - share + share / factor)


def loss_difference(losses, baseline):
    return max(abs(a - b) / abs(b) for a, b in zip(losses, baseline))


def days(samples, samples_per_s_per_gpu, gpus):
    return samples / (samples_per_s_per_gpu * gpus) / (24 * 3600)


SOLUTIONS = {"amdahl": amdahl, "loss-difference": loss_difference, "days": days}
