"""Pictures of video decoding: groups of pictures, what a window costs, workers and their price."""

from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes

from wamlab.config import ConfigError
from wamlab.jupyter.plot import GREY, INK, MARKERS, style
from wamlab.measure import Record

KEY, DECODED, WANTED = "#d55e00", "#56b4e9", "#0072b2"
DECODER_COLOURS: dict[str, str] = {
    "pyav-naive": GREY,
    "pyav": "#e69f00",
    "torchcodec": "#0072b2",
    "torchcodec-cuda": "#009e73",
    "opencv": "#cc79a7",
    "decord": "#d55e00",
    "ffmpeg": "#7f5fa8",
    "pynvvideocodec": "#17a2a2",
}


@style()
def plot_groups(rows: Mapping[str, tuple[Sequence[int], Sequence[int]]], *, frames: int) -> Axes:
    """Draw which frames are decoded to show the wanted ones, one line of frames a row.

    Args:
        rows: name -> (keyframes, wanted frames).
        frames: in the file.

    Returns:
        The axes; x is the frame.
    """
    _, ax = plt.subplots(figsize=(10, 1.3 + 0.6 * len(rows)), layout="constrained")
    for y, (keys, wanted) in enumerate(rows.values()):
        decoded = sorted(_decoded(keys, wanted))
        ax.plot([0, frames - 1], [y, y], color="#e3e6ea", lw=7, solid_capstyle="butt", zorder=1)
        for colour, marked, height in ((DECODED, decoded, 0.16), (WANTED, wanted, 0.28)):
            ax.vlines(marked, y - height, y + height, color=colour, lw=1.6, zorder=2)
        ax.plot(keys, [y - 0.34] * len(keys), "v", color=KEY, markersize=5, zorder=3)
        text = f" {len(wanted)} wanted, {len(decoded)} decoded"
        ax.text(frames, y, text, va="center", color=INK)
    for colour, name, mark in (
        (KEY, "keyframe", "v"),
        (DECODED, "decoded", "|"),
        (WANTED, "wanted", "|"),
    ):
        ax.plot([], [], mark, color=colour, label=name, markersize=8, markeredgewidth=2)
    ax.set(xlim=(-1, frames * 1.28), ylim=(len(rows) - 0.4, -0.9), xlabel="frame")
    ax.set_yticks(range(len(rows)), list(rows))
    ax.set_xticks(range(0, frames, 25))
    ax.set_title("What must be decoded to show a window")
    ax.legend(loc="upper right", ncols=3, fontsize=9)
    return ax


def _decoded(keys: Sequence[int], wanted: Sequence[int]) -> set[int]:
    found: set[int] = set()
    for frame in wanted:
        start = max(k for k in keys if k <= frame)
        found |= set(range(start, frame + 1))
    return found


