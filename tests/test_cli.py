"""The command line: every mistake is one line that says what is allowed, and exit code 2."""

import argparse
import importlib
import json
import pkgutil
import re
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

import wamlab.cli
from wamlab.__main__ import COMMANDS, main
from wamlab.cli import demo, doctor
from wamlab.measure import Record, append_jsonl, read_records


def refused(capsys, *argv: str) -> str:
    """Return the one line that a refused command prints."""
    assert main(list(argv)) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1, lines
    return lines[0]


def test_help_names_every_command(capsys):
    assert main([]) == 0
    text = capsys.readouterr().out
    assert all(name in text for name in COMMANDS)


def test_every_command_has_its_options(capsys):
    for name in COMMANDS:
        with pytest.raises(SystemExit) as stop:
            main([name, "--help"])
        assert stop.value.code == 0
        assert f"wamlab {name}" in capsys.readouterr().out


@pytest.mark.parametrize("module", [m.name for m in pkgutil.iter_modules(wamlab.cli.__path__)])
def test_every_option_says_in_words_what_it_is(module):
    parser = argparse.ArgumentParser(prog=module)
    importlib.import_module(f"wamlab.cli.{module}").add_arguments(parser)
    for action in parser._actions:
        assert action.help, f"{module} {action.dest}: no help"
        assert "{" not in action.help, f"{module} {action.dest}: {action.help}"


def test_bench_alone_names_its_parts(capsys):
    assert "decode|encode" in refused(capsys, "bench")


def test_an_unknown_command_is_refused_with_the_nearest(capsys):
    assert "did you mean 'demo'" in refused(capsys, "dmeo")


def test_the_version_is_the_packages(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"wamlab {metadata.version('wamlab')}\n"


def test_a_description_keeps_its_words(capsys):
    for name, word in (("train", "JSON"), ("train-vae", "VAE"), ("lab", "JupyterLab")):
        with pytest.raises(SystemExit):
            main([name, "--help"])
        assert word in capsys.readouterr().out.split("positional arguments")[0].split("options")[0]


@pytest.mark.parametrize("command", ["train", "ladder", "converge"])
def test_a_file_that_is_not_text_is_named(command, tmp_path, capsys):
    path = tmp_path / "run.json"
    path.write_bytes(b"\xff\xfe\x00")
    assert f"{path} is not a UTF-8 text file" in refused(capsys, command, str(path))


def test_a_value_of_a_ladder_file_is_refused_by_its_field(tmp_path, capsys):
    path = tmp_path / "ladder.json"
    path.write_text('{"rows": [{"name": "official"}], "changes": {"steps": "x"}}')
    assert "TrainConfig.steps takes int, got 'x'" in refused(capsys, "ladder", str(path))


def test_an_unknown_option_is_refused(capsys):
    line = refused(capsys, "demo", "--sise", "tiny")
    assert "unrecognized arguments: --sise tiny; see `wamlab demo --help`" in line


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--data", "nowhere"], "--data nowhere: no such folder"),
        (["--size", "tinny"], "unknown model size 'tinny'.*did you mean 'tiny'"),
        (["--embodiment", "droit"], "unknown embodiment 'droit'.*did you mean 'droid'"),
        (["--video", "none.mp4"], "none.mp4: no such file"),
        (["--repeats", "0"], "--repeats 0: at least 1"),
    ],
)
def test_the_demo_refuses_bad_input_before_it_starts(capsys, tmp_path, argv, message):
    line = refused(capsys, "demo", "--out", str(tmp_path / "out"), *argv)
    assert re.search(message, line), line
    assert not (tmp_path / "out" / "report.html").exists()


