"""`wamlab bench dit`: the DiT's forward and backward alone, or one operation of its blocks."""

import argparse
from pathlib import Path

import torch

from wamlab.config import positive_int
from wamlab.measure import append_jsonl
from wamlab.model.attention import IMPLEMENTATIONS
from wamlab.model.dit import MODEL_SIZES
from wamlab.train.bench_dit import DiTCase, measure_dit
from wamlab.train.bench_ops import PASSES, OpCase, measure_op

WAYS = ("official", "eager", "compiled", "triton")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `wamlab bench dit`."""
    parser.add_argument("--size", default="tiny", help=f"one of {', '.join(MODEL_SIZES)}")
    parser.add_argument("--layers", type=positive_int, help="fewer blocks of the true width")
    parser.add_argument("--micro-batch", type=positive_int, default=1, help="samples at once")
    parser.add_argument("--way", default="official", choices=WAYS, help="how it computes")
    parser.add_argument("--only", help=f"one operation, every way: {', '.join(PASSES)}")
    parser.add_argument("--attention", default="auto", help=f"auto, {', '.join(IMPLEMENTATIONS)}")
    parser.add_argument("--recompute", default="none", help="none, selective, full or every-K")
    parser.add_argument("--float8", default="none", choices=("none", "tensorwise", "rowwise"),
                        help="scaling of float8 in the large matrix products")  # fmt: skip
    parser.add_argument("--cuda-graph", action="store_true", help="replay a recorded step")
    parser.add_argument("--repeats", type=positive_int, default=10, help="measured steps")
    parser.add_argument("--trace", action="store_true", help="the record also lists the kernels")
    parser.add_argument("--out", type=Path, help="append the record to this JSONL file")


def run(args: argparse.Namespace) -> int:
    """Measure one case and print it."""
    on_gpu = torch.cuda.is_available()
    if args.only:
        return _run_op(args, on_gpu)
    record = measure_dit(
        DiTCase(
            name=args.way,
            size=args.size,
            layers=args.layers,
            micro_batch=args.micro_batch,
            way=args.way,
            attention=args.attention,
            recompute=args.recompute,
            float8=args.float8,
            cuda_graph=args.cuda_graph,
            repeats=args.repeats,
            trace=args.trace,
            precision="bf16" if on_gpu else "fp32",
            device="cuda" if on_gpu else "cpu",
        )
    )
    time = record.step_ms
    mfu = "n/a" if record.mfu is None else f"{record.mfu:.1%}"
    print(
        f"{args.way} {args.size} micro-batch {args.micro_batch}: {time.median:.1f} ms "
        f"({time.q25:.1f} to {time.q75:.1f}, n={time.n}), {record.samples_per_s:.2f} samples/s, "
        f"MFU {mfu}, peak {record.peak_gib:.1f} GiB, first call {record.first_step_s:.1f} s"
    )
    if args.out:
        append_jsonl(args.out, [record])
    return 0


def _run_op(args: argparse.Namespace, on_gpu: bool) -> int:
    records = measure_op(
        OpCase(
            op=args.only,
            size=args.size,
            micro_batch=args.micro_batch,
            precision="bf16" if on_gpu else "fp32",
            device="cuda" if on_gpu else "cpu",
            repeats=args.repeats,
        )
    )
    for record in records:
        if record.reason:
            print(f"{record.name:<28}skipped: {record.reason}")
            continue
        print(
            f"{record.name:<28}{record.step_ms.median:9.3f} ms "
            f"{record.extra['gb_per_s']:8.1f} GB/s, gradients off by "
            f"{record.extra['largest_error']:.1e}"
        )
    if args.out:
        append_jsonl(args.out, records)
    return 0
