"""Fifty launches in a row with random kills leave nothing behind."""

import os
import random
import signal
import socket
import time
from pathlib import Path

import processes
import psutil
import pytest
import rank_targets

from wamlab.jupyter.launch import LaunchError, StoppedError, launch

LAUNCHES = int(os.environ.get("WAMLAB_STRESS", 50))
ENDS = ("return", "raise", "stop", "kill rank", "kill torchrun", "kill guard")


def left_behind() -> dict[str, object]:
    """Return what a launch could leak: open files, shared memory, listening ports."""
    own = psutil.Process()
    shared = Path("/dev/shm")
    return {
        "files": own.num_fds(),
        "children": len(own.children(recursive=True)),
        "shared memory": len(list(shared.glob("wamlab-test-*"))),
    }


def await_shared_memory() -> None:
    """Give Python's resource trackers, which outlive a killed guard, a moment to clean up."""
    give_up = time.monotonic() + 10
    while left_behind()["shared memory"] and time.monotonic() < give_up:
        time.sleep(0.1)


def end(way: str, job, rng: random.Random) -> None:
    """End a run of `stay` in one of the ways, at a random moment after the ranks are up."""
    pids = [int((job.folder / "ranks" / f"{rank}.pid").read_text()) for rank in (0, 1)]
    rank = psutil.Process(rng.choice(pids))
    time.sleep(rng.random() * 0.3)
    if way == "stop":
        job.stop()
    elif way == "kill rank":
        rank.send_signal(rng.choice([signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT]))
    elif way == "kill torchrun":
        rank.parent().kill()
    elif way == "kill guard":
        rank.parent().parent().kill()


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.skipif(not hasattr(os, "fork"), reason="signals of POSIX")
def test_fifty_launches_with_random_kills(tmp_path):
    """D11: no process, port, file handle or shared memory is left."""
    rng, before = random.Random(0), None
    for number in range(LAUNCHES):
        way = ENDS[number] if number < len(ENDS) else rng.choice(ENDS)
        out = tmp_path / "run"
        target, config = "rank_targets:stay", {}
        if way == "return":
            target, config = "rank_targets:describe", rank_targets.Plan()
        elif way == "raise":
            target, config = "rank_targets:fail", {"rank": rng.randrange(2), "how": "raise"}
        job = launch(target, config, 2, out=out, monitor=False)
        if target == "rank_targets:stay":
            processes.wait_for(out / "up0", out / "up1", seconds=120)
            end(way, job, rng)
        try:
            job.result(120)
            assert way == "return"
        except LaunchError:
            assert way in ("raise", "kill rank", "kill torchrun", "kill guard")
        except StoppedError:
            assert way == "stop"
        processes.wait_gone(out)
        for file in ("up0", "up1"):
            (out / file).unlink(missing_ok=True)
        await_shared_memory()
        before = before or left_behind()  # after one launch: imports have opened theirs
        assert left_behind() == before, f"launch {number}, {way}"
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
