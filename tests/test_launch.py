"""Ranks from a script: results, errors, and that nothing outlives its caller."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import processes
import psutil
import pytest
import rank_targets

from wamlab.config import ConfigError
from wamlab.jupyter._ship import ShipError
from wamlab.jupyter.launch import Job, LaunchError, StoppedError, launch

TESTS = Path(__file__).parent
slow = pytest.mark.slow
FAILURES = {
    "raise": ("rank_targets:fail", {"rank": 1, "how": "raise"}),
    "segfault": ("rank_targets:fail", {"rank": 0, "how": "SIGSEGV"}),
    "kill": ("rank_targets:fail", {"rank": 1, "how": "SIGKILL"}),
    "exit": ("rank_targets:fail", {"rank": 1, "how": "exit"}),
    "unsendable": ("rank_targets:fail", {"rank": 1, "how": "unsendable"}),
    "syntax": ("bad_syntax:run", {}),
    "consequence": ("rank_targets:collide", {}),
}
SHORT = ("raise", "segfault")  # the rest with the slow tests: a launch takes some 5 s of a core


def run_failing(names, out):
    """Run failing targets at once; return name -> (LaunchError, folder)."""
    (out / "bad_syntax.py").write_text("def run(config):\n    return (\n")
    sys.path.append(str(out))
    jobs = {n: launch(*FAILURES[n], 2, out=out / n, monitor=False) for n in names}
    sys.path.remove(str(out))
    errors = {}
    for name, job in jobs.items():
        with pytest.raises(LaunchError) as caught:
            job.result(90)
        errors[name] = caught.value, job.folder
    return errors


@pytest.fixture(scope="module")
def failed(tmp_path_factory):
    return run_failing(SHORT, tmp_path_factory.mktemp("failed"))


@pytest.fixture(scope="module")
def failed_too(tmp_path_factory):
    rest = [name for name in FAILURES if name not in SHORT]
    return run_failing(rest, tmp_path_factory.mktemp("failed"))


def check_failure(errors, name, rank, message):
    error, folder = errors[name]
    assert error.rank == rank
    assert str(error).startswith(message)
    assert error.log == folder / "logs" / f"rank{rank}.log"
    assert str(error.log) in str(error)
    assert not processes.of_run(folder)  # the other ranks ignore SIGTERM


def test_the_first_failing_rank_is_named(failed):
    """D12: not just ChildFailedError; the rank, its message, its last lines, the log's path."""
    check_failure(failed, "raise", 1, "rank 1 raised ValueError: x42")
    error, _ = failed["raise"]
    assert error.signal is None
    assert len(error.lines) == 20
    assert error.lines[-1] == "ValueError: x42"
    assert "_runner.py" not in "\n".join(error.lines)  # the target's own frames only


def test_a_signal_is_named(failed):
    """D12: rank 0 dies by SIGSEGV; its log shows where."""
    check_failure(failed, "segfault", 0, "rank 0 was ended by SIGSEGV")
    assert failed["segfault"][0].signal == "SIGSEGV"
    assert "rank_targets.py" in "\n".join(failed["segfault"][0].lines)


@slow
@pytest.mark.parametrize(
    ("name", "rank", "message"),
    [
        ("kill", 1, "rank 1 was ended by SIGKILL"),
        ("exit", 1, "rank 1 ended with exit code 3"),
        ("unsendable", 1, "rank 1 raised TypeError: the target returned object"),
        ("consequence", 0, "rank 0 raised ValueError: the cause"),
    ],
)
def test_other_ends_are_named(failed_too, name, rank, message):
    """D12: rank 1 dies by SIGKILL, and others."""
    check_failure(failed_too, name, rank, message)


@slow
def test_a_syntax_error_in_the_target_is_shown(failed_too):
    """D12: a SyntaxError in the target."""
    error, _ = failed_too["syntax"]
    assert "SyntaxError" in error.exception
    assert "bad_syntax.py" in "\n".join(error.lines)


