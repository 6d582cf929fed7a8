"""`wamlab bench decode`: time the decoders on any video or data set."""

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from wamlab.config import ConfigError, natural, positive, positive_int
from wamlab.data.bench_decode import PATTERNS, gain_parts, re_encode, time_decoders
from wamlab.data.bench_workers import sweep_workers
from wamlab.data.transcode import TranscodeConfig
from wamlab.data.video import DECODERS
from wamlab.measure import Record, append_jsonl

SAMPLES = Path(__file__).resolve().parents[2] / "data_samples" / "droid_mini"
# the files that people have: DROID's long groups at two sizes, LeRobot's short AV1 ones, between
MATRIX = (("h264", 2), ("h264", 15), ("h264", 250), ("av1", 2), ("av1", 250))
SIZES = ((180, 320), (480, 640))
DECODE_HEAD = ("ms/sample", "quartiles", "CPU ms", "quartiles", "max diff")
SWEEP_HEAD = ("workers", "samples/s", "CPU ms", "spread", "GiB", "main loop slower")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `wamlab bench decode`."""
    parser.add_argument(
        "source", nargs="*", type=Path, default=[SAMPLES],
        help="a video, a data set, or several videos that are views of one episode",
    )  # fmt: skip
    parser.add_argument("--decoders", nargs="+", default=list(DECODERS), metavar="NAME",
                        help=f"only these: {', '.join(DECODERS)}")  # fmt: skip
    parser.add_argument("--pattern", nargs="+", default=["window"], choices=tuple(PATTERNS),
                        help="which frames a sample asks for (default: window)")  # fmt: skip
    parser.add_argument("--cached", action="store_true", help="keep decoders open between samples")
    parser.add_argument(
        "--samples", type=positive_int, default=10, help="measured samples (default 10)"
    )
    parser.add_argument("--threads", type=natural, default=1, help="FFmpeg threads a decoder")
    parser.add_argument("--views-at-once", action="store_true", help="a thread for each view")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"),
                        help="where frames are wanted")  # fmt: skip
    parser.add_argument("--matrix", type=Path, metavar="FOLDER",
                        help="re-encode the first episode into FOLDER at every codec and size, "
                        "and time each")  # fmt: skip
    parser.add_argument(
        "--workers", nargs="+", type=natural, default=[], help="also sweep processes"
    )
    parser.add_argument("--seconds", type=positive, default=3.0, help="of each step of the sweep")
    parser.add_argument("--out", type=Path, help="append the records to this JSONL file")


def run(args: argparse.Namespace) -> int:
    """Measure, print, and return 1 if a decoder returned other frames."""
    if args.device.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(f"--device {args.device}: torch sees no CUDA GPU")
    records = []
    for source in _sources(args):
        for pattern in args.pattern:
            rows = time_decoders(
                source,
                args.decoders,
                pattern,
                cached=args.cached,
                samples=args.samples,
                threads=args.threads,
                views_at_once=args.views_at_once,
                device=args.device,
            )
            print_decode(rows)
            records += rows
    if args.workers:
        rows = sweep_workers(
            _source(args.source), args.decoders, args.workers,
            seconds=args.seconds, device=args.device,
        )  # fmt: skip
        print_sweep(rows)
        records += rows
    if args.out:
        append_jsonl(args.out, records)
    return int(any(r.wrong for r in records))


def _source(paths: list[Path]) -> Path | list[Path]:
    return paths[0] if len(paths) == 1 else paths


def _sources(args: argparse.Namespace) -> list[Path | list[Path]]:
    source = _source(args.source)
    if args.matrix is None:
        return [source]
    configs = [
        TranscodeConfig(codec=codec, gop=gop, height=height, width=width)
        for height, width in SIZES
        for codec, gop in MATRIX
    ]
    return [re_encode(source, args.matrix, config) for config in configs]


def _names(records: Sequence[Record]) -> Column:
    """Return the first column: a name is never cut, however narrow the terminal."""
    return Column("decoder", no_wrap=True, min_width=max(len(r.name) for r in records))


def _failures(records: Sequence[Record]) -> list[str]:
    """Return a line under the table for each decoder that has no numbers."""
    return [escape(f"{r.name}: {r.wrong or r.reason}") for r in records if r.wrong or r.reason]


def print_decode(records: Sequence[Record]) -> None:
    """Print one run of `time_decoders` as a table, and what its gain is made of."""
    facts = records[0].extra
    title = (
        f"{records[0].data}: {facts['codec']}, GOP {facts['gop']}, "
        f"{facts['height']}x{facts['width']}, {facts['views']} views, {facts['pattern']}: "
        f"{facts['frames_per_view']} frames a view, {facts['frames_decoded']:.0f} decoded a sample"
    )
    table = Table(_names(records), *DECODE_HEAD)
    for record in records:
        if record.step_ms is None:
            continue
        cpu = record.extra["cpu_ms"]
        wall = record.step_ms
        table.add_row(
            record.name,
            f"{wall.median:.0f}",
            f"{wall.q25:.0f}–{wall.q75:.0f}",
            f"{cpu['median']:.0f}",
            f"{cpu['q25']:.0f}–{cpu['q75']:.0f}",
            str(record.extra["max_diff"]),
        )
    console = Console()
    console.print(title, table, *_failures(records), sep="\n")
    if {"pyav-naive", "pyav", "torchcodec"} <= {r.name for r in records if r.step_ms}:
        parts = gain_parts(records)
        console.print(", ".join(f"{name} {ratio:.2f}x" for name, ratio in parts.items()))


def print_sweep(records: Sequence[Record]) -> None:
    """Print one run of `sweep_workers` as a table."""
    table = Table(_names(records), *SWEEP_HEAD)
    for record in records:
        if record.reason:
            continue
        facts = record.extra
        table.add_row(
            record.name,
            str(facts["workers"]),
            f"{record.samples_per_s:.1f}",
            f"{facts['cpu_ms']['median']:.0f}",
            f"{facts['cpu_ms_spread']:.0f}",
            f"{facts['rss_gib']:.2f}",
            f"{facts['slowdown']:.2f}x",
        )
    Console().print(table, *_failures(records), sep="\n")
