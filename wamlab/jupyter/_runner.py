"""What runs in the fresh processes: the agent (torchrun, in process) and, below it, each rank.

The guard starts `python -m wamlab.jupyter._runner FOLDER`; torchrun starts the same line once a
rank, told apart by RANK in the environment.
"""

import atexit
import ctypes
import faulthandler
import gc
import importlib
import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from wamlab.config import UserError, from_dict, to_dict
from wamlab.jupyter._folder import RunFolder
from wamlab.jupyter._guard import die_with_parent

CONSEQUENCES = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "gloo",
    "NCCL",
)

CAUSE_S = 1.0  # how long a rank that a peer's end threw out waits for that peer to say why


def leave_quickly(code: list[int]) -> None:
    """End this process where the interpreter would go on to take apart torch's modules, for 1 s.

    Args:
        code: the exit code; empty where an error or a signal ends the process, as it always did.
    """
    if code:
        sys.stdout.flush()
        sys.stderr.flush()
        ctypes.CDLL(None).fflush(None)  # what native code has printed
        os._exit(code[0])


def run_agent(folder: RunFolder) -> int:
    """Run torchrun for the folder's job and write the exit codes of ranks that failed."""
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    job = folder.read("job.json")
    single_host = ["--standalone", "--local-addr", "127.0.0.1"]
    options = [*(job["torchrun"] or single_host), "--nproc-per-node", str(job["nproc"])]
    target = ["-m", "wamlab.jupyter._runner", str(folder.path)]
    try:
        run.run(run.parse_args([*options, "--max-restarts", "0", *target]))
    except ChildFailedError as error:
        codes = {str(rank): failure.exitcode for rank, failure in error.failures.items()}
        folder.write("failures.json", codes)
        return 1
    return 0


def run_rank(folder: RunFolder) -> int:
    """Run the target in this rank, its output in its own log, and write its result or error."""
    rank = int(os.environ["RANK"])
    _redirect(folder.log(rank))
    folder.write(f"ranks/{rank}.pid", os.getpid())
    try:
        report = {"ok": encode(_call_target(folder))}
    except BaseException as error:
        _print_error(error)
        text = "".join(traceback.format_exception_only(error)).strip()
        secondary = any(word in text for word in CONSEQUENCES)
        refused = isinstance(error, UserError)
        report = {"error": text, "refused": refused, "secondary": secondary}
    folder.write(f"ranks/{rank}.json", {**report, "time": time.time()})
    if report.get("secondary"):
        _await_cause(folder)
    return 0 if "ok" in report else 1


def _await_cause(folder: RunFolder) -> None:
    """Stay for up to CAUSE_S, until another rank has said why: this one's end ends the others."""
    end = time.monotonic() + CAUSE_S
    while time.monotonic() < end:
        reports = [folder.read(f"ranks/{p.name}") or {} for p in folder.path.glob("ranks/*.json")]
        if any("error" in r and not r["secondary"] for r in reports):
            return
        time.sleep(0.02)


def _print_error(error: BaseException) -> None:
    """Print the traceback from the target's own first line on."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename == __file__:
        frames = frames.tb_next
    traceback.print_exception(type(error), error, frames)


def _redirect(path: Path) -> None:
    """Send file descriptors 1 and 2 to the log, so that native code's output lands there too."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    faulthandler.enable()


def _call_target(folder: RunFolder) -> Any:
    job = folder.read("job.json")
    sys.path[:0] = [str(folder.path / "code")] if job["shipped"] else []
    sys.path += [entry for entry in job["sys_path"] if entry not in sys.path]
    target = resolve(job["target"])
    if job["config"] is None:
        return target()
    config = job["config"]
    if job["config_class"]:
        config = from_dict(resolve(job["config_class"]), config)
    return target(config)


def resolve(path: str) -> Any:
    """Return the object named "module:qualified.name"."""
    module, _, name = path.partition(":")
    found: Any = _import(module)
    for part in name.split("."):
        found = getattr(found, part)
    return found


def _import(module: str) -> Any:
    """Import a module and leave what it made to no garbage collection, now or later.

    What torch makes lives as long as the process. Looking through it again and again took a third
    of the import, and as much of the imports that building a model begins.
    """
    gc.disable()
    try:
        return importlib.import_module(module)
    finally:
        gc.freeze()
        gc.enable()


def encode(value: Any) -> dict[str, Any]:
    """Return a rank's result as JSON values that `decode` turns back.

    Raises:
        TypeError: it is neither a Record, a list of Records, a dataclass nor JSON values.
    """
    values = value if isinstance(value, list | tuple) else [value]
    if values and all(_is_record(v) for v in values):
        plain = [v.to_json() for v in values]
        return {"records": plain} if values is value else {"record": plain[0]}
    plain = to_dict(value)
    try:
        json.dumps(plain)
    except TypeError as error:
        raise TypeError(
            f"the target returned {type(value).__name__}, which is no Record, list of Records, "
            f"dataclass or JSON value ({error}); return numbers, and save tensors to a file"
        ) from error
    return {"json": plain}


def _is_record(value: Any) -> bool:
    measure = sys.modules.get("wamlab.measure")  # not imported here: it takes torch's 3 s
    return measure is not None and isinstance(value, measure.Record)


def decode(values: dict[str, Any]) -> Any:
    """Return what `encode` was given (a dataclass other than Record comes back as a dict)."""
    from wamlab.measure import Record

    if "record" in values:
        return Record.from_json(values["record"])
    if "records" in values:
        return [Record.from_json(v) for v in values["records"]]
    return values["json"]


if __name__ == "__main__":
    die_with_parent()
    FOLDER, CODE = RunFolder(sys.argv[1]), []
    atexit.register(leave_quickly, CODE)  # the first to be registered is the last to be called
    CODE.append(run_rank(FOLDER) if "RANK" in os.environ else run_agent(FOLDER))
    sys.exit(CODE[0])
