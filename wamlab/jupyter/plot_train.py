"""Pictures of the trainer: the knee of the micro-batch, and what a forward starts in which
order."""

from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from wamlab.jupyter.plot import GREY, INK, MARKERS, style

BLOCK = "#56b4e9"
EVENT_COLOURS = {"all_gather": "#cc79a7", "reduce_scatter": "#e69f00"}
MODE_COLOURS = {"none": "#d55e00", "selective": "#009e73", "full": "#0072b2"}


@style()
def plot_knee(rows: Mapping[str, Mapping[int, tuple[float, float]]]) -> tuple[Axes, Axes]:
    """Draw throughput and kept memory over the micro-batch, one line a recompute mode.

    Args:
        rows: mode -> micro-batch -> (samples/s, MiB kept for the backward).

    Returns:
        The axes of throughput and of memory.
    """
    _, (left, right) = plt.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
    for marker, (mode, points) in zip(MARKERS, rows.items()):
        look = {"marker": marker, "color": MODE_COLOURS.get(mode, GREY), "label": mode}
        left.plot(list(points), [rate for rate, _ in points.values()], **look)
        right.plot(list(points), [mib for _, mib in points.values()], **look)
    for ax, title, unit in (
        (left, "Throughput", "samples/s"),
        (right, "Kept from forward to backward", "MiB"),
    ):
        ax.set_xscale("log", base=2)
        sizes = sorted({size for points in rows.values() for size in points})
        ax.set_xticks(sizes, [str(size) for size in sizes])
        ax.minorticks_off()
        ax.set_ylim(bottom=0)
        ax.set(title=title, xlabel="micro-batch", ylabel=unit)
    left.legend(title="recompute")
    return left, right


@style()
def plot_order(rows: Mapping[str, Sequence[str]]) -> Axes:
    """Draw what a pass starts in which order, one strip a row.

    Args:
        rows: name -> events: "all_gather", "reduce_scatter" or "compute 3".

    Returns:
        The axes; x counts events.
    """
    longest = max(len(events) for events in rows.values())
    size = (1.6 + 0.66 * longest, 0.9 + 0.55 * len(rows))
    _, ax = plt.subplots(figsize=size, layout="constrained")
    for y, events in enumerate(rows.values()):
        for x, event in enumerate(events):
            text = {"all_gather": "gather", "reduce_scatter": "scatter"}.get(event)
            colour = EVENT_COLOURS.get(event, BLOCK)
            ax.barh(y, 0.94, left=x, height=0.7, color=colour)
            text = text or event.replace("compute", "block")
            ax.text(x + 0.47, y, text, ha="center", va="center", fontsize=8, color=INK)
    ax.set_yticks(range(len(rows)), list(rows))
    ax.set_ylim(len(rows) - 0.5, -0.5)
    ax.tick_params(axis="both", length=0)
    ax.set(xticks=[], xlabel="in the order in which they are started")
    ax.spines[["left", "bottom"]].set_visible(False)
    return ax
