"""`wamlab report FILE...`: the table, the page and its pictures from record files."""

import argparse
from pathlib import Path

from wamlab.jupyter.report import print_ladder, write_report
from wamlab.measure import read_records


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `wamlab report`."""
    parser.add_argument("files", nargs="+", type=Path, help="records.jsonl, the baseline first")
    parser.add_argument("--out", type=Path, default=Path("runs/report"), help="folder of the page")
    parser.add_argument("--title", default="A ladder of speed-ups", help="heading of the page")


def run(args: argparse.Namespace) -> int:
    """Read the records, print the table and write the page."""
    records = [record for file in args.files for record in read_records(file)]
    page = write_report(records, args.out, title=args.title)
    print_ladder([r for r in records if r.scope == "step"])
    print(f"\nreport: {page}")
    return 0
