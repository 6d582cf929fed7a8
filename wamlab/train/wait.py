"""How much of a step a rank waits for communication, found in two ways that must agree.

Ablation: the same forward and backward with every collective cut out; what they are faster by was
waited for. Trace: the time in which a collective runs and nothing is computed. Both are rehearsals
after the run: nothing that they compute changes a weight.
"""

import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from wamlab.dist import barrier, gather
from wamlab.measure import synchronize
from wamlab.profiler import profile_steps
from wamlab.trace import read_trace, split_steps, summarise

WARMUP = 1  # the run before has warmed up the rest


def measure_wait(
    rehearse: Callable[[bool], None],
    *,
    device: torch.device,
    repeats: int,
    step_ms: float,
    folder: Path | None = None,
) -> dict[str, Any]:
    """Measure the exposed communication of every rank as a share of the whole step.

    Args:
        rehearse: runs one step without its update; False cuts its communication out.
        device: this rank's.
        repeats: pairs of rehearsals, with and without communication, taken in turn.
        step_ms: the whole step's median, which the shares refer to.
        folder: keeps the traces; None throws them away.

    Returns:
        One value a rank: `wait_share_ablation`, `wait_share_trace` (None where the trace shows no
        collective), `rank_busy_ms` (a rehearsed step without its wait) and `rank_skew`, by how much
        the busiest rank exceeds the least busy one.
    """
    with_ms, without_ms = _in_turn(rehearse, device, repeats)
    lost = statistics.median(1 - off / on for on, off in zip(with_ms, without_ms))
    whole = statistics.median(with_ms)
    of_step = min(1.0, whole / step_ms)  # a rehearsal lacks data, update and log
    exposed_ms = _exposed_ms(rehearse, device, folder)
    mine = {
        "ablation": max(0.0, lost) * of_step,
        # of the step as it is without a profiler, which makes everything but the wait longer
        "trace": None if exposed_ms is None else min(1.0, exposed_ms / whole) * of_step,
        "busy": statistics.median(without_ms),
    }
    ranks = gather(mine)
    busy = [r["busy"] for r in ranks]
    return {
        "wait_share_ablation": [r["ablation"] for r in ranks],
        "wait_share_trace": [r["trace"] for r in ranks],
        "rank_busy_ms": busy,
        "rank_skew": max(busy) / min(busy) - 1.0,
    }


def worst(found: dict[str, Any]) -> float:
    """Return the largest share of any rank: the trace's, or where there is none the ablation's."""
    traced = [share for share in found["wait_share_trace"] if share is not None]
    return max(traced or found["wait_share_ablation"])


def _in_turn(
    rehearse: Callable[[bool], None], device: torch.device, repeats: int
) -> tuple[list[float], list[float]]:
    times: dict[bool, list[float]] = {True: [], False: []}
    for _ in range(WARMUP + repeats):
        for communicate, into in times.items():
            synchronize(device)
            barrier()  # ranks that ran apart would wait for each other in the next rehearsal
            start = time.perf_counter()
            rehearse(communicate)
            synchronize(device)
            into.append((time.perf_counter() - start) * 1e3)
    return times[True][WARMUP:], times[False][WARMUP:]


def _exposed_ms(
    rehearse: Callable[[bool], None], device: torch.device, folder: Path | None
) -> float | None:
    with ExitStack() as stack:
        out = folder or stack.enter_context(tempfile.TemporaryDirectory())
        path = profile_steps(lambda: rehearse(True), out, dev=device, warmup=1, active=2)
        return summarise(split_steps(read_trace(path)))["exposed_comm_ms"]


def balance(costs: Sequence[float], ranks: int) -> list[int]:
    """Return an order of samples in which equal shares cost about the same.

    The costliest sample goes to the rank that has the least to do and still has room. The global
    batch stays the same set of samples, so its loss and gradients do too.

    Args:
        costs: expected seconds of each sample; a multiple of `ranks` of them.
        ranks: how many take a contiguous share each.
    """
    share = len(costs) // ranks
    shares: list[list[int]] = [[] for _ in range(ranks)]
    for index in sorted(range(len(costs)), key=lambda i: -costs[i]):
        open_shares = [s for s in shares if len(s) < share]
        min(open_shares, key=lambda s: sum(costs[i] for i in s)).append(index)
    return [index for one in shares for index in one]
