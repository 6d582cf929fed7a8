"""The guard: one small process between the caller and torchrun that lets nothing outlive the
caller.

`python -m wamlab.jupyter._guard FOLDER PARENT_PID`, started in a session of its own so that a
signal to the caller's process group does not end it before it has cleaned up. It starts the
agent (torchrun), then looks several times a second whether the caller has died, a stop was
asked for, or a rank has ended badly. As a "child subreaper" it inherits every orphan below it,
however deep, so that whatever ignores SIGTERM is still found and killed.
"""

import ctypes
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

from wamlab.jupyter._folder import RunFolder, is_helper

POLL_S = 0.1
GRACE_S = 3.0  # from SIGTERM to SIGKILL; all must be gone within 10 s, on a busy machine too
REPORT_S = 2.0  # for torchrun to see its ranks dead and write what it knows
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36


def prctl(option: int, value: int) -> None:
    """Call Linux's prctl; other systems have none and rely on the guard's polling."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def die_with_parent() -> None:
    """Ask Linux to SIGKILL this process when its parent dies, also if that has just happened."""
    parent = os.getppid()
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


class Guard:
    """Runs the agent of one run folder and ends everything below it."""

    def __init__(self, folder: RunFolder, parent: int) -> None:
        self.folder, self.parent = folder, parent
        self.signalled = False
        self.deaths: dict[int, float] = {}  # rank -> when it was seen gone
        self.killed: set[int] = set()  # pids that the guard itself killed

    def run(self) -> None:
        """Start the agent, wait for it, clean up, and write end.json."""
        prctl(PR_SET_CHILD_SUBREAPER, 1)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._on_signal)
        command = [sys.executable, "-u", "-m", "wamlab.jupyter._runner", str(self.folder.path)]
        with self.folder.log().open("ab") as log:
            agent = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        reason = self._watch(agent)
        self._kill(None)
        self.folder.write("end.json", self._verdict(reason, agent.returncode))

    def _on_signal(self, number: int, frame: object) -> None:
        self.signalled = True

    def _watch(self, agent: subprocess.Popen) -> str | None:
        reason, deadline = None, float("inf")
        while agent.poll() is None:
            if reason is None and (reason := self._reason()):
                deadline = time.monotonic() + GRACE_S
                if reason != "failed":  # torchrun ends the other ranks of a failed one itself
                    agent.terminate()
            if time.monotonic() > deadline:
                if reason == "failed":
                    self._end_ranks(agent)
                break
            time.sleep(POLL_S)
        if agent.poll() is None:
            agent.kill()
            agent.wait()
        return reason

    def _end_ranks(self, agent: subprocess.Popen) -> None:
        """Kill the ranks, and let torchrun see that and write how each of them ended."""
        self._kill(agent.pid)
        deadline = time.monotonic() + REPORT_S
        while agent.poll() is None and time.monotonic() < deadline:
            time.sleep(POLL_S)

    def _reason(self) -> str | None:
        if os.getppid() != self.parent:
            return "orphaned"
        if self.signalled or (self.folder.path / "stop").exists():
            return "stopped"
        for file in (self.folder.path / "ranks").glob("*.pid"):
            rank = int(file.stem)
            if rank not in self.deaths and not psutil.pid_exists(int(file.read_text())):
                self.deaths[rank] = time.time()
        failed = [r for r in self.deaths if "ok" not in (self.folder.read(f"ranks/{r}.json") or {})]
        return "failed" if failed else None

    def _kill(self, spared: int | None) -> None:
        """SIGKILL all that is left below, again until nothing is; `spared` may live on."""
        give_up = time.monotonic() + 5.0  # a process in an uninterruptible system call stays
        while time.monotonic() < give_up:
            left = [p for p in psutil.Process().children(recursive=True) if p.pid != spared]
            left = [p for p in left if not is_helper(p) or time.monotonic() > give_up - 4.0]
            for process in left:
                self._kill_one(process)
            if spared is None:
                _reap()
            if not psutil.Process().children(recursive=True) or (spared and not left):
                return
            time.sleep(0.05)

    def _kill_one(self, process: psutil.Process) -> None:
        try:
            process.kill()
            self.killed.add(process.pid)
        except psutil.NoSuchProcess:
            pass  # ended by itself meanwhile

    def _verdict(self, reason: str | None, returncode: int) -> dict:
        if reason in ("orphaned", "stopped"):
            return {"status": "stopped", "reason": reason}
        nproc = self.folder.read("job.json")["nproc"]
        results = list((self.folder.path / "ranks").glob("*.json"))
        if returncode == 0 and len(results) >= nproc:
            return {"status": "done"}
        return {"status": "failed", "first": self._first_failure()}

    def _first_failure(self) -> dict | None:
        """Return the failure that came first and is not the mere consequence of another rank's."""
        exits = self.folder.read("failures.json") or {}
        found = []
        for file in (self.folder.path / "ranks").glob("*.pid"):
            rank, pid = int(file.stem), int(file.read_text())
            report = self.folder.read(f"ranks/{rank}.json") or {}
            code = exits.get(str(rank), 0)
            when = report.get("time") or self.deaths.get(rank, time.time())
            if "error" in report:
                failure = {"rank": rank, **report}
                found.append((report["secondary"], when, rank, failure))
            elif code and pid not in self.killed:
                secondary = code == -signal.SIGTERM  # torchrun's own way to end the others
                found.append((secondary, when, rank, {"rank": rank, "exit_code": code}))
            elif "ok" not in report:
                found.append((True, when, rank, {"rank": rank, "exit_code": code}))
        return min(found)[-1] if found else None


def _reap() -> None:
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass  # none left


if __name__ == "__main__":
    Guard(RunFolder(Path(sys.argv[1])), int(sys.argv[2])).run()
