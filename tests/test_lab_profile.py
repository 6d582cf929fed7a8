"""What notebooks 02 and 03 measure and draw, on small cases."""

import matplotlib

matplotlib.use("agg")

import matplotlib.pyplot as plt
import pytest
import torch

from wamlab.jupyter import lab_fusion, lab_profile, plot_fusion, plot_profile
from wamlab.jupyter.exercises_fusion import EXERCISES
from wamlab.measure import Record, Timing
from wamlab.model.dit import MODEL_SIZES
from wamlab.trace import Event
from wamlab.train.bench_dit import layout_of
from wamlab.train.bench_ops import OpCase, measure_op

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def closed():
    torch.set_num_threads(1)
    yield
    plt.close("all")


def rms_norm(x, weight):
    square = (x * x).mean(dim=-1, keepdim=True)
    return x * torch.rsqrt(square + 1e-6) * weight


def test_traffic_counts_what_the_exercise_asks_for():
    x, weight = torch.randn(40, 32), torch.randn(32)
    rows = lab_fusion.traffic(rms_norm, x, weight)
    assert [name for name, _ in rows] == ["mul", "mean", "add", "rsqrt", "mul", "mul"]
    assert sum(moved for _, moved in rows) == EXERCISES["norm-bytes"].spec(40, 32, 4)[0]
    assert lab_fusion.traffic(lambda x: x.t().reshape(-1, 8)[:4].view(2, 2, 8), x)[-1][0] != "view"


def test_the_ways_of_attention_agree_and_count_their_calls():
    ways = lab_fusion.attention_ways(layout_of("tiny"), 2, 8, CPU)
    assert [r.extra["calls"] for r in ways] == [18, 10, 1]
    assert max(r.extra["output"] for r in ways) == pytest.approx(ways[0].extra["output"], rel=1e-4)
    assert ways[0].extra["pairs_share"] == 1 < ways[2].extra["pairs_share"]
    assert len(plot_fusion.plot_ways(ways).patches) == 3


def test_an_official_and_an_eager_block_give_the_same_and_start_fewer():
    runs = {way: lab_fusion.build_block(way, CPU) for way in ("official", "eager")}
    outs = [run.block(*run.args, **run.kwargs) for run in runs.values()]
    torch.testing.assert_close(*outs, rtol=1e-4, atol=1e-4)
    tables = {way: lab_fusion.block_kernels(run, CPU) for way, run in runs.items()}
    started = {way: sum(n for n, _ in table.values()) for way, table in tables.items()}
    assert 2 * started["eager"] < started["official"]
    assert plot_fusion.plot_kernels(tables)[0].get_xlabel() == "operations started"


def test_real_operations_have_a_cost_each():
    config = MODEL_SIZES["tiny"]
    ops = lab_profile.step_ops(config, layout_of("tiny"), CPU)
    assert {"attention S4", "attention N4", "norm + RoPE"} <= ops.keys()
    for call, flops, moved in ops.values():
        assert call() is not None
        assert flops > 0
        assert moved > 0
    assert lab_profile.launch_us(CPU, calls=50) > 0


def test_an_operation_is_timed_in_every_way_or_says_why_not(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda call, **_: call)  # a compile takes a minute cold
    records = measure_op(OpCase(op="norm_modulate", repeats=2))
    assert [r.name.split(", ")[1] for r in records] == ["reference", "compiled", "triton"]
    assert records[1].extra["largest_error"] < 1e-5
    assert "CUDA GPU" in records[2].reason or records[2].step_ms


def timed(name, size, ms):
    return Record(
        name=name, micro_batch=size, device="X", step_ms=Timing(median=ms, q25=ms, q75=ms, n=1)
    )


def test_pictures_of_profiles():
    mark = Event("ProfilerStep#1", "user_annotation", 0, 1000)
    backward = Event("wamlab.backward", "user_annotation", 500, 400)
    again = Event("wamlab.forward", "user_annotation", 500, 100)
    events = [mark, backward, again, Event("aten::mm", "cpu_op", 100, 300, 0)]
    texts = plot_profile.plot_timeline(events).figure.legends[0].get_texts()
    assert [t.get_text() for t in texts] == [
        "part: backward",
        "part: recompute",
        "matmul",
        "no operator",
    ]
    assert len(plot_profile.plot_part_histograms({"a": [1.0, 2.0], "b": [3.0, 3.0]})) == 2
    ax = plot_profile.plot_ranked({"small": 1.0, "large": 20.0}, {"large": "03"})
    assert [t.get_text() for t in ax.get_yticklabels()] == ["large", "small"]
    line = plot_profile.plot_batch_times([timed("official", n, 10.0 * n) for n in (8, 1)]).lines[1]
    assert list(line.get_xdata()) == [1, 8]
    ax = plot_profile.plot_memory_timeline([(0.0, 0), (1.0, 2**20), (2.0, 0)])
    assert "peak 1.0 MiB" in [t.get_text() for t in ax.texts]


def test_pictures_of_fusion():
    ax = plot_fusion.plot_scaling({1: 4.0, 64: 5.0, 1024: 60.0})
    assert "starting it: 4.0 µs" in [t.get_text() for t in ax.get_legend().get_texts()]
    ax = plot_fusion.plot_traffic({"by hand": [("mul", 30.0), ("add", 1.0)], "fused": [("", 9.0)]})
    assert "31 MiB" in [t.get_text() for t in ax.texts]
    ax = plot_fusion.plot_per_sample([timed("official", 1, 90.0), timed("compiled", 4, 40.0)])
    assert "official, micro-batch 1" in [t.get_text() for t in ax.get_yticklabels()]


def test_a_committed_pair_of_records_gives_the_costs():
    dit = [
        Record(
            name="official", model="dreamzero-5b", micro_batch=1, step_ms=timed("", 1, 900).step_ms
        )
    ]
    encode = [
        Record(name="official", model="wan2.2", micro_batch=8, step_ms=timed("", 8, 800).step_ms)
    ]
    costs = lab_profile.h200_costs(dit, encode)
    assert list(costs.values()) == [900, 100, 100]
