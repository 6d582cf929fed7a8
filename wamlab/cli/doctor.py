"""`wamlab doctor`: what this machine offers, and for every missing thing the cure.

Whatever is missing, torch and PyAV too, doctor starts and says so: a package is imported only where
something is asked of it.
"""

import argparse
import importlib.util
import json
import os
import platform
import shutil
from collections.abc import Callable
from importlib import metadata

from wamlab import ffmpeg

PACKAGES = ("torch", "torchcodec", "av", "transformers", "jupyterlab", "deepspeed", "torchao")
Row = dict[str, str | None]


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


def machine_report() -> dict[str, dict[str, Row]]:
    """Return {section: {thing: {"found": text, "cure": text or None}}}."""
    report: dict[str, dict[str, Row]] = {}
    looks: tuple[tuple[str, Callable[[], dict[str, Row]]], ...] = (
        ("support", lambda: {"platform": _support()}),
        ("machine", _machine),
        ("packages", lambda: {name: _package(name) for name in PACKAGES}),
        ("compute", lambda: {"compiler": _compiler()}),
        ("compute", lambda: {"nccl": _nccl(), "gloo": _gloo()}),
        ("video", lambda: {"ffmpeg": _ffmpeg()}),
        ("video", lambda: {"nvdec": _nvdec()}),
        ("decoders", _decoders),
    )
    for section, look in looks:
        report.setdefault(section, {}).update(_rows(section, look))
    return report


def _rows(section: str, look: Callable[[], dict[str, Row]]) -> dict[str, Row]:
    """Return what a look found; one that needs a missing package is a row that names it."""
    try:
        return look()
    except (ImportError, OSError) as error:
        name = (getattr(error, "name", None) or section).partition(".")[0]
        if isinstance(error, ModuleNotFoundError):
            return {name: _row("not installed: nothing more can be said here", _install())}
        why = str(error).strip().partition("\n")[0][:300]
        return {name: _row(f"does not import: {why}", _install())}


def _install() -> str:
    if shutil.which("nvidia-smi") is None:
        return "pip install -e '.[cpu]'"
    return "pip install -e '.[cuda]' (a CUDA 13 driver; an older one: '.[cpu]')"


def _row(found: str, cure: str | None = None) -> Row:
    return {"found": found, "cure": cure}


def _support() -> Row:
    system = platform.system()
    if system == "Linux":
        where = "WSL2" if "microsoft" in platform.release().lower() else "Linux"
        return _row(f"{where} {platform.machine()}: supported in full")
    if system == "Darwin":
        cure = "brew install ffmpeg, or the decoder 'pyav', which brings its own"
        return _row("macOS: supported on the CPU", cure)
    return _row(f"{system}: not supported natively", "use WSL2 (Linux inside Windows)")


def _machine() -> dict[str, Row]:
    import psutil
    import torch

    from wamlab.measure import machine

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


def _gpu(index: int) -> Row:
    import torch

    properties = torch.cuda.get_device_properties(index)
    text = f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB"
    if (properties.major, properties.minor) < (8, 0):
        return _row(f"{text}: not supported (no bf16 before sm_80)", "use the CPU: device='cpu'")
    return _row(text)


def _package(name: str) -> Row:
    extra = {"deepspeed": "pip install -e '.[baseline]'", "torchao": "pip install torchao"}
    try:
        return _row(metadata.version(name))
    except metadata.PackageNotFoundError:
        return _row("not installed", extra.get(name, _install()))


def _compiler() -> Row:
    found = shutil.which(os.environ.get("CXX", "g++")) or shutil.which("clang++")
    if found:
        return _row(found)
    return _row("none: the compute rows will be skipped", "apt-get install g++ (or your system's)")


def _nccl() -> Row:
    import torch

    if not torch.cuda.is_available():
        return _row("not needed without GPUs")
    return _row(".".join(map(str, torch.cuda.nccl.version())))


def _gloo() -> Row:
    import torch

    if torch.distributed.is_available() and torch.distributed.is_gloo_available():
        return _row("available")
    return _row("missing from this torch", "install torch from PyPI")


def _ffmpeg() -> Row:
    try:
        return _row(ffmpeg.describe())
    except ffmpeg.FFmpegError as error:
        return _row("torchcodec cannot decode here", str(error))


def _nvdec() -> Row:
    import torch

    if not torch.cuda.is_available():
        return _row("none without a GPU")
    from wamlab.data.video import decoder_status

    status = decoder_status("torchcodec-cuda")
    return _row(status or "available through torchcodec-cuda")


def _decoders() -> dict[str, Row]:
    from wamlab.data.video import DECODERS, decoder_status

    return {name: _decoder(name, decoder_status(name)) for name in DECODERS}


def _decoder(name: str, status: str | None) -> Row:
    if status is None:
        return _row("works")
    if "not installed" not in status:
        return _row(status)  # a library that does not import says in its message what to do
    if name == "pynvvideocodec":
        return _row(f"{status}; it needs an NVIDIA GPU", "with one: pip install PyNvVideoCodec")
    if name.startswith("torchcodec"):
        missing = importlib.util.find_spec("torchcodec") is None
        return _row("not installed: no module torchcodec", _install()) if missing else _row(status)
    return _row(status, "pip install -e '.[decoders]'")
