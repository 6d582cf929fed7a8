"""Timing, traces, snapshots and graphs on a GPU: known times, known bytes, the known fault."""

import pytest
import torch

from wamlab.measure import measure_ms
from wamlab.memory_timeline import read_snapshot
from wamlab.profiler import memory_snapshot, part, profile_steps
from wamlab.trace import kernel_table, read_trace, split_steps, summarise

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")


def cycles_of(ms):
    """Return how many cycles `torch.cuda._sleep` needs for `ms` on this GPU."""
    trial = 50_000_000
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(trial)
    begin.record()
    torch.cuda._sleep(trial)
    end.record()
    torch.cuda.synchronize()
    return int(trial * ms / begin.elapsed_time(end))


def test_a_known_sleep_of_50_ms_measures_50_ms():
    cycles = cycles_of(50.0)
    timing = measure_ms(lambda: torch.cuda._sleep(cycles), dev=CUDA, repeats=5)
    assert timing.median == pytest.approx(50.0, rel=0.05)


def test_a_trace_is_split_into_kernels_parts_and_idle_time(tmp_path):
    weight = torch.randn(2048, 2048, device=CUDA, requires_grad=True)
    host = torch.randn(2048, 2048, pin_memory=True)

    def step():
        with part("forward"):
            loss = (host.to(CUDA, non_blocking=True) @ weight).square().mean()
        with part("backward"):
            loss.backward()
        weight.grad = None
        loss.item()

    events = read_trace(profile_steps(step, tmp_path, dev=CUDA, active=2))
    found = summarise(split_steps(events))
    assert found["gpu_ms"]["matmul"] > 0
    assert found["parts_ms"]["forward"] > 0
    assert found["parts_ms"]["backward"] > 0
    assert found["parts_ms"]["to_device"] > 0
    assert 0 <= found["idle_ms"] < found["step_ms"]
    assert found["exposed_comm_ms"] == 0
    assert found["counts"]["item_calls"] == 1
    assert found["counts"]["synchronisations"] >= 1
    assert found["counts"]["kernels"] >= 4
    assert kernel_table(events)


def test_graph_replays_are_counted(tmp_path):
    x = torch.zeros(1024, device=CUDA)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x += 1
    events = read_trace(profile_steps(graph.replay, tmp_path, dev=CUDA, active=1))
    assert split_steps(events)[0].counts["graph_replays"] == 1


def test_a_snapshot_shows_a_known_allocation(tmp_path):
    before = torch.cuda.memory_allocated()
    path = tmp_path / "snapshot.pickle"
    with memory_snapshot(path):
        block = torch.empty(32 * 2**20, dtype=torch.uint8, device=CUDA)
        del block
    held = [size for _, size in read_snapshot(path)]
    assert max(held) - before == pytest.approx(32 * 2**20, rel=0.05)
    assert held[-1] == before


@pytest.mark.parametrize(("existed", "expected"), [(False, 0.25), (True, 1.0)])
def test_accumulation_in_a_graph_depends_on_what_existed_at_capture(existed, expected):
    """What the exercises' StaticGraph shows on a CPU is what a CUDA graph does."""
    torch.manual_seed(0)
    layer = torch.nn.Linear(8, 1, device=CUDA)
    x = torch.randn(16, 8, device=CUDA)

    def micro_batch():
        (layer(x).mean() / 4).backward()

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            micro_batch()
    torch.cuda.current_stream().wait_stream(stream)
    layer.zero_grad(set_to_none=not existed)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        micro_batch()
    if existed:
        layer.zero_grad(set_to_none=False)
    for _ in range(4):
        graph.replay()
    assert layer.bias.grad.item() == pytest.approx(expected)
