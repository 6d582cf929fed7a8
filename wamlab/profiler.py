"""Records training steps with torch.profiler, bounded: at most 3 steps, gzip, size printed."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function, schedule

from wamlab.config import ConfigError
from wamlab.dist import print0, rank
from wamlab.measure import synchronize
from wamlab.trace import PARTS

MAX_ACTIVE = 3  # a 5B step writes about 20 MB of trace; nobody reads a hundred


@contextlib.contextmanager
def part(name: str) -> Iterator[None]:
    """Mark a part of a step in the trace, and as an NVTX range on a GPU.

    Args:
        name: one of `trace.PARTS`.
    """
    if name not in PARTS:
        raise ConfigError(f"unknown part {name!r}: allowed are {', '.join(PARTS)}")
    with record_function(f"wamlab.{name}"):
        if not torch.cuda.is_available():
            yield
            return
        torch.cuda.nvtx.range_push(f"wamlab.{name}")
        try:
            yield
        finally:
            torch.cuda.nvtx.range_pop()


def profile_steps(
    step: Callable[[], object],
    out: str | Path,
    *,
    dev: torch.device,
    warmup: int = 2,
    active: int = 2,
) -> Path:
    """Profile `active` calls of `step` after `warmup` that are not kept.

    Args:
        step: one training step, called with no argument.
        out: the folder of the traces; one file a rank.
        dev: the device the step runs on.
        warmup: steps before, which pay for compilation and for the profiler's own start.
        active: recorded steps, at most 3.

    Returns:
        The path of this rank's trace, for `trace.read_trace` or https://ui.perfetto.dev.
    """
    if not 1 <= active <= MAX_ACTIVE:
        raise ConfigError(f"active={active}: record 1 to {MAX_ACTIVE} steps, a trace grows fast")
    activities = [ProfilerActivity.CPU]
    if dev.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    path = Path(out) / f"trace_rank{rank()}.json.gz"
    path.parent.mkdir(parents=True, exist_ok=True)
    plan = schedule(wait=0, warmup=warmup, active=active, repeat=1)
    with profile(activities=activities, schedule=plan, acc_events=True) as profiler:
        for _ in range(warmup + active):
            step()
            synchronize(dev)  # a step's kernels belong to its own mark
            profiler.step()
    profiler.export_chrome_trace(str(path))
    print0(
        f"trace: {path} ({path.stat().st_size / 2**20:.1f} MiB), opens at https://ui.perfetto.dev"
    )
    return path


@contextlib.contextmanager
def memory_snapshot(path: str | Path) -> Iterator[None]:
    """Record every allocation of the block and write torch's snapshot, for `read_snapshot`.

    Raises:
        ConfigError: there is no GPU; only CUDA's allocator keeps a history.
    """
    if not torch.cuda.is_available():
        raise ConfigError("a memory snapshot needs a CUDA GPU: the CPU allocator keeps no history")
    torch.cuda.memory._record_memory_history(max_entries=200_000)
    try:
        yield
    finally:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        torch.cuda.memory._dump_snapshot(str(path))
        torch.cuda.memory._record_memory_history(enabled=None)
