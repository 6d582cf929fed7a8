"""Exercises of notebook 02: reading a trace, and what bounds an operation."""

from collections.abc import Sequence

from wamlab.jupyter._exercise import Exercise
from wamlab.trace import intersect, length

Intervals = Sequence[tuple[float, float]]


def _exposed_ms(compute: Intervals, communication: Intervals) -> float:
    return length(communication) - length(intersect(communication, compute))


def _own_times(operators: Sequence[tuple[str, float, float]]) -> dict[str, float]:
    own: dict[str, float] = {}
    for name, start, end in operators:
        inside = [
            (s, e) for n, s, e in operators if start <= s and e <= end and (s, e) != (start, end)
        ]
        own[name] = end - start - length(inside)
    return own


def _modulation_bytes(tokens: int, rows: int, width: int, itemsize: int) -> tuple[int, int]:
    per_row = 6 * width * itemsize
    return tokens * per_row, rows * per_row


def _bound(flops: float, byte_count: float, machine: tuple[float, float, float]) -> str:
    peak, bandwidth, launch = machine
    costs = {"launch": launch, "memory": byte_count / bandwidth, "compute": flops / peak}
    return max(costs, key=costs.get)


def _bound_cases() -> list[tuple]:
    gpu, cpu = (8e14, 4e12, 6e-6), (5e10, 1e10, 4e-6)
    return [
        (2 * 16000 * 3072 * 14336, 5.7e8, gpu),
        (9 * 1000 * 3072, 2.5e7, gpu),
        (9 * 16000 * 3072, 4e8, gpu),
        (4 * 24 * 128, 4e5, gpu),
        (2 * 244 * 128 * 512, 9e5, cpu),
        (9 * 244 * 128, 5e5, cpu),
        (4.0, 16.0, cpu),
    ]


EXERCISES: dict[str, Exercise] = {
    "exposed-ms": Exercise(
        task="exposed_ms(compute, communication): two lists of (start, end) in milliseconds, which "
        "may overlap each other and themselves. Return for how long communication ran while no "
        "computation did.",
        spec=_exposed_ms,
        inputs=lambda: [
            ([(1.0, 11.0)], [(7.0, 17.0)]),
            ([(0.0, 4.0), (6.0, 8.0)], [(1.0, 2.0), (3.0, 7.0)]),
            ([(0.0, 5.0), (2.0, 9.0)], [(1.0, 3.0), (2.0, 4.0), (8.0, 12.0)]),
            ([], [(0.0, 2.0), (1.0, 3.0)]),
            ([(0.0, 1.0)], []),
        ],
        hints=(
            "The times of two overlapping collectives must not be counted twice. Cut the time "
            "line at every start and end, and ask of each piece who runs in it.",
            "cuts = sorted({t for pair in compute + communication for t in pair}); go over "
            "zip(cuts, cuts[1:]).",
            "Add up b - a of the pieces (a, b) that lie in some communication and in no compute: "
            "any(s <= a and b <= e for s, e in communication).",
        ),
        tolerance=1e-9,
    ),
    "own-times": Exercise(
        task="own_times(operators): (name, start, end) of operators on one thread, each either "
        "inside another or beside it. Return name -> the time that was its own: not that of the "
        "operators inside it.",
        spec=_own_times,
        inputs=lambda: [
            ([("linear", 0.0, 10.0), ("t", 1.0, 2.0), ("addmm", 3.0, 9.0)],),
            ([("a", 0.0, 9.0), ("b", 1.0, 8.0), ("c", 2.0, 7.0), ("d", 12.0, 13.0)],),
            ([("only", 5.0, 6.5)],),
        ],
        hints=(
            "Subtract from each operator the time that something inside it took.",
            "Grandchildren lie inside children: subtract both and you subtract twice.",
            "Subtract only direct children: those inside with nothing else in between.",
        ),
        tolerance=1e-9,
    ),
    "modulation-bytes": Exercise(
        task="modulation_bytes(tokens, rows, width, itemsize): a block's time modulation has six "
        "vectors (shift, scale and gate, twice) of `width` numbers. Return its bytes with one set "
        "a token, and with one set for each of `rows` distinct times.",
        spec=_modulation_bytes,
        inputs=lambda: [(15940, 6, 5120, 2), (1000, 6, 3072, 2), (244, 6, 128, 4), (10, 10, 8, 4)],
        hints=(
            "Six vectors of `width` numbers of `itemsize` bytes, for each token or each row.",
            "Return a pair: (per token, per distinct time).",
            "(tokens * 6 * width * itemsize, rows * 6 * width * itemsize)",
        ),
    ),
    "bound": Exercise(
        task='bound(flops, byte_count, machine): which of "launch", "memory" and "compute" bounds '
        "an operation, when machine is (FLOP/s, bytes/s, seconds to start one operation)? The "
        "slowest of the three is the bound.",
        spec=_bound,
        inputs=_bound_cases,
        hints=(
            "Work out three times in seconds: to start it, to move its bytes, to do its FLOPs.",
            "byte_count / bandwidth, flops / peak, and the launch time as it is.",
            "Return the name of the largest of the three times.",
        ),
    ),
}
