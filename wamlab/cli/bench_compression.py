"""`wamlab bench compression`: five gates at equal bytes, judged against a random one."""

import argparse
from pathlib import Path

from wamlab.config import positive_int
from wamlab.jupyter.launch import launch
from wamlab.measure import append_jsonl
from wamlab.train.bench_compression import ARMS, OPTIMIZERS, JudgeConfig, verdicts


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `wamlab bench compression`."""
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=list(ARMS),
                        help="gates to compare (default: all)")  # fmt: skip
    parser.add_argument("--optimizers", nargs="+", default=list(OPTIMIZERS), choices=OPTIMIZERS,
                        help="optimizers of the runs (default: all)")  # fmt: skip
    parser.add_argument("--seeds", type=positive_int, default=5, help="runs of each (default 5)")
    parser.add_argument("--steps", type=positive_int, default=600, help="of a run (default 600)")
    parser.add_argument("--out", type=Path, help="append the records to this JSONL file")


def run(args: argparse.Namespace) -> int:
    """Make all runs on two ranks and print the judgement."""
    records = []
    for seed in range(args.seeds):  # one run folder each: what is done is kept
        config = JudgeConfig(
            arms=tuple(args.arms),
            optimizers=tuple(args.optimizers),
            seeds=(seed,),
            steps=args.steps,
        )
        found = launch("wamlab.train.bench_compression:judge", config, 2, threads=1).result()
        records += found
        if args.out:
            append_jsonl(args.out, found)
    print(f"{'optimizer':<11}{'arm':<14}{'bytes':>7}{'final loss':>12}{'±':>9}  verdict")
    for row in verdicts(records):
        print(
            f"{row['optimizer']:<11}{row['arm']:<14}{row['bytes']:>7.3f}{row['final_loss']:>12.5f}"
            f"{row['spread']:>9.5f}  {_verdict(row)}"
        )
    return 0


def _verdict(row: dict) -> str:
    words = []
    if row["parity"] is not None:
        words.append("as good as dense" if row["parity"] else "worse than dense")
    if row["worth_having"] is not None:
        gain = f"{row['gain']:+.1%} ± {row['error']:.1%} against random"
        words.append(f"{gain}: {'worth having' if row['worth_having'] else 'not worth having'}")
    return "; ".join(words)
