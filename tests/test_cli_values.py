"""Values that a command refuses before it does anything: exit code 2, and a line with its name."""

import pytest
import torch

from wamlab.__main__ import main

NUMBERS = [
    ("bench augment", "--batch 0"),
    ("bench augment", "--native 0 0"),
    ("bench communication", "--slow-link --rate 0"),
    ("bench compression", "--seeds 0"),
    ("bench decode", "--workers -1"),
    ("bench dit", "--layers 0"),
    ("bench dit", "--micro-batch 0"),
    ("bench dit", "--repeats 0"),
    ("bench encode", "--batch 0"),
    ("bench encode", "--hw -1 5"),
    ("converge toy-cpu", "--seeds -1"),
    ("encode-latents DATA", "--batch 0"),
    ("encode-latents DATA", "--max-gib 0"),
    ("evaluate RUN", "--episodes 0"),
    ("lab", "--port -1"),
    ("profile cpu", "--nproc 0"),
    ("train cpu", "--micro-batch 0"),
    ("train-vae DATA", "--lr nan"),
    ("transcode DATA OUT", "--workers 0"),
]


@pytest.mark.parametrize(("command", "options"), NUMBERS, ids=lambda text: text)
def test_a_number_that_makes_no_sense_is_named_with_its_option(command, options, capsys):
    assert main([*command.split(), *options.split()]) == 2
    option, value = options.removeprefix("--slow-link ").split()[:2]
    (line,) = capsys.readouterr().err.splitlines()
    assert f"argument {option}: takes a" in line
    assert f"got {value!r}; see `wamlab {command.split()[0]}" in line


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("bench augment --impl zzz", "argument --impl: invalid choice: 'zzz' (choose from"),
        ("bench decode --device gpu", "argument --device: invalid choice: 'gpu' (choose from"),
        ("bench dit --attention zz", "unknown attention implementation 'zz': allowed are auto,"),
        ("bench dit --recompute zz", "recompute is none, selective, full or every-K"),
        ("bench dit --out /proc/x", "wamlab bench: /proc/x: No such file or directory"),
        ("bench encode --vae tiny --hw 60 128", "hw (60, 128): tiny takes multiples of 16 pixels"),
        ("bench motion --folder nowhere", "--folder nowhere: no .bvh file there"),
        ("bench motion --only fk nothing", "unknown motion case 'fk'"),
        ("converge toy-cpuu", "did you mean 'toy-cpu'"),
        ("converge toy-gpu --out OUT", "torch sees no CUDA GPU"),
        ("converge toy-cpu --out /proc/x", "wamlab converge: /proc/x: No such file or directory"),
        ("evaluate RUN --device cuda", "torch sees no CUDA GPU"),
        ("profile cpu --active 9", "argument --active: invalid choice: 9"),
        ("train-vae DATA --device gpu", "unknown device 'gpu': allowed are auto, cpu, cuda"),
        ("transcode DATA OUT --crf 999", "crf 999: h264 takes 0 (best) to 51"),
    ],
)
def test_a_word_or_path_that_makes_no_sense_is_one_line(
    argv, message, capsys, tmp_path, monkeypatch
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.chdir(tmp_path)
    assert main(argv.split()) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


def test_a_refused_measurement_leaves_no_file(tmp_path):
    out = tmp_path / "records.jsonl"
    assert main(["bench", "motion", "--folder", str(tmp_path), "--out", str(out)]) == 2
    assert not out.exists()
