"""Every optimization: its row, its JSON, what it needs, and the loss it leaves."""

import dataclasses
import shutil

import pytest
import torch

from wamlab.config import ConfigError, to_dict
from wamlab.data.loader import DataConfig
from wamlab.draws import Draws
from wamlab.model.wam import WAMConfig, WorldActionModel
from wamlab.train.optimizations import (
    OPTIMIZATIONS,
    MissingNeedError,
    StepPlan,
    build_optimizations,
    build_plan,
    check_needs,
    recompute_of,
    tolerance,
)

CPU = torch.device("cpu")
PARAMETERS = {  # another value than the default for each parameter
    "compile": {"attention": "dense"},
    "float8": {"recipe": "rowwise"},
    "micro_batch": {"size": 4},
    "recompute": {"mode": "every-3"},
    "fsdp2": {
        "keep_unsharded": -1,
        "prefetch": 2,
        "defer_sync": True,
        "replicate": 2,
        "reduce_dtype": "bf16",
        "gather": "float8",
        "scatter": "bf16",
        "between": "fp16",
        "root": False,
    },
    "ddp": {
        "bucket_mb": 1.0,
        "wire": "lowrank",
        "rank": 4,
        "keep": 0.1,
        "error_feedback": False,
        "start": 0.2,
        "gate": "high",
        "share": 0.25,
    },
    "shortcuts": {"trim_last_block": False},
    "split_adamw": {"second_moment": "fp32"},
    "prefetch": {"workers": 1, "depth": 3},
}


@pytest.mark.parametrize("name", OPTIMIZATIONS)
def test_row_and_json(name):
    cls = OPTIMIZATIONS[name]
    assert cls.name == name
    assert cls.dimension in ("compute", "parallel", "data", "communication")
    assert cls.__doc__
    values = PARAMETERS.get(name, {})
    assert set(values) == {f.name for f in dataclasses.fields(cls)}
    (built,) = build_optimizations([{"name": name, **values}])
    assert to_dict(built) == values
    assert built != cls() or not values


def test_entries_are_applied_in_their_own_order():
    names = list(OPTIMIZATIONS)
    forth, back = build_optimizations(names), build_optimizations(names[::-1])
    assert forth == back
    assert len({o.order for o in forth}) == len(names)
    together = [o for o in forth if o.name != "ddp"]  # which replaces fsdp2
    assert build_plan(together).optimizer == "split"


def test_no_optimization_is_the_public_way():
    assert build_plan(()) == StepPlan()
    assert StepPlan().micro_batch == 1
    assert StepPlan().recompute == "full"
    assert StepPlan().optimizer == "adamw"
    assert StepPlan().fsdp is None


@pytest.mark.parametrize("name", [n for n, c in OPTIMIZATIONS.items() if c.dimension == "data"])
def test_data_entries_change_the_data_alone(name):
    (built,) = build_optimizations([name])
    assert built.apply_data(DataConfig()) != DataConfig()
    assert built.apply_step(StepPlan()) == StepPlan()


def test_a_missing_compiler_is_named_with_its_cure(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(MissingNeedError, match=r"compile needs g\+\+ .*apt-get install g\+\+"):
        check_needs(build_optimizations(["compile"]), CPU)


def test_refusals():
    with pytest.raises(ConfigError, match=r'an optimization is a name or \{"name": ...\}'):
        build_optimizations([{"size": 2}])
    with pytest.raises(ConfigError, match=r"size must be at least 1 or null, got 0"):
        build_optimizations([{"name": "micro_batch", "size": 0}])
    with pytest.raises(ConfigError, match=r"every-K.*got 'every-0'"):
        recompute_of("every-0", 0)


def test_recompute_modes():
    assert [recompute_of("every-3", i) for i in range(5)] == ["full", *["none"] * 2, "full", "none"]


def test_tolerances():
    exact = build_optimizations(["recompute", "prefetch"])
    assert tolerance(exact, "fp32") == tolerance(exact, "bf16") == 0.0
    some = build_optimizations(["recompute", "compile"])
    assert tolerance(some, "fp32") == OPTIMIZATIONS["compile"].tolerance
    assert tolerance(some, "bf16") == 2e-2


@pytest.fixture(scope="module")
def batch():
    draws = Draws(5, 0, torch.arange(2))
    actions = (96, 32)
    return {
        "video": draws.integers("video", 256, (33, 32, 64, 3)).to(torch.uint8),
        "state": draws.normal("state", (4, 64)),
        "action": draws.uniform("action", actions) * 2 - 1,
        "action_mask": torch.ones(2, *actions, dtype=torch.bool),
        "has_real_action": torch.ones(2, dtype=torch.bool),
        "prompt": ["pick the red cube", "open"],
        "sample_id": torch.arange(2),
    }


@pytest.fixture(scope="module")
def official(batch):
    return loss_after([], batch)


def loss_after(names, batch):
    torch.set_num_threads(1)
    model = WorldActionModel(WAMConfig(layers=2, target_hw=(32, 64)))
    for optimization in build_optimizations(names):
        optimization.apply_model(model)
    with torch.no_grad():
        return model.loss(batch, Draws(0, 0, batch["sample_id"]))["loss"]


WHOLE_LAST = {"name": "shortcuts", "trim_last_block": False}


@pytest.mark.parametrize(
    "name", ["shortcuts", WHOLE_LAST, "compile", "batched_encoders", "prompt_cache"]
)
def test_the_models_loss_stays_within_the_tolerance(name, batch, official):
    loss = loss_after([name], batch)
    (built,) = build_optimizations([name])
    allowed = tolerance([built], "fp32")
    assert abs(loss - official) / official <= allowed
