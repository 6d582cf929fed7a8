"""`wamlab train run.json`: train from one file, on one process, under torchrun, or on several
nodes."""

import argparse
import json
import os
import shlex
import sys
from pathlib import Path
from typing import Any

import torch

from wamlab.config import (
    ConfigError,
    find_recipe,
    from_dict,
    load_json,
    positive_int,
    replace,
    to_dict,
)
from wamlab.data.lerobot import find_root
from wamlab.dist import device, print0, world_size
from wamlab.measure import Record
from wamlab.train import memory
from wamlab.train.config import PRESETS, TrainConfig
from wamlab.train.optimizations import build_optimizations, build_plan
from wamlab.train.trainer import train

RECIPES = Path(__file__).resolve().parents[1] / "train" / "recipes"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `wamlab train`."""
    known = sorted([*PRESETS, *(p.stem for p in RECIPES.glob("*.json"))])
    parser.add_argument("run", help=f"a TrainConfig as JSON, or one of {', '.join(known)}")
    parser.add_argument("--micro-batch", type=positive_int, help="samples a rank computes at once")
    parser.add_argument("--steps", type=positive_int, help="optimizer steps")
    parser.add_argument("--out", help="run folder")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="any field, dotted, as JSON: --set optim.lr=1e-4 --set data.root=DIR",
    )
    parser.add_argument("--memory", action="store_true", help="predict the memory and stop")
    parser.add_argument("--nproc", type=positive_int, help="ranks to start here, through torchrun")
    parser.add_argument(
        "--torchrun",
        default="--standalone",
        metavar="OPTIONS",
        help="torchrun's own options beside --nproc, such as the rendezvous of several nodes",
    )


def run(args: argparse.Namespace) -> int:
    """Train, or start the ranks that do."""
    config = configure(args)
    if args.memory:
        print(predicted(config, args.nproc or world_size()))
        return 0
    device(config.device)
    _check_paths(config)
    if args.nproc and "RANK" not in os.environ:
        _become_torchrun(args)
    if "console" not in config.trackers:
        config = replace(config, trackers=("console", *config.trackers))
    record = train(config)
    print0(_summary(record))
    return 0


def configure(args: argparse.Namespace) -> TrainConfig:
    """Return the run's configuration with the command line's changes in it.

    Raises:
        ConfigError: no such run or field, or a value of the wrong type.
    """
    if args.run in PRESETS:
        config = PRESETS[args.run]
    else:
        config = load_json(TrainConfig, find_recipe(RECIPES, args.run, PRESETS))
    values = to_dict(config)
    changes = {"steps": args.steps, "out": args.out}
    for key, value in changes.items():
        if value is not None:
            values[key] = value
    for setting in args.set:
        key, equals, value = setting.partition("=")
        if not equals:
            raise ConfigError(f"--set takes KEY=VALUE, got {setting!r}")
        _set(values, key.split("."), value)
    if args.micro_batch is not None:
        others = [o for o in values["optimizations"] if _name(o) != "micro_batch"]
        values["optimizations"] = [*others, {"name": "micro_batch", "size": args.micro_batch}]
    config = from_dict(TrainConfig, values)
    for field in ("model", "data"):
        if getattr(config, field) is None:
            raise ConfigError(f"{field} is null: a run of the command line needs one")
    return config


def _name(entry: str | dict[str, Any]) -> str | None:
    return entry.get("name") if isinstance(entry, dict) else entry


def _set(values: dict[str, Any], path: list[str], text: str) -> None:
    """Set a dotted key; from_dict then refuses one that does not exist."""
    for part in path[:-1]:
        if not isinstance(values.setdefault(part, {}), dict):
            raise ConfigError(f"--set {'.'.join(path)}: {part!r} has no fields")
        values = values[part]
    try:
        values[path[-1]] = json.loads(text)
    except json.JSONDecodeError:
        values[path[-1]] = text  # a bare word is a string


def predicted(config: TrainConfig, world: int) -> str:
    """Return the memory table of a run, and the nearest settings where a GPU here cannot hold
    it."""
    plan = build_plan(build_optimizations(config.optimizations))
    setting = memory.Setting(
        shape=memory.shape_of(config.model, config.lora),
        plan=plan,
        precision=config.precision,
        world=world,
        micro_batch=plan.micro_batch or max(1, config.global_batch // world),
    )
    if not torch.cuda.is_available():
        return memory.predict(setting).table()
    return memory.explain(setting, memory.usable_bytes(device("cuda")))


def _check_paths(config: TrainConfig) -> None:
    """Refuse data that is not there, and an `out` that cannot be made, before anything starts."""
    for data in (config.data, config.validation):
        for source in (data, *data.mixture) if data else ():
            find_root(source.root)
    if config.out:
        Path(config.out).mkdir(parents=True, exist_ok=True)


def _become_torchrun(args: argparse.Namespace) -> None:
    """Replace this process by torchrun with the same command for each rank."""
    try:
        options = [*shlex.split(args.torchrun), "--nproc-per-node", str(args.nproc)]
    except ValueError as error:
        raise ConfigError(f"--torchrun {args.torchrun!r}: {error}") from error
    # behind "--" torchrun takes no option of ours for one of its own, as it would --nproc
    command = [sys.executable, "-m", "torch.distributed.run", *options, "-m", "--", "wamlab"]
    os.execv(sys.executable, [*command, *sys.argv[1:]])


def _summary(record: Record) -> str:
    if record.reason:
        return record.reason
    step = record.step_ms
    return (
        f"median step {step.median:.1f} ms (quartiles {step.q25:.1f} to {step.q75:.1f}, "
        f"n {step.n}), {record.samples_per_s:.2f} samples/s, peak {record.peak_gib:.2f} GiB, "
        f"last loss {record.losses[-1]:.5f}"
    )
