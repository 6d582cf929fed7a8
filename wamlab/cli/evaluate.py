"""`wamlab evaluate CHECKPOINT`: does the trained model act? Closed loop in a world, or open loop on
held-out episodes of a data set."""

import argparse
from pathlib import Path

from wamlab import dist
from wamlab.config import ConfigError, natural, positive_int, replace
from wamlab.data.data_config import DataConfig, open_data
from wamlab.data.toy_env import ToyConfig
from wamlab.evaluate import libero_loop
from wamlab.evaluate.closed_loop import ClosedLoopConfig, ClosedLoopResult, closed_loop
from wamlab.evaluate.film import Filmer
from wamlab.evaluate.load import Acting, find_run, load_decoder, open_policy
from wamlab.evaluate.open_loop import OpenLoopResult, open_loop
from wamlab.evaluate.policy import ModelPolicy
from wamlab.measure import Record, append_jsonl, stamp
from wamlab.model.sampling import DIT_STEPS

EPISODES = {"toy": 200, "libero": 50}  # LIBERO has 50 starts a task


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `wamlab evaluate`."""
    parser.add_argument("checkpoint", type=Path, help="a run's folder, a checkpoint or weights")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--env", default="toy", choices=("toy", "libero"), help="closed loop in it")
    what.add_argument("--data", help="open loop on this LeRobot data set instead")
    parser.add_argument("--held-out", type=int, nargs=2, metavar=("FIRST", "STOP"),
                        help="episodes of --data to compare (default: all)")  # fmt: skip
    parser.add_argument(
        "--episodes", type=positive_int, help="in closed loop (default: toy 200, libero 50)"
    )
    parser.add_argument("--seed", type=natural, default=1_000_000, help="of the first episode")
    parser.add_argument("--batch", type=positive_int, default=50, help="episodes in step")
    parser.add_argument(
        "--max-steps", type=positive_int, default=360, help="after which an episode fails"
    )
    parser.add_argument(
        "--execute", type=positive_int, help="steps of a chunk carried out before the next"
    )
    parser.add_argument(
        "--context-chunks", type=positive_int, help="1: look at the present frame alone"
    )
    parser.add_argument("--guidance", type=float, help="scale on the video")
    parser.add_argument("--dit-steps", choices=tuple(DIT_STEPS), help="network calls a chunk")
    parser.add_argument(
        "--workers", type=positive_int, default=1, help="processes that draw the world"
    )
    parser.add_argument("--videos", type=natural, default=4, help="episodes to film")
    parser.add_argument("--chunks", type=positive_int, default=64, help="compared in the open loop")
    parser.add_argument("--libero-python", metavar="PATH",
                        help="LIBERO's own Python: see wamlab.evaluate.libero_loop")  # fmt: skip
    parser.add_argument("--libero-set", action="append", default=[], metavar="NAME=VALUE",
                        help="of LIBERO: suite, task, first, side, shadows")  # fmt: skip
    parser.add_argument("--out", type=Path, help="folder of results (default: RUN/evaluation)")
    parser.add_argument(
        "--device", default="auto", choices=("auto", "cpu", "cuda"), help="of the model"
    )


def run(args: argparse.Namespace) -> int:
    """Evaluate, print one line, append a record."""
    device = dist.device(args.device)
    args.episodes = args.episodes or EPISODES[args.env]
    if args.env == "libero" and not args.libero_python:
        raise ConfigError(
            "--env libero needs --libero-python PATH, the python of an environment with the "
            f"simulator: {libero_loop.INSTALL}"
        )
    found = find_run(args.checkpoint)
    acting = _changed(found.acting(), args)
    policy = open_policy(args.checkpoint, acting.policy, device=device)
    out = args.out or found.folder / "evaluation"
    if args.data:
        result = _open_loop(policy, args)
        scope, text = "open_loop", _open_text(result)
    else:
        play = _libero if args.env == "libero" else _closed_loop
        result = play(policy, acting, args, out)
        scope, text = "closed_loop", closed_text(result)
    record = Record(
        name=found.folder.name,
        scope=scope,
        model=policy.model.config.size,
        device=device.type,
        data=args.data or args.env,
        extra=result.to_json(),
    )
    append_jsonl(out / "records.jsonl", [stamp(record)])
    print(f"{text}\nrecord   {out / 'records.jsonl'}")
    return 0


def _changed(acting: Acting, args: argparse.Namespace) -> Acting:
    """Return how to act, with the command line's changes in it."""
    given = {
        "execute": args.execute,
        "policy.context_chunks": args.context_chunks,
        "policy.sampling.guidance": args.guidance,
        "policy.sampling.dit_steps": args.dit_steps,
    }
    return replace(acting, {k: v for k, v in given.items() if v is not None})


def _closed_loop(
    policy: ModelPolicy, acting: Acting, args: argparse.Namespace, out: Path
) -> ClosedLoopResult:
    config = ClosedLoopConfig(
        world=acting.world or ToyConfig(),
        episodes=args.episodes,
        seed=args.seed,
        batch=args.batch,
        max_steps=args.max_steps,
        execute=acting.execute,
        workers=args.workers,
    )
    filmer = None
    if args.videos:
        count = min(args.videos, args.batch, args.episodes)
        filmer = Filmer(policy, load_decoder(policy), count)
    result = closed_loop(policy, config, watch=filmer and filmer.watch)
    for path in filmer.save(out / "videos") if filmer else ():
        print(f"film     {path}")
    return result


def _libero(
    policy: ModelPolicy, acting: Acting, args: argparse.Namespace, out: Path
) -> ClosedLoopResult:
    given = dict(text.partition("=")[::2] for text in args.libero_set)
    options = {"episodes": args.episodes, "steps": args.max_steps} | given
    execute = acting.execute
    return libero_loop.evaluate_libero(
        policy, args.libero_python, out / "libero", execute=execute, **options
    )


def _open_loop(policy: ModelPolicy, args: argparse.Namespace) -> OpenLoopResult:
    robot = policy.embodiment
    data = open_data(
        DataConfig(
            root=args.data,
            embodiment=robot.name,
            episodes=tuple(args.held_out) if args.held_out else None,
            decoder="pyav",
            decoder_cache=8,
            train=False,
        )
    )
    return open_loop(policy, data, chunks=args.chunks, batch=min(args.batch, 16))


def closed_text(result: ClosedLoopResult) -> str:
    """Return the one line that says how it went."""
    low, high = result.interval
    return (
        f"success  {result.successes} of {len(result.episodes)} episodes, "
        f"{result.success_rate:.1%} (95 % interval {low:.1%} to {high:.1%}), "
        f"{result.seconds:.0f} s"
    )


def _open_text(result: OpenLoopResult) -> str:
    parts = [
        f"{name} {error:.4f} (who plays the mean: {result.mean_error[name]:.4f})"
        for name, error in result.error.items()
    ]
    return f"mean absolute action error over {result.chunks} chunks: " + ", ".join(parts)
