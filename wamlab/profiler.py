"""Records training steps with torch.profiler, bounded: at most 3 steps, gzip, size printed."""

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch
from torch import nn
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

    Raises:
        ConfigError: another name.
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


class Marks:
    """Marks the parts of a step in a trace, where a StepClock times them: neither waits."""

    def part(self, name: str) -> contextlib.AbstractContextManager[None]:
        """Return a context manager that marks its block, see `part`."""
        return part(name)


@contextlib.contextmanager
def marked_blocks(blocks: Iterable[nn.Module]) -> Iterator[None]:
    """Mark what each block computes as "forward": what of it lies in the backward is recompute.

    Args:
        blocks: those whose forward calls a method `compute`; others stay unmarked. Compiled blocks
            cannot be marked: there recompute is part of the backward's own kernels.
    """
    found = [block for block in blocks if hasattr(block, "compute")]
    for block in found:
        block.compute = _marked(block.compute)
    try:
        yield
    finally:
        for block in found:
            del block.compute  # the class's own is left


def _marked(compute: Callable[..., object]) -> Callable[..., object]:
    def marked(*args: object) -> object:
        with part("forward"):
            return compute(*args)

    return marked


def compiler_counts() -> dict[str, int]:
    """Return how many graphs Dynamo has compiled in this process, and how often it broke one."""
    if "torch._dynamo" not in sys.modules:  # importing it takes 2 s
        return {"compiled_graphs": 0, "graph_breaks": 0}
    from torch._dynamo.utils import counters

    breaks = sum(counters["graph_break"].values())
    return {"compiled_graphs": counters["stats"]["unique_graphs"], "graph_breaks": breaks}


def profile_steps(
    step: Callable[[], object],
    out: str | Path,
    *,
    dev: torch.device,
    warmup: int = 2,
    active: int = 2,
    memory: bool = False,
) -> Path:
    """Profile `active` calls of `step` after `warmup` that are not kept.

    Args:
        step: one training step, called with no argument.
        out: the folder of the traces; one file a rank.
        dev: the device the step runs on.
        warmup: steps before, which pay for compilation and for the profiler's own start.
        active: recorded steps, at most 3.
        memory: also record every allocation on the CPU, for `memory_timeline.read_memory`.

    Returns:
        The path of this rank's trace, for `trace.read_trace` or https://ui.perfetto.dev.

    Raises:
        ConfigError: `active` is not 1 to 3.
    """
    if not 1 <= active <= MAX_ACTIVE:
        raise ConfigError(f"active={active}: record 1 to {MAX_ACTIVE} steps, a trace grows fast")
    activities = [ProfilerActivity.CPU]
    if dev.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    path = Path(out) / f"trace_rank{rank()}.json.gz"
    path.parent.mkdir(parents=True, exist_ok=True)
    how = {
        "activities": activities,
        "schedule": schedule(wait=0, warmup=warmup, active=active, repeat=1),
        "profile_memory": memory,
    }  # without acc_events, which makes a Python object of every event: seconds for nothing
    with profile(**how) as profiler:
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
    """Record every allocation of the block and write torch's snapshot.

    `memory_timeline.read_snapshot` reads it, and so does https://pytorch.org/memory_viz.

    Args:
        path: the snapshot's file, written at the end of the block.

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
