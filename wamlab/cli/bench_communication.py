"""`wamlab bench communication`: the wait for communication, row by row in fresh processes.

On two GPUs: `wamlab bench communication --size dreamzero-5b --micro-batch 16 --out FILE`.
"""

import argparse
import re
from pathlib import Path
from typing import Any

import torch

from wamlab.config import lookup, positive, positive_int
from wamlab.hosts import HostsError
from wamlab.jupyter import slow_link
from wamlab.jupyter.launch import LaunchError, launch
from wamlab.measure import Record, append_jsonl
from wamlab.model.dit import MODEL_SIZES
from wamlab.train.bench_communication import CommCase, CommPlan


def _fsdp(**options: Any) -> dict[str, Any]:
    return {"name": "fsdp2", "keep_unsharded": 0, "prefetch": 0, **options}


ROWS: dict[str, dict[str, Any]] = {
    "each block a root": _fsdp(root=False),
    "root wrapped": _fsdp(),
    "prefetch 2": _fsdp(prefetch=2),
    "last block stays": _fsdp(prefetch=1, keep_unsharded=1),
    "all stay": _fsdp(keep_unsharded=-1),
    "bf16 sums": _fsdp(reduce_dtype="bf16"),
    "bf16 gradients": _fsdp(scatter="bf16"),
    "float8 gradients": _fsdp(scatter="float8"),
    "float8 weights": _fsdp(gather="float8"),
    "hsdp": _fsdp(replicate=2),
    "hsdp by links": _fsdp(replicate=0),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `wamlab bench communication`."""
    parser.add_argument("--size", default="tiny", help=f"one of {', '.join(MODEL_SIZES)}")
    parser.add_argument("--layers", type=positive_int, help="fewer blocks of the true width")
    parser.add_argument(
        "--micro-batch", type=positive_int, default=1, help="samples a rank at once"
    )
    parser.add_argument(
        "--ranks", type=positive_int, default=2, help="processes started (default 2)"
    )
    parser.add_argument("--recompute", default="none", help="none, selective, full or every-K")
    parser.add_argument(
        "--wait-steps", type=positive_int, default=20, help="rehearsals of each kind"
    )
    parser.add_argument("--rows", nargs="+", help=f"some of: {', '.join(ROWS)}")
    parser.add_argument("--slow-link", action="store_true", help="replicas over a slow link")
    parser.add_argument("--rate", type=positive, default=100.0, help="of the CPU's link, megabit/s")
    parser.add_argument("--steps", type=positive_int, default=12, help="optimizer steps")
    parser.add_argument("--seeds", type=positive_int, default=1, help="runs of each slow-link arm")
    parser.add_argument("--out", type=Path, help="append the records to this JSONL file")


def run(args: argparse.Namespace) -> int:
    """Measure the rows and print a table."""
    lookup(MODEL_SIZES, args.size, "model size")
    records = _slow(args) if args.slow_link else _rows(args)
    print(f"{'row':<20}{'step ms':>10}{'exposed':>9}{'ablation':>10}{'peak GiB':>10}{'loss':>10}")
    for record in records:
        print(_line(record))
    if args.out:
        append_jsonl(args.out, records)
    return 0


def _rows(args: argparse.Namespace) -> list[Record]:
    on_gpu = torch.cuda.is_available()
    names = args.rows or list(ROWS)
    rows = {name: lookup(ROWS, name, "row") for name in names}
    fast = ("compile", "split_adamw") if on_gpu else ("fused_adamw",)
    recompute = {"name": "recompute", "mode": args.recompute}
    records = []
    for name, fsdp in rows.items():
        case = CommCase(
            name=name,
            size=args.size,
            layers=args.layers,
            micro_batch=args.micro_batch,
            optimizations=(*fast, recompute, fsdp),
            steps=args.steps,
            wait_steps=args.wait_steps,
        )
        plan = CommPlan(cases=(case,), device="cuda" if on_gpu else "cpu")
        out = Path("runs/bench_communication") / re.sub(r"\W+", "-", name)
        try:
            found = launch(slow_link.TARGET, plan, args.ranks, out=out, monitor=False).result()
        except LaunchError as error:  # a row that does not fit stands in the table as such
            found = [Record(name=name, scope=case.scope, reason=str(error).splitlines()[0])]
        records += found
    return records


def _slow(args: argparse.Namespace) -> list[Record]:
    common = {"size": args.size, "layers": args.layers, "micro_batch": args.micro_batch}
    common |= {"steps": args.steps, "wait_steps": args.wait_steps}
    arms = args.rows or list(slow_link.ARMS)
    runs = [
        case for seed in range(args.seeds) for case in slow_link.cases(arms, seed=seed, **common)
    ]
    out = Path("runs/bench_slow_link")
    try:
        if torch.cuda.is_available():
            return slow_link.over_loopback(runs, out)
        return slow_link.over_slow_link(runs, out, rate_mbit=args.rate)
    except HostsError as error:
        reason = f"skipped: {error}"
        return [Record(name=case.name, scope=case.scope, reason=reason) for case in runs]


def _line(record: Record) -> str:
    if record.reason:
        return f"{record.name:<20}{record.reason}"
    ablation = max(record.extra["wait_share_ablation"])
    return (
        f"{record.name:<20}{record.step_ms.median:>10.1f}{record.exposed_comm_share:>9.1%}"
        f"{ablation:>10.1%}{record.peak_gib:>10.2f}{record.extra['final_loss']:>10.4f}"
    )
