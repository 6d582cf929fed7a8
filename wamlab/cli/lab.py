"""`wamlab lab`: JupyterLab, opened on the notebooks."""

import argparse
import os
import sys
from pathlib import Path

from wamlab.config import UserError, positive_int

NOTEBOOKS = Path(__file__).resolve().parents[2] / "notebooks"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `wamlab lab`."""
    parser.add_argument(
        "--port", type=positive_int, help="port of the server (default: JupyterLab's own)"
    )
    parser.add_argument("--no-browser", action="store_true", help="do not open a browser")


def command(args: argparse.Namespace) -> list[str]:
    """Return the command line that starts JupyterLab.

    Raises:
        UserError: wamlab was installed without its notebooks.
    """
    if not NOTEBOOKS.is_dir():
        raise UserError(
            f"no notebooks at {NOTEBOOKS}: they come with the repository; clone it and install it "
            "there with pip install -e '.[cpu]'"
        )
    options = ["--port", str(args.port)] if args.port else []
    options += ["--no-browser"] if args.no_browser else []
    return [sys.executable, "-m", "jupyterlab", str(NOTEBOOKS), *options]


def run(args: argparse.Namespace) -> int:
    """Become JupyterLab, so that its Ctrl-C is its own."""
    line = command(args)
    sys.stdout.flush()
    os.execv(line[0], line)
