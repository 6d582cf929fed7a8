"""`wamlab report`: the table, the page and its pictures from record files; README's tables."""

import argparse
from pathlib import Path

from wamlab.config import ConfigError
from wamlab.jupyter import markdown
from wamlab.jupyter.report import print_ladder, write_report
from wamlab.measure import Record, read_records

DAY_S = 86_400.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `wamlab report`."""
    parser.add_argument("files", nargs="*", type=Path, help="records.jsonl, the baseline first")
    parser.add_argument("--out", type=Path, default=Path("runs/report"), help="folder of the page")
    parser.add_argument("--title", default="A ladder of speed-ups", help="heading of the page")
    parser.add_argument("--samples", type=float, help="also print the days that so many take")
    parser.add_argument(
        "--update", type=Path, metavar="FILE.md", help="rewrite a file's tables from their records"
    )


def run(args: argparse.Namespace) -> int:
    """Rewrite the tables of a Markdown file, or print them and write the page.

    Raises:
        ConfigError: neither files nor --update were given, or nothing can be reported.
    """
    if not args.files and not args.update:
        raise ConfigError("report takes files of records, or --update FILE.md")
    if args.samples is not None and not args.samples > 0:
        raise ConfigError(f"--samples {args.samples:g}: a number above 0")
    if args.update:
        print(f"{args.update}: {markdown.update(args.update)} tables are those of their records")
    if args.files:
        _report(args)
    return 0


def _report(args: argparse.Namespace) -> None:
    records = [record for file in args.files for record in read_records(file)]
    steps = [r for r in records if r.scope == "step"]
    scopes = sorted({r.scope for r in records})
    parts = [scope for scope in scopes if scope in markdown.TABLES and scope != "step"]
    if not steps and not parts:
        raise ConfigError(
            f"nothing to report: scopes {', '.join(scopes) or 'none'} in {len(records)} records; "
            f"there are tables of {', '.join(markdown.TABLES)}"
        )
    for scope in parts:
        print(f"{scope}\n{markdown.table(records, scope)}\n")
    if not steps:
        return
    page = write_report(records, args.out, title=args.title)
    print_ladder(steps)
    if args.samples:
        print("\n".join(days(record, args.samples) for record in steps if record.samples_per_s))
    print(f"\nreport: {page}")


def days(record: Record, samples: float) -> str:
    """Return a line that says how long so many samples take at a row's rate."""
    needed = samples / record.samples_per_s / DAY_S
    return f"{record.name:<28}{needed:10.3g} days for {samples:.3g} samples on this machine"
