"""Memory: predictions, refusals, and what fits instead."""

import dataclasses

import pytest
import torch

from wamlab.model.wam import WAMConfig, WorldActionModel
from wamlab.train.memory import (
    GIB,
    MemoryLimitError,
    Setting,
    check,
    explained,
    nearest,
    predict,
    shape_of,
)
from wamlab.train.optimizations import Fsdp2, StepPlan

PLAN = StepPlan(compile=True, optimizer="fused", recompute="none", fsdp=Fsdp2())
H200 = 131.4 * GIB


@pytest.fixture(scope="module")
def shapes():
    """The networks alone, as the reference peaks were measured."""
    sizes = ("dreamzero-5b", "dreamzero-14b")
    return {s: dataclasses.replace(shape_of(WAMConfig(size=s)), frozen_bytes=0) for s in sizes}


def setting(shape, micro_batch, world=2, **plan):
    return Setting(
        shape=shape,
        plan=dataclasses.replace(PLAN, **plan),
        precision="bf16",
        world=world,
        micro_batch=micro_batch,
    )


@pytest.mark.parametrize(
    ("size", "micro_batch", "plan", "measured_gib"),
    [
        ("dreamzero-5b", 16, {}, 119.3),
        ("dreamzero-5b", 16, {"optimizer": "split"}, 109.1),
        ("dreamzero-5b", 32, {"recompute": "selective"}, 128.3),
        ("dreamzero-5b", 1, {"fsdp": Fsdp2(keep_unsharded=-1)}, 46.9),
        ("dreamzero-14b", 1, {"optimizer": "split", "recompute": "full"}, 81.8),
    ],
)
def test_peaks_measured_on_two_h200_are_predicted_within_ten_percent(
    shapes, size, micro_batch, plan, measured_gib
):
    peak = predict(setting(shapes[size], micro_batch, **plan)).peak / GIB
    assert peak == pytest.approx(measured_gib, rel=0.1)


def test_counts_are_those_of_the_model():
    shape, model = shape_of(WAMConfig()), WorldActionModel(WAMConfig())
    assert shape.trained == sum(p.numel() for p in model.dit.parameters())
    frozen = [p for m in model.frozen() for p in m.parameters()]
    assert shape.frozen_bytes == sum(p.numel() * p.element_size() for p in frozen)
    assert shape.layers == len(model.blocks())


def test_what_must_cost_more_does(shapes):
    def peak(world=2, **changes):
        return predict(setting(shapes["dreamzero-5b"], 8, world, **changes)).peak

    assert peak(recompute="full") < peak(recompute="every-2") < peak()
    assert peak(recompute="full") < peak(recompute="selective") < peak()
    assert peak(optimizer="split") < peak(optimizer="split", second_moment="fp32") < peak()
    assert peak(world=4) < peak(world=2) < peak(fsdp=Fsdp2(replicate=2))
    assert peak() < peak(compile=False)


def test_14b_with_plain_adamw_on_two_gpus_is_refused_with_what_fits(shapes):
    run = setting(shape_of(WAMConfig(size="dreamzero-14b")), 1, recompute="full")
    with pytest.raises(
        MemoryLimitError, match=r"(?s)cannot fit: predicted peak 1\d\d.*what fits: split"
    ) as e:
        check(run, H200)
    assert "optimizer" in str(e.value)
    assert "peak in backward" in str(e.value)
    check(dataclasses.replace(run, plan=dataclasses.replace(run.plan, optimizer="split")), H200)


def test_nearest_prefers_no_further_gpus_and_few_changes(shapes):
    found = nearest(setting(shapes["dreamzero-5b"], 32), H200)
    assert found[0].startswith(("micro_batch 16 (", "recompute selective ("))
    assert not any("GPUs" in text for text in found)
    assert nearest(setting(shapes["dreamzero-14b"], 1), 1.0) == []


def test_running_out_of_memory_ends_with_the_table(shapes):
    run = setting(shapes["dreamzero-5b"], 32)
    with (
        pytest.raises(MemoryLimitError, match=r"(?s)out of memory: tried.*last checkpoint: step_7"),
        explained(run, H200, lambda: "step_7"),
    ):
        raise torch.OutOfMemoryError("tried to allocate")
