"""Experiments of notebook 07 that run on ranks: two ranks side by side in time, and a dead host."""

import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from wamlab.dist import gather
from wamlab.hosts import linked_hosts
from wamlab.jupyter._folder import RunFolder
from wamlab.jupyter.launch import LaunchError
from wamlab.jupyter.slow_link import start_on_hosts
from wamlab.profiler import Marks, profile_steps
from wamlab.trace import Event, read_trace
from wamlab.train.bench_communication import CommCase, build
from wamlab.train.communication import training_group
from wamlab.train.peers import PeerWatch

CPU = torch.device("cpu")
SILENCE_S = 4.0  # a busy machine's heartbeat may be seconds late
DEAR_S, CHEAP_S = 0.05, 0.005  # what reading a sample costs
PARTS = ("data_wait", "forward", "backward", "optimizer")
READERS = {
    "equal": lambda sample, rank: 0.5 * (DEAR_S + CHEAP_S),
    "slow rank": lambda sample, rank: DEAR_S if rank == 1 else CHEAP_S,
    "dear samples": lambda sample, rank: DEAR_S if sample % 8 >= 4 else CHEAP_S,
}


def timelines(config: Mapping[str, Any]) -> dict[str, Any]:
    """Trace one training step on two ranks for several ways of reading samples.

    Args:
        config: `ways`: name -> {"reader": a key of READERS, "balanced": bool}.

    Returns:
        Name -> `ranks`: one list a rank of [what, start, end] in milliseconds from the step's
        start, what being a part of the step or "exchange"; `step_ms` and `losses`.
    """
    torch.set_num_threads(1)
    with training_group(CPU):
        return {name: _timeline(**way) for name, way in config["ways"].items()}


def _timeline(reader: str, balanced: bool = False) -> dict[str, Any]:
    case = CommCase(name=reader, layers=1, micro_batch=4, steps=2, warmup_steps=1, wait_steps=0)
    trainer = build(case, CPU, seconds=READERS[reader], balanced=balanced)
    trainer.step()
    trainer.stepper.clock = Marks()
    with tempfile.TemporaryDirectory() as folder:
        events = read_trace(profile_steps(trainer.step, folder, dev=CPU, warmup=1, active=1))
    step = next(e for e in events if e.name.startswith("ProfilerStep#"))
    mine = [_row(e, step) for e in events if _what(e) and step.start <= e.start < step.end]
    losses = [r.loss for r in trainer.log.flush()]
    times = gather({"rows": mine, "ms": step.duration / 1e3})
    return {"ranks": [t["rows"] for t in times], "step_ms": times[0]["ms"], "losses": losses}


def _what(event: Event) -> str | None:
    name = event.name.removeprefix("wamlab.")
    if event.name.startswith("gloo:"):
        return "exchange"
    return name if name in PARTS and event.category == "user_annotation" else None


def _row(event: Event, step: Event) -> list[Any]:
    start, end = event.start - step.start, min(event.end, step.end) - step.start
    return [_what(event), start / 1e3, end / 1e3]


def exchange_forever(config: Mapping[str, Any]) -> None:
    """Exchange a number over and over; note in a file that it has begun."""
    with training_group(CPU), PeerWatch(SILENCE_S):
        while True:
            dist.all_reduce(torch.ones(1))
            Path(config["folder"], f"rank{dist.get_rank()}").touch()
            time.sleep(0.05)


def kill_a_host(out: str | Path) -> tuple[float, str]:
    """Run an exchange on two made-up hosts and take the second away.

    Args:
        out: folder of the runs.

    Returns:
        Seconds until the first host's run has ended, and what its rank raised.
    """
    out = Path(out).absolute()
    out.mkdir(parents=True, exist_ok=True)
    begun = [out / f"rank{rank}" for rank in range(2)]
    for file in begun:
        file.unlink(missing_ok=True)
    target = f"{__name__}:exchange_forever"
    with linked_hosts() as hosts:
        jobs = start_on_hosts(hosts, target, {"folder": str(out)}, out)
        try:
            while not all(file.exists() for file in begun) and jobs[0].status == "running":
                time.sleep(0.1)
            RunFolder(jobs[1].folder).sweep()
            start = time.monotonic()
            jobs[0].result(timeout_s=60.0)
        except LaunchError as error:
            return time.monotonic() - start, str(error.exception)
        finally:
            for job in jobs:
                job.stop()
    raise AssertionError("an exchange without end has ended")
