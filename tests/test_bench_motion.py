"""The benchmark's cases at the smallest size, the ledger, and the plots that show them."""

import dataclasses

import numpy as np
import pytest
from conftest import ROOT

from wamlab.__main__ import main
from wamlab.jupyter import plot_motion
from wamlab.measure import Record, read_records
from wamlab.motion.claims import CLAIMS, ledger
from wamlab.motion.segments import segment
from wamlab.motion.synthetic import make
from wamlab.train.bench_motion import (
    CASES,
    MotionCase,
    measure_augmentation,
    measure_block_parallel,
    measure_training,
)

SMALL = MotionCase(
    folder=str(ROOT / "data_samples" / "mocap"), frames=1, batch=2, window=32, clips=2, repeats=2
)


def test_serial_and_parallel_have_the_same_gradients():
    record = measure_block_parallel(SMALL)
    assert record.scope == "motion"
    assert record.extra["gradient_rel_diff"] <= 1e-5
    assert record.extra["detached_rel_diff"] > 1e-3
    assert record.extra["ratio"] == record.extra["baseline_ms"] / record.step_ms.median


def test_batched_augmentation_is_that_of_one_clip():
    assert measure_augmentation(SMALL).extra["max_abs_diff_m"] < 1e-5


def test_training_is_measured_on_held_out_motions():
    record = measure_training(dataclasses.replace(SMALL, batch=1), steps=3)
    assert (record.name, record.scope) == ("training", "motion")
    assert record.extra["mpjpe_cm"] > 0


def test_the_command_writes_a_record(tmp_path, capsys):
    out = tmp_path / "motion.jsonl"
    assert main(["bench", "motion", "--cpu", "--only", "cache", "--out", str(out)]) == 0
    (record,) = read_records(out)
    found = record.extra["hit_rates"]["weighted_1"]
    assert found["belady"] >= found["lookahead"] > found["motion"] > found["lfu"] > found["lru"]
    assert "hit_rates weighted_1" in capsys.readouterr().out
    assert main(["bench", "motion", "--only", "cach"]) == 2


def test_the_ledger_says_what_was_measured_and_what_cannot_be():
    assert {c.record for c in CLAIMS} - {None} == {*CASES, "training"}
    rows = {text: measured for text, _, measured in ledger([])}
    assert rows["an error of at most 2.3 cm"] == "not measured here"
    assert rows["25 days become 7; 1.7e4 frames a day become 6.5e4"] == "–"
    made = Record(name="training", extra={"mpjpe_cm": 4.04, "hold_cm": 9.0})
    rows = {text: measured for text, _, measured in ledger([made])}
    assert rows["an error of at most 2.3 cm"] == "held-out error, cm 4.0; standing still, cm 9.0"
    assert "<td" in plot_motion.ledger_table([made])
    fast = Record(name="augmentation", device="NVIDIA H200", extra={"own_ms": 0.1, "ratio": 37.0})
    half = Record(name="augmentation", device="x", precision="bf16")
    table = plot_motion.ledger_table([made], [fast, half])
    assert "<th>measured on NVIDIA H200, x</th>" in table
    assert "ms a clip 0.1; over clip by clip 37.0×" in table


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_plots_draw():
    made = make(4, rate=60.0)
    place = made.clip.positions()
    figure = plot_motion.plot_motion(place, segment(place, 60.0), 60.0, count=4)
    assert {t.get_text() for t in figure.axes[1].texts} >= {"flight", "kick"}
    t = np.arange(9) / 10
    assert len(plot_motion.plot_alias((t, t), {"a": (t, t)}).lines) == 2
    ax = plot_motion.plot_hit_rates({"shuffled": {"lru": 0.02, "belady": 0.2}}, 0.2)
    assert ".02" in {text.get_text() for text in ax.texts}
    assert "2,000 ms" in plot_motion.plot_times({"a": 2000.0, "b": 2.0}, "t").texts[0].get_text()
    plot_motion.plot_matrix(np.eye(4), "t", edges=[2])
    record = Record(name="training", extra={"mpjpe_cm": 4.0, "hold_cm": 9.0})
    assert plot_motion.plot_errors([record]).texts[0].get_text() == "4.0 cm"
