"""wamlab.trace on traces made by hand, right to the microsecond."""

import gzip
import json

import pytest

from wamlab.trace import (
    Event,
    TraceError,
    diff_kernels,
    intersect,
    kernel_group,
    kernel_table,
    length,
    merge_ranks,
    own_times,
    read_trace,
    split_steps,
    summarise,
    union,
)

MARK = Event("ProfilerStep#2", "user_annotation", 0, 20_000)
GEMM = Event("nvjet_tst_128x256", "kernel", 1_000, 10_000, 7)
NCCL = Event("ncclDevKernel_ReduceScatter", "kernel", 7_000, 10_000, 20)
SYNC = Event("Stream Wait Event", "cuda_sync", 11_000, 5_000, 7)


def test_interval_arithmetic():
    assert union([(3, 4), (0, 2), (1, 2.5), (5, 5)]) == [(0, 2.5), (3, 4)]
    assert length([(0, 2), (1, 3)]) == 3
    assert intersect([(0, 2), (4, 8)], [(1, 5), (7, 9)]) == [(1, 2), (4, 5), (7, 8)]


def test_exposed_communication_and_idle_time_to_the_microsecond():
    """10 ms compute, 10 ms NCCL, 4 ms of them together, and a wait that is not work."""
    (split,) = split_steps([MARK, GEMM, NCCL, SYNC])
    assert split.comm_ms == 10.0
    assert split.exposed_comm_ms == 6.0  # 40 % overlapped
    assert split.idle_ms == 4.0  # 1 ms before, 3 ms after
    assert split.gpu_ms == {"matmul": 10.0, "communication": 10.0}
    assert split.counts["kernels"] == 2


def test_the_parts_of_a_step_and_recompute_inside_the_backward():
    def gpu(name, start, duration):
        return Event(f"wamlab.{name}", "gpu_user_annotation", start, duration)

    (split,) = split_steps(
        [
            MARK,
            GEMM,
            Event("wamlab.data_wait", "user_annotation", 0, 500),
            gpu("forward", 1_000, 3_000),
            gpu("backward", 4_000, 7_000),
            gpu("forward", 5_000, 2_000),
        ]
    )
    assert split.parts_ms["data_wait"] == 0.5
    assert split.parts_ms["forward"] == 3.0
    assert split.parts_ms["backward"] == 5.0
    assert split.parts_ms["recompute"] == 2.0


def test_an_operator_owns_what_its_callees_do_not():
    def op(name, start, duration, lane=0):
        return Event(name, "cpu_op", start, duration, lane)

    events = [op("linear", 0, 100), op("t", 10, 5), op("addmm", 20, 70), op("copy_", 30, 10)]
    events += [op("add", 100, 20), op("mm", 50, 100, lane=1)]
    own = {event.name: micros for event, micros in own_times(events)}
    assert own == {"linear": 25, "t": 5, "addmm": 60, "copy_": 10, "add": 20, "mm": 100}


def test_a_cpu_step_is_split_by_its_operators():
    events = [
        MARK,
        Event("aten::linear", "cpu_op", 0, 6_000, 0),
        Event("aten::addmm", "cpu_op", 1_000, 4_000, 0),
        Event("aten::mul", "cpu_op", 10_000, 1_000, 0),
    ]
    (split,) = split_steps(events)
    assert split.cpu_ms == {"matmul": 6.0, "elementwise": 1.0, "no operator": 13.0}
    assert kernel_table(events)["aten::addmm"] == (1, 4.0)


def test_gloo_is_exposed_where_no_operator_computes():
    """10 ms of gloo, of which an operator covers 4; the wait is c10d's own and does not count."""
    events = [
        MARK,
        Event("aten::mm", "cpu_op", 1_000, 7_000, 0),
        Event("c10d::allreduce_", "cpu_op", 3_900, 100, 0),
        Event("gloo:all_reduce", "user_annotation", 4_000, 10_000, 1),
    ]
    (split,) = split_steps(events)
    assert (split.comm_ms, split.exposed_comm_ms) == (10.0, 6.0)
    assert split.idle_ms is None


def test_host_to_device_copies_are_a_part():
    copy = Event("Memcpy HtoD (Pinned -> Device)", "gpu_memcpy", 100, 300, 7)
    back = Event("Memcpy DtoH (Device -> Pinned)", "gpu_memcpy", 600, 300, 7)
    (split,) = split_steps([MARK, GEMM, copy, back])
    assert split.parts_ms["to_device"] == 0.3


