"""wamlab.trace against Holistic Trace Analysis, where that is installed.

They are given a trace without synchronisation markers: release 0.5 counts such a marker on a stream
as computation, which wamlab does not (see test_trace.py).
"""

import gzip
import importlib.util
import json

import pytest

from wamlab.trace import read_trace, split_steps

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("hta") is None,
        reason="Holistic Trace Analysis is not installed (`pip install HolisticTraceAnalysis`)",
    ),
    pytest.mark.filterwarnings("ignore"),  # its own
]
STEP = (1_000_000, 20_000)  # begin and duration in microseconds
KERNELS = [  # name, begin after the step's, duration, stream
    ("nvjet_tst_128x256", 1_000, 10_000, 7),
    ("ncclDevKernel_ReduceScatter", 7_000, 10_000, 20),
    ("triton_poi_fused_gelu_1", 18_000, 500, 7),
]


def write(path):
    begin, duration = STEP
    rows = [
        {"ph": "X", "cat": "user_annotation", "name": "ProfilerStep#2", "pid": 1, "tid": 1}
        | {"ts": begin, "dur": duration, "args": {"External id": 1}}
    ]
    for number, (name, start, length, stream) in enumerate(KERNELS, 11):
        link = {"correlation": number, "External id": number}
        launch = {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": 1, "tid": 1}
        rows.append(launch | {"ts": begin + start - 5, "dur": 3, "args": link})
        kernel = {"ph": "X", "cat": "kernel", "name": name, "pid": 0, "tid": stream}
        args = {**link, "stream": stream}
        rows.append(kernel | {"ts": begin + start, "dur": length, "args": args})
    trace = {"schemaVersion": 1, "distributedInfo": {"rank": 0}, "traceEvents": rows}
    path.write_bytes(gzip.compress(json.dumps(trace).encode()))


def test_overlap_and_idle_time_agree_to_the_microsecond(tmp_path):
    from hta.trace_analysis import TraceAnalysis

    path = tmp_path / "rank0.json.gz"
    write(path)
    theirs = TraceAnalysis(trace_files={0: str(path)}, trace_dir=str(tmp_path))
    overlap = theirs.get_comm_comp_overlap(visualize=False)["comp_comm_overlap_pctg"][0]
    times = theirs.get_temporal_breakdown(visualize=False)
    (ours,) = split_steps(read_trace(path))
    assert 100 * (1 - ours.exposed_comm_ms / ours.comm_ms) == pytest.approx(overlap)
    # they count idle time between the first kernel and the last, wamlab over the whole step
    outside = KERNELS[0][1] + STEP[1] - (KERNELS[-1][1] + KERNELS[-1][2])
    assert ours.idle_ms * 1e3 == times["idle_time(us)"][0] + outside
