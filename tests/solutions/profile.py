"""Solutions of the exercises of notebook 02."""

from itertools import pairwise


def exposed_ms(compute, communication):
    cuts = sorted({t for pair in [*compute, *communication] for t in pair})

    def inside(a, b, rows):
        return any(start <= a and b <= end for start, end in rows)

    pieces = [p for p in pairwise(cuts) if inside(*p, communication)]
    return sum(b - a for a, b in pieces if not inside(a, b, compute))


def own_times(operators):
    own, parents = {}, []
    for name, start, end in sorted(operators, key=lambda row: (row[1], -row[2])):
        while parents and parents[-1][1] <= start:
            parents.pop()
        own[name] = end - start
        if parents:
            own[parents[-1][0]] -= end - start
        parents.append((name, end))
    return own


def modulation_bytes(tokens, rows, width, itemsize):
    return tuple(6 * width * itemsize * count for count in (tokens, rows))


def bound(flops, byte_count, machine):
    peak, bandwidth, launch = machine
    slowest = max(flops / peak, byte_count / bandwidth, launch)
    if slowest == launch:
        return "launch"
    return "memory" if slowest == byte_count / bandwidth else "compute"


SOLUTIONS = {
    "exposed-ms": exposed_ms,
    "own-times": own_times,
    "modulation-bytes": modulation_bytes,
    "bound": bound,
}
