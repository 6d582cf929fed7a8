"""What the launcher's tests run on ranks; light, so that a rank starts without torch."""

import atexit
import ctypes
import dataclasses
import os
import signal
import subprocess
import sys
import time
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

RANK = int(os.environ.get("RANK", 0))
STUBBORN = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
    "print('up', flush=True); time.sleep(600)"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    factor: int = 2
    names: tuple[str, ...] = ()


def describe(plan: Plan) -> dict:
    """Return what the rank sees."""
    print(f"hello from rank {RANK}")
    print("and on stderr", file=sys.stderr)
    os.system("echo from a child of the rank")
    ctypes.CDLL(None).puts(b"from native code")  # waits in its buffer for the rank's end
    atexit.register(print, "from an exit handler")
    kept = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "OMP_NUM_THREADS", "EXTRA")
    seen = {name: os.environ.get(name) for name in kept}
    return {"rank": RANK, "plan": type(plan).__name__, "product": plan.factor * RANK, **seen}


def records(config: dict) -> list:
    from wamlab.measure import Record

    return [Record(name="a", samples_per_s=1.0), Record(name="b", extra={"x": config["x"]})]


def fail(config: dict) -> None:
    """Let rank `rank` end in the way `how`; the other ranks ignore SIGTERM and would stay."""
    if config["rank"] == RANK:
        for line in range(30):
            print("line", line)
        if config["how"] == "raise":
            raise ValueError("x42")
        if config["how"] == "exit":
            os._exit(3)
        if config["how"] == "unsendable":
            return object()
        os.kill(os.getpid(), getattr(signal, config["how"]))
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(600)


def collide(config: dict) -> None:
    """Rank 1 raises in gloo's words before rank 0, the true cause, raises its own error."""
    ready = Path(os.environ["WAMLAB_RUN"], "ready")
    if RANK == 1:
        while not ready.exists():  # on a busy machine ranks start seconds apart
            time.sleep(0.001)
        raise RuntimeError("[gloo] Connection closed by peer")
    ready.touch()
    time.sleep(0.05)
    raise ValueError("the cause")


def stay(config: dict) -> None:
    """Ignore SIGTERM, start a grandchild in a session of its own that does too, and stay."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    held = SharedMemory(f"wamlab-test-{os.getpid()}", create=True, size=1000)  # noqa: F841
    command = [sys.executable, "-c", STUBBORN]
    child = subprocess.Popen(command, start_new_session=True, stdout=subprocess.PIPE)
    child.stdout.readline()
    Path(os.environ["WAMLAB_RUN"], f"up{RANK}").touch()
    time.sleep(600)


def hold_gpu(config: dict) -> None:
    """Hold 4 GiB of this rank's GPU, deaf to SIGTERM."""
    import torch

    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    held = torch.ones(2**30, device=f"cuda:{os.environ['LOCAL_RANK']}")
    torch.cuda.synchronize()
    Path(os.environ["WAMLAB_RUN"], f"up{RANK}").touch()
    time.sleep(600)
    del held


def train(config: dict) -> dict:
    """Write a StepRecord every `pause` seconds."""
    from wamlab.measure import append_jsonl

    for step in range(config["steps"]):
        time.sleep(config["pause"])
        if RANK == 0:
            row = {"step": step, "loss": 2.0 / (step + 1), "dynamics_loss": 1.5 / (step + 1)}
            speed = {"step_ms": 1e3 * config["pause"], "samples_per_s": 2.0, "data_wait_ms": 5.0}
            append_jsonl(Path(os.environ["WAMLAB_RUN"], "steps.jsonl"), [row | speed])
    return {"steps": config["steps"]}


def shout(config: dict) -> int:
    """Print 1,000 lines a second until `seconds` have passed."""
    end, count = time.monotonic() + config["seconds"], 0
    while time.monotonic() < end:
        for _ in range(20):
            print(f"rank {RANK} line {count}")
            count += 1
        time.sleep(0.02)
    return count
