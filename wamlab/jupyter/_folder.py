"""The run folder: everything that a launch writes, and what can be told from it by any process.

    job.json          what was launched (target, config, ranks, environment), enough to repeat it
    guard.json        the guard process: pid and the time it was created
    stop              appears when somebody asks the run to stop
    end.json          written last: status and the first failure
    steps.jsonl       one StepRecord a step, where the target writes them
    code/             source shipped from a notebook's cells
    logs/             launcher.log, rank0.log, rank1.log, ...
    ranks/            per rank: N.pid, N.json (its result or its error)

The handle, the monitor and the guard share nothing else, so that a run can be watched and stopped
from another kernel, and read after both are gone. Nothing here imports torch.
"""

import contextlib
import json
import os
from pathlib import Path
from typing import Any

import psutil

from wamlab.config import ConfigError

OWN_FILES = ("job.json", "guard.json", "stop", "end.json", "failures.json", "steps.jsonl")
MARK = "WAMLAB_RUN"  # the environment variable that names the run to all its processes
TAIL_BYTES = 64 * 1024  # enough for any last 20 lines worth reading


class RunFolder:
    """Reads one run folder.

    Args:
        path: the folder; it need not exist yet.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).absolute()

    def log(self, rank: int | None = None) -> Path:
        """Return the log file of a rank, or the launcher's own."""
        name = "launcher.log" if rank is None else f"rank{rank}.log"
        return self.path / "logs" / name

    def read(self, name: str) -> dict[str, Any] | None:
        """Return one of the folder's JSON files, or None while it is absent."""
        try:
            return json.loads((self.path / name).read_text())
        except FileNotFoundError:
            return None

    def write(self, name: str, values: Any) -> None:
        """Write one of the folder's JSON files; it appears whole or not at all."""
        path = self.path / name
        partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
        partial.write_text(json.dumps(values, indent=1) + "\n")
        partial.replace(path)

    def prepare(self) -> None:
        """Make the folder ready for a run: the traces of an earlier one go, other files stay.

        Raises:
            ConfigError: a run is still alive in it.
        """
        if self.status() == "running":
            raise ConfigError(
                f"{self.path} holds a run that is still alive; stop it, or give another folder"
            )
        for name in ("logs", "ranks", "code"):
            (self.path / name).mkdir(parents=True, exist_ok=True)
            for file in (self.path / name).iterdir():
                if file.is_file():
                    file.unlink()
        for name in OWN_FILES:
            (self.path / name).unlink(missing_ok=True)

    def status(self) -> str:
        """Return "new", "running", "done", "failed", "stopped" or "lost" (guard killed)."""
        guard = self.read("guard.json")
        if guard is None:
            return "new"
        if is_alive(guard["pid"], guard["created"]):
            return "running"  # also while the guard cleans up behind the ranks
        end = self.read("end.json")
        return end["status"] if end else "lost"

    def request_stop(self) -> None:
        """Ask the guard to end the run; it looks several times a second."""
        (self.path / "stop").touch()

    def sweep(self) -> None:
        """SIGKILL what a killed guard left behind: every process with this run's environment."""
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):  # ended meanwhile, or another user's
                if process.environ().get(MARK) == str(self.path) and not is_helper(process):
                    process.kill()

    def tail(self, rank: int | None = 0, lines: int = 20) -> list[str]:
        """Return the last lines of a rank's log (None: the launcher's); empty before it exists."""
        path = self.log(rank)
        if not path.is_file():
            return []
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - TAIL_BYTES))
            return file.read().decode(errors="replace").splitlines()[-lines:]


def is_alive(pid: int, created: float) -> bool:
    """Tell whether a process lives and is the one that was meant, not a later one with its pid."""
    try:
        process = psutil.Process(pid)
        same = abs(process.create_time() - created) < 1.0
        return same and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def is_helper(process: psutil.Process) -> bool:
    """Tell Python's resource tracker, which frees the shared memory of the dead and then ends."""
    try:
        return "resource_tracker" in " ".join(process.cmdline())
    except psutil.Error:
        return False
