"""Pictures of learning and acting: losses with their band, success over seconds, sampling's noise,
and a film's frames beside what was imagined."""

from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import PercentFormatter

from wamlab.config import ConfigError
from wamlab.evaluate.closed_loop import wilson
from wamlab.jupyter.plot import GREY, INK, MARKERS, style
from wamlab.measure import Record

RUN_COLOURS = {"official": "#d55e00", "optimised": "#0072b2"}
STRATEGY_COLOURS = {"step": "#0072b2", "shard": "#e69f00", "union": "#009e73"}
GOAL = 0.8


@style()
def plot_loss_band(records: Sequence[Record], *, window: int = 20, ax: Axes | None = None) -> Axes:
    """Draw the mean loss of each configuration over its seeds, and the band from least to most.

    Args:
        records: of scope `closed_loop`, one a seed and configuration.
        window: steps averaged, 1 draws every step.
        ax: where to draw.
    """
    ax = ax or plt.subplots(figsize=(8, 3.6), layout="constrained")[1]
    for name, runs in _by_name(records).items():
        length = min(len(r.losses) for r in runs)
        width = max(1, min(window, length // 4))
        kernel = np.ones(width) / width
        curves = np.stack([np.convolve(r.losses[:length], kernel, "valid") for r in runs])
        steps = np.arange(curves.shape[1]) + width
        colour = RUN_COLOURS.get(name, GREY)
        dashes, above = ("--", 3) if name == "official" else ("-", 2)
        label = f"{name}, {len(runs)} seed" + "s" * (len(runs) > 1)
        ax.plot(steps, curves.mean(0), dashes, color=colour, label=label, zorder=above)
        ax.fill_between(steps, curves.min(0), curves.max(0), color=colour, alpha=0.15, lw=0)
    ax.set_yscale("log")
    ax.set(xlabel="optimizer step", ylabel=f"loss, mean of {width} steps")
    ax.set_title("Same seeds, same samples: the same learning")
    ax.legend()
    return ax


@style()
def plot_success(records: Sequence[Record], ax: Axes | None = None) -> Axes:
    """Draw success over training seconds, a line a run, with the time to 80 % of each.

    Args:
        records: of scope `closed_loop`.
        ax: where to draw; its x axis is logarithmic.
    """
    ax = ax or plt.subplots(figsize=(8, 3.6), layout="constrained")[1]
    for marker, (name, runs) in zip(MARKERS, _by_name(records).items()):
        colour = RUN_COLOURS.get(name, GREY)
        for number, record in enumerate(runs):
            curve = record.extra["curve"]
            x, y = [p["train_s"] for p in curve], [p["success_rate"] for p in curve]
            low, high = [p["success_low"] for p in curve], [p["success_high"] for p in curve]
            ax.plot(x, y, color=colour, marker=marker, ms=4, label=None if number else name)
            ax.fill_between(x, low, high, color=colour, alpha=0.1, lw=0)
        reached = [r.extra["seconds_to_80"] for r in runs if r.extra["seconds_to_80"]]
        if reached:
            ax.plot(np.median(reached), GOAL, "*", color=colour, ms=14, mec="white")
    ax.axhline(GOAL, color=GREY, lw=0.8, ls=":")
    ax.text(1.0, GOAL, " 80 %", transform=ax.get_yaxis_transform(), va="center", color=INK)
    ax.set_xscale("log")
    ax.set_ylim(-0.02, 1.02)
    ax.yaxis.set_major_formatter(PercentFormatter(1.0))
    ax.set(xlabel="training seconds (the clock stands while the model acts)", ylabel="success")
    ax.set_title("Closed loop: how soon does it act?")
    ax.legend(loc="upper left")
    return ax


@style()
def plot_rates(rows: Mapping[str, tuple[int, int]], ax: Axes | None = None) -> Axes:
    """Draw success rates with their 95 % intervals.

    Args:
        rows: name -> (successes, episodes).
        ax: where to draw.
    """
    ax = ax or plt.subplots(figsize=(8, 0.9 + 0.5 * len(rows)), layout="constrained")[1]
    for y, (name, (successes, trials)) in enumerate(rows.items()):
        rate, (low, high) = successes / trials, wilson(successes, trials)
        colour = RUN_COLOURS.get(name.split()[0], GREY)
        ax.plot([low, high], [y, y], color=colour, lw=6, alpha=0.35, solid_capstyle="butt")
        ax.plot(rate, y, "o", color=colour)
        ax.text(high, y, f"  {rate:.0%} of {trials}", va="center", color=INK)
    ax.set_yticks(range(len(rows)), list(rows))
    ax.set_ylim(len(rows) - 0.5, -0.5)
    ax.set_xlim(0, 1.15)
    ax.set_xticks(np.linspace(0, 1, 6))
    ax.xaxis.set_major_formatter(PercentFormatter(1.0))
    ax.set(xlabel="success, bar: where the true rate lies (95 %)")
    return ax


@style()
def plot_sampling(rows: Mapping[str, Mapping[str, float]]) -> tuple[Axes, Axes]:
    """Draw what the order of samples does to the gradient and to the loss.

    Args:
        rows: strategy -> `gradient_noise` (relative variance of a batch's gradient) and
            `loss_roughness` (variance of the difference of two steps' losses).

    Returns:
        The two axes.
    """
    _, axes = plt.subplots(1, 2, figsize=(9, 2.6), layout="constrained")
    for ax, key, title in zip(
        axes,
        ("gradient_noise", "loss_roughness"),
        ("Noise of a batch's gradient", "Roughness of the loss"),
    ):
        for y, (name, row) in enumerate(rows.items()):
            ax.barh(y, row[key], color=STRATEGY_COLOURS.get(name, GREY))
            ax.text(row[key], y, f" {row[key]:.3g}", va="center", color=INK)
        ax.set_yticks(range(len(rows)), list(rows))
        ax.set_ylim(len(rows) - 0.5, -0.5)
        ax.margins(x=0.2)
        ax.set_title(title)
    axes[0].set_xlabel("E|g_batch - g|² / |g|²")
    axes[1].set_xlabel("variance of loss(t+1) - loss(t)")
    return tuple(axes)


@style()
def plot_film(real: np.ndarray, dream: np.ndarray, *, shown: int = 4) -> np.ndarray:
    """Draw frames of one chunk: what was seen, and what had been imagined.

    Args:
        real, dream: uint8 [T, H, W, 3] of the same moments.
        shown: how many of them, evenly spread.

    Returns:
        The axes [2, shown].
    """
    at = np.linspace(0, len(real) - 1, shown).round().astype(int)
    height = 9 / shown * real.shape[1] / real.shape[2]
    size = (9.4, 2 * height + 0.5)
    _, axes = plt.subplots(2, shown, figsize=size, layout="constrained", squeeze=False)
    for row, (name, frames) in enumerate((("seen", real), ("imagined", dream))):
        for column, frame in enumerate(at):
            ax = axes[row, column]
            ax.imshow(frames[frame])
            ax.set(xticks=[], yticks=[])
            if row == 0:
                ax.set_title(f"frame {frame + 1} of {len(real)}", fontsize=9, weight="normal")
            if column == 0:
                ax.set_ylabel(name)
    return axes


def _by_name(records: Sequence[Record]) -> dict[str, list[Record]]:
    found: dict[str, list[Record]] = {}
    for record in records:
        if record.scope == "closed_loop" and record.losses and "curve" in record.extra:
            found.setdefault(record.name, []).append(record)
    if not found:
        raise ConfigError("no record of `wamlab converge` among them: scope closed_loop, a curve")
    return found
