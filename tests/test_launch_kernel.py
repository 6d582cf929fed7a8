"""Ranks from a real Jupyter kernel: field reports D10 to D15."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import nbformat
import processes
import pytest
from live_kernel import kernel

from wamlab.jupyter.launch import Job

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # jupyter_client's own
START = "job = launch('rank_targets:{target}', {config}, 2, out={out!r}, monitor={monitor})"


@pytest.fixture(scope="module")
def shared():
    with kernel() as made:
        yield made


def start(target: str, out: Path, config: dict | None = None, *, monitor: bool = False) -> str:
    return START.format(target=target, config=config or {}, out=str(out), monitor=monitor)


def test_what_a_cell_defines_runs_on_the_ranks(shared, tmp_path):
    """D14: function and data set of a cell, edited and run again; D13: stale variables."""
    shared.run(
        "import os, math as m\n"
        "os.environ.update(RANK='3', WORLD_SIZE='4', MASTER_ADDR='10.0.0.1', MASTER_PORT='1')\n"
        "from collections import Counter\n"
        "class Data:\n"
        "    def __getitem__(self, i): return Counter([i])\n"
    )
    define = "def run(config):\n    return {'n': Data()[config['i']][7], 'root': m.sqrt(VALUE)}"
    cells = f"VALUE = 16\n{define}", f"VALUE = 16\n{define.replace('VALUE', 'VALUE / 4')}"
    for number, cell in enumerate(cells):
        shared.run(cell)
        call = f"launch(run, {{'i': 7}}, 1, out={str(tmp_path)!r}, monitor=False).result()"
        ran = shared.run(call)
        assert ran.error is None, ran.error
        result = {"n": 1, "root": (4.0, 2.0)[number]}
        assert ran.displays[-1]["text/plain"] == str(result)


@pytest.mark.parametrize(
    ("cell", "message"),
    [
        ("model = object()\ndef f(c): return model\nlaunch(f, {})", "live objects of this process"),
        ("launch(lambda c: 1, {})", "a lambda has no name"),
        (
            "def outer(big):\n    def f(c): return big\n    return f\nlaunch(outer([1]), {})",
            "f is a closure over big (list)",
        ),
    ],
)
def test_live_objects_are_refused(shared, cell, message):
    """D14: a clear refusal, before anything starts."""
    ran = shared.run(cell)
    assert ran.error.startswith("ShipError: ")
    assert message in ran.error


def test_the_error_of_a_rank_reaches_the_cell(shared, tmp_path):
    """D12: the first failing rank, its message, its last 20 lines and the log's path."""
    shared.run(start("fail", tmp_path, {"rank": 1, "how": "raise"}))
    ran = shared.run("job.result()")
    assert ran.error.startswith("LaunchError: rank 1 raised ValueError: x42")
    assert str(tmp_path / "logs" / "rank1.log") in ran.error
    assert len(ran.error.splitlines()) == 22
    assert not processes.of_run(tmp_path)


def test_output_stays_in_its_own_widget(shared, tmp_path):
    """D15: 8 ranks print 1,000 lines a second each while other cells run."""
    launching = f"job = launch('rank_targets:shout', {{'seconds': 4}}, 8, out={str(tmp_path)!r})"
    first = shared.send(launching)
    assert shared.collect(first).text == ""
    processes.wait_for(*(tmp_path / "ranks" / f"{rank}.pid" for rank in range(8)))
    other = shared.run("print('another cell')")
    assert other.text == "another cell\n"
    assert not other.displays
    seconds = 2.0
    sent = [m["header"]["msg_type"] for m in shared.messages(seconds)]
    assert len([kind for kind in sent if kind != "status"]) <= 10 * seconds
    assert "stream" not in sent
    counts = shared.run("print(job.results())").text
    for rank, count in enumerate(json.loads(counts)):
        assert len((tmp_path / "logs" / f"rank{rank}.log").read_text().splitlines()) == count


def stop_by(way: str, made) -> None:
    if way == "interrupt":
        made.interrupt()
    elif way == "kill":
        os.kill(made.manager.provisioner.pid, signal.SIGKILL)
    else:
        made.restart(now=False)


@pytest.mark.parametrize(
    "way", ["interrupt", "kill", pytest.param("restart", marks=pytest.mark.slow)]
)
def test_nothing_outlives_its_kernel(tmp_path, way):
    """D11: ranks and grandchildren deaf to SIGTERM are gone in 10 s; the next run starts."""
    with kernel() as made:
        made.run(start("stay", tmp_path, monitor=way == "restart"))
        processes.wait_for(tmp_path / "up0", tmp_path / "up1")
        assert len(processes.of_run(tmp_path)) >= 6
        if way == "interrupt":
            cell = made.send("print('waiting', flush=True)\njob.result()")
            made.await_text("waiting")
        stop_by(way, made)
        processes.wait_gone(tmp_path)
        assert Job.attach(tmp_path).wait(10) == "stopped"
        if way == "interrupt":
            assert made.collect(cell).error.startswith("KeyboardInterrupt")
        if way == "restart":
            made.run("from wamlab.jupyter.launch import launch, Job")
            again = made.run(f"Job.attach({str(tmp_path)!r}).status")
            assert again.displays[-1]["text/plain"] == "'stopped'"
            made.run(start("records", tmp_path, {"x": 1}))
            assert made.run("len(job.results())").displays[-1]["text/plain"] == "2"


@pytest.mark.slow
def test_a_notebook_with_a_run_passes_nbval_twice(tmp_path):
    """D15: the output of the monitor, other in every run, does not break the notebook test."""
    config = {"steps": 10, "pause": 0.05}
    cells = (
        "from wamlab.jupyter.launch import launch",
        f"job = launch('rank_targets:train', {config}, 2, out={str(tmp_path / 'run')!r})",
        "# NBVAL_CHECK_OUTPUT\nprint(job.result())",
    )
    numbered = [nbformat.v4.new_code_cell(c, execution_count=i) for i, c in enumerate(cells, 1)]
    made = nbformat.v4.new_notebook(cells=numbered)
    printed = nbformat.v4.new_output("stream", name="stdout", text="{'steps': 10}\n")
    made.cells[-1].outputs = [printed]
    nbformat.write(made, tmp_path / "run.ipynb")
    options = ["--nbval-lax", "--nbval-current-env", "-p", "no:cacheprovider"]
    for _ in range(2):
        run = subprocess.run(
            [sys.executable, "-m", "pytest", *options, str(tmp_path / "run.ipynb")],
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parent)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert run.returncode == 0, run.stdout[-2000:]
