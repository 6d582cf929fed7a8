"""Finding and awaiting the processes of a run, however they have detached themselves."""

import time
from pathlib import Path

import psutil


def of_run(folder: Path) -> list[psutil.Process]:
    """Return every living process that inherited the run's WAMLAB_RUN variable."""
    found = []
    for process in psutil.process_iter():
        try:
            inherited = process.environ().get("WAMLAB_RUN") == str(folder)
            if inherited and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def wait_gone(folder: Path, seconds: float = 10.0) -> float:
    """Wait until no process of the run is left; return how long it took, or fail by name."""
    start = time.monotonic()
    while left := of_run(folder):
        spent = time.monotonic() - start
        assert spent < seconds, f"after {spent:.1f} s: {[p.cmdline() for p in left]}"
        time.sleep(0.05)
    return time.monotonic() - start


def wait_for(*paths: Path, seconds: float = 60.0) -> None:
    """Wait until all files exist."""
    end = time.monotonic() + seconds
    while not all(path.exists() for path in paths):
        assert time.monotonic() < end, (
            f"after {seconds} s: no {[p for p in paths if not p.exists()]}"
        )
        time.sleep(0.05)
