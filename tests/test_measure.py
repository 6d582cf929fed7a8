"""wamlab.measure: timing, records, files."""

import time

import pytest
import torch

from wamlab.config import ConfigError
from wamlab.measure import (
    Record,
    StepClock,
    Timing,
    append_jsonl,
    measure_ms,
    mfu,
    peak_gib,
    read_jsonl,
    read_records,
    stamp,
)

CPU = torch.device("cpu")


def test_timing_is_median_and_quartiles():
    assert Timing.of([1.0, 2.0, 3.0, 4.0, 100.0]) == Timing(median=3.0, q25=2.0, q75=4.0, n=5)
    with pytest.raises(ValueError, match="no repeat"):
        Timing.of([])


def test_measure_counts_warmups_apart():
    calls = []
    timing = measure_ms(lambda: calls.append(time.sleep(0.01)), warmup=2, repeats=5)
    assert len(calls) == 7
    assert timing.n == 5
    assert 10 <= timing.median < 100


def test_a_record_survives_its_json_line_and_keeps_its_extra_fields(tmp_path):
    record = stamp(
        Record(
            name="row",
            step_ms=Timing.of([1.0, 2.0]),
            optimizations=("compile",),
            losses=(1.0, 0.5),
            extra={"ratio": 3.0},
        )
    )
    append_jsonl(tmp_path / "r.jsonl", [record])
    assert read_records(tmp_path / "r.jsonl") == [record]
    line = read_jsonl(tmp_path / "r.jsonl")[0]
    assert line["ratio"] == 3.0
    assert line["peak_gib"] is None
    assert set(line["versions"]) >= {"python", "torch", "torchcodec", "wamlab"}


def test_an_extra_field_may_not_hide_a_real_one():
    with pytest.raises(ConfigError, match="'mfu' is a field"):
        Record(name="row", extra={"mfu": 1.0})


def test_a_line_cut_by_a_kill_is_left_out_but_a_broken_one_is_refused(tmp_path):
    path = tmp_path / "r.jsonl"
    append_jsonl(path, [{"name": "a"}, {"name": "b"}])
    path.write_text(path.read_text() + '{"name": "c", "sc')
    assert [r["name"] for r in read_jsonl(path)] == ["a", "b"]
    path.write_text('{"name": \n{"name": "b"}\n')
    with pytest.raises(ConfigError, match="line 1 is not JSON"):
        read_jsonl(path)
    with pytest.raises(ConfigError, match="no such record file"):
        read_jsonl(tmp_path / "none.jsonl")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"null", r"line 1 is not a JSON object: null"),
        (b'{"scope": "step"}', r"line 1: a record needs a name"),
        (b'{"name": "a", "step_ms": "fast"}', r"line 1: Timing takes a JSON object, got 'fast'"),
        (b'{"name": "a", "peak_gib": "many"}', r"line 1: Record.peak_gib takes float, got 'many'"),
        (b"\xff\xfe", r"is not a UTF-8 text file"),
    ],
)
def test_a_line_that_is_no_record_is_named(tmp_path, line, message):
    path = tmp_path / "r.jsonl"
    path.write_bytes(line + b"\n")
    with pytest.raises(ConfigError, match=f"r.jsonl.*{message}"):
        read_records(path)


def test_mfu_is_null_for_an_unknown_device_and_never_above_one(monkeypatch):
    assert mfu(1e12, 1.0, CPU, "bf16") is None
    monkeypatch.setattr("wamlab.measure.device_name", lambda dev: "NVIDIA H200")
    assert mfu(494.7e12, 1.0, CPU, "bf16") == pytest.approx(0.5)
    with pytest.raises(ValueError, match="above 1"):
        mfu(1e15, 1.0, CPU, "bf16")


def test_a_step_clock_adds_up_the_parts_of_each_step():
    clock = StepClock(CPU)
    for _ in range(3):
        for _ in range(2):
            with clock.part("forward"):
                time.sleep(0.005)
        with clock.part("optimizer"):
            pass
        clock.end_step()
    parts = clock.median_ms()
    assert list(parts) == ["forward", "optimizer"]
    assert 10 <= parts["forward"] < 60
    assert parts["optimizer"] < 5


def test_peak_memory_of_this_process_is_plausible():
    assert 0.05 < peak_gib(CPU) < 64
