"""A model that is not wamlab's: its trainer protocol, and its exercise."""

import sys

import pytest
import torch
from conftest import ROOT

from wamlab.draws import Draws
from wamlab.jupyter.exercise import attempt
from wamlab.train.optimizations import build_optimizations


@pytest.fixture
def example(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "notebooks" / "bring_your_own"))
    import bring_your_own

    yield bring_your_own
    for name in ("bring_your_own", "cloner"):
        sys.modules.pop(name)


def test_the_guests_loss_does_not_depend_on_how_the_batch_is_cut(example):
    torch.manual_seed(0)
    guest = example.Guest(width=24, depth=1)
    batch = {
        "video": torch.randint(0, 256, (4, 33, 32, 64, 3), dtype=torch.uint8),
        "state": torch.randn(4, 4, 64),
        "action": torch.randn(4, 96, 32) * (torch.arange(32) < 8),
        "action_mask": (torch.arange(32) < 8).expand(4, 96, 32),
    }
    draws = Draws(0, 0, torch.arange(4))
    whole = guest.loss(batch, draws)["loss"]
    parts = [guest.loss({k: v[i : i + 1] for k, v in batch.items()}, draws) for i in range(4)]
    torch.testing.assert_close(whole, torch.stack([p["loss"] for p in parts]).mean())
    whole.backward()
    assert all(p.grad is not None for p in guest.parameters())
    assert not torch.equal(whole, guest.loss(batch | {"video": batch["video"] * 0}, draws)["loss"])


def test_its_rows_name_known_optimizations_and_the_first_is_the_guests_own_way(example):
    for row in example.ROWS:
        build_optimizations(row.optimizations)
    assert example.ROWS[0].optimizations == example.YOURS
    assert {row.dimension for row in example.ROWS} == {None, "compute", "parallel", "data"}


def test_a_near_miss_does_not_solve_the_exercise():
    assert not attempt("break-even", lambda wait, slow, fast: wait / (slow - fast)).solved
