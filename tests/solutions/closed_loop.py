"""Solutions of the exercises of the closed loop."""

import math


def wilson(successes, trials, z=1.959964):
    found, share = successes / trials, z * z / trials
    middle = found + share / 2
    reach = z * math.sqrt(found * (1 - found) / trials + share / (4 * trials))
    return [(middle - reach) / (1 + share), (middle + reach) / (1 + share)]


def time_to(seconds, rates, goal):
    return next((s for s, rate in zip(seconds, rates) if rate >= goal), math.inf)


def reliability(success, decisions):
    return success ** (1 / decisions)


SOLUTIONS = {"wilson": wilson, "time-to": time_to, "reliability": reliability}
