"""`wamlab ladder FILE`: run the ladder that a JSON file describes."""

import argparse
import dataclasses
import sys
from pathlib import Path
from typing import Any

from wamlab.config import load_json, lookup, replace
from wamlab.jupyter.ladder import MODES, Mode, Row, ladder
from wamlab.jupyter.launch import LaunchError
from wamlab.jupyter.report import print_ladder, write_report
from wamlab.train.config import PRESETS


@dataclasses.dataclass(frozen=True, kw_only=True)
class LadderFile:
    """A ladder: a preset, what differs from it in every row, and the rows, the baseline first."""

    rows: tuple[Row, ...]
    preset: str = "cpu"
    changes: dict[str, Any] = dataclasses.field(default_factory=dict)
    mode: Mode = "alone"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `wamlab ladder`."""
    parser.add_argument("file", type=Path, help="JSON with rows, preset, changes and mode")
    parser.add_argument("--out", type=Path, default=Path("runs/ladder"), help="folder of results")
    parser.add_argument("--mode", choices=MODES, help="instead of the file's mode")
    parser.add_argument("--fresh", action="store_true", help="measure again what is in the cache")


def run(args: argparse.Namespace) -> int:
    """Run the rows, print the table and write the report."""
    plan = load_json(LadderFile, args.file)
    base = replace(lookup(PRESETS, plan.preset, "preset"), plan.changes)
    mode = args.mode or plan.mode
    try:
        records = ladder(base, plan.rows, args.out, mode=mode, fresh=args.fresh)
    except LaunchError as error:
        print(f"wamlab ladder: the baseline failed: {error}", file=sys.stderr)
        return 1
    print_ladder(records)
    print(f"\nreport: {write_report(records, args.out)}\nrecords: {args.out / 'records.jsonl'}")
    return 0
