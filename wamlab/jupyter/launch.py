"""Start real torchrun ranks from a notebook cell or a script, watch them, stop them, read their
fate.

`launch` returns at once with a handle. The ranks are fresh processes under
torch.distributed.run, so the caller may hold a CUDA context, stale MASTER_* variables or port
29500 and none of it matters. A guard process ends every rank within 10 s of a failure, a stop,
an interrupt or the caller's death.
"""

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil

from wamlab.config import ConfigError, RunError, to_dict
from wamlab.jupyter import _ship
from wamlab.jupyter._folder import MARK, RunFolder
from wamlab.jupyter._runner import decode

STALE = re.compile(
    r"(MASTER_ADDR|MASTER_PORT|RANK|LOCAL_RANK|WORLD_SIZE|LOCAL_WORLD_SIZE|NODE_RANK|GROUP_\w+|ROLE_\w+"
    r"|TORCHELASTIC_\w+|PET_\w+|JPY_\w+|MPLBACKEND)"
)  # a rank's or a kernel's own variables, which would mislead fresh ranks
LOG_LINES = 20
END_S = 12.0  # the guard promises 10


class LaunchError(RunError):
    """A run that failed: the first failing rank, why, its last log lines and where the log is.

    Attributes:
        rank: the first failing rank, None when the launcher itself failed.
        exception: the rank's exception as "Type: message", None when it died otherwise.
        refusal: what it says where it is a UserError: the target refused what it was given.
        signal: the name of the signal that ended it, such as "SIGSEGV", or None.
        log: path of the log file.
        lines: its last 20 lines.
    """

    def __init__(self, folder: RunFolder) -> None:
        end = folder.read("end.json")
        self._lost = end is None
        first = (end or {}).get("first") or {}
        self.rank: int | None = first.get("rank")
        self.exception: str | None = first.get("error")
        self.refusal = self.exception.partition(": ")[2] if first.get("refused") else None
        code = first.get("exit_code", 0)
        self.signal = signal.Signals(-code).name if code < 0 else None
        self.log = folder.log(self.rank)
        self.lines = folder.tail(self.rank, LOG_LINES)
        log = "\n".join(f"    {line}" for line in self.lines)
        text = f"{self._what(code)}\nlast {len(self.lines)} lines of {self.log}:\n{log}"
        super().__init__(text.replace(f"{Path.cwd()}{os.sep}", ""))  # shorter to read

    def _what(self, code: int) -> str:
        if self._lost:
            return "the guard was killed, and the ranks with it"
        if self.rank is None:
            return "the launcher ended before any rank failed"
        if self.exception:
            return f"rank {self.rank} raised {self.exception}"
        if self.signal:
            hint = " (often the system's out-of-memory killer)" if self.signal == "SIGKILL" else ""
            return f"rank {self.rank} was ended by {self.signal}{hint}"
        return f"rank {self.rank} ended with exit code {code} and without a result"


class StoppedError(RuntimeError):
    """The run was stopped before it had a result."""


class Job:
    """The handle of one run; everything it tells comes from the run folder.

    Attributes:
        folder: the run folder.
    """

    def __init__(self, folder: str | Path, guard: subprocess.Popen | None = None) -> None:
        self._files = RunFolder(folder)
        self.folder = self._files.path
        self._guard = guard
        self._on_end: list[Callable[[], None]] = []

    @classmethod
    def attach(cls, folder: str | Path) -> "Job":
        """Return the handle of a run started elsewhere or earlier, alive or ended.

        Raises:
            ConfigError: the folder holds no run.
        """
        job = cls(folder)
        if job._files.read("job.json") is None:
            raise ConfigError(f"{folder} holds no run (no job.json in it)")
        return job

    def __repr__(self) -> str:
        return f"Job({str(self.folder)!r}: {self.status})"

    @property
    def status(self) -> str:
        """Return "running", "done", "failed", "stopped", or "lost" when the guard was killed."""
        if self._guard is not None:
            self._guard.poll()  # reaps it, so that no zombie stays
        return self._files.status()

    def log(self, rank: int | None = 0) -> Path:
        """Return the path of a rank's log (None: the launcher's)."""
        return self._files.log(rank)

    def tail(self, rank: int | None = 0, lines: int = LOG_LINES) -> str:
        """Return the last lines of a rank's log (None: the launcher's)."""
        return "\n".join(self._files.tail(rank, lines))

    def stop(self) -> None:
        """End the run and wait until every process of it is gone (10 s at most)."""
        self._files.request_stop()
        deadline = time.monotonic() + END_S
        while self.status == "running" and time.monotonic() < deadline:
            time.sleep(0.05)
        if self.status == "running":
            self._files.sweep()
        self._finish()

    def wait(self, timeout_s: float | None = None) -> str:
        """Wait until the run has ended and return its status.

        An interrupt (Ctrl-C, a notebook's stop button) ends the run if this handle started it.

        Raises:
            TimeoutError: it still runs after `timeout_s`.
        """
        deadline = time.monotonic() + (timeout_s if timeout_s is not None else float("inf"))
        try:
            while self.status == "running":
                if time.monotonic() > deadline:
                    raise TimeoutError(f"{self.folder} still runs after {timeout_s} s")
                time.sleep(0.05)
        except KeyboardInterrupt:
            if self._guard is not None:
                self.stop()
            raise
        self._finish()
        return self.status

    def result(self, timeout_s: float | None = None) -> Any:
        """Wait and return what rank 0 (of this host) returned: a Record, Records, or JSON values.

        Raises:
            LaunchError: a rank failed.
            StoppedError: the run was stopped.
        """
        return self.results(timeout_s)[0]

    def results(self, timeout_s: float | None = None) -> list[Any]:
        """Wait and return what each rank (of this host) returned, in rank order; see `result`."""
        status = self.wait(timeout_s)
        if status == "stopped":
            raise StoppedError(f"{self.folder} was stopped before it had a result")
        if status != "done":
            raise LaunchError(self._files)
        files = sorted((self.folder / "ranks").glob("*.json"), key=lambda f: int(f.stem))
        return [decode(self._files.read(f"ranks/{f.name}")["ok"]) for f in files]

    def _finish(self) -> None:
        if self._guard is not None:
            self._guard.wait(5.0)
        if self.status == "lost":
            self._files.sweep()
        while self._on_end:
            self._on_end.pop()()


