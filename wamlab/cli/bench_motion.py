"""`wamlab bench motion`: the ratios of the motion track, each against its baseline."""

import argparse
import dataclasses
from pathlib import Path

import torch

from wamlab.config import ConfigError, lookup, natural
from wamlab.measure import Record, append_jsonl
from wamlab.train.bench_motion import (
    CASES,
    ON_GPU,
    MotionCase,
    measure_block_parallel,
    measure_training,
)

MOCAP = Path(__file__).resolve().parents[2] / "data_samples" / "mocap"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `wamlab bench motion`."""
    parser.add_argument("--only", nargs="*", default=list(CASES), help=f"of {', '.join(CASES)}")
    parser.add_argument("--folder", type=Path, default=MOCAP, help="folder of BVH files")
    parser.add_argument(
        "--cpu", action="store_true", help="measure on the CPU though a GPU is there"
    )
    parser.add_argument(
        "--train", type=natural, default=0, help="steps; then measure held-out motions"
    )
    parser.add_argument("--out", type=Path, help="append the records to this JSONL file")


def run(args: argparse.Namespace) -> int:
    """Measure the cases, print each as it comes."""
    case = ON_GPU if torch.cuda.is_available() and not args.cpu else MotionCase()
    case = dataclasses.replace(case, folder=str(args.folder))
    measures = {name: lookup(CASES, name, "motion case") for name in args.only}
    if not any(args.folder.glob("*.bvh")):
        raise ConfigError(f"--folder {args.folder}: no .bvh file there")
    for name, measure in measures.items():
        _keep(measure(case), args.out)
        if name == "block_parallel" and case.device == "cuda":
            _keep(measure_block_parallel(case, "bf16"), args.out)
    if args.train:
        _keep(measure_training(case, args.train), args.out)
    return 0


def _keep(record: Record, out: Path | None) -> None:
    values = {"precision": record.precision, **record.extra}
    if record.step_ms:
        values = {"own_ms": record.step_ms.median, **values}
    print(f"{record.name} ({record.device})")
    for key, value in values.items():
        for name, number in value.items() if isinstance(value, dict) else [(None, value)]:
            text = f"{number:.4g}" if isinstance(number, float) else str(number)
            print(f"  {key if name is None else f'{key} {name}':<28}{text}")
    if out:
        append_jsonl(out, [record])
