"""The pictures of the closed loop: what they draw, and what they refuse."""

import matplotlib.pyplot as plt
import numpy as np
import pytest

from wamlab.config import ConfigError
from wamlab.evaluate.closed_loop import wilson
from wamlab.jupyter.lab_closed_loop import loss_roughness
from wamlab.jupyter.plot_closed_loop import (
    plot_film,
    plot_loss_band,
    plot_rates,
    plot_sampling,
    plot_success,
)
from wamlab.measure import Record


def run(name: str, seed: int, speed: float, *, reached: bool = True) -> Record:
    steps = np.arange(1, 11) * 100
    rng = np.random.default_rng(seed)
    losses = tuple((2 * (1 + np.arange(1000)) ** -0.3 + rng.normal(0, 0.02, 1000)).tolist())
    curve = []
    for step in steps.tolist():
        hits = round(50 * min(0.95, (step / 1000) ** 2 + (0.0 if reached else -0.3)))
        low, high = wilson(max(hits, 0), 50)
        rate = max(hits, 0) / 50
        point = {"step": step, "train_s": step / speed, "success_rate": rate}
        curve.append(point | {"success_low": low, "success_high": high})
    at = next((p["train_s"] for p in curve if p["success_rate"] >= 0.8), None)
    extra = {"curve": curve, "seconds_to_80": at, "seed": seed, "success_rate": rate}
    return Record(name=name, scope="closed_loop", losses=losses, extra=extra | {"episodes": 50})


RUNS = [run("official", s, 2.0) for s in range(3)] + [run("optimised", s, 20.0) for s in range(3)]


@pytest.fixture(autouse=True)
def close_figures():
    yield
    plt.close("all")


def test_losses_have_a_band_a_configuration():
    ax = plot_loss_band(RUNS, window=50)
    assert [line.get_label() for line in ax.get_lines()] == [
        "official, 3 seeds",
        "optimised, 3 seeds",
    ]
    assert len(ax.collections) == 2
    assert len(ax.get_lines()[0].get_xdata()) == 951


def test_success_over_seconds_marks_the_goal():
    ax = plot_success(RUNS)
    stars = [line for line in ax.get_lines() if line.get_marker() == "*"]
    assert [float(np.ravel(s.get_xdata())[0]) for s in stars] == [450.0, 45.0]
    assert ax.get_xscale() == "log"
    ax = plot_success([run("official", 0, 2.0, reached=False)])
    assert not [line for line in ax.get_lines() if line.get_marker() == "*"]


def test_rates_are_drawn_with_their_intervals():
    ax = plot_rates({"official seed 0": (45, 50), "optimised seed 0": (46, 50)})
    bar = ax.get_lines()[0].get_xdata()
    np.testing.assert_allclose(bar, wilson(45, 50))
    assert "  90% of 50" in [t.get_text() for t in ax.texts]


def test_sampling_shows_both_figures():
    rows = {"step": {"gradient_noise": 1.0, "loss_roughness": 0.1}}
    left, right = plot_sampling(rows | {"union": {"gradient_noise": 3.0, "loss_roughness": 0.3}})
    assert [p.get_width() for p in left.patches] == [1.0, 3.0]
    assert [p.get_width() for p in right.patches] == [0.1, 0.3]


def test_a_film_shows_both_rows():
    frames = np.zeros((8, 16, 32, 3), np.uint8)
    assert plot_film(frames, frames, shown=3).shape == (2, 3)


def test_records_of_something_else_are_refused():
    with pytest.raises(ConfigError, match="no record of `wamlab converge` among them"):
        plot_success([Record(name="official", losses=(1.0,))])


def test_roughness_is_the_variance_of_the_differences():
    assert loss_roughness((1.0, 3.0, 2.0, 2.0)) == pytest.approx(np.var([2, -1, 0], ddof=1))
