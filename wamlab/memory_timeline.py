"""How much memory was allocated at each moment: from a trace on a CPU, from a snapshot on a GPU."""

import io
import pickle
from pathlib import Path
from typing import Any

from wamlab.trace import TraceError, trace_rows

Timeline = list[tuple[float, int]]  # (milliseconds from the first event, bytes allocated then)
DELTA = {"alloc": 1, "free_completed": -1}  # a snapshot's actions that change what is allocated


def read_memory(path: str | Path) -> Timeline:
    """Read the CPU allocations of a trace recorded with `profile_steps(..., memory=True)`.

    Returns:
        The timeline; its zero is what was allocated before the trace began.

    Raises:
        TraceError: there is no trace, or it holds none.
    """
    rows = [
        (float(e["ts"]), int(e["args"]["Bytes"]))
        for e in trace_rows(path)
        if e.get("name") == "[memory]" and e["args"].get("Device Type") == 0
    ]
    if not rows:
        raise TraceError(f"{path} holds no allocations: record it with memory=True")
    return _cumulate(sorted(rows), 0)


def read_snapshot(path: str | Path) -> Timeline:
    """Read the allocations of a snapshot that `profiler.memory_snapshot` wrote, of its first GPU.

    Returns:
        The timeline; bytes as `torch.cuda.memory_allocated` counts them.

    Raises:
        TraceError: the file is no snapshot, or it holds no history.
    """
    try:
        snapshot = _PlainUnpickler(io.BytesIO(Path(path).read_bytes())).load()
        device = next((i for i, trace in enumerate(snapshot["device_traces"]) if trace), 0)
        held = sum(s["allocated_size"] for s in snapshot["segments"] if s["device"] == device)
        history = [e for e in snapshot["device_traces"][device] if e["action"] in DELTA]
    except FileNotFoundError as error:
        raise TraceError(f"no such snapshot: {path}") from error
    except (pickle.UnpicklingError, EOFError, KeyError, TypeError, IndexError) as error:
        raise TraceError(f"{path} is not a memory snapshot: {error}") from error
    if not history:
        raise TraceError(f"{path} holds no history: record it with memory_snapshot()")
    rows = [(float(e["time_us"]), DELTA[e["action"]] * e["size"]) for e in history]
    return _cumulate(rows, held - sum(size for _, size in rows))


def _cumulate(rows: list[tuple[float, int]], held: int) -> Timeline:
    first, timeline = rows[0][0], []
    for time_us, size in rows:
        held += size
        timeline.append(((time_us - first) / 1e3, held))
    return timeline


class _PlainUnpickler(pickle.Unpickler):
    """A snapshot is plain dicts, lists and numbers: anything else in the file is refused."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it names {module}.{name}")
