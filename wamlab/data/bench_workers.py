"""Decode in several processes at once: throughput, CPU time and memory, and what the main loop
pays.

The main process runs a loop that launches many tiny operations, as a training step does; how much
slower it gets while workers decode is the price that a GPU's step pays for its data.
"""

import dataclasses
import multiprocessing
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch

from wamlab.config import ConfigError, lookup
from wamlab.data.bench_decode import Sample, cpu_seconds, draw_samples
from wamlab.data.frame_times import frame_times
from wamlab.data.video import DECODERS, decoder_status
from wamlab.measure import Record, Timing, stamp, synchronize

PATTERN = "window"  # of bench_decode.PATTERNS
LAUNCHES = 200  # operations between two looks at the clock


@dataclasses.dataclass(frozen=True)
class _Task:
    """One decoder's turn in a worker."""

    decoder: str
    samples: tuple[Sample, ...]
    device: str
    until: float  # seconds of time.monotonic, the same clock in every process


def sweep_workers(
    source: str | Path | Sequence[str | Path],
    decoders: Sequence[str],
    workers: Sequence[int] = (1, 2),
    *,
    seconds: float = 3.0,
    device: str = "cpu",
) -> list[Record]:
    """Decode samples in 1, 2, ... processes for some seconds each, beside a launch-bound main loop.

    Args:
        source: what `bench_decode.view_sets` takes.
        decoders: names of DECODERS; one that cannot run here gets one record with its reason.
        workers: numbers of processes.
        seconds: how long each pair of decoder and number of workers decodes.
        device: where the frames are wanted, and where the main loop runs.

    Returns:
        A record of scope "decode" a pair. `samples_per_s` is that of all workers; `extra` holds
        `workers`, `cpu_ms` (a sample, with quartiles), `rss_gib` (all workers), and `slowdown` of
        the main loop (1 = none).

    Raises:
        ConfigError: no workers or no time, or an unknown decoder.
    """
    if not workers or min(workers) < 1 or seconds <= 0:
        raise ConfigError(f"workers {list(workers)} for {seconds} s: at least 1, for some time")
    reasons = {n: lookup(DECODERS, n, "decoder") and decoder_status(n) for n in decoders}
    samples = tuple(draw_samples(source, PATTERN, count=64))
    records = [_named(n, device, reason=reason) for n, reason in reasons.items() if reason]
    usable = [n for n, reason in reasons.items() if reason is None]
    with _Crew(max(workers) if usable else 0) as crew:
        for name in usable:
            for count in workers:
                crew.run(name, samples, device, count, 0.0)  # opens the libraries and the files
                alone = launches_per_s(seconds / 2, device)  # just before: other load may change
                done, beside = crew.run(name, samples, device, count, seconds)
                facts = {"workers": count, "pattern": PATTERN, "slowdown": alone / beside}
                records.append(_record(name, device, done, facts, seconds))
    return records


def launches_per_s(seconds: float, device: str = "cpu") -> float:
    """Return how many tiny operations a loop launches in a second."""
    x = torch.zeros(64, device=device)
    launches, start = 0, time.perf_counter()
    with torch.no_grad():
        while time.perf_counter() - start < seconds:
            for _ in range(LAUNCHES):
                x.add_(1.0)
            synchronize(x.device)
            launches += LAUNCHES
    return launches / (time.perf_counter() - start)


class _Crew:
    """Processes that wait for tasks; started once, because a start takes seconds."""

    def __init__(self, size: int) -> None:
        context = multiprocessing.get_context("spawn")  # a fork would copy the GPU's context
        self.pipes, self.processes = [], []
        for _ in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_work, args=(theirs,), daemon=True)
            process.start()
            self.pipes.append(ours)
            self.processes.append(process)
        for pipe in self.pipes:
            pipe.recv()

    def __enter__(self) -> "_Crew":
        return self

    def run(
        self, name: str, samples: tuple[Sample, ...], device: str, count: int, seconds: float
    ) -> tuple[list[dict[str, Any]], float]:
        """Return what `count` workers did in some seconds, and the main loop's rate meanwhile."""
        until = time.monotonic() + seconds
        for number, pipe in enumerate(self.pipes[:count]):
            pipe.send(_Task(name, samples[number::count], device, until))
        rate = launches_per_s(seconds, device) if seconds else 0.0
        answers = [pipe.recv() for pipe in self.pipes[:count]]
        for answer in answers:
            if isinstance(answer, Exception):
                raise answer
        return answers, rate

    def __exit__(self, *error: object) -> None:
        for pipe in self.pipes:
            pipe.close()
        for process in self.processes:
            process.join(timeout=10)
            if process.is_alive():
                process.kill()


def _work(pipe: Connection) -> None:
    """Decode what comes through the pipe until it is closed."""
    torch.set_num_threads(1)
    pipe.send("ready")
    while True:
        try:
            task = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send(_decode(task))
        except Exception as error:  # the parent raises it
            pipe.send(error)


def _decode(task: _Task) -> dict[str, Any]:
    cpu_ms, start = [], time.monotonic()
    while not cpu_ms or time.monotonic() < task.until:
        sample = task.samples[len(cpu_ms) % len(task.samples)]
        before = cpu_seconds()
        for view in sample.views:
            decoder = DECODERS[task.decoder](view, device=task.device)
            decoder.frames_at(frame_times(view).seconds[list(sample.frames)])
            decoder.close()
        synchronize(torch.device(task.device))
        cpu_ms.append((cpu_seconds() - before) * 1e3)
    rss = psutil.Process().memory_info().rss
    return {"cpu_ms": cpu_ms, "seconds": time.monotonic() - start, "rss": rss}


def _named(name: str, device: str, **fields: Any) -> Record:
    return stamp(Record(name=name, scope="decode", dimension="data", device=device, **fields))


def _record(
    name: str, device: str, done: list[dict[str, Any]], facts: dict[str, Any], seconds: float
) -> Record:
    times = Timing.of([ms for worker in done for ms in worker["cpu_ms"]])
    rate = sum(len(worker["cpu_ms"]) / worker["seconds"] for worker in done)
    facts["cpu_ms"] = dataclasses.asdict(times)
    facts["cpu_ms_spread"] = times.q75 - times.q25
    facts["rss_gib"] = float(np.sum([worker["rss"] for worker in done])) / 2**30
    return _named(name, device, samples_per_s=rate, extra=facts | {"seconds": seconds})
