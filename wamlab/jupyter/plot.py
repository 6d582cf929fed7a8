"""Records -> Axes. One colour per dimension everywhere, units on every axis, readable in grey
print.

Colours are from Okabe and Ito's palette, which readers with the common forms of colour
blindness can tell apart; bars carry their number, so that nothing hangs on colour alone.
Without `ax` a function makes a figure with pyplot, which a notebook shows; a report passes axes
of its own.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, MaxNLocator

from wamlab.config import ConfigError
from wamlab.jupyter.table import baseline, speedup
from wamlab.measure import Record

GREY, INK = "#6b7280", "#22262b"
COLOURS: dict[str | None, str] = {
    None: GREY,
    "compute": "#0072b2",
    "parallel": "#009e73",
    "data": "#e69f00",
    "communication": "#cc79a7",
}
PART_COLOURS: dict[str, str] = {
    "data_wait": "#e69f00",
    "encoders": "#f0e442",
    "forward": "#56b4e9",
    "backward": "#0072b2",
    "communication": "#cc79a7",
    "optimizer": "#009e73",
}
SPARE_COLOURS = ("#d55e00", "#999999", "#bcbd22", "#7f5fa8", "#17a2a2")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
STYLE = {
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": GREY,
    "axes.axisbelow": True,
    "xtick.color": INK,
    "ytick.color": INK,
    "legend.frameon": False,
    "figure.dpi": 100,
    "savefig.facecolor": "white",
}
EQUAL = 1e-9  # where a loss difference of exactly zero is drawn on the logarithmic axis


@contextlib.contextmanager
def style() -> Iterator[None]:
    """Make figures in wamlab's style inside; nothing is changed outside."""
    plt.draw_if_interactive()  # loads the backend: done inside, what it sets would be undone
    with plt.rc_context(STYLE):
        yield


@style()
def plot_speedup(records: Sequence[Record], ax: Axes | None = None) -> Axes:
    """Draw training throughput of each row over the baseline's, as horizontal bars.

    Args:
        records: rows of one ladder on one machine, the baseline first.
        ax: where to draw.

    Returns:
        The axes; x is the speed-up, 1 = the baseline's samples/s.
    """
    base = _baseline(records)
    ax = ax or _axes(len(records))
    ratios = [speedup(r, base) for r in records]
    longest = max(r for r in ratios if r)
    for y, (record, ratio) in enumerate(zip(records, ratios)):
        if ratio is None:
            ax.text(0.02 * longest, y, _why(record), va="center", color=GREY, style="italic")
            continue
        _bar(ax, y, ratio, record)
        text = f"{ratio:.2f}×   {record.samples_per_s:.3g} samples/s"
        text += "   (wrong: losses differ)" if record.wrong else ""
        ax.text(ratio + 0.015 * longest, y, text, va="center", color=INK)
    ax.axvline(1.0, color=INK, lw=0.8, ls=":", zorder=0)
    ax.set_xlim(0, longest * 1.45)
    ax.set_xlabel(f"speed-up in samples/s (× {base.name})")
    ax.set_title("Training throughput of the whole machine")
    return _rows(ax, [r.name for r in records])


@style()
def plot_waterfall(records: Sequence[Record], ax: Axes | None = None) -> Axes:
    """Draw what each row of a cumulative ladder adds, each bar starting where the last one ended.

    Args:
        records: rows of a cumulative ladder, the baseline first.
        ax: where to draw.

    Returns:
        The axes; x is the step time in milliseconds, falling from row to row.
    """
    ax = ax or _axes(len(records))
    shown = [r for r in records if r.step_ms]
    if not shown:
        raise ConfigError(_missing(records, "step_ms"))
    start = shown[0].step_ms.median
    before = 0.0
    for y, record in enumerate(shown):
        now = record.step_ms.median
        left, width = (0, now) if y == 0 else (min(before, now), abs(before - now))
        ax.barh(y, width, left=left, height=0.62, color=COLOURS[record.dimension])
        factor = "" if y == 0 else f"   {before / now:.2f}×"
        ax.text(max(before, now) + 0.01 * start, y, f"{_ms(now)} ms{factor}", va="center")
        before = now
    ax.set_xlim(0, start * 1.3)
    ax.set_xlabel("median step time (ms); a bar is the time that its row takes away")
    ax.set_title(f"From {_ms(start)} to {_ms(before)} ms a step")
    return _rows(ax, [r.name for r in shown])


