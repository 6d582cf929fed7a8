"""`wamlab profile run.json`: where the steps of a run spend their time, on every rank."""

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch

from wamlab.cli.train import configure
from wamlab.config import natural, positive_int, replace
from wamlab.jupyter.launch import launch
from wamlab.measure import Record, append_jsonl
from wamlab.trace import Event, diff_kernels, read_trace
from wamlab.train.profile import ProfileConfig

SHOWN = 5  # kernels of each kind in a comparison


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `wamlab profile`."""
    parser.add_argument("run", help="a TrainConfig as JSON, a preset or a recipe, as for `train`")
    parser.add_argument("--micro-batch", type=positive_int, help="samples a rank computes at once")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE",
                        help="any field of the run, dotted, as JSON")  # fmt: skip
    parser.add_argument("--nproc", type=positive_int, help="ranks (default: every GPU, or 1)")
    parser.add_argument("--warmup", type=natural, default=3, help="steps before any is timed")
    parser.add_argument("--steps", type=positive_int, default=8, help="steps timed part by part")
    parser.add_argument(
        "--active", type=int, choices=(1, 2, 3), default=1, help="steps in the trace, at most 3"
    )
    parser.add_argument("--out", type=Path, default=Path("runs/profile"), help="folder of traces")
    parser.add_argument("--against", type=Path, help="compare with this trace of another run")
    parser.add_argument("--record", type=Path, help="append the record to this JSONL file")


def run(args: argparse.Namespace) -> int:
    """Profile a run in fresh processes and print what it found."""
    before = read_trace(args.against) if args.against else None  # refused before anything runs
    train = configure(argparse.Namespace(**vars(args) | {"steps": None, "out": None}))
    config = ProfileConfig(
        train=replace(train, name=args.run if train.name == "train" else train.name),
        out=str(args.out.resolve()),
        warmup=args.warmup,
        steps=args.steps,
        active=args.active,
    )
    ranks = args.nproc or max(1, torch.cuda.device_count())
    record = launch("wamlab.train.profile:profile_run", config, ranks, monitor=False).result()
    print(summary(record))
    if before:
        print(difference(before, read_trace(record.extra["traces"][0])))
    if args.record:
        append_jsonl(args.record, [record])
    return 0


def summary(record: Record) -> str:
    """Return a profile as text: parts, groups of kernels or operators, counts, ranks, traces."""
    split, ranks, step = record.extra["split"], record.extra["ranks"], record.step_ms
    groups = split["gpu_ms"] or split["cpu_ms"]
    lines = [
        f"step {step.median:.1f} ms ({step.q25:.1f} to {step.q75:.1f}, n={step.n}), each part "
        "waited for",
        _row("parts (ms)", record.parts_ms),
        _row("in the trace (ms)", split["parts_ms"]),
        _row("GPU (ms)" if split["gpu_ms"] else "operators (ms)", groups),
        _row("counts", split["counts"] | record.extra["compiler"]),
    ]
    if split["idle_ms"] is not None:
        lines.append(f"GPU idle {split['idle_ms']:.1f} ms")
    if split["comm_ms"] is not None:
        exposed = split["exposed_comm_ms"]
        lines.append(f"communication {split['comm_ms']:.1f} ms, of it exposed {exposed:.1f}")
    if record.world_size > 1:
        slow, fast = ranks["slowest_rank"], ranks["fastest_rank"]
        lines.append(f"slowest rank {slow}, fastest {fast}, skew {ranks['skew']:.1%}")
    lines += [f"trace: {path}, opens at https://ui.perfetto.dev" for path in record.extra["traces"]]
    return "\n".join(lines)


def difference(before: Sequence[Event], after: Sequence[Event]) -> str:
    """Return what the second run's trace lacks, has anew, and runs faster or slower."""
    found = diff_kernels(before, after)
    lines = []
    for kind in ("gone", "new"):
        rows = sorted(found[kind].items(), key=lambda row: -row[1][1])
        total = sum(ms for _, (_, ms) in rows)
        lines.append(f"{kind}: {len(rows)} kernels, {total:.1f} ms")
        lines += [f"  {ms:9.2f} ms {calls:>6} × {name[:80]}" for name, (calls, ms) in rows[:SHOWN]]
    rows = sorted(found["changed_ms"].items(), key=lambda row: -abs(row[1]))
    lines.append(f"in both: {len(rows)} kernels, {sum(ms for _, ms in rows):+.1f} ms")
    lines += [f"  {ms:+9.2f} ms          {name[:80]}" for name, ms in rows[:SHOWN]]
    return "\n".join(lines)


def _row(title: str, values: dict[str, float]) -> str:
    shown = sorted(((k, v) for k, v in values.items() if v), key=lambda row: -row[1])
    return f"{title}: " + ", ".join(f"{k} {v:.4g}" for k, v in shown)
