"""wamlab.train.profile: a toy run, profiled on one rank and on two."""

import dataclasses

import pytest
from toy_model import ToyLoader, ToyModel

from wamlab.__main__ import main
from wamlab.cli import profile as command
from wamlab.config import ConfigError, RunError, to_dict
from wamlab.jupyter.launch import launch
from wamlab.measure import read_records
from wamlab.memory_timeline import read_memory
from wamlab.train.communication import training_group
from wamlab.train.config import TrainConfig
from wamlab.train.profile import ProfileConfig, profile_trainer

RUN = TrainConfig(
    model=None, data=None, device="cpu", global_batch=4, optimizations=("recompute", "micro_batch")
)


def profiled(out, *optimizations, **changes):
    import torch

    run = dataclasses.replace(RUN, optimizations=optimizations)
    config = ProfileConfig(train=run, out=str(out), steps=3, **changes)
    with training_group(torch.device("cpu")):
        return profile_trainer(config, ToyModel(), ToyLoader)


def test_a_run_is_split_over_its_steps_and_inside_one(tmp_path):
    record = profiled(tmp_path, memory=True)
    assert record.step_ms.n == 3
    assert set(record.parts_ms) == {"data_wait", "forward", "backward", "optimizer"}
    assert all(len(times) == 3 for times in record.extra["parts_steps"].values())
    split = record.extra["split"]
    assert split["parts_ms"]["recompute"] > 0  # the public way recomputes every block
    assert split["counts"]["cpu_ops"] > 100
    assert split["cpu_ms"]["matmul"] > 0
    assert (split["idle_ms"], split["comm_ms"]) == (None, None)
    assert record.extra["compiler"] == {"compiled_graphs": 0, "graph_breaks": 0}
    assert max(held for _, held in read_memory(record.extra["traces"][0])) > 0
    assert record.to_json()["ranks"]["skew"] == 0.0


def test_without_recompute_there_is_none(tmp_path):
    record = profiled(tmp_path, "recompute")
    assert record.extra["split"]["parts_ms"]["recompute"] == 0


def test_two_ranks_are_merged_and_their_communication_is_seen(tmp_path):
    run = dataclasses.replace(RUN, optimizations=("micro_batch", "fsdp2"))
    config = ProfileConfig(train=run, out=str(tmp_path / "trace"), steps=3)
    job = launch("profile_ranks:run", to_dict(config), 2, out=tmp_path / "run", monitor=False)
    record = job.result(90)
    assert record.world_size == 2
    assert len(record.extra["traces"]) == 2
    assert record.extra["split"]["comm_ms"] > 0
    assert 0 < record.exposed_comm_share <= 1
    waits = record.extra["parts_steps"]["data_wait"]
    assert len(waits) == 3


def test_bounds_are_checked():
    with pytest.raises(ConfigError, match="warmup 1 and steps 0"):
        ProfileConfig(steps=0)


def test_the_command_prints_what_was_found(tmp_path, monkeypatch, capsys):
    def launched(target, config, nproc, *, monitor):
        assert (target, nproc) == ("wamlab.train.profile:profile_run", 1)
        assert (config.steps, config.train.global_batch) == (2, 3)
        record = profiled(tmp_path, "micro_batch")
        return _Done(record)

    monkeypatch.setattr(command, "launch", launched)
    record = tmp_path / "records.jsonl"
    argv = ["cpu", "--set", "global_batch=3", "--steps", "2", "--nproc", "1"]
    assert main(["profile", *argv, "--record", str(record)]) == 0
    text = capsys.readouterr().out
    for words in ("parts (ms): ", "operators (ms): ", "recompute ", "counts: cpu_ops", "perfetto"):
        assert words in text
    (kept,) = read_records(record)
    assert kept.scope == "profile"
    monkeypatch.setattr(command, "launch", lambda *_, **__: _Done(kept))
    argv += ["--against", kept.extra["traces"][0]]
    assert main(["profile", *argv]) == 0
    text = capsys.readouterr().out
    assert "gone: 0 kernels" in text
    assert "+0.0 ms" in text
    assert main(["profile", *argv[:-1], "none.json.gz"]) == 2
    assert "no such trace: none.json.gz" in capsys.readouterr().err


@pytest.mark.parametrize(("refusal", "code"), [("global_batch 3 of 2 ranks", 2), (None, 1)])
def test_a_run_that_fails_is_told_without_a_traceback(refusal, code, monkeypatch, capsys):
    def launched(*_, **__):
        error = RunError("rank 0 raised X\nlast 2 lines of rank0.log:\n    a\n    b")
        error.refusal = refusal
        raise error

    monkeypatch.setattr(command, "launch", launched)
    assert main(["profile", "cpu"]) == code
    said = capsys.readouterr().err.splitlines()
    assert said[0] == f"wamlab profile: {refusal or 'rank 0 raised X'}"
    assert len(said) == (1 if refusal else 4)


class _Done:
    def __init__(self, record):
        self.record = record

    def result(self):
        return self.record
