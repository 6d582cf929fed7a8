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
    assert split.gpu_ms == {"matmul": 10.0, "nccl": 10.0}
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
        ("ncclDevKernel_AllGather_RING_LL", "nccl"),
        ("Memcpy HtoD (Pinned -> Device)", "copy"),
        ("void flash::flash_fwd_kernel<...>", "attention"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop", "attention"),
        ("sm90_xmma_fprop_implicit_gemm_bf16", "convolution"),
        ("nvjet_hsh_256x128_64x4", "matmul"),
        ("triton_red_fused_native_layer_norm_3", "norm"),
        ("triton_poi_fused_gelu_1", "elementwise"),
        ("something_else", "other"),
    ],
)
def test_kernel_groups(name, group):
    assert kernel_group(name) == group


def test_summary_ranks_and_diff():
    fast, slow = split_steps([MARK, GEMM]), split_steps([MARK, GEMM, NCCL])
    assert summarise(slow)["exposed_comm_ms"] == 6.0
    longer = [type(slow[0])(**{**vars(slow[0]), "step_ms": 25.0})]
    assert merge_ranks([fast, longer]) == {
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
