"""Pictures of a profile: a part's times over steps, one step along its time, costs by rank, memory
over time."""

from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.patches import Patch

from wamlab.jupyter.plot import GREY, INK, PART_COLOURS, style
from wamlab.measure import Record
from wamlab.memory_timeline import Timeline
from wamlab.trace import Event, kernel_group, own_times

GROUP_COLOURS: dict[str, str] = {
    "matmul": "#0072b2",
    "attention": "#56b4e9",
    "convolution": "#009e73",
    "norm": "#f0e442",
    "elementwise": "#e69f00",
    "copy": "#d55e00",
    "optimizer": "#7f5fa8",
    "communication": "#cc79a7",
    "bookkeeping": "#999999",
    "other": "#c9ced6",
    "no operator": "#eef0f3",
}


@style()
def plot_part_histograms(parts: Mapping[str, Sequence[float]]) -> list[Axes]:
    """Draw each part's milliseconds as a histogram over steps.

    Args:
        parts: part -> one time a step.

    Returns:
        One axes a part, each with its own x axis from 0.
    """
    figure = plt.figure(figsize=(9.6, 2.3), layout="constrained")
    axes = figure.subplots(1, len(parts), sharey=True)
    for ax, (part, times) in zip(np.atleast_1d(axes), parts.items()):
        top = 1.25 * max(times)
        ax.hist(times, bins=np.linspace(0, top, 21), color=PART_COLOURS.get(part, GREY))
        ax.axvline(float(np.median(times)), color=INK, lw=1, ls="--")
        ax.set(xlim=(0, top), xlabel="ms")
        ax.set_title(f"{part}\n{np.median(times):.0f} ms", fontsize=10)
        ax.yaxis.get_major_locator().set_params(integer=True)
    np.atleast_1d(axes)[0].set_ylabel("steps")
    return list(np.atleast_1d(axes))


@style()
def plot_timeline(events: Sequence[Event], *, bins: int = 1200) -> Axes:
    """Draw one profiled step along its time: its marked parts above, what ran below.

    Args:
        events: a trace; its first step is drawn. The GPU's kernels where there are any, else the
            CPU's operators, by group.
        bins: pieces that the step is cut into; each shows the group that took most of it.

    Returns:
        The axes; x is milliseconds from the step's begin.
    """
    mark = min((e for e in events if e.name.startswith("ProfilerStep#")), key=lambda e: e.start)
    names, share = list(GROUP_COLOURS), np.zeros((len(GROUP_COLOURS), bins))
    width = mark.duration / bins
    share[-1] = width / 2  # a piece that is mostly empty shows as empty
    for name, start, end in _work(events):
        first, last = (start - mark.start) / width, (end - mark.start) / width
        row = names.index(kernel_group(name))
        for piece in range(max(int(first), 0), min(int(last) + 1, bins)):
            share[row, piece] += max(0.0, min(last, piece + 1) - max(first, piece)) * width
    figure, ax = plt.subplots(figsize=(9.6, 2.2), layout="constrained")
    span = mark.duration / 1e3
    colours = ListedColormap(list(GROUP_COLOURS.values()))
    image = share.argmax(0)[None]
    ax.imshow(image, aspect="auto", extent=(0, span, 0, 1), cmap=colours, vmin=-0.5,
              vmax=len(names) - 0.5, interpolation="nearest")  # fmt: skip
    seen = _draw_parts(ax, events, mark)
    ax.set_yticks([0.5, 1.6], ["what ran", "part"])
    ax.set(ylim=(0, 2.1), xlim=(0, span), xlabel="ms of one step")
    ax.tick_params(axis="y", length=0)
    shown = [Patch(color=GROUP_COLOURS[n], label=n) for i, n in enumerate(names) if i in image]
    handles = [Patch(color=c, label=f"part: {p}") for p, c in seen.items()]
    figure.legend(handles=handles + shown, loc="outside lower center", ncols=6, fontsize=8)
    return ax


def _work(events: Sequence[Event]) -> list[tuple[str, float, float]]:
    kernels = [(e.name, e.start, e.end) for e in events if e.category == "kernel"]
    if kernels:
        return kernels
    # an operator's own time stands at its begin: its callees follow there
    return [(op.name, op.start, op.start + own) for op, own in own_times(events)]


