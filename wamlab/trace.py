"""Reads a profiler's trace: where each microsecond of a step went.

A trace is a list of events with a start and a duration on a CPU thread or a GPU stream. Everything
here is arithmetic on intervals: what a GPU was doing at an instant is the union of its kernels, and
communication is exposed where a collective runs and no compute kernel does. Waiting (stream
synchronisation, wait-event markers) is never work.
"""

import dataclasses
import gzip
import json
import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from wamlab.config import UserError

Interval = tuple[float, float]  # start and end in microseconds

# First match wins. Names of kernels come from cuBLAS, cuDNN, FlashAttention, NCCL, Inductor and
# PyTorch, names of operators ("aten::mm") from PyTorch and gloo.
KERNEL_GROUPS: dict[str, re.Pattern[str]] = {
    "communication": re.compile(r"nccl|gloo:|c10d::", re.I),
    "bookkeeping": re.compile(  # CPU operators that move no data: views, allocation, autograd
        r"^aten::_?(alias|as_strided|broadcast_tensors|chunk|detach|empty(_like|_strided)?|expand"
        r"|flatten|is_same_size|item|lift_fresh|local_scalar_dense|narrow|permute|reshape(_alias)?"
        r"|resize|resolve_(conj|neg)|result_type|select|slice|split(_with_sizes)?|squeeze|t"
        r"|transpose|unbind|unflatten|unsafe_view|unsqueeze|view(_as_\w+)?)_?$"
        r"|^(autograd|torch::autograd)::|Backward\d+$|^detach$|^Torch|^## Call|^CompiledFunction"
    ),
    "copy": re.compile(
        r"memcpy|memset|copy_kernel|CatArray|split_with_sizes|chunk_cat"
        r"|^aten::_?(cat|clone|constant_pad_nd|contiguous|copy|fill|pad|repeat|stack|to|to_copy"
        r"|zero)_?$",
        re.I,
    ),
    "attention": re.compile(r"flash|fmha|flex_attention|attention|sdpa|softmax", re.I),
    "convolution": re.compile(r"conv|wgrad_|dgrad_|implicit", re.I),
    "matmul": re.compile(
        r"gemm|nvjet|cutlass|xmma|matmul|triton_tem|splitK|^aten::(addmm|mm|bmm|baddbmm|linear)$",
        re.I,
    ),
    "norm": re.compile(r"norm|triton_(red|per)|var_mean", re.I),
    "optimizer": re.compile(r"adam|multi_tensor|foreach", re.I),
    "elementwise": re.compile(
        r"elementwise|triton_poi|vectorized|reduce|index|distribution|^aten::|cpp_fused", re.I
    ),
}
WORK = {"kernel", "gpu_memcpy", "gpu_memset"}
PARTS = (
    *("data_wait", "to_device", "encoders", "forward", "backward", "recompute", "optimizer"),
    "graph",  # a captured step, whose parts run as one
)
SYNCHRONISING = re.compile(r"cuda(Device|Stream|Event)Synchronize|hipDeviceSynchronize")


class TraceError(UserError):
    """A trace that cannot be read, or that lacks what was asked of it."""


@dataclasses.dataclass(frozen=True)
class Event:
    """One event: name, category, start and duration in microseconds, and its thread or stream."""

    name: str
    category: str
    start: float
    duration: float
    lane: Any = None

    @property
    def end(self) -> float:
        """The event's end in microseconds."""
        return self.start + self.duration


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepSplit:
    """One step of one rank, in milliseconds: the whole, its parts, and what CPU and GPU did.

    Without a GPU, communication is gloo's, and `idle_ms` is null: a CPU has no queue to run dry.
    """

    step_ms: float
    parts_ms: dict[str, float]
    gpu_ms: dict[str, float]  # busy time by kernel group (overlaps counted in each)
    cpu_ms: dict[str, float]  # own time of the operators by group, and "no operator"
    exposed_comm_ms: float | None
    comm_ms: float | None
    idle_ms: float | None
    counts: dict[str, int]


def trace_rows(path: str | Path) -> list[dict[str, Any]]:
    """Return the JSON objects of a Chrome trace (.json or .json.gz), one an event.

    Raises:
        TraceError: the file is missing or is no trace.
    """
    path = Path(path)
    try:
        raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        return json.loads(raw)["traceEvents"]
    except FileNotFoundError as error:
        raise TraceError(f"no such trace: {path}") from error
    except (OSError, EOFError, ValueError, KeyError, TypeError) as error:
        raise TraceError(f"{path} is not a Chrome trace: {error}") from error