def launch(
    target: str | Callable[..., Any],
    config: Any = None,
    nproc: int | str = "auto",
    *,
    out: str | Path | None = None,
    env: Mapping[str, str] | None = None,
    threads: int | None = None,
    monitor: bool = True,
    torchrun: Sequence[str] = (),
    within: Sequence[str] = (),
) -> Job:
    """Run `target(config)` on fresh ranks under torchrun; returns at once.

    Args:
        target: "module:function", or a function or class defined in a cell or script, whose
            source is shipped with the cell's imports. It joins the process group itself, with
            `wamlab.dist.process_group`.
        config: a dataclass or dict, passed as JSON; None calls `target()`.
        nproc: ranks on this host; "auto" is one a GPU, or 1 without GPUs.
        out: run folder; by default a new one under runs/.
        env: further environment variables of the ranks.
        threads: OMP_NUM_THREADS of a rank; by default the usable cores shared among the ranks.
        monitor: show the live monitor, in a notebook.
        torchrun: options for several hosts, such as ("--nnodes=2", "--rdzv-backend=c10d",
            "--rdzv-endpoint=host:29400", "--rdzv-id=7"); they replace `--standalone`.
        within: words in front of the command that starts the run, such as those of a made-up host.

    Returns:
        The handle; its `result()` waits.

    Raises:
        ShipError: the target cannot be sent to another process; nothing was started.
        ConfigError: a bad rank count, a config that is no JSON, or a folder whose run is alive.
    """
    job = _describe(target, config, torchrun)
    job["nproc"] = _count(nproc)
    folder = RunFolder(out or _new_folder(job["target"]))
    folder.prepare()
    if job["shipped"]:
        (folder.path / "code" / f"{_ship.MODULE}.py").write_text(job["shipped"])
    folder.write("job.json", job)
    environment = _environment(env, threads, job["nproc"])
    handle = Job(folder.path, _start_guard(folder, environment, within))
    if monitor and in_notebook():
        from wamlab.jupyter.monitor import Monitor  # needs IPython, which launch does not

        handle._on_end.append(Monitor(folder.path).show().finish)
    return handle


def in_notebook() -> bool:
    """Tell whether this process is a notebook's kernel; IPython is not imported to find out."""
    ipython = sys.modules.get("IPython")
    return ipython is not None and hasattr(ipython.get_ipython(), "kernel")


def _describe(target: Any, config: Any, torchrun: Sequence[str]) -> dict[str, Any]:
    config_class = type(config) if dataclasses.is_dataclass(config) else None
    if config_class is None and config is not None and not isinstance(config, Mapping):
        raise ConfigError(f"a config is a dataclass or a dict, got {type(config).__name__}")
    shipped = [obj for obj in (target, config_class) if _ship.must_ship(obj)]
    return {
        "target": _ship.path_of(target),
        "config_class": config_class and _ship.path_of(config_class),
        "config": _as_json(config),
        "shipped": _ship.ship(*shipped) if shipped else None,
        "torchrun": list(torchrun),
        "sys_path": [p for p in sys.path if p],
        "started_utc": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _as_json(config: Any) -> Any:
    values = to_dict(config)
    try:
        json.dumps(values)
    except TypeError as error:
        raise ConfigError(
            f"the config must be JSON ({error}); pass numbers, strings and paths"
        ) from error
    return values


def _count(nproc: int | str) -> int:
    if nproc == "auto":
        import torch

        return max(1, torch.cuda.device_count())
    if isinstance(nproc, bool) or not isinstance(nproc, int) or nproc < 1:
        raise ConfigError(f'nproc is a positive number of ranks or "auto", got {nproc!r}')
    return nproc


def _new_folder(target: str) -> Path:
    name = re.sub(r"\W+", "-", target.partition(":")[2])
    return Path("runs") / f"{name}-{datetime.now():%Y%m%d-%H%M%S}-{uuid.uuid4().hex[:4]}"


def _environment(env: Mapping[str, str] | None, threads: int | None, nproc: int) -> dict[str, str]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    kept = {k: v for k, v in os.environ.items() if not STALE.fullmatch(k)}
    kept["OMP_NUM_THREADS"] = str(threads or max(1, (cores or 1) // nproc))
    return kept | dict(env or {})


def _start_guard(
    folder: RunFolder, environment: dict[str, str], within: Sequence[str]
) -> subprocess.Popen:
    guard = [sys.executable, "-m", "wamlab.jupyter._guard", str(folder.path), str(os.getpid())]
    command = [*within, *guard]
    environment[MARK] = str(folder.path)
    with folder.log().open("ab") as log:
        guard = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=environment,
            start_new_session=True,
        )
    created = psutil.Process(guard.pid).create_time()
    folder.write("guard.json", {"pid": guard.pid, "created": created})
    return guard
