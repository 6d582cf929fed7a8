"""`wamlab bench encode`: the frozen encoders, the public way beside ours in one run."""

import argparse
from pathlib import Path

import torch

from wamlab.config import UserError, positive_int, unknown_name
from wamlab.measure import Record, append_jsonl
from wamlab.model import bench_encode
from wamlab.model.bench_encode import EncodeCase
from wamlab.model.vae import VAE_SIZES

SIZES = {"tiny": (64, 128), "wan2.2": (160, 320), "wan2.1": (352, 640)}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `wamlab bench encode`."""
    on_gpu = torch.cuda.is_available()
    parser.add_argument("--vae", default="wan2.2" if on_gpu else "tiny",
                        help=f"video encoder: {', '.join(VAE_SIZES)}")  # fmt: skip
    parser.add_argument(
        "--batch", type=positive_int, default=8 if on_gpu else 2, help="clips a batch"
    )
    parser.add_argument("--frames", type=positive_int, default=33, help="of a clip (default 33)")
    parser.add_argument("--hw", type=positive_int, nargs=2, metavar=("H", "W"),
                        help="pixels of a frame (default: the encoder's own)")  # fmt: skip
    parser.add_argument("--only", nargs="+", help="rows whose name holds one of these words")
    parser.add_argument(
        "--conditioning", action="store_true", help="add rows with `y`, the first frame"
    )
    parser.add_argument("--autotune", action="store_true", help="add rows slow to compile")
    parser.add_argument("--others", action="store_true", help="the text and the image encoder")
    parser.add_argument("--repeats", type=positive_int, default=10, help="measured calls a row")
    parser.add_argument("--out", type=Path, help="append the records to this JSONL file")


def run(args: argparse.Namespace) -> int:
    """Measure the rows and print a table."""
    on_gpu = torch.cuda.is_available()
    base = EncodeCase(
        vae=args.vae,
        batch=args.batch,
        frames=args.frames,
        hw=tuple(args.hw or SIZES.get(args.vae, SIZES["tiny"])),
        precision="bf16" if on_gpu else "fp32",
        device="cuda" if on_gpu else "cpu",
        repeats=args.repeats,
    )
    rows = bench_encode.ladder(base, conditioning=args.conditioning, autotune=args.autotune)
    cases = _chosen(rows, args.only)
    rate = bench_encode.measure_matmul(
        torch.device(base.device), base.precision, 8192 if on_gpu else 512
    )
    flops = bench_encode.encode_flops(base.vae, base.frames, base.hw)
    print(
        f"{args.vae}, {args.frames} frames of {base.hw[0]}x{base.hw[1]}, batch {args.batch}: "
        f"{flops / 1e12:.3g} TFLOP a clip; a matrix product runs at {rate / 1e12:.0f} TFLOP/s: "
        f"floor {1e3 * flops / rate:.2f} ms a clip\n"
    )
    records = []
    for case in cases:
        records.append(bench_encode.measure_encode(case))
        print(_line(records[-1], rate), flush=True)
        if args.out:
            append_jsonl(args.out, records[-1:])
    if args.others:
        others = _others(base.device)
        if args.out:
            append_jsonl(args.out, others)
    return 0


def _chosen(cases: list[EncodeCase], words: list[str] | None) -> list[EncodeCase]:
    if not words:
        return cases
    found = [c for c in cases if any(word in c.name for word in words)]
    if not found:
        raise UserError(unknown_name(" ".join(words), [c.name for c in cases], "row"))
    return found


def _line(record: Record, rate: float) -> str:
    if record.reason:
        return f"{record.name:<52} {record.reason}"
    extra = record.extra
    return (
        f"{record.name:<52} {extra['sample_ms']:8.2f} ms a clip  "
        f"{extra['tflops_per_s']:6.1f} TFLOP/s ({1e12 * extra['tflops_per_s'] / rate:4.0%})  "
        f"peak {record.peak_gib:5.1f} GiB  off {extra['latents_rel_diff']:.2e}  "
        f"first {record.first_step_s:.0f} s"
    )


def _others(device: str) -> list[Record]:
    on_gpu = device == "cuda"
    text, image = ("umt5-xxl", "clip-vit-h") if on_gpu else ("tiny", "tiny")
    records = [
        bench_encode.measure_text(text, batch, positions, device=device)
        for batch, positions in ((1, 512), (8, 512), (8, 64))
    ]
    records += [bench_encode.measure_image(image, batch, device=device) for batch in (1, 8)]
    for record in records:
        print(f"{record.name:<52} {record.extra['sample_ms']:8.2f} ms a sample")
    return records