@style()
def plot_breakdown(records: Sequence[Record], ax: Axes | None = None) -> Axes:
    """Draw where a step's time goes, one stacked bar a row, from `parts_ms`.

    Returns:
        The axes; x is milliseconds a step. The parts are timed apart, each synchronised.
    """
    shown = [r for r in records if r.parts_ms]
    if not shown:
        raise ConfigError(_missing(records, "parts_ms"))
    ax = ax or _axes(len(shown))
    return _stack(ax, {r.name: r.parts_ms for r in shown}, "ms a step", "Where a step's time goes")


@style()
def plot_memory(rows: Mapping[str, Mapping[str, float]], ax: Axes | None = None) -> Axes:
    """Draw memory by part, one stacked bar a row.

    Args:
        rows: row name -> part -> GiB.
        ax: where to draw.
    """
    ax = ax or _axes(len(rows))
    return _stack(ax, rows, "GiB on one rank", "Where the memory goes")


@style()
def plot_losses(
    records: Sequence[Record], axes: tuple[Axes, Axes] | None = None, *, tolerance: float = 1e-2
) -> tuple[Axes, Axes]:
    """Draw the rows' losses over each other, and below them their differences to the baseline.

    Args:
        records: rows of one ladder; those without losses are left out.
        axes: two axes, losses and differences.
        tolerance: the band of differences that count as equal.

    Returns:
        The two axes: loss by global step, and |relative difference| on a logarithmic axis.
    """
    shown = [r for r in records if r.losses]
    if not shown:
        raise ConfigError(_missing(records, "losses"))
    if axes is None:
        figure = plt.figure(figsize=(8, 4.6), layout="constrained")
        axes = tuple(figure.subplots(2, 1, sharex=True, height_ratios=(3, 2)))
    top, bottom = axes
    base = shown[0]
    for number, record in enumerate(shown):
        look = _look(record, number)
        top.plot(range(len(record.losses)), record.losses, label=record.name, **look)
        if number:
            pairs = zip(record.losses, base.losses)
            far = [max(abs(a - b) / max(abs(b), 1e-12), EQUAL) for a, b in pairs]
            bottom.plot(range(len(far)), far, **look)
    _finish_losses(top, bottom, base.name, tolerance)
    return axes


def _finish_losses(top: Axes, bottom: Axes, name: str, tolerance: float) -> None:
    top.set_ylabel("loss")
    top.set_title("Same seed, same samples: the losses must lie on each other")
    top.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=9)
    bottom.axhspan(EQUAL / 3, tolerance, color="#009e73", alpha=0.12, lw=0)
    bottom.axhline(tolerance, color="#009e73", lw=0.8)
    text = f" allowed: up to {tolerance:g}"
    bottom.text(1.0, tolerance, text, transform=bottom.get_yaxis_transform(), va="center")
    bottom.text(1.0, EQUAL, " equal", transform=bottom.get_yaxis_transform(), va="center")
    bottom.set_yscale("log")
    bottom.set_ylim(EQUAL / 3, max(10 * tolerance, bottom.get_ylim()[1]))
    bottom.set_ylabel(f"|Δ loss| / {name}")
    bottom.set_xlabel("global step")
    bottom.xaxis.set_major_locator(MaxNLocator(integer=True))


@style()
def plot_decode(records: Sequence[Record], ax: Axes | None = None) -> Axes:
    """Draw decode times with their quartiles, one bar a decoder.

    Returns:
        The axes; x is milliseconds a training window, all views.
    """
    ax = ax or _axes(len(records))
    times = [r.step_ms.median for r in records if r.step_ms]
    if not times:
        raise ConfigError(_missing(records, "step_ms"))
    slowest = max(times)
    for y, record in enumerate(records):
        if record.step_ms is None:
            ax.text(0.02 * slowest, y, _why(record), va="center", color=GREY, style="italic")
            continue
        low = record.step_ms.median - record.step_ms.q25
        high = record.step_ms.q75 - record.step_ms.median
        _bar(ax, y, record.step_ms.median, record, xerr=[[low], [high]])
        text = f"{_ms(record.step_ms.median)} ms"
        ax.text(record.step_ms.q75 + 0.015 * slowest, y, text, va="center", color=INK)
    ax.set_xlim(0, slowest * 1.25)
    views = records[0].extra.get("views")
    ax.set_xlabel("ms a window" + (f" of {views} views" if views else "") + " (median, quartiles)")
    ax.set_title("Video decoding alone, one thread a decoder")
    return _rows(ax, [r.name for r in records])


