"""Two made-up hosts: a slow link, and a host that dies."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from wamlab import hosts
from wamlab.__main__ import main
from wamlab.jupyter import slow_link

HERE = Path(__file__).parent
STEPS = 40
SEND = """
import socket, sys, time
if sys.argv[1] == "serve":
    with socket.create_server((sys.argv[2], 29511)) as server:
        print("ready", flush=True)
        peer = server.accept()[0]
        start, count = time.monotonic(), 0
        while part := peer.recv(1 << 16):
            count += len(part)
        print(count * 8e-6 / (time.monotonic() - start))
else:
    socket.create_connection((sys.argv[2], 29511)).sendall(bytes(5_000_000))
"""


@pytest.fixture(scope="module")
def possible():
    reason = hosts.why_not()
    if reason:
        pytest.skip(f"no made-up hosts here: {reason}")


def test_a_host_has_its_name_its_address_and_its_links_rate(possible):
    with hosts.linked_hosts(rate_mbit=80.0) as (a, b):
        name = subprocess.run([*b.within, "hostname"], capture_output=True, text=True, check=True)
        assert name.stdout.strip() == "host-b"
        python = [sys.executable, "-c", SEND]
        server = [*a.within, *python, "serve", a.address]
        with subprocess.Popen(server, stdout=subprocess.PIPE, text=True) as serving:
            assert serving.stdout.readline() == "ready\n"
            subprocess.run([*b.within, *python, "send", a.address], check=True, timeout=20)
            rate = float(serving.stdout.readline())
    assert 60 < rate < 100  # what the full bucket holds comes at once
    left = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True)
    assert a.namespace not in left.stdout


def test_why_not_names_what_is_missing(monkeypatch):
    monkeypatch.setattr(hosts.shutil, "which", lambda tool: None if tool == "tc" else tool)
    assert hosts.why_not() == "`tc` is not installed (Debian, Ubuntu: apt-get install iproute2)"
    monkeypatch.setattr(hosts.shutil, "which", lambda tool: tool)
    monkeypatch.setattr(hosts.os, "geteuid", lambda: 1000)
    assert hosts.why_not() == "network namespaces need root"


def test_a_refusal_carries_the_systems_words():
    with pytest.raises(hosts.HostsError, match=r"`sh -c echo no >&2; exit 1` was refused: no"):
        hosts._run("sh", "-c", "echo no >&2; exit 1")


def test_without_hosts_the_bench_says_why(monkeypatch, capsys):
    def refuse(rate_mbit):
        raise hosts.HostsError("network namespaces need root")

    monkeypatch.setattr(slow_link, "linked_hosts", refuse)
    assert main(["bench", "communication", "--slow-link"]) == 0
    printed = capsys.readouterr().out
    assert printed.count("skipped: network namespaces need root") == len(slow_link.ARMS)


@pytest.mark.slow
def test_a_slow_link_waits_and_low_rank_takes_the_wait_away(possible, tmp_path):
    """From at least 30 % of the step to less than half of that, on a busy machine too."""
    names = (slow_link.BASELINE, "low rank 1")
    runs = slow_link.cases(names, layers=1, micro_batch=2, steps=5, warmup_steps=1, wait_steps=2)
    base, low = slow_link.over_slow_link(runs, tmp_path, rate_mbit=75.0)
    assert (base.scope, low.extra["rate_mbit"]) == ("slow_link", 75.0)
    assert base.exposed_comm_share >= 0.3
    assert low.extra["baseline_exposed_comm_share"] == base.exposed_comm_share
    assert low.exposed_comm_share < base.exposed_comm_share / 2


def start(host, folder, *, nodes="2", restarts=0):
    torchrun = ["-m", "torch.distributed.run", *host.torchrun(nodes, restarts=restarts)]
    script = [str(HERE / "host_ranks.py"), str(folder), str(STEPS)]
    command = [*host.within, sys.executable, *torchrun, "--nproc-per-node=1", *script]
    env = {**os.environ, **host.env, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    env["PYTHONPATH"] = os.pathsep.join([str(HERE.parent), str(HERE)])
    with (folder / f"{host.name}.log").open("w") as log:
        return subprocess.Popen(command, env=env, stdout=log, stderr=log, start_new_session=True)


def kill(process):
    """Take a whole host away at once."""
    family = [process, *psutil.Process(process.pid).children(recursive=True)]
    for one in family:
        with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
            os.kill(one.pid, signal.SIGKILL)
    process.wait()


@contextlib.contextmanager
def running(pair, folder, **options):
    jobs = [start(host, folder, **options) for host in pair]
    try:
        yield jobs
    finally:
        for job in jobs:
            if job.poll() is None:
                kill(job)


def wait_for_checkpoint(folder, seconds=60):
    end = time.monotonic() + seconds
    while not list(folder.glob("run/checkpoints/step_*/complete.json")):
        assert time.monotonic() < end, (folder / "host-a.log").read_text()[-3000:]
        time.sleep(0.1)


@pytest.mark.slow
def test_a_dead_host_ends_the_job_and_is_named(possible, tmp_path):
    with hosts.linked_hosts() as pair, running(pair, tmp_path) as (a, b):
        wait_for_checkpoint(tmp_path)
        kill(b)
        begin = time.monotonic()
        assert a.wait(60) != 0
    log = (tmp_path / "host-a.log").read_text()
    assert "LostHostError: rank 1 on host host-b (10.213.7.2) is lost" in log, log[-3000:]
    assert time.monotonic() - begin < 60


@pytest.mark.slow
def test_with_restarts_the_job_goes_on_from_its_checkpoint(possible, tmp_path):
    """Host b dies for good; host a goes on alone, with the losses of a run that nothing struck."""
    how = {"nodes": "1:2", "restarts": 3}
    with hosts.linked_hosts() as pair, running(pair, tmp_path, **how) as (a, b):
        wait_for_checkpoint(tmp_path)
        kill(b)
        assert a.wait(120) == 0, (tmp_path / "host-a.log").read_text()[-3000:]
    world, losses = json.loads((tmp_path / "losses.json").read_text())
    assert world == 1
    assert "resumed from" in (tmp_path / "host-a.log").read_text()
    alone = tmp_path / "alone"
    alone.mkdir()
    command = [sys.executable, str(HERE / "host_ranks.py"), str(alone), str(STEPS)]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE.parent), str(HERE)])}
    subprocess.run(command, env=env, check=True, timeout=120, capture_output=True)
    _, want = json.loads((alone / "losses.json").read_text())
    assert losses == pytest.approx(want, rel=1e-5)
