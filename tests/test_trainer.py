"""The trainer on one process: equal work, exactness, checkpoints, refusals."""

import dataclasses
import itertools
import json
import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from toy_model import ToyBlock, ToyLoader, ToyModel

from wamlab.config import ConfigError, from_dict, to_dict
from wamlab.data.data_config import DataConfig
from wamlab.model.stored import CheckpointError
from wamlab.train import trainer as module
from wamlab.train.communication import training_group
from wamlab.train.config import PRESETS, TrainConfig
from wamlab.train.metrics import NonFiniteError
from wamlab.train.optim import OptimConfig
from wamlab.train.trainer import Trainer
from wamlab.train.wrap import CompileCacheError, explained

CONFIG = TrainConfig(
    name="toy",
    model=None,
    data=None,
    device="cpu",
    steps=4,
    warmup_steps=1,
    global_batch=4,
    optim=OptimConfig(lr=1e-2),
)
BATCH = "micro_batch"


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def run(*optimizations, loader=ToyLoader, model=None, **changes):
    config = dataclasses.replace(CONFIG, optimizations=optimizations, **changes)
    with training_group(torch.device("cpu")):
        trainer = Trainer(config, model or ToyModel(), loader)
        return trainer.fit(), trainer


def losses(*optimizations, **changes):
    return torch.tensor(run(*optimizations, **changes)[0].losses, dtype=torch.float64)


def recompute(mode):
    return {"name": "recompute", "mode": mode}


def test_the_record_says_what_ran_and_how_fast():
    record, _ = run(parts_steps=2)
    assert (record.scope, record.model, record.precision) == ("step", "ToyModel", "fp32")
    assert (record.micro_batch, record.grad_accum, record.global_batch) == (1, 4, 4)
    assert record.recompute == "full"
    assert record.step_ms.n == 3
    assert len(record.losses) == 4
    assert set(record.parts_ms) == {"data_wait", "forward", "backward", "optimizer"}
    assert record.samples_per_s == pytest.approx(4e3 / record.step_ms.median)
    assert record.first_step_s > 0
    assert record.peak_gib > 0
    assert 0 <= record.data_wait_share < 1


