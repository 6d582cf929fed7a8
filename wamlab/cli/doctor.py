"""`wamlab doctor`: what this machine offers, and for every missing thing the cure."""

import argparse
import json
import os
import platform
import shutil
from importlib import metadata

import psutil
import torch

from wamlab import ffmpeg
from wamlab.data.video import DECODERS, decoder_status
from wamlab.measure import machine

PACKAGES = ("torch", "torchcodec", "av", "transformers", "jupyterlab", "deepspeed", "torchao")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `wamlab doctor`."""
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Print the report and return 0."""
    report = machine_report()
    if args.json:
        print(json.dumps(report, indent=2))
        return 0
    for section, rows in report.items():
        print(section)
        for name, row in rows.items():
            cure = f"\n{'':22}cure: {row['cure']}" if row.get("cure") else ""
            print(f"  {name:<20}{row['found']}{cure}")
    return 0


def machine_report() -> dict[str, dict[str, dict[str, str | None]]]:
    """Return {section: {thing: {"found": text, "cure": text or None}}}."""
    return {
        "support": {"platform": _support()},
        "machine": _machine(),
        "packages": {name: _package(name) for name in PACKAGES},
        "compute": {"compiler": _compiler(), "nccl": _nccl(), "gloo": _gloo()},
        "video": {"ffmpeg": _ffmpeg(), "nvdec": _nvdec()},
        "decoders": {name: _decoder(name) for name in DECODERS},
    }


def _row(found: str, cure: str | None = None) -> dict[str, str | None]:
    return {"found": found, "cure": cure}


def _support() -> dict[str, str | None]:
    system = platform.system()
    if system == "Linux":
        where = "WSL2" if "microsoft" in platform.release().lower() else "Linux"
        return _row(f"{where} {platform.machine()}: supported in full")
    if system == "Darwin":
        cure = "brew install ffmpeg, or the decoder 'pyav', which brings its own"
        return _row("macOS: supported on the CPU", cure)
    return _row(f"{system}: not supported natively", "use WSL2 (Linux inside Windows)")


def _machine() -> dict[str, dict[str, str | None]]:
    here, memory = machine(), psutil.virtual_memory().total / 2**30
    rows = {"processor": _row(f"{here['cpu']}, {here['cores']} cores")}
    rows["memory"] = _row(f"{memory:.0f} GiB")
    if not torch.cuda.is_available():
        cure = None
        if torch.version.cuda:
            cure = "this torch is a CUDA build, but no driver answers: see `nvidia-smi`"
        rows["gpu"] = _row("none: everything runs on the CPU", cure)
    for i in range(torch.cuda.device_count()):
        rows[f"gpu {i}"] = _gpu(i)
    return rows


def _gpu(index: int) -> dict[str, str | None]:
    properties = torch.cuda.get_device_properties(index)
    text = f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB"
    if (properties.major, properties.minor) < (8, 0):
        return _row(f"{text}: not supported (no bf16 before sm_80)", "use the CPU: device='cpu'")
    return _row(text)


def _package(name: str) -> dict[str, str | None]:
    extra = {"deepspeed": "pip install -e '.[baseline]'", "torchao": "pip install torchao"}
    try:
        return _row(metadata.version(name))
    except metadata.PackageNotFoundError:
        return _row("not installed", extra.get(name, "pip install -e '.[cpu]'"))


def _compiler() -> dict[str, str | None]:
    found = shutil.which(os.environ.get("CXX", "g++")) or shutil.which("clang++")
    if found:
        return _row(found)
    return _row("none: the compute rows will be skipped", "apt-get install g++ (or your system's)")


def _nccl() -> dict[str, str | None]:
    if not torch.cuda.is_available():
        return _row("not needed without GPUs")
    return _row(".".join(map(str, torch.cuda.nccl.version())))


def _gloo() -> dict[str, str | None]:
    if torch.distributed.is_available() and torch.distributed.is_gloo_available():
        return _row("available")
    return _row("missing from this torch", "install torch from PyPI")


def _ffmpeg() -> dict[str, str | None]:
    try:
        return _row(ffmpeg.describe())
    except ffmpeg.FFmpegError as error:
        return _row("torchcodec cannot decode here", str(error))


def _nvdec() -> dict[str, str | None]:
    if not torch.cuda.is_available():
        return _row("none without a GPU")
    status = decoder_status("torchcodec-cuda")
    return _row(status or "available through torchcodec-cuda")


def _decoder(name: str) -> dict[str, str | None]:
    status = decoder_status(name)
    cure = "pip install -e '.[decoders]'" if status and "not installed" in status else None
    return _row(status or "works", cure)
