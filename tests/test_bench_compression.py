"""The judgement of gated compression: its arithmetic, and one seed of two arms."""

import pytest
import torch

from wamlab.jupyter.launch import launch
from wamlab.measure import Record
from wamlab.train.bench_compression import (
    ARMS,
    BUDGET,
    GATES,
    PAST,
    JudgeConfig,
    moving_points,
    verdicts,
)


def record(arm, seed, loss):
    extra = {"optimizer": "sgd", "seed": seed, "final_loss": loss, "wire_bytes_share": 0.6}
    return Record(name=arm, scope="compression", extra=extra)


def test_a_gate_is_worth_having_only_if_it_beats_the_random_one():
    losses = {
        "dense": [1.0, 1.1, 0.9],
        "random": [1.0, 1.2, 1.1],
        "high change": [0.9, 1.08, 0.99],  # 10 % better for each seed
        "low change": [0.9, 1.3, 1.1],  # better once, worse once
        "by activity": [2.0, 2.4, 2.2],
    }
    made = [record(arm, seed, x) for arm, row in losses.items() for seed, x in enumerate(row)]
    rows = {row["arm"]: row for row in verdicts(made)}
    assert rows["high change"]["worth_having"]
    assert rows["high change"]["gain"] == pytest.approx(0.1)
    assert rows["low change"]["worth_having"] is False
    assert rows["by activity"]["gain"] == pytest.approx(-1.0)
    assert rows["random"]["worth_having"] is None
    assert rows["random"]["parity"]
    assert rows["by activity"]["parity"] is False


def test_one_seed_alone_is_no_judgement():
    rows = verdicts([record("random", 0, 1.0), record("high change", 0, 0.5)])
    assert [row["worth_having"] for row in rows] == [None, None]


def test_wild_points_move_more_than_calm_ones():
    def change(kicks):
        points = moving_points(500, kicks, torch.Generator().manual_seed(0))
        assert points.shape == (500, PAST + 1, 2)
        return points.diff(dim=1).norm(dim=-1).mean()

    assert change(0.3) > 1.3 * change(0.02)


def test_two_arms_learn_and_send_what_they_say():
    """What CI runs of the judgement: one seed of random and high change."""
    arms = ("random", "high change")
    config = JudgeConfig(arms=arms, optimizers=("adamw",), seeds=(0,), steps=150)
    target = "wamlab.train.bench_compression:judge"
    found = launch(target, config, 2, threads=1, monitor=False).result(timeout_s=200)
    assert tuple(r.name for r in found) == arms
    for r in found:
        assert r.losses[-1] < r.losses[0], r.name
        assert r.extra["wire_bytes_share"] == pytest.approx(0.1 + 0.9 * BUDGET, abs=0.05)
    assert set(GATES) < set(ARMS)