@style()
def plot_cost_per_view(rows: Mapping[str, Sequence[Record]], *, cpu: bool = False) -> Axes:
    """Draw milliseconds a view for files coded in different ways, one bar a decoder.

    Args:
        rows: how the file is coded -> the records of `time_decoders`.
        cpu: draw CPU time, else wall time; quartiles as error bars.

    Returns:
        The axes; y is milliseconds a view.
    """
    names = list(dict.fromkeys(r.name for records in rows.values() for r in records))
    _, ax = plt.subplots(figsize=(10, 3.6), layout="constrained")
    width = 0.8 / len(names)
    for number, name in enumerate(names):
        x = np.arange(len(rows)) + (number - (len(names) - 1) / 2) * width
        cost = np.array([_quartiles(records, name, cpu=cpu) for records in rows.values()])
        middle = cost[:, 0]
        colour = DECODER_COLOURS.get(name, INK)
        spread = np.abs(cost[:, 1:] - middle[:, None]).T
        ax.bar(x, middle, width * 0.92, yerr=spread, color=colour, label=name, error_kw={"lw": 1})
        for at, value in zip(x, cost):
            text = "×" if np.isnan(value[0]) else f"{value[0]:.0f}"
            ax.text(at, np.nan_to_num(value[2]), text, ha="center", va="bottom", fontsize=7.5)
    ax.set_xticks(range(len(rows)), list(rows))
    ax.set_ylabel(f"{'CPU ' if cpu else ''}ms a view (median, quartiles)")
    ax.set_title("A window of 33 frames, one thread; × = refused")
    ax.legend(fontsize=9, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return ax


def _quartiles(records: Sequence[Record], name: str, *, cpu: bool) -> tuple[float, float, float]:
    record = next((r for r in records if r.name == name), None)
    if record is None or record.step_ms is None:
        return (np.nan,) * 3
    views = record.extra["views"]
    if cpu:
        return tuple(record.extra["cpu_ms"][k] / views for k in ("median", "q25", "q75"))
    return tuple(v / views for v in (record.step_ms.median, record.step_ms.q25, record.step_ms.q75))


@style()
def plot_parts(rows: Mapping[str, Mapping[str, float]]) -> Axes:
    """Draw what a view's milliseconds go into, one bar a row, its parts beside each other."""
    parts = list(dict.fromkeys(part for row in rows.values() for part in row))
    colours = dict(zip(parts, (WANTED, "#e69f00", "#009e73", "#cc79a7")))
    _, ax = plt.subplots(figsize=(9, 1.3 + 0.45 * len(rows)), layout="constrained")
    for y, row in enumerate(rows.values()):
        left = 0.0
        for part, value in row.items():
            ax.barh(y, value, left=left, color=colours[part], height=0.62)
            if value > 0.05 * max(sum(r.values()) for r in rows.values()):
                ax.text(
                    left + value / 2, y, f"{value:.0f}", ha="center", va="center", color="white"
                )
            left += value
        ax.text(left, y, f"  {left:.0f} ms", va="center", color=INK)
    for part in parts:
        ax.barh(0, 0, color=colours[part], label=part)
    ax.set_yticks(range(len(rows)), list(rows))
    ax.set(ylim=(len(rows) - 0.4, -0.6), xlabel="ms a view (CPU)", title="Where the time goes")
    ax.margins(x=0.12)
    ax.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=9)
    return ax


@style()
def plot_workers(records: Sequence[Record]) -> np.ndarray:
    """Draw throughput, CPU time a sample and the main loop's slow-down against workers.

    Args:
        records: of `sweep_workers`.

    Returns:
        The three axes.

    Raises:
        ConfigError: no record of a sweep.
    """
    rows = [r for r in records if "workers" in r.extra]
    if not rows:
        raise ConfigError("nothing to draw: no record names its workers; run sweep_workers first")
    _, axes = plt.subplots(1, 3, figsize=(11, 3.2), layout="constrained")
    for number, name in enumerate(dict.fromkeys(r.name for r in rows)):
        own = [r for r in rows if r.name == name]
        x = [r.extra["workers"] for r in own]
        look = {"color": DECODER_COLOURS.get(name, INK), "marker": MARKERS[number], "label": name}
        axes[0].plot(x, [r.samples_per_s for r in own], **look)
        cpu = [r.extra["cpu_ms"] for r in own]
        middle = np.array([c["median"] for c in cpu])
        spread = [middle - [c["q25"] for c in cpu], np.array([c["q75"] for c in cpu]) - middle]
        axes[1].errorbar(x, middle, yerr=spread, capsize=3, **look)
        axes[2].plot(x, [r.extra["slowdown"] for r in own], **look)
    titles = ("samples/s of all workers", "CPU ms a sample (quartiles)", "main loop slower by ×")
    for ax, title in zip(axes, titles):
        ax.set_title(title)
        ax.set(xlabel="workers", ylim=(0, None))
        ax.set_xticks(sorted({r.extra["workers"] for r in rows}))
        ax.grid(axis="y", color="#e3e6ea", lw=0.8)
    axes[2].axhline(1.0, color=GREY, lw=1, ls="--")
    axes[0].legend(fontsize=9)
    return axes
