"""`wamlab transcode DATASET OUT`: re-encode a data set's videos once, for training."""

import argparse
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from wamlab.config import ConfigError, natural, positive_int
from wamlab.data.bench_decode import time_decoders
from wamlab.data.transcode import ENCODERS, JOURNAL, TranscodeConfig, transcode_dataset
from wamlab.measure import Record, append_jsonl


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `wamlab transcode`."""
    default = TranscodeConfig()
    parser.add_argument("dataset", type=Path, help="a LeRobot data set (v2.0, v2.1, v3.0)")
    parser.add_argument("out", type=Path, help="the new data set; a stopped run is continued")
    parser.add_argument("--codec", default=default.codec, help=f"one of {', '.join(ENCODERS)}")
    parser.add_argument("--gop", type=int, default=default.gop, help="frames between keyframes")
    parser.add_argument("--height", type=int, help="in pixels (default: unchanged)")
    parser.add_argument("--width", type=int, help="in pixels (default: unchanged)")
    parser.add_argument("--crf", type=int, help="the encoder's quality, lower is better")
    parser.add_argument("--workers", type=positive_int, default=1, help="files encoded at once")
    parser.add_argument("--decoder", default="torchcodec", help="times the gain at the end")
    parser.add_argument(
        "--samples", type=natural, default=10, help="samples timed; 0 times nothing"
    )


def run(args: argparse.Namespace) -> int:
    """Transcode, print what changed and what decoding gains."""
    config = TranscodeConfig(
        codec=args.codec, gop=args.gop, height=args.height, width=args.width, crf=args.crf
    )
    with tqdm(unit="file", file=sys.stderr) as bar:

        def report(done: int, total: int) -> None:
            bar.total, bar.n = total, done
            bar.refresh()

        rows = transcode_dataset(
            args.dataset, args.out, config, workers=args.workers, report=report
        )
    Console().print(changes(rows))
    print(f"every file, with its checksum before and after: {args.out / JOURNAL}")
    if args.samples:
        records = measured_gain(args.dataset, args.out, args.decoder, args.samples)
        append_jsonl(args.out / "decode.jsonl", records)
        before, after = (r.step_ms.median for r in records)
        print(
            f"{args.decoder}: {before:.1f} ms a window before, {after:.1f} ms after: "
            f"{before / after:.2f}x (records: {args.out / 'decode.jsonl'})"
        )
    return 0


def changes(rows: Sequence[dict[str, Any]]) -> Table:
    """Return the table of what became of the files: one row a kind of change."""
    table = Table("change", "files", "codec", "size", "GOP", "MB")
    counts = Counter(row["change"] for row in rows)
    for change, count in counts.items():
        chosen = [row for row in rows if row["change"] == change]
        if change != "re-encoded":
            table.add_row(change, str(count), "", "", "", f"{_mb(r['bytes'] for r in chosen):.2f}")
            continue
        cells = [_arrow(chosen, key) for key in ("codec", "size", "gop")]
        size = [_mb(row[when]["bytes"] for row in chosen) for when in ("before", "after")]
        table.add_row(change, str(count), *cells, f"{size[0]:.2f} → {size[1]:.2f}")
    return table


def _arrow(rows: Sequence[dict[str, Any]], key: str) -> str:
    before, after = (sorted({str(r[when][key]) for r in rows}) for when in ("before", "after"))
    return f"{', '.join(before[:3])} → {', '.join(after[:3])}"


def _mb(sizes: Any) -> float:
    return sum(sizes) / 1e6


def measured_gain(before: Path, after: Path, decoder: str, samples: int) -> list[Record]:
    """Return the decode times of the same windows in both data sets.

    Raises:
        ConfigError: the decoder cannot run here, or cannot read one of them.
    """
    records = [time_decoders(root, [decoder], samples=samples)[0] for root in (before, after)]
    for record in records:
        if record.step_ms is None:
            raise ConfigError(f"{decoder}: {record.reason or record.wrong}")
    return records
