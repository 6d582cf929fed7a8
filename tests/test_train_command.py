"""`wamlab train`: files, presets, recipes, and the command line's changes."""

import argparse
import json
import subprocess
import sys

import pytest
import torch

from wamlab.__main__ import main
from wamlab.cli.train import RECIPES, add_arguments, configure, predicted
from wamlab.config import ConfigError, save_json
from wamlab.train.config import PRESETS


def arguments(*words):
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return configure(parser.parse_args(words))


@pytest.mark.parametrize("name", sorted(p.stem for p in RECIPES.glob("*.json")))
def test_recipes_follow_the_public_training(name):
    config = arguments(name)
    assert config.optim.betas == (0.95, 0.999)
    assert (config.optim.lr, config.optim.weight_decay, config.optim.clip_norm) == (1e-5, 1e-5, 1.0)
    assert config.precision == "bf16"
    assert config.model.size.endswith(name.split("-")[1])


def test_a_file_and_the_changes_to_it(tmp_path):
    save_json(PRESETS["cpu"], tmp_path / "run.json")
    config = arguments(
        *(str(tmp_path / "run.json"), "--micro-batch", "2", "--steps", "9"),
        *("--set", "optim.lr=1e-3", "--set", "data.root=elsewhere"),
    )
    assert (config.steps, config.optim.lr, config.data.root) == (9, 1e-3, "elsewhere")
    assert config.optimizations == ({"name": "micro_batch", "size": 2},)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere.json"], r"no such configuration file: nowhere.json"),
        (["cpu", "--set", "optim.lrr=1"], r"did you mean 'lr'"),
        (["cpu", "--set", "steps"], r"--set takes KEY=VALUE, got 'steps'"),
        (["cpu", "--set", "steps=many"], r"TrainConfig.steps takes int, got 'many'"),
        (["cpuu"], r"unknown run 'cpuu'.*did you mean 'cpu'"),
        (["droid-5bb"], r"did you mean 'droid-5b'"),
        (["cpu", "--set", "model=null"], r"model is null"),
        (["cpu", "--set", "data=null"], r"data is null"),
        (["cpu", "--set", "model.layers=0"], r"layers must be at least 1, got 0"),
        (["cpu", "--set", "optim.lr=-1e-4"], r"lr must be at least 0, got -0.0001"),
        (["cpu", "--set", "optim.lr=NaN"], r"lr must be at least 0, got nan"),
        (["cpu", "--set", "optim.lr=Infinity"], r"lr must be at least 0, got inf"),
        (["cpu", "--set", "optim.betas=[1, 0.9]"], r"betas are two shares"),
        (["cpu", "--set", "seed=-1"], r"seed must be at least 0, got -1"),
        (["cpu", "--set", "timeout_s=-5"], r"timeout_s must be at least 0, got -5"),
        (
            ["cpu", "--set", 'optimizations=[{"name": "prefetch", "workers": -2}]'],
            r"workers must be 0 or more, got -2",
        ),
    ],
)
def test_refusals(words, message):
    with pytest.raises(ConfigError, match=message):
        arguments(*words)


def test_memory_is_predicted_without_a_run():
    table = predicted(arguments("cpu"), 1)
    assert "activations" in table
    assert "peak in backward" in table


def test_recipes_are_plain_json():
    for path in RECIPES.glob("*.json"):
        assert json.loads(path.read_text())["name"] == path.stem


QUICK = ("--steps", "1", "--set", "warmup_steps=0", "--set", "wait_steps=0", "--set", "seed=3")


def test_two_ranks_start_from_the_command_itself(tmp_path, data_samples):
    root = f"data.root={data_samples / 'droid_mini'}"
    words = ["cpu", "--nproc", "2", *QUICK, "--set", "model.layers=1", "--set", root]
    command = [sys.executable, "-m", "wamlab", "train", *words, "--out", str(tmp_path)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert ran.returncode == 0, ran.stderr
    assert "median step" in ran.stdout
    (step,) = (tmp_path / "steps.jsonl").read_text().splitlines()
    assert json.loads(step)["step"] == 0
    assert json.loads((tmp_path / "run.json").read_text())["seed"] == 3


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--set", "data.root=nowhere"], "nowhere: no such folder"),
        (["--set", "data.root=nowhere", "--nproc", "2"], "nowhere: no such folder"),
        (["--out", "/proc/x"], "wamlab train: /proc/x: No such file or directory"),
        (["--out", __file__], f"{__file__}: File exists"),
        (["--set", "device=cuda"], "torch sees no CUDA GPU"),
        (["--nproc", "2", "--torchrun", "--role 'x"], '--torchrun "--role \'x": No closing'),
    ],
)
def test_what_a_run_lacks_is_one_line_before_anything_starts(
    words, message, capsys, monkeypatch, data_samples
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.chdir(data_samples.parent)
    assert main(["train", "cpu", *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


@pytest.mark.parametrize("count", ["0", "-1", "two"])
def test_the_number_of_ranks_is_one_or_more(count, capsys):
    assert main(["train", "cpu", "--nproc", count]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"argument --nproc: takes a whole number of 1 or more, got {count!r}" in line