def test_a_data_set_without_a_needed_column_is_refused_and_leaves_no_result(
    capsys, tmp_path, data_samples
):
    root = tmp_path / "broken"
    shutil.copytree(data_samples / "droid_mini", root)
    for table in root.rglob("*.parquet"):
        _drop_column(table, "action")
    earlier = tmp_path / "out" / "records.jsonl"
    append_jsonl(earlier, [Record(name="earlier")])
    line = refused(capsys, "demo", "--data", str(root), "--out", str(tmp_path / "out"))
    assert "action" in line
    assert "read as --embodiment toy; there are also droid, libero" in line
    assert not (tmp_path / "out" / "report.html").exists()
    assert read_records(earlier)[0].name == "earlier"


def _drop_column(table: Path, name: str) -> None:
    import pyarrow.parquet as pq

    pq.write_table(pq.read_table(table).drop_columns([name]), table)


def test_the_demo_writes_its_report_from_the_rows_it_measured(tmp_path, capsys, monkeypatch):
    rows = [
        Record(name="official", samples_per_s=1.0, losses=(2.0, 1.0)),
        Record(name="compute", dimension="compute", reason="compile needs g++"),
    ]
    monkeypatch.setattr(demo, "ladder", lambda *_, **__: rows)
    monkeypatch.setattr(demo, "_time_decoders", lambda *_: [])
    assert main(["demo", "--device", "cpu", "--out", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "needs g++" in out
    assert "00_machine" in out
    assert "needs g++" in (tmp_path / "report.html").read_text()


def test_the_rows_of_the_demo_name_known_optimizations():
    from wamlab.train.optimizations import build_optimizations

    for on_gpu in (False, True):
        names = [row.name for row in demo.rows(on_gpu)]
        assert names[0] == "official"
        assert len(names) == 6
    for row in demo.rows(False):
        build_optimizations(row.optimizations)


def test_doctor_reports_as_text_and_as_json(capsys):
    assert main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert set(report) == {"support", "machine", "packages", "compute", "video", "decoders"}
    assert report["packages"]["torch"]["found"][0].isdigit()
    assert main(["doctor"]) == 0
    assert "ffmpeg" in capsys.readouterr().out


def test_doctor_names_the_cure_for_a_missing_compiler(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setattr(doctor.shutil, "which", lambda name: None)
    assert "g++" in doctor._compiler()["cure"]


DOCTOR_WITHOUT = """
import sys
sys.modules[sys.argv[1]] = None
from wamlab.__main__ import main
sys.exit(main(["doctor", "--json"]))
"""


@pytest.mark.parametrize("package", ["av", "torch"])
def test_doctor_starts_without_what_it_looks_for(package):
    run = subprocess.run(
        [sys.executable, "-c", DOCTOR_WITHOUT, package], capture_output=True, text=True, check=True
    )
    report = json.loads(run.stdout)
    assert set(report) == {"support", "machine", "packages", "compute", "video", "decoders"}
    section = {"av": "decoders", "torch": "compute"}[package]
    assert report[section][package]["found"].startswith("not installed")
    assert "pip install -e '.[c" in report[section][package]["cure"]


@pytest.mark.parametrize(
    ("driver", "extra"), [(None, "'.[cpu]'"), ("/usr/bin/nvidia-smi", "'.[cuda]'")]
)
def test_doctor_cures_each_decoder_with_what_brings_it(monkeypatch, driver, extra):
    monkeypatch.setattr(doctor.shutil, "which", lambda name: driver)
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: None)
    lost = "does not import: torchcodec is not installed: pip install"
    assert extra in doctor._decoder("torchcodec", lost)["cure"]
    assert doctor._decoder("torchcodec-cuda", "needs an NVIDIA GPU")["cure"] is None
    assert "decoders" in doctor._decoder("opencv", "not installed: no module cv2")["cure"]
    row = doctor._decoder("pynvvideocodec", "not installed: no module PyNvVideoCodec")
    assert "needs an NVIDIA GPU" in row["found"]
    assert row["cure"] == "with one: pip install PyNvVideoCodec"
    assert doctor._decoder("pyav", None) == {"found": "works", "cure": None}
