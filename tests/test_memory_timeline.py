"""wamlab.memory_timeline on a snapshot and a trace made by hand."""

import json
import os
import pickle

import pytest

from wamlab.memory_timeline import read_memory, read_snapshot
from wamlab.trace import TraceError


def entry(action, size, time_us):
    return {"action": action, "size": size, "time_us": time_us, "addr": 0, "stream": 0}


def test_a_snapshot_becomes_a_timeline(tmp_path):
    history = [
        entry("segment_alloc", 1000, 10),
        entry("alloc", 100, 1_000),
        entry("alloc", 50, 2_000),
        entry("free_requested", 100, 2_500),
        entry("free_completed", 100, 3_000),
    ]
    path = tmp_path / "snapshot.pickle"
    segments = [{"device": 0, "allocated_size": 250}, {"device": 1, "allocated_size": 7}]
    path.write_bytes(pickle.dumps({"segments": segments, "device_traces": [history, []]}))
    # 250 are held at the end, of which the history explains 50: it began with 200
    assert read_snapshot(path) == [(0.0, 300), (1.0, 350), (2.0, 250)]


def test_a_snapshot_of_the_second_gpu_is_found(tmp_path):
    path = tmp_path / "snapshot.pickle"
    segments = [{"device": 1, "allocated_size": 7}]
    traces = [[], [entry("alloc", 7, 5)]]
    path.write_bytes(pickle.dumps({"segments": segments, "device_traces": traces}))
    assert read_snapshot(path) == [(0.0, 7)]


def test_what_is_no_snapshot_is_refused_and_runs_nothing(tmp_path):
    path = tmp_path / "bad.pickle"
    path.write_bytes(pickle.dumps(os.getcwd))
    with pytest.raises(TraceError, match=r"bad\.pickle is not a memory snapshot: it names"):
        read_snapshot(path)
    path.write_bytes(b"")
    with pytest.raises(TraceError, match="is not a memory snapshot"):
        read_snapshot(path)
    path.write_bytes(pickle.dumps({"segments": [], "device_traces": [[]]}))
    with pytest.raises(TraceError, match="holds no history"):
        read_snapshot(path)
    with pytest.raises(TraceError, match="no such snapshot"):
        read_snapshot(tmp_path / "none.pickle")


def test_a_trace_without_allocations_says_how_to_record_them(tmp_path):
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": []}))
    with pytest.raises(TraceError, match="record it with memory=True"):
        read_memory(path)


def test_allocations_of_a_cpu_add_up(tmp_path):
    path = tmp_path / "trace.json"
    rows = [(30, -64), (10, 64), (20, 32)]
    events = [
        {"ph": "i", "name": "[memory]", "ts": ts, "args": {"Bytes": size, "Device Type": 0}}
        for ts, size in rows
    ]
    path.write_text(json.dumps({"traceEvents": events}))
    assert read_memory(path) == [(0.0, 64), (0.01, 96), (0.02, 32)]
