"""`wamlab check DATASET`: every fault of a data set in one pass; exit code 1 if one would spoil
training."""

import argparse
import json
from pathlib import Path

from wamlab.config import lookup, to_dict
from wamlab.data.check import check_dataset
from wamlab.data.embodiment import EMBODIMENTS, Embodiment
from wamlab.data.lerobot import find_root
from wamlab.data.metadata import DatasetError, read_embodiment_tag


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("dataset", help="a LeRobot data set's folder, or its hub id")
    parser.add_argument(
        "--embodiment",
        help="the robot to train as; default the one that the data set names, if wamlab knows it",
    )
    parser.add_argument(
        "--frames", action="store_true", help="decode every frame and compare its stored checksum"
    )
    parser.add_argument(
        "--write-checksums", action="store_true", help="decode every frame and store its checksum"
    )
    parser.add_argument("--threads", type=int, help="files at the same time; default all cores")
    parser.add_argument("--json", action="store_true", help="print the faults as one JSON object")


def run(args: argparse.Namespace) -> int:
    """Check, print and return 1 if a fault would spoil training."""
    root = find_root(args.dataset)
    embodiment = _embodiment(root, args.embodiment)
    checksums = "write" if args.write_checksums else "compare" if args.frames else None
    faults = check_dataset(
        root, embodiment, checksums=checksums, threads=args.threads, progress=not args.json
    )
    bad = sum(fault.spoils for fault in faults)
    if args.json:
        values = {"dataset": str(root), "embodiment": embodiment and embodiment.name}
        values |= {"faults": to_dict(faults), "ok": not bad}
        print(json.dumps(values, indent=2))
        return 1 if bad else 0
    for fault in faults:
        print(f"{'fault' if fault.spoils else 'note '}  {fault}")
    as_what = f" as {embodiment.name}" if embodiment else ""
    print(f"{root}{as_what}: {bad} faults that would spoil training, {len(faults) - bad} notes")
    return 1 if bad else 0


def _embodiment(root: Path, name: str | None) -> Embodiment | None:
    if name is not None:
        return lookup(EMBODIMENTS, name, "embodiment")
    try:
        tag = read_embodiment_tag(root)
    except DatasetError:
        return None  # one of the faults that check_dataset lists
    return EMBODIMENTS.get(str(tag).removeprefix("oxe_"))
