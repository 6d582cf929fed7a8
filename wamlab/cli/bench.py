"""`wamlab bench PART`: time one part alone. A part is the file wamlab/cli/bench_PART.py."""

import argparse
import importlib

from wamlab.config import Parser, check_name
from wamlab.measure import append_jsonl

PARTS: dict[str, str] = {
    "decode": "video decoders, frames compared in the same run",
    "encode": "the frozen encoders",
    "augment": "augmentation on the CPU and on the device",
    "dit": "the DiT's forward and backward",
    "motion": "the ratios of the motion track",
    "communication": "the wait for communication, and what hides it",
    "compression": "gated gradient compression at equal bytes",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the part and leave its options to it."""
    parser.description = "Time one part alone: " + "; ".join(f"{k}: {v}" for k, v in PARTS.items())
    parser.add_argument("part", metavar="|".join(PARTS), help="the part to time")
    parser.add_argument("options", nargs=argparse.REMAINDER, help="see `wamlab bench PART --help`")


def run(args: argparse.Namespace) -> int:
    """Run one part."""
    check_name(args.part, PARTS, "part")
    module = importlib.import_module(f"wamlab.cli.bench_{args.part}")
    parser = Parser(prog=f"wamlab bench {args.part}", description=f"Time {PARTS[args.part]}.")
    module.add_arguments(parser)
    options = parser.parse_args(args.options)
    if not options.out:
        return module.run(options)
    append_jsonl(options.out, ())  # a path that cannot be written is refused before the work
    try:
        return module.run(options)
    finally:
        if not options.out.stat().st_size:
            options.out.unlink()