def test_two_ranks_return_what_they_saw(tmp_path, monkeypatch):
    """D13: stale variables and a held port 29500 change nothing."""
    stale = {"MASTER_ADDR": "10.9.9.9", "MASTER_PORT": "29500", "RANK": "7", "WORLD_SIZE": "9"}
    for name, value in {**stale, "LOCAL_RANK": "7", "PET_NNODES": "4"}.items():
        monkeypatch.setenv(name, value)
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 29500))
        held.listen()
        plan = rank_targets.Plan(factor=5, names=("a", "b"))
        options = {"env": {"EXTRA": "yes"}, "threads": 3, "monitor": False}
        job = launch("rank_targets:describe", plan, 2, out=tmp_path / "run", **options)
        assert job.status == "running"
        first, second = job.results(90)
    assert (first["rank"], second["rank"]) == (0, 1)
    assert second == {**first, "rank": 1, "product": 5}
    assert first["plan"] == "Plan"
    assert first["WORLD_SIZE"] == "2"
    assert first["OMP_NUM_THREADS"] == "3"
    assert first["EXTRA"] == "yes"
    assert first["MASTER_PORT"] != "29500"
    for rank in (0, 1):
        lines = job.tail(rank).splitlines()
        parts = ("a child of the rank", "native code", "an exit handler")
        assert {f"hello from rank {rank}", "and on stderr"} <= {*lines}
        assert {f"from {part}" for part in parts} <= {*lines}
    again = Job.attach(job.folder)
    assert again.status == "done"
    assert again.results() == [first, second]