@style()
def mark_prediction(ax: Axes, value: float | None, *, vertical: bool = True) -> Axes:
    """Draw the reader's prediction over a measurement; nothing when none was made."""
    if value is None:
        return ax
    line = ax.axvline if vertical else ax.axhline
    line(value, color="#d55e00", lw=1.5, ls="--", label=f"your prediction: {value:g}")
    ax.legend(loc="lower right", fontsize=9)
    return ax


def _baseline(records: Sequence[Record]) -> Record:
    base = baseline(records)
    if base is None:
        raise ConfigError(_missing(records, "samples_per_s"))
    return base


def _missing(records: Sequence[Record], field: str) -> str:
    names = ", ".join(r.name for r in records) or "no records at all"
    return f"nothing to draw: none of the records has {field!r} ({names})"


def _axes(rows: int) -> Axes:
    return plt.subplots(figsize=(8, 1.3 + 0.42 * rows), layout="constrained")[1]


def _bar(ax: Axes, y: int, length: float, record: Record, **options: object) -> None:
    look = {"color": COLOURS[record.dimension], "height": 0.62, "error_kw": {"lw": 1}}
    if record.wrong:
        look |= {"hatch": "///", "alpha": 0.45}
    ax.barh(y, length, **look, **options)


def _stack(ax: Axes, rows: Mapping[str, Mapping[str, float]], unit: str, title: str) -> Axes:
    parts = list(dict.fromkeys(part for row in rows.values() for part in row))
    spare = iter(SPARE_COLOURS * 3)
    longest = max(sum(row.values()) for row in rows.values())
    left = [0.0] * len(rows)
    for part in parts:
        widths = [row.get(part, 0.0) for row in rows.values()]
        colour = PART_COLOURS.get(part) or next(spare)
        ax.barh(range(len(rows)), widths, left=left, height=0.62, label=part, color=colour)
        for y, width in enumerate(widths):
            if width > 0.06 * longest:
                dark = colour in ("#0072b2", "#7f5fa8", "#009e73", "#d55e00")
                text = _ms(width)
                ax.text(left[y] + width / 2, y, text, ha="center", va="center", fontsize=8.5,
                        color="white" if dark else INK)  # fmt: skip
        left = [a + b for a, b in zip(left, widths)]
    for y, total in enumerate(left):
        ax.text(total + 0.01 * longest, y, _ms(total), va="center", color=INK)
    ax.set_xlim(0, longest * 1.12)
    ax.set_xlabel(unit)
    ax.set_title(title)
    ax.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=9)
    return _rows(ax, list(rows))


def _rows(ax: Axes, names: Sequence[str]) -> Axes:
    ax.set_yticks(range(len(names)), names)
    ax.set_ylim(len(names) - 0.4, -0.6)  # the first row on top
    ax.tick_params(axis="y", length=0)
    ax.grid(axis="x", color="#e3e6ea", lw=0.8)
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    return ax


def _look(record: Record, number: int) -> dict[str, object]:
    if number == 0:
        return {"color": GREY, "lw": 5, "alpha": 0.5, "solid_capstyle": "round"}
    marker = MARKERS[number % len(MARKERS)]
    size = {"markersize": 4.5, "lw": 1.2, "markerfacecolor": "white"}
    return {"color": COLOURS[record.dimension], "marker": marker, **size}


def _why(record: Record) -> str:
    text = record.reason or record.wrong or "not measured"
    text = text if len(text) <= 80 else text[:77] + "..."
    return f"skipped: {text}" if record.reason else text


def _ms(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