def read_trace(path: str | Path) -> list[Event]:
    """Return the complete events of a Chrome trace, see `trace_rows`."""
    return [
        Event(
            r["name"],
            r.get("cat", ""),
            float(r["ts"]),
            float(r["dur"]),
            (r.get("pid"), r.get("tid")),
        )
        for r in trace_rows(path)
        if r.get("ph") == "X"
    ]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Return disjoint, sorted intervals that cover the same instants."""
    merged: list[list[float]] = []
    for start, end in sorted(intervals):
        if end <= start:
            continue
        if merged and start <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], end)
        else:
            merged.append([start, end])
    return [(s, e) for s, e in merged]


def length(intervals: Iterable[Interval]) -> float:
    """Return the time that intervals cover, overlaps counted once."""
    return sum(end - start for start, end in union(intervals))


def intersect(a: Iterable[Interval], b: Iterable[Interval]) -> list[Interval]:
    """Return the instants that lie in both."""
    a, b = union(a), union(b)
    found, i, j = [], 0, 0
    while i < len(a) and j < len(b):
        start, end = max(a[i][0], b[j][0]), min(a[i][1], b[j][1])
        if start < end:
            found.append((start, end))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return found


def kernel_group(name: str) -> str:
    """Return the group of a GPU kernel by its name ("other" where nothing fits)."""
    return next(
        (group for group, pattern in KERNEL_GROUPS.items() if pattern.search(name)), "other"
    )


def split_steps(events: Sequence[Event]) -> list[StepSplit]:
    """Split every profiled step of a trace.

    Args:
        events: of `read_trace`, recorded with `profiler.profile_steps`.

    Raises:
        TraceError: the trace holds no step markers.
    """
    marks = sorted(
        (
            e
            for e in events
            if e.name.startswith("ProfilerStep#") and e.category == "user_annotation"
        ),
        key=lambda e: e.start,
    )
    if not marks:
        raise TraceError("the trace holds no ProfilerStep marks: record it with profile_steps()")
    return [_split_step(events, (mark.start, mark.end)) for mark in marks]


def _split_step(events: Sequence[Event], window: Interval) -> StepSplit:
    inside = [e for e in events if e.start < window[1] and e.end > window[0]]
    work = [e for e in inside if e.category in WORK]
    by_group: dict[str, list[Interval]] = defaultdict(list)
    for e in work:
        by_group[kernel_group(e.name)].append((e.start, e.end))
    comm = intersect(by_group.get("communication", []), [window])
    compute = [i for group, rows in by_group.items() if group != "communication" for i in rows]
    busy = intersect([*comm, *compute], [window])
    has_gpu = bool(work)
    if not has_gpu:
        comm, compute = _host_communication(inside, window)
    known = has_gpu or bool(comm)
    return StepSplit(
        step_ms=(window[1] - window[0]) / 1e3,
        parts_ms=_parts(inside, window, has_gpu),
        gpu_ms={g: length(intersect(rows, [window])) / 1e3 for g, rows in by_group.items()},
        cpu_ms=_cpu_groups(inside, window),
        comm_ms=length(comm) / 1e3 if known else None,
        exposed_comm_ms=(length(comm) - length(intersect(comm, compute))) / 1e3 if known else None,
        idle_ms=(window[1] - window[0] - length(busy)) / 1e3 if has_gpu else None,
        counts=_counts(inside),
    )


def _host_communication(
    events: Sequence[Event], window: Interval
) -> tuple[list[Interval], list[Interval]]:
    """Return when gloo's own threads worked, and when operators that compute did.

    c10d's operators only hand the work over, or wait for it: neither computes.
    """
    comm = [(e.start, e.end) for e in events if e.name.startswith("gloo:")]
    compute = [
        (e.start, e.end)
        for e in events
        if e.category == "cpu_op" and e.name.startswith(("aten::", "graph_"))
    ]
    return intersect(comm, [window]), compute


def own_times(events: Iterable[Event]) -> list[tuple[Event, float]]:
    """Return every CPU operator with its own microseconds: without the operators it called."""
    lanes: dict[Any, list[Event]] = defaultdict(list)
    for e in events:
        if e.category == "cpu_op":
            lanes[e.lane].append(e)
    found: list[tuple[Event, float]] = []
    for lane in lanes.values():
        open_ops: list[list[Any]] = []  # [operator, microseconds of the operators inside it]
        for e in sorted(lane, key=lambda e: (e.start, -e.duration)):
            while open_ops and open_ops[-1][0].end <= e.start:
                op, inside = open_ops.pop()
                found.append((op, op.duration - inside))
            if open_ops:
                open_ops[-1][1] += e.duration
            open_ops.append([e, 0.0])
        found += [(op, op.duration - inside) for op, inside in open_ops]
    return found


def _cpu_groups(events: Sequence[Event], window: Interval) -> dict[str, float]:
    groups: dict[str, float] = defaultdict(float)
    for op, own in own_times(events):
        groups[kernel_group(op.name)] += own / 1e3
    covered = length(
        intersect(((e.start, e.end) for e in events if e.category == "cpu_op"), [window])
    )
    groups["no operator"] = (window[1] - window[0] - covered) / 1e3
    return dict(groups)


def _parts(events: Sequence[Event], window: Interval, on_gpu: bool) -> dict[str, float]:
    # A GPU runs behind its CPU: the GPU-side copy of each annotation says when its kernels ran.
    category = "gpu_user_annotation" if on_gpu else "user_annotation"
    spans: dict[str, list[Interval]] = {part: [] for part in PARTS}
    for e in events:
        part = e.name.removeprefix("wamlab.")
        host_side = part == "data_wait" and e.category == "user_annotation"
        if part in spans and (e.category == category or host_side):
            spans[part].append((e.start, e.end))
        elif e.category == "gpu_memcpy" and "HtoD" in e.name:
            spans["to_device"].append((e.start, e.end))
    # A block's forward that runs inside the backward is recompute; it is taken out of the backward.
    again = intersect(spans["forward"], spans["backward"])
    spans["recompute"] += again
    times = {part: length(intersect(rows, [window])) / 1e3 for part, rows in spans.items()}
    times["backward"] -= times["recompute"]
    times["forward"] -= length(intersect(again, [window])) / 1e3
    return times


def _counts(events: Sequence[Event]) -> dict[str, int]:
    counts = Counter()
    for e in events:
        if e.category == "kernel":
            counts["kernels"] += 1
        elif e.category == "cuda_runtime" and "GraphLaunch" in e.name:
            counts["graph_replays"] += 1
        elif e.category == "cuda_runtime" and SYNCHRONISING.search(e.name):
            counts["synchronisations"] += 1
        elif e.name == "aten::_local_scalar_dense":
            counts["item_calls"] += 1
        elif e.category == "cpu_op":
            counts["cpu_ops"] += 1
    return dict(counts)


def summarise(splits: Sequence[StepSplit]) -> dict[str, Any]:
    """Return the median of every quantity over steps, as plain values for a record."""

    def median(values: Iterable[float | None]) -> float | None:
        known = [v for v in values if v is not None]
        return statistics.median(known) if known else None

    def by_key(rows: Sequence[dict[str, float]]) -> dict[str, float]:
        keys = dict.fromkeys(k for row in rows for k in row)
        return {k: statistics.median(row.get(k, 0) for row in rows) for k in keys}

    return {
        "step_ms": median(s.step_ms for s in splits),
        "parts_ms": by_key([s.parts_ms for s in splits]),
        "gpu_ms": by_key([s.gpu_ms for s in splits]),
        "cpu_ms": by_key([s.cpu_ms for s in splits]),
        "comm_ms": median(s.comm_ms for s in splits),
        "exposed_comm_ms": median(s.exposed_comm_ms for s in splits),
        "idle_ms": median(s.idle_ms for s in splits),
        "counts": by_key([s.counts for s in splits]),
    }


def merge_ranks(per_rank: Sequence[Sequence[float]]) -> dict[str, Any]:
    """Return slowest and fastest rank by median step time, and the skew between them (0 = none).

    Args:
        per_rank: every rank's step times in milliseconds, in rank order.
    """
    medians = [statistics.median(times) for times in per_rank]
    slow, fast = max(medians), min(medians)
    return {
        "slowest_rank": medians.index(slow),
        "fastest_rank": medians.index(fast),
        "skew": slow / fast - 1.0,
        "step_ms": medians,
    }


def kernel_table(events: Sequence[Event]) -> dict[str, tuple[int, float]]:
    """Return {kernel name: (how often, total milliseconds)}, the most expensive first.

    A trace without GPU kernels is tabled by its CPU operators and their own times.
    """
    table: dict[str, list[float]] = defaultdict(list)
    for e in events:
        if e.category in WORK:
            table[e.name].append(e.duration / 1e3)
    if not table:
        for op, own in own_times(events):
            table[op.name].append(own / 1e3)
    rows = {name: (len(times), sum(times)) for name, times in table.items()}
    return dict(sorted(rows.items(), key=lambda row: -row[1][1]))


def diff_kernels(before: Sequence[Event], after: Sequence[Event]) -> dict[str, dict[str, Any]]:
    """Compare two runs' kernels.

    Returns:
        `gone` and `new`: {kernel: (how often, milliseconds)} of those that one run alone has;
        `changed_ms`: {kernel: milliseconds more} of those in both.
    """
    a, b = kernel_table(before), kernel_table(after)
    return {
        "gone": {name: row for name, row in a.items() if name not in b},
        "new": {name: row for name, row in b.items() if name not in a},
        "changed_ms": {name: b[name][1] - a[name][1] for name in a if name in b},
    }