def _draw_parts(ax: Axes, events: Sequence[Event], mark: Event) -> dict[str, str]:
    seen: dict[str, str] = {}
    marks = [e for e in events if e.name.startswith("wamlab.") and e.category == "user_annotation"]
    backward = [(e.start, e.end) for e in marks if e.name == "wamlab.backward"]
    for e in sorted(marks, key=lambda e: -e.duration):
        part = e.name.removeprefix("wamlab.")
        again = part == "forward" and any(a <= e.start and e.end <= b for a, b in backward)
        part = "recompute" if again else part
        seen[part] = INK if again else PART_COLOURS.get(part, GREY)
        place = (e.start - mark.start) / 1e3, e.duration / 1e3
        ax.broken_barh([place], (1.75 if again else 1.35, 0.35), color=seen[part], lw=0)
    return seen


@style()
def plot_ranked(costs: Mapping[str, float], cures: Mapping[str, str], unit: str = "ms") -> Axes:
    """Draw costs as bars, the largest on top, each with what removes it.

    Args:
        costs: name -> cost.
        cures: name -> where it is taken away; names without one are left grey.
        unit: of the costs.

    Returns:
        The axes; x is the cost.
    """
    rows = sorted(costs.items(), key=lambda row: -row[1])
    ax = plt.subplots(figsize=(9, 0.9 + 0.36 * len(rows)), layout="constrained")[1]
    longest = rows[0][1]
    for y, (name, cost) in enumerate(rows):
        ax.barh(y, cost, height=0.66, color="#0072b2" if name in cures else GREY)
        text = f"{cost:,.0f} {unit}" if cost >= 10 else f"{cost:.2g} {unit}"
        text += f"  →  {cures[name]}" if name in cures else ""
        ax.text(cost + 0.01 * longest, y, text, va="center", fontsize=9)
    ax.set_yticks(range(len(rows)), [name for name, _ in rows])
    ax.set(ylim=(len(rows) - 0.4, -0.6), xlim=(0, 1.75 * longest), xlabel=unit)
    ax.tick_params(axis="y", length=0)
    return ax


@style()
def plot_batch_times(records: Sequence[Record], ax: Axes | None = None) -> Axes:
    """Draw step time over micro-batch, with the line that pure throughput would give.

    Args:
        records: of one way to compute, at several micro-batches.
        ax: where to draw.

    Returns:
        The axes, both logarithmic; points far above the line pay for something else than work.
    """
    ax = ax or plt.subplots(figsize=(6.4, 3.4), layout="constrained")[1]
    rows = sorted((r.micro_batch, r.step_ms.median) for r in records)
    sizes, times = [size for size, _ in rows], [ms for _, ms in rows]
    slope = times[-1] / sizes[-1]
    ax.plot(sizes, [slope * size for size in sizes], ls=":", color=INK, label="work alone")
    ax.plot(sizes, times, "o-", color="#0072b2", label=f"{records[0].name}, {records[0].device}")
    for size, ms in rows:
        ax.annotate(f"{ms:,.0f} ms", (size, ms), xytext=(0, 7), textcoords="offset points",
                    ha="center", fontsize=9)  # fmt: skip
    ax.set(xscale="log", yscale="log", xlabel="micro-batch", ylabel="ms, forward and backward")
    ax.set_xticks(sizes, [str(size) for size in sizes])
    ax.set_yticks([], minor=True)
    ax.minorticks_off()
    ax.margins(x=0.1, y=0.15)
    ax.legend()
    return ax


@style()
def plot_memory_timeline(timeline: Timeline, ax: Axes | None = None) -> Axes:
    """Draw what was allocated at each moment.

    Args:
        timeline: as `memory_timeline` reads it.
        ax: where to draw.

    Returns:
        The axes; MiB over milliseconds.
    """
    ax = ax or plt.subplots(figsize=(9, 2.6), layout="constrained")[1]
    ms = [moment for moment, _ in timeline]
    mib = [held / 2**20 for _, held in timeline]
    peak = int(np.argmax(mib))
    ax.fill_between(ms, mib, step="post", color="#56b4e9", alpha=0.5, lw=0)
    ax.step(ms, mib, where="post", color="#0072b2", lw=0.8)
    ax.plot(ms[peak], mib[peak], "o", color="#d55e00", markersize=5)
    ax.annotate(f"peak {mib[peak]:,.1f} MiB", (ms[peak], mib[peak]), xytext=(6, 0),
                textcoords="offset points", va="center", fontsize=9)  # fmt: skip
    ax.set(xlabel="ms", ylabel="MiB allocated", xlim=(0, None))
    ax.margins(y=0.12)
    return ax