@slow
def test_records_come_back_as_records(tmp_path):
    """Options for several hosts replace --standalone and reach torchrun."""
    hosts = ("--nnodes=1", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", "--rdzv-id=7")
    job = launch("rank_targets:records", {"x": 3}, 1, out=tmp_path, monitor=False, torchrun=hosts)
    one, two = job.result(90)
    assert (one.name, one.samples_per_s, two.extra) == ("a", 1.0, {"x": 3})


def test_stop_ends_everything(tmp_path):
    """D11: ranks and grandchildren in sessions of their own, all deaf to SIGTERM, end in 10 s."""
    job = launch("rank_targets:stay", {}, 2, out=tmp_path, monitor=False)
    with pytest.raises(ConfigError, match="still alive"):
        launch("rank_targets:stay", {}, 2, out=tmp_path, monitor=False)
    processes.wait_for(tmp_path / "up0", tmp_path / "up1")
    assert len(processes.of_run(tmp_path)) >= 6  # guard, torchrun, 2 ranks, 2 grandchildren
    start = time.monotonic()
    Job.attach(tmp_path).stop()  # as from another kernel
    assert time.monotonic() - start < 10
    assert not processes.of_run(tmp_path)
    assert job.status == "stopped"
    with pytest.raises(StoppedError, match="was stopped before it had a result"):
        job.result()


CALLER = """
import sys; sys.path.insert(0, {tests!r})
from wamlab.jupyter.launch import launch
launch("rank_targets:stay", {{}}, 2, out={out!r}).result()
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGINT, marks=slow)])
def test_the_caller_takes_its_ranks_along(tmp_path, number):
    """D11: whatever ends the caller ends all of the run within 10 s."""
    script = CALLER.format(tests=str(TESTS), out=str(tmp_path))
    caller = subprocess.Popen([sys.executable, "-c", script], stderr=subprocess.DEVNULL)
    processes.wait_for(tmp_path / "up0", tmp_path / "up1")
    os.kill(caller.pid, number)
    processes.wait_gone(tmp_path)
    assert caller.wait(10) != 0
    assert Job.attach(tmp_path).wait(10) == "stopped"


def test_a_killed_guard_takes_the_ranks_along(tmp_path):
    """The guard itself may be killed; then the kernel ends launcher and ranks."""
    job = launch("rank_targets:fail", {"rank": 9, "how": ""}, 2, out=tmp_path, monitor=False)
    processes.wait_for(tmp_path / "ranks" / "0.pid", tmp_path / "ranks" / "1.pid")
    psutil.Process(job._guard.pid).kill()
    if sys.platform == "linux":
        processes.wait_gone(tmp_path)
    assert job.wait() == "lost"
    with pytest.raises(LaunchError, match="the guard was killed"):
        job.result()


def closure():
    caught, number = [1], 3
    return lambda_free(caught, number)


def lambda_free(caught, number):
    def target(config):
        return caught, number

    return target


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (closure(), r"target is a closure over caught \(list\), number \(int\)"),
        (lambda config: 1, "a lambda has no name"),
        ("no_such_module:run", "no module 'no_such_module'"),
        ("rank_targets.stay", '"module:function"'),
        (7, "a target is"),
    ],
)
def test_what_cannot_travel_is_refused_before_anything_starts(tmp_path, target, message):
    """D14: a closure or a lambda is refused by name."""
    with pytest.raises(ShipError, match=message):
        launch(target, {}, 1, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("config", "nproc", "message"),
    [
        ({}, 0, "positive number of ranks"),
        ({}, True, "positive number of ranks"),
        ({}, "all", "positive number of ranks"),
        ({"x": object()}, 1, "config must be JSON"),
        ([1], 1, "a config is a dataclass or a dict, got list"),
    ],
)
def test_bad_arguments_are_refused(tmp_path, config, nproc, message):
    with pytest.raises(ConfigError, match=message):
        launch("rank_targets:stay", config, nproc, out=tmp_path / "run")


def test_attach_needs_a_run(tmp_path):
    with pytest.raises(ConfigError, match="holds no run"):
        Job.attach(tmp_path)


SCRIPT = """
import math
import numpy as np
from collections import OrderedDict as Ordered
STEPS = 3
unused = object()

def helper(x: np.ndarray) -> float:
    return math.sqrt(x) * STEPS

class Base:
    def go(self):
        return helper(4)

class Task(Base):
    kind: type = Ordered

def run(config):
    return Task().go()

from wamlab.jupyter._ship import ship
namespace = {}
exec(ship(run), namespace)
print(namespace["run"]({}), "unused" in namespace, namespace["np"].__name__)
STEPS = unused
try:
    ship(run)
except ValueError as error:
    print(error)
"""


def test_a_script_ships_what_its_function_needs(tmp_path):
    """D14: definitions, imports and constants travel along; a live object is refused by name."""
    file = tmp_path / "script.py"
    file.write_text(SCRIPT)
    command = [sys.executable, str(file)]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert lines[0] == "6.0 False numpy"
    assert lines[1].startswith("run uses live objects of this process: STEPS (object)")


def test_source_that_is_not_kept_is_refused():
    code = "from wamlab.jupyter._ship import ship\ndef f(c): pass\nship(f)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "the source of f is not kept here" in run.stderr


def test_no_display_package_is_imported():
    """launch, ladder and report serve scripts and the command line too."""
    code = (
        "import sys, wamlab.jupyter.launch, wamlab.jupyter.ladder, wamlab.jupyter.report;"
        "print([m for m in ('IPython', 'ipywidgets') if m in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


def test_a_rank_imports_nothing_heavy_that_its_run_may_not_need():
    """Dynamo or transformers take as long as torch, in every process of every row of a ladder."""
    code = (
        "import gc, sys; from wamlab.jupyter import _guard, _runner;"
        "print('torch' in sys.modules);"
        "_runner.resolve('wamlab.train.trainer:train');"
        "from wamlab.data.augment import Augment; from wamlab.data.embodiment import EMBODIMENTS;"
        "Augment(EMBODIMENTS['toy']);"
        "heavy = ('torch._dynamo', 'transformers', 'scipy', 'matplotlib', 'IPython');"
        "print([m for m in heavy if m in sys.modules], gc.isenabled(), gc.get_freeze_count() > 0)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.splitlines() == ["False", "[] True True"]
