"""Checkpoints: whole or ignored, never the last one lost, only what is trained."""

import json
import os
import signal
import subprocess
import sys
from concurrent.futures import Future
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from toy_model import ToyLoader, ToyModel

from wamlab.model.lora import LoRAConfig
from wamlab.model.stored import CheckpointError
from wamlab.model.wam import WAMConfig
from wamlab.train.build import build_model, export
from wamlab.train.checkpoint import Checkpoints, load, read_marker
from wamlab.train.communication import training_group
from wamlab.train.config import TrainConfig
from wamlab.train.trainer import Trainer

CPU = torch.device("cpu")
HERE = Path(__file__).parent


@pytest.fixture(autouse=True)
def group():
    with training_group(CPU):
        yield


def numbers(value):
    return {"w": torch.full((3,), float(value))}


def steps(checkpoints):
    return [read_marker(path)["step"] for path in checkpoints.complete()]


def test_the_newest_complete_ones_stay(tmp_path):
    checkpoints = Checkpoints(tmp_path, 2, CPU)
    for step in (1, 2, 3, 4):
        checkpoints.save(numbers(step), step, {})
        checkpoints.wait()
    assert steps(checkpoints) == [3, 4]
    state = numbers(0)
    load(checkpoints.latest(), state)
    assert torch.equal(state["w"], numbers(4)["w"])


def test_the_only_complete_one_stays_while_the_next_is_written(tmp_path):
    checkpoints = Checkpoints(tmp_path, 1, CPU)
    checkpoints.save(numbers(1), 1, {})
    checkpoints.wait()
    checkpoints.save(numbers(2), 2, {})
    checkpoints._running[0].result()  # written, but not marked: as a kill right here leaves it
    assert steps(checkpoints) == [1]
    again = Checkpoints(tmp_path, 1, CPU)
    assert steps(again) == [1]
    again.save(numbers(2), 2, {})
    again.close()
    assert steps(again) == [2]


def test_the_copy_is_made_before_save_returns(tmp_path):
    checkpoints, state = Checkpoints(tmp_path, 1, CPU), numbers(1)
    checkpoints.save(state, 1, {})
    state["w"].zero_()
    checkpoints.close()
    load(checkpoints.latest(), state)
    assert torch.equal(state["w"], numbers(1)["w"])


def test_a_write_that_fails_is_named_with_the_last_good_one(tmp_path, monkeypatch):
    checkpoints = Checkpoints(tmp_path, 1, CPU)
    checkpoints.save(numbers(1), 1, {})
    checkpoints.wait()
    failed = Future()
    failed.set_exception(OSError("No space left on device"))
    monkeypatch.setattr(dcp, "async_save", lambda *a, **k: failed)
    checkpoints.save(numbers(2), 2, {})
    with pytest.raises(CheckpointError, match=r"step_00000002 .*No space left.*step_00000001"):
        checkpoints.poll()
    assert steps(checkpoints) == [1]


def test_an_incomplete_one_is_refused(tmp_path):
    with pytest.raises(
        CheckpointError, match=r"not a complete checkpoint: it has no complete.json"
    ):
        read_marker(tmp_path)


def test_only_what_is_trained_is_saved(tmp_path):
    config = TrainConfig(
        model=None, data=None, device="cpu", steps=3, save_every=3, out=str(tmp_path)
    )
    trainer = Trainer(config, ToyModel(), ToyLoader)
    trainer.fit()
    stored = dcp.FileSystemReader(trainer.checkpoints.latest()).read_metadata()
    names = set(stored.state_dict_metadata)
    assert names == set(trainer.stepper.state())
    assert not any("encoder" in name for name in names)


def test_adapters_save_little(tmp_path):
    config = TrainConfig(model=WAMConfig(layers=1), lora=LoRAConfig(rank=2))
    model = build_model(config, CPU)
    trained = [n for n, p in model.named_parameters() if p.requires_grad and "vae" not in n]
    kinds = {
        n.split(".")[1] if "lora" not in n else "lora" for n in trained if n.startswith("dit.")
    }
    assert kinds == {"lora", "action_encoder", "state_encoder", "action_decoder"}
    export(model, tmp_path / "weights")
    assert (tmp_path / "weights/adapter_config.json").is_file()


KILLED = """
import os, signal, sys
from toy_model import ToyLoader, ToyModel
from wamlab.train.communication import training_group
from wamlab.train.config import TrainConfig
from wamlab.train.trainer import Trainer
import torch

class Killed(ToyLoader):
    def __iter__(self):
        for number, batch in enumerate(super().__iter__()):
            if number == 2 * 7:
                os.kill(os.getpid(), signal.SIGKILL)
            yield batch

with training_group(torch.device("cpu")):
    fixed = {"model": None, "data": None, "device": "cpu"}
    config = TrainConfig(**fixed, steps=20, save_every=2, out=sys.argv[1])
    Trainer(config, ToyModel(), Killed).fit()
"""


def test_a_killed_run_goes_on_from_the_last_complete_checkpoint(tmp_path):
    """SIGKILL in step 7, with a save every 2: at most the steps since the last complete one go."""
    paths = os.pathsep.join([str(HERE.parent), str(HERE)])
    env = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], env=env, timeout=200)
    assert done.returncode == -signal.SIGKILL
    config = TrainConfig(
        model=None, data=None, device="cpu", steps=20, save_every=2, out=str(tmp_path)
    )
    trainer = Trainer(config, ToyModel(), ToyLoader)
    assert trainer.step_count in (4, 6)
    record = trainer.fit()
    assert len(record.losses) == 20 - trainer.first_step
    rows = [json.loads(line) for line in (tmp_path / "steps.jsonl").read_text().splitlines()]
    assert rows[-1]["step"] == 19