def test_on_a_cpu_nothing_is_claimed_about_a_gpu():
    forward = Event("wamlab.forward", "user_annotation", 100, 900)
    (split,) = split_steps([MARK, forward, Event("aten::mm", "cpu_op", 100, 10)])
    assert split.parts_ms["forward"] == 0.9
    assert split.exposed_comm_ms is None
    assert split.idle_ms is None
    assert split.counts == {"cpu_ops": 1}


def test_counts_of_what_stalls_a_step():
    events = [
        MARK,
        Event("cudaStreamSynchronize", "cuda_runtime", 1, 1),
        Event("cudaGraphLaunch", "cuda_runtime", 2, 1),
        Event("aten::_local_scalar_dense", "cpu_op", 3, 1),
    ]
    (split,) = split_steps(events)
    assert split.counts == {"synchronisations": 1, "graph_replays": 1, "item_calls": 1}


@pytest.mark.parametrize(
    ("name", "group"),
    [
        ("ncclDevKernel_AllGather_RING_LL", "communication"),
        ("Memcpy HtoD (Pinned -> Device)", "copy"),
        ("void flash::flash_fwd_kernel<...>", "attention"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop", "attention"),
        ("sm90_xmma_fprop_implicit_gemm_bf16", "convolution"),
        ("nvjet_hsh_256x128_64x4", "matmul"),
        ("triton_red_fused_native_layer_norm_3", "norm"),
        ("triton_poi_fused_gelu_1", "elementwise"),
        ("aten::addmm", "matmul"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu", "attention"),
        ("aten::mkldnn_convolution", "convolution"),
        ("ConvolutionBackward0", "bookkeeping"),
        ("aten::t", "bookkeeping"),
        ("TorchDynamo Cache Lookup", "bookkeeping"),
        ("## Call CompiledFxGraph fv4yg5 ##", "bookkeeping"),
        ("aten::tanh", "elementwise"),
        ("aten::threshold_backward", "elementwise"),
        ("aten::_to_copy", "copy"),
        ("aten::topk", "elementwise"),
        ("graph_0_cpp_fused_native_layer_norm_1", "norm"),
        ("graph_0_cpp_fused_add_mul_1", "elementwise"),
        ("gloo:all_reduce", "communication"),
        ("something_else", "other"),
    ],
)
def test_kernel_groups(name, group):
    assert kernel_group(name) == group


def test_summary_ranks_and_diff():
    assert summarise(split_steps([MARK, GEMM, NCCL]))["exposed_comm_ms"] == 6.0
    assert merge_ranks([[19.0, 20.0, 24.0], [25.0]]) == {
        "slowest_rank": 1,
        "fastest_rank": 0,
        "skew": 0.25,
        "step_ms": [20.0, 25.0],
    }
    assert kernel_table([GEMM, GEMM, NCCL]) == {GEMM.name: (2, 20.0), NCCL.name: (1, 10.0)}
    found = diff_kernels([GEMM, NCCL], [GEMM, Event("new", "kernel", 0, 1_000)])
    assert found["gone"] == {NCCL.name: (1, 10.0)}
    assert found["new"] == {"new": (1, 1.0)}
    assert found["changed_ms"] == {GEMM.name: 0.0}


def test_a_trace_file_is_read_and_a_broken_one_is_named(tmp_path):
    rows = [{"ph": "X", "name": "k", "cat": "kernel", "ts": 1, "dur": 2, "pid": 0, "tid": 7}]
    path = tmp_path / "t.json.gz"
    path.write_bytes(gzip.compress(json.dumps({"traceEvents": [*rows, {"ph": "i"}]}).encode()))
    assert read_trace(path) == [Event("k", "kernel", 1.0, 2.0, (0, 7))]
    path.write_bytes(b"not gzip")
    with pytest.raises(TraceError, match=r"t\.json\.gz is not a Chrome trace"):
        read_trace(path)
    with pytest.raises(TraceError, match="no such trace"):
        read_trace(tmp_path / "none.json")
    with pytest.raises(TraceError, match="no ProfilerStep marks"):
        split_steps([GEMM])
