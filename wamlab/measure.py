"""Timing that cannot forget to synchronise, and the records that every number comes from.

A record is one flat JSON object a line. A field that was not measured is null, never a guess; a row
that could not run is written with its `reason`.
"""

import contextlib
import dataclasses
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import UTC, datetime
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import torch

from wamlab.config import ConfigError, from_dict, read_text, to_dict
from wamlab.hardware import peak_flops

Dimension = Literal["compute", "parallel", "data", "communication"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Timing:
    """Median and quartiles of repeated measurements, in milliseconds, and how many there were."""

    median: float
    q25: float
    q75: float
    n: int

    @classmethod
    def of(cls, times_ms: Sequence[float]) -> "Timing":
        """Summarise a list of times in milliseconds.

        Raises:
            ValueError: the list is empty.
        """
        if not times_ms:
            raise ValueError("no times to summarise: the measurement made no repeat")
        if len(times_ms) == 1:
            return cls(median=times_ms[0], q25=times_ms[0], q75=times_ms[0], n=1)
        q25, median, q75 = statistics.quantiles(times_ms, n=4, method="inclusive")
        return cls(median=median, q25=q25, q75=q75, n=len(times_ms))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Record:
    """One measured row. Units are in the names; null means "not measured".

    `scope` says what was timed: "step" (the whole training step), "dit" (the DiT's forward and
    backward), "decode", "encode", "augment", ... `extra` holds the fields of one scope alone; in
    JSON they stand flat beside the others.
    """

    name: str
    scope: str = "step"
    dimension: Dimension | None = None
    reason: str | None = None  # why the row could not run
    wrong: str | None = None  # why its result does not count (its losses left the tolerance)
    model: str | None = None
    scale: str | None = None
    device: str | None = None
    world_size: int | None = None
    micro_batch: int | None = None
    grad_accum: int | None = None
    layers: int | None = None  # null = all
    precision: str | None = None
    recompute: str | None = None
    encoders: str | None = None
    global_batch: int | None = None
    data: str | None = None
    optimizations: tuple[str, ...] = ()
    step_ms: Timing | None = None
    parts_ms: dict[str, float] | None = None  # median milliseconds a step by part
    samples_per_s: float | None = None  # of the whole machine
    samples_per_s_per_gpu: float | None = None
    mfu: float | None = None
    peak_gib: float | None = None
    data_wait_share: float | None = None
    exposed_comm_share: float | None = None
    loss_rel_diff: float | None = None
    first_step_s: float | None = None
    losses: tuple[float, ...] | None = None  # one a global step, in order
    versions: dict[str, str | None] | None = None
    machine: dict[str, Any] | None = None
    time_utc: str | None = None
    extra: dict[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        names = {f.name for f in dataclasses.fields(self)}
        for key in self.extra:
            if key in names:
                raise ConfigError(
                    f"record {self.name!r}: {key!r} is a field of its own, not an extra"
                )

    def to_json(self) -> dict[str, Any]:
        """Return the flat JSON object."""
        values = to_dict(self)
        extra = values.pop("extra")
        return {**values, **extra}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "Record":
        """Build a record from its flat JSON object; unknown keys become `extra`.

        Raises:
            ConfigError: `name` is missing, or a value has another type.
        """
        if "name" not in values:
            raise ConfigError(f"a record needs a name, got keys {sorted(values)}")
        names = {f.name for f in dataclasses.fields(cls)} - {"extra"}
        own = {k: v for k, v in values.items() if k in names}
        return from_dict(cls, own | {"extra": {k: v for k, v in values.items() if k not in names}})


def stamp(record: Record) -> Record:
    """Return the record with versions, machine and time filled in."""
    return dataclasses.replace(
        record,
        versions=versions(),
        machine=machine(),
        time_utc=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def append_jsonl(path: str | Path, rows: Iterable[Record | dict[str, Any]]) -> None:
    """Append rows to a JSONL file, one write a row, so that an interruption leaves whole lines."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        for row in rows:
            values = row.to_json() if isinstance(row, Record) else to_dict(row)
            file.write(json.dumps(values) + "\n")
            file.flush()


def read_jsonl(path: str | Path) -> list[dict[str, Any]]:
    """Read a JSONL file; a last line that was cut by a kill is left out.

    Raises:
        ConfigError: the file is missing or no text, or a line is not a JSON object.
    """
    path = Path(path)
    if not path.is_file():
        raise ConfigError(f"no such record file: {path}")
    lines = read_text(path).splitlines()
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError as error:
            if number < len(lines):
                raise ConfigError(f"{path}, line {number} is not JSON: {error}") from error
            break
        if not isinstance(rows[-1], dict):
            raise ConfigError(f"{path}, line {number} is not a JSON object: {line[:80]}")
    return rows


def read_records(path: str | Path) -> list[Record]:
    """Read the records of a JSONL file, see `read_jsonl`.

    Raises:
        ConfigError: as `read_jsonl`, or a line is not a record.
    """
    records = []
    for number, row in enumerate(read_jsonl(path), 1):
        try:
            records.append(Record.from_json(row))
        except ConfigError as error:
            raise ConfigError(f"{path}, line {number}: {error}") from error
    return records


def synchronize(dev: torch.device | str | None = None) -> None:
    """Wait until the device (None: the current GPU) has done all it was given; nothing on a CPU."""
    dev = torch.device(dev) if dev is not None else None
    if torch.cuda.is_available() and (dev is None or dev.type == "cuda"):
        torch.cuda.synchronize(dev)


def measure_ms(
    fn: Callable[[], Any],
    *,
    dev: torch.device | str | None = None,
    warmup: int = 3,
    repeats: int = 10,
) -> Timing:
    """Time `fn` alone: warm-ups first, the device synchronised before and after every repeat.

    Args:
        fn: the work, called with no argument.
        dev: the device it runs on; None waits for the current GPU if there is one.
        warmup: calls that are not counted.
        repeats: calls that are.

    Returns:
        Timing in milliseconds.
    """
    for _ in range(warmup):
        fn()
    times = []
    for _ in range(repeats):
        synchronize(dev)
        start = time.perf_counter()
        fn()
        synchronize(dev)
        times.append((time.perf_counter() - start) * 1e3)
    return Timing.of(times)


class StepClock:
    """Times the parts of a step; each boundary synchronises, so no part leaks into the next.

    Use `with clock.part("forward"): ...` inside a step and `clock.end_step()` at its end.
    Synchronising costs a few microseconds a part and forbids overlap: use it to explain a step, not
    to race it.

    Args:
        dev: the device that the parts run on.
    """

    def __init__(self, dev: torch.device) -> None:
        self.dev = dev
        self.steps: list[dict[str, float]] = []
        self._current: dict[str, float] = {}

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Add the block's duration to `name` of the current step."""
        synchronize(self.dev)
        start = time.perf_counter()
        yield
        synchronize(self.dev)
        spent = (time.perf_counter() - start) * 1e3
        self._current[name] = self._current.get(name, 0.0) + spent

    def end_step(self) -> None:
        """Close the current step."""
        self.steps.append(self._current)
        self._current = {}

    def median_ms(self) -> dict[str, float]:
        """Return the median milliseconds of each part over the steps."""
        names = dict.fromkeys(name for step in self.steps for name in step)
        return {n: statistics.median(s.get(n, 0.0) for s in self.steps) for n in names}


@contextlib.contextmanager
def exact_fp32() -> Iterator[None]:
    """Compute fp32 products and convolutions without TF32 inside the block."""
    backends = (torch.backends.cuda.matmul, torch.backends.cudnn)
    before = [b.allow_tf32 for b in backends]
    for backend in backends:
        backend.allow_tf32 = False
    try:
        yield
    finally:
        for backend, allowed in zip(backends, before):
            backend.allow_tf32 = allowed


def reset_peak(dev: torch.device) -> None:
    """Start a new peak-memory measurement (a CPU process's peak cannot be reset)."""
    if dev.type == "cuda":
        torch.cuda.reset_peak_memory_stats(dev)


def peak_gib(dev: torch.device) -> float:
    """Return peak allocated GPU memory, or on a CPU the process's peak resident memory, in GiB."""
    if dev.type == "cuda":
        return torch.cuda.max_memory_allocated(dev) / 2**30
    rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return rss * (1 if sys.platform == "darwin" else 1024) / 2**30


def mfu(model_flops: float, seconds: float, dev: torch.device, precision: str) -> float | None:
    """Return model FLOP/s (recompute not counted) over the peak, None for an unknown device.

    Args:
        model_flops: FLOP of the work on one device.
        seconds: that it took.
        dev: the device.
        precision: whose peak counts, a key of `hardware.Peak.flops`.

    Raises:
        ValueError: the result is above 1: the FLOPs, the time or the peak is wrong.
    """
    peak = peak_flops(device_name(dev), precision)
    if peak is None:
        return None
    share = model_flops / seconds / peak
    if share > 1.0:
        raise ValueError(
            f"MFU {share:.2f} is above 1: {model_flops:.3g} FLOP in {seconds:.3g} s against a peak "
            f"of {peak:.3g} FLOP/s; was the work synchronised?"
        )
    return share


def device_name(dev: torch.device) -> str:
    """Return the GPU's marketing name, or the CPU's."""
    return torch.cuda.get_device_name(dev) if dev.type == "cuda" else cpu_name()


@cache
def cpu_name() -> str:
    """Return the CPU's model name."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass  # not Linux
    return platform.processor() or platform.machine()


@cache
def versions() -> dict[str, str | None]:
    """Return the versions a record carries; wamlab's commit is null outside a git checkout."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for package in ("torch", "torchcodec", "triton", "av"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = None
    found["wamlab"] = _commit()
    return found


def _commit() -> str | None:
    root = Path(__file__).resolve().parent.parent
    if not (root / ".git").exists():
        return None
    run = subprocess.run(
        ["git", "-C", str(root), "rev-parse", "--short=12", "HEAD"],
        capture_output=True,
        text=True,
        check=False,
    )
    return run.stdout.strip() or None


@cache
def machine() -> dict[str, Any]:
    """Return the machine stamp: processor, usable cores, GPUs. No host name, no user name."""
    gpus = []
    if torch.cuda.is_available():
        gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {"cpu": cpu_name(), "cores": cores, "system": platform.system(), "gpus": gpus}