@pytest.mark.parametrize("size", [1, 2, None])
def test_any_micro_batch_gives_the_same_losses(size):
    torch.testing.assert_close(losses({"name": BATCH, "size": size}), losses(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("mode", ["none", "selective", "full", "every-2"])
@pytest.mark.parametrize("sharded", [(), ("fsdp2",)], ids=["plain", "fsdp2"])
def test_recompute_is_bitwise_exact(mode, sharded):
    """D16, eager fp32: recompute inside the block, sharded or not."""
    assert torch.equal(losses(BATCH, recompute(mode), *sharded), losses(BATCH))


MATRIX = list(itertools.product(("none", "selective", "full"), ((), ("fsdp2",)), ("fp32", "bf16")))


# Dynamo looks at .grad of the blocks' inputs, which is torch's own affair
DYNAMO = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


def compiled(mode, sharded, precision):
    torch._dynamo.reset()
    counters.clear()
    got, _ = run("compile", BATCH, recompute(mode), *sharded, precision=precision)
    want = losses(BATCH, recompute("none"), *sharded, precision=precision)
    tolerance = 1e-6 if precision == "fp32" else 1e-3
    torch.testing.assert_close(torch.tensor(got.losses).double(), want, rtol=tolerance, atol=0)
    assert got.extra["recompiles"] == 0


@DYNAMO
def test_compile_inside_shards_with_recompute():
    """D16: the corner of the matrix where all three meet, bf16, fp32 times among the inputs."""
    compiled("full", ("fsdp2",), "bf16")


@DYNAMO
@pytest.mark.slow
@pytest.mark.parametrize(("mode", "sharded", "precision"), MATRIX)
def test_recompute_compile_shard_matrix(mode, sharded, precision):
    """D16: every combination runs, its losses agree, nothing compiles again after warm-up."""
    compiled(mode, sharded, precision)


def test_times_reach_a_sharded_bf16_block_as_float32():
    """D16: FSDP2 would cast them by default, and 999.8 would arrive as 1000."""
    seen = []
    model = ToyModel()
    model.layers[0].register_forward_pre_hook(lambda _, args: seen.append(args))
    run("fsdp2", precision="bf16", model=model)
    assert {args[1].dtype for args in seen} == {torch.float32}
    assert {args[0].dtype for args in seen} == {torch.bfloat16}


def test_optimizers_agree():
    exact = losses()
    torch.testing.assert_close(losses("fused_adamw"), exact, rtol=1e-5, atol=0)
    torch.testing.assert_close(losses("split_adamw", BATCH), exact, rtol=2e-2, atol=0)
    torch.testing.assert_close(losses("split_adamw", "fsdp2"), exact, rtol=2e-2, atol=0)


def test_a_step_with_nan_changes_nothing_and_is_named(tmp_path):
    record, _ = run(loader=partial(ToyLoader, poison=[2]), out=str(tmp_path))
    rows = [json.loads(line) for line in (tmp_path / "steps.jsonl").read_text().splitlines()]
    assert [row["skipped"] for row in rows] == [False, False, True, False]
    ids = ToyLoader(None, global_batch=4, micro_batch=1, seed=0, rank=0, world_size=1, device="cpu")
    assert rows[2]["bad"] == [{"rank": 0, "sample_ids": ids.ids_of_step(2).tolist()}]
    assert rows[2]["loss"] != rows[2]["loss"]
    assert record.losses[3] == record.losses[3]


def test_too_many_skips_stop_the_run():
    with pytest.raises(NonFiniteError, match=r"step 3: .* in 3 steps in a row.*checkpoint: none"):
        run(loader=partial(ToyLoader, poison=[1, 2, 3]), max_skipped=3)


@pytest.mark.parametrize("optimizer", ["adamw", "fused_adamw", "split_adamw"])
def test_a_resumed_run_is_the_run_without_interruption(tmp_path, optimizer):
    entries = () if optimizer == "adamw" else (optimizer,)
    whole, trainer = run(*entries, steps=6)
    run(*entries, steps=6, out=str(tmp_path), save_every=2)
    for step in (4, 6):  # as a kill after the save of step 4, which was under way, leaves it
        (tmp_path / f"checkpoints/step_{step:08d}/complete.json").unlink(missing_ok=True)
    (tmp_path / "checkpoints/step_00000002").mkdir(exist_ok=True)
    again, resumed = run(*entries, steps=6, out=str(tmp_path), save_every=2, keep=5)
    assert again.losses == whole.losses[-len(again.losses) :]
    for name, tensor in trainer.stepper.state().items():
        assert torch.equal(tensor, resumed.stepper.state()[name]), name
    rows = [json.loads(line) for line in (tmp_path / "steps.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(6))
    assert [row["loss"] for row in rows] == list(whole.losses)


def test_sigterm_saves_and_ends(tmp_path):
    class Interrupted(ToyLoader):
        def __iter__(self):
            for number, batch in enumerate(super().__iter__()):
                if number == 9:  # in the third step
                    os.kill(os.getpid(), signal.SIGTERM)
                yield batch

    handler = signal.getsignal(signal.SIGTERM)
    record, _ = run(loader=Interrupted, out=str(tmp_path), save_every=100, steps=50)
    assert record.reason == "stopped by SIGTERM"
    assert len(record.losses) == 3
    assert (tmp_path / "checkpoints/step_00000003/complete.json").is_file()
    assert signal.getsignal(signal.SIGTERM) == handler
    resumed, _ = run(out=str(tmp_path), steps=50, save_every=100)
    assert len(resumed.losses) == 47


def test_resume_refuses_another_run(tmp_path):
    run(out=str(tmp_path), save_every=4)
    with pytest.raises(CheckpointError, match=r"trained with seed 0, this run has 1"):
        run(out=str(tmp_path), save_every=4, seed=1, steps=8)
    with pytest.raises(CheckpointError, match=r"lacks model.layers.3.down.bias"):
        run(out=str(tmp_path), steps=8, model=ToyModel(layers=4))
    with pytest.raises(CheckpointError, match=r"has shape \(.*13.*\), this run's has"):
        run(out=str(tmp_path), steps=8, model=ToyModel(dim=12))


def test_a_finished_run_says_so(tmp_path):
    run(out=str(tmp_path), save_every=4)
    record, _ = run(out=str(tmp_path), save_every=4)
    assert record.reason == "no step to measure: the run stands at step 4"


def test_numbers_are_read_at_log_steps_only(tmp_path):
    reads = []

    class Loader(ToyLoader):
        def __iter__(self):
            for batch in super().__iter__():
                path = tmp_path / "steps.jsonl"
                reads.append(len(path.read_text().splitlines()) if path.exists() else 0)
                yield batch

    run(BATCH, loader=Loader, out=str(tmp_path), steps=6, log_every=3)
    assert reads == [0, 0, 0, 3, 3, 3]


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(13, 13)

    def blocks(self):
        return [self.layer]

    def frozen(self):
        return []


@pytest.mark.parametrize(
    ("entries", "changes", "message"),
    [
        ([], {"global_batch": 0}, r"global_batch must be at least 1, got 0"),
        ([], {"warmup_steps": 4}, r"warmup_steps 4 leaves none of the 4 steps"),
        ([], {"save_every": 2}, r"save_every and export need `out`"),
        (["fuse_adamw"], {}, r"unknown optimization 'fuse_adamw'.*did you mean 'fused_adamw'"),
        ([BATCH, BATCH], {}, r"'micro_batch' is listed twice"),
        ([{"name": BATCH, "sise": 2}], {}, r"did you mean 'size'"),
        ([{"name": BATCH, "size": 3}], {}, r"micro_batch 3 does not divide a rank's share of 4"),
        ([recompute("some")], {}, r"recompute is none, selective, full or every-K.*'some'"),
        (["prompt_cache"], {}, r"'prompt_cache' sets .* but ToyModel has no options"),
        (["cuda_graph"], {}, r"cuda_graph needs a CUDA GPU"),
        ([], {"model": Plain()}, r"recompute 'full': Linear has no attribute `recompute`"),
    ],
)
def test_refusals(entries, changes, message):
    with pytest.raises(ValueError, match=message):
        run(*entries, **changes)


def test_configuration_survives_json():
    for preset in PRESETS.values():
        assert from_dict(TrainConfig, json.loads(json.dumps(to_dict(preset)))) == preset
    with pytest.raises(ConfigError, match=r"did you mean 'global_batch'"):
        from_dict(TrainConfig, {"globl_batch": 4})


def test_a_block_is_recomputed_once(monkeypatch):
    calls = []
    compute = ToyBlock.compute
    monkeypatch.setattr(ToyBlock, "compute", lambda s, *a: calls.append(s) or compute(s, *a))
    run(BATCH, recompute("full"), steps=2)
    assert len(calls) == 2 * 2 * 3
    calls.clear()
    run(BATCH, recompute("every-2"), steps=2)
    assert len(calls) == 2 * (3 + 2)


def test_workers_begin_to_import_before_the_model_is_built(monkeypatch):
    class BuiltError(Exception):
        pass

    def build(*_):
        raise BuiltError(*prepared)

    prepared = []
    monkeypatch.setattr(module, "build_model", build)
    monkeypatch.setattr(module, "prepare_workers", lambda data: prepared.append(data.workers))
    config = dataclasses.replace(CONFIG, data=DataConfig(workers=3))
    with training_group(torch.device("cpu")), pytest.raises(BuiltError, match="3"):
        Trainer(config)


def test_validation_is_the_same_every_time(tmp_path):
    _, trainer = run(BATCH, "fsdp2", out=str(tmp_path))
    first, second = trainer.validate(), trainer.validate()
    assert first == second
    rows = [json.loads(line) for line in (tmp_path / "validation.jsonl").read_text().splitlines()]
    assert rows == [{"step": 4, **first}] * 2
    assert set(first) == {"loss"}


def test_a_half_written_file_of_the_compile_cache_is_named_with_its_cure():
    with pytest.raises(CompileCacheError, match=r"^/c/ab.main.so is half-written"), explained():
        raise RuntimeError("InductorError: ImportError: /c/ab.main.so: file too short\n\nSet ...")
    with pytest.raises(RuntimeError, match=r"^another"), explained():
        raise RuntimeError("another")


@pytest.mark.slow
def test_a_compile_cache_is_whole_again_after_its_half_written_file_was_deleted(tmp_path):
    script = "from test_trainer import *; run('compile', BATCH, recompute('none'))"
    paths = os.pathsep.join([str(Path(__file__).parent), str(Path(__file__).parents[1])])
    env = {**os.environ, "PYTHONPATH": paths, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}

    def fresh():
        command = [sys.executable, "-c", script]
        return subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)

    assert fresh().returncode == 0
    library = min(tmp_path.rglob("*.main.so"))
    library.write_bytes(b"")
    assert f"CompileCacheError: {library} is half-written" in fresh().stderr
    library.unlink()
    assert fresh().returncode == 0
