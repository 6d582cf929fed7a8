"""Pictures of fusion: what starting costs, what an operation moves, what a block is made of."""

from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.ticker import FuncFormatter, NullFormatter

from wamlab.jupyter.plot import GREY, INK, style
from wamlab.jupyter.plot_profile import GROUP_COLOURS
from wamlab.measure import Record
from wamlab.trace import kernel_group


@style()
def plot_scaling(times: Mapping[int, float], ax: Axes | None = None) -> Axes:
    """Draw an operation's time over its size, with the two lines that bound it.

    Args:
        times: KiB -> microseconds.
        ax: where to draw.

    Returns:
        The axes, both logarithmic.
    """
    ax = ax or plt.subplots(figsize=(8.6, 3.2), layout="constrained")[1]
    sizes, micros = list(times), list(times.values())
    floor, slope = min(micros), micros[-1] / sizes[-1]
    ax.axhline(floor, color="#d55e00", ls=":", label=f"starting it: {floor:.1f} µs")
    ax.plot(sizes, [slope * s for s in sizes], color="#009e73", ls=":", label="moving its bytes")
    ax.plot(sizes, micros, "o-", color="#0072b2", label="measured")
    ax.axvline(floor / slope, color=GREY, lw=0.8)
    ax.annotate(f"as long as starting:\n{floor / slope:.0f} KiB", (floor / slope, max(micros)),
                xytext=(6, -4), textcoords="offset points", va="top", fontsize=9)  # fmt: skip
    ax.set(xscale="log", yscale="log", xlabel="KiB read", ylabel="µs a call")
    ax.set_ylim(bottom=floor / 3)
    _plain(ax.xaxis, ax.yaxis)
    ax.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    return ax


@style()
def plot_traffic(rows: Mapping[str, Sequence[tuple[str, float]]]) -> Axes:
    """Draw the bytes that each way of computing the same thing moves, operation by operation.

    Args:
        rows: way -> (operation, MiB) in order.

    Returns:
        The axes; x is MiB, every operation a piece of its bar.
    """
    ax = plt.subplots(figsize=(9, 0.9 + 0.62 * len(rows)), layout="constrained")[1]
    longest = max(sum(mib for _, mib in pieces) for pieces in rows.values())
    for y, pieces in enumerate(rows.values()):
        left = 0.0
        for number, (name, mib) in enumerate(pieces):
            shade = "#56b4e9" if number % 2 else "#0072b2"
            ax.barh(y, mib, left=left, height=0.62, color=shade)
            if mib > 0.045 * longest:
                colour = INK if number % 2 else "white"
                ax.text(left + mib / 2, y, name, ha="center", va="center", fontsize=7.5,
                        color=colour, rotation=0 if mib > 0.1 * longest else 90)  # fmt: skip
            left += mib
        ax.text(left + 0.01 * longest, y, f"{left:,.0f} MiB", va="center")
    ax.set_yticks(range(len(rows)), list(rows))
    ax.set(ylim=(len(rows) - 0.4, -0.6), xlim=(0, 1.15 * longest), xlabel="MiB read and written")
    ax.tick_params(axis="y", length=0)
    return ax


@style()
def plot_kernels(tables: Mapping[str, Mapping[str, tuple[int, float]]]) -> tuple[Axes, Axes]:
    """Draw how many kernels or operators a block runs, and for how long, by group.

    Args:
        tables: way -> {name: (how often, milliseconds)}.

    Returns:
        The axes of counts and of milliseconds.
    """
    figure = plt.figure(figsize=(9.6, 1.5 + 0.42 * len(tables)), layout="constrained")
    axes = figure.subplots(1, 2, sharey=True)
    for ax, field, unit in zip(axes, (0, 1), ("operations started", "ms")):
        left = [0.0] * len(tables)
        for group, colour in GROUP_COLOURS.items():
            widths = [
                sum(row[field] for name, row in table.items() if kernel_group(name) == group)
                for table in tables.values()
            ]
            label = group if any(widths) else None
            ax.barh(range(len(tables)), widths, left=left, height=0.62, color=colour, label=label)
            left = [a + b for a, b in zip(left, widths)]
        for y, total in enumerate(left):
            ax.text(total * 1.01, y, f"{total:,.0f}" if field == 0 else f"{total:.3g}",
                    va="center", fontsize=9)  # fmt: skip
        ax.set(xlabel=unit, xlim=(0, 1.16 * max(left)))
        ax.tick_params(axis="y", length=0)
    axes[0].set_yticks(range(len(tables)), list(tables))
    axes[0].set_ylim(len(tables) - 0.4, -0.6)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=6, fontsize=8)
    return tuple(axes)


@style()
def plot_ways(records: Sequence[Record]) -> Axes:
    """Draw ways to compute one thing: their time, and in words the calls and pairs they take.

    Args:
        records: with `calls` and `pairs_share`, as `lab_fusion.attention_ways` makes them.

    Returns:
        The axes; x is milliseconds with quartiles.
    """
    ax = plt.subplots(figsize=(9, 0.9 + 0.42 * len(records)), layout="constrained")[1]
    longest = max(r.step_ms.q75 for r in records)
    for y, record in enumerate(records):
        step = record.step_ms
        spread = [[step.median - step.q25], [step.q75 - step.median]]
        ax.barh(y, step.median, xerr=spread, height=0.62, color="#56b4e9", error_kw={"lw": 1})
        calls = record.extra["calls"]
        text = f"{calls} call{'s' * (calls > 1)}, {record.extra['pairs_share']:.2f} × the pairs"
        ax.text(step.q75 + 0.01 * longest, y, f"{step.median:.3g} ms   {text}", va="center")
    ax.set_yticks(range(len(records)), [r.name for r in records])
    ax.set(ylim=(len(records) - 0.4, -0.6), xlim=(0, 1.6 * longest))
    ax.set_xlabel("ms, one layer's self-attention forward and backward")
    ax.tick_params(axis="y", length=0)
    return ax


@style()
def plot_per_sample(records: Sequence[Record]) -> Axes:
    """Draw milliseconds a sample of several ways and micro-batches, the slowest on top.

    Returns:
        The axes; x is milliseconds a sample, logarithmic.
    """
    rows = sorted(records, key=lambda r: -r.step_ms.median / r.micro_batch)
    ax = plt.subplots(figsize=(9, 0.9 + 0.38 * len(rows)), layout="constrained")[1]
    times = [r.step_ms.median / r.micro_batch for r in rows]
    for y, (record, ms) in enumerate(zip(rows, times)):
        colour = GREY if record.name == "official" else "#0072b2"
        ax.barh(y, ms, height=0.64, color=colour)
        rate = f", {record.mfu:.0%} MFU" if record.mfu else ""
        text = f"{ms:,.0f}" if ms >= 100 else f"{ms:.3g}"
        ax.text(ms * 1.04, y, f"{text} ms{rate}", va="center", fontsize=9)
    ax.set_yticks(range(len(rows)), [f"{r.name}, micro-batch {r.micro_batch}" for r in rows])
    ax.set(xscale="log", xlim=(min(times) / 2, max(times) * 3), ylim=(len(rows) - 0.4, -0.6))
    _plain(ax.xaxis)
    ax.set_xlabel("ms a sample, forward and backward (logarithmic)")
    ax.tick_params(axis="y", length=0)
    return ax


def _plain(*axes: Axis) -> None:
    """Label a logarithmic axis with plain numbers, at powers of ten alone."""
    for axis in axes:
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.set_minor_formatter(NullFormatter())
