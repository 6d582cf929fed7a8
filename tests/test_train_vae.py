"""Training the tiny VAE: a few steps on a CPU lower the error; what is saved is whole and small."""

import dataclasses

import pytest
import torch
from conftest import ROOT
from PIL import Image

from wamlab.__main__ import COMMANDS, main
from wamlab.config import ConfigError
from wamlab.measure import read_jsonl
from wamlab.model.vae import load_vae
from wamlab.model.wam import preprocess
from wamlab.train import train_vae as module
from wamlab.train.train_vae import Episodes, VAETrainConfig, load_episodes, psnr, train_vae

CONFIG = VAETrainConfig(
    datasets=("none",),
    target_hw=(32, 48),
    small_hw=(32, 32),
    clips=2,
    statistics_clips=1,
    evaluations=2,
    evaluation_clips=2,
    lr=5e-3,
    device="cpu",
)


def moving_squares(count: int, frames: int = 34) -> list[torch.Tensor]:
    grids = []
    for i in range(count):
        grid = torch.full((frames, 32, 48, 3), 60 + 20 * i, dtype=torch.uint8)
        for t in range(frames):
            grid[t, 8:16, t : t + 10] = torch.tensor([220, 40 * i, 90], dtype=torch.uint8)
        grids.append(grid)
    return grids


@pytest.fixture
def squares(monkeypatch):
    episodes = Episodes(moving_squares(3)), Episodes(moving_squares(1))
    monkeypatch.setattr(module, "load_episodes", lambda config, device: episodes)
    return episodes


def test_a_few_steps_learn_and_the_file_holds_the_statistics(squares, tmp_path, capsys):
    out, log = tmp_path / "vae.safetensors", tmp_path / "log"
    config = dataclasses.replace(CONFIG, steps=10, out=str(out), log=str(log))
    score = train_vae(config)
    looks = read_jsonl(log / "evaluations.jsonl")
    assert [row["step"] for row in looks] == [5, 10]
    assert looks[1]["psnr_db"] > looks[0]["psnr_db"]
    assert f"held-out PSNR {score:.2f} dB" in capsys.readouterr().out
    assert out.stat().st_size < 4e6
    with Image.open(log / "reconstructions.png") as sheet:
        assert sheet.size == (5 * 48, 4 * 32)

    vae = load_vae("tiny", out)
    latents = vae.encode(preprocess(squares[0].grids[0][None, :33], config.target_hw))
    assert latents.mean().abs() < 1
    assert 0.2 < latents.std() < 5


def test_the_clock_follows_minutes_or_steps(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    clock = module.Clock(dataclasses.replace(CONFIG, minutes=2.0))
    now[0], clock.step = 60.0, 500
    assert clock.done == 0.5
    assert clock.lr() == pytest.approx(CONFIG.lr * (0.02 + 0.98 * 0.5))
    clock = module.Clock(dataclasses.replace(CONFIG, steps=8))
    clock.step = 6
    assert clock.done == 0.75
    clock.step = 9
    assert clock.done == 1


def test_psnr_is_its_definition():
    want = torch.rand(1, 3, 2, 4, 4) * 2 - 1
    got = (want + 0.2).clamp(-1, 1)
    error = ((got - want) / 2).square().mean((1, 3, 4))
    assert psnr(want + 0.2, want) == pytest.approx(float((-10 * error.log10()).mean()), abs=1e-4)
    assert psnr(want, want) == pytest.approx(100, abs=1e-3)


def test_episodes_are_decoded_into_grids_and_the_last_ones_are_held_out():
    root = str(ROOT / "data_samples" / "droid_mini")
    config = dataclasses.replace(CONFIG, datasets=(root,), episodes=2, variants=1, held_out=0.5)
    train, held = load_episodes(config, torch.device("cpu"))
    assert len(train.grids) == 2  # one plain, one augmented
    assert len(held.grids) == 1
    plain, augmented = train.grids
    assert plain.shape == augmented.shape == (len(plain), 176, 320, 3)
    assert not torch.equal(plain, augmented)
    clip = preprocess(held.grids[0][None, :5], (64, 128))
    assert clip.shape == (1, 3, 5, 64, 128)


def test_mistakes_are_named():
    with pytest.raises(ConfigError, match="a clip has 33 frames, the longest episode 20"):
        Episodes(moving_squares(2, frames=20))


@pytest.mark.skipif("train-vae" not in COMMANDS, reason="the command is not listed")
def test_the_command_trains(squares, tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr("wamlab.cli.train_vae.train_vae", seen.append)
    out = str(tmp_path / "v.safetensors")
    assert main(["train-vae", "A", "B", "--out", out, "--minutes", "0.5"]) == 0
    assert seen == [VAETrainConfig(datasets=("A", "B"), out=out, minutes=0.5)]
