"""Pictures of motion: skeletons drawn, phases shaded, streams and aliases, caches, the ledger."""

import html
from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from wamlab.jupyter.plot import GREY, INK, style
from wamlab.measure import Record
from wamlab.motion.claims import ledger
from wamlab.motion.segments import Block
from wamlab.motion.skeleton import CANONICAL, CANONICAL_TREE

KIND_COLOURS: dict[str, str] = {
    "support": "#d5d9de",
    "take-off": "#e69f00",
    "flight": "#56b4e9",
    "landing": "#009e73",
    "kick": "#d55e00",
    "balance": "#cc79a7",
}
LEFT, RIGHT, TRUNK = "#0072b2", "#d55e00", INK


@style()
def plot_motion(
    place_TJ3: np.ndarray, blocks: Sequence[Block], rate: float, *, count: int = 10
) -> Figure:
    """Draw a motion from the side as a row of skeletons over its blocks.

    Args:
        place_TJ3: canonical joints, m, +Z up.
        blocks: of the clip.
        rate: frames a second.
        count: skeletons drawn, evenly in time.

    Returns:
        The figure: skeletons above; below, heights of pelvis and ankles with phases shaded.
    """
    figure = plt.figure(figsize=(10, 5.4), layout="constrained")
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    seconds = np.arange(len(place_TJ3)) / rate
    _shade(top, blocks, rate)
    _shade(bottom, blocks, rate, names=True)
    frames = np.linspace(0, len(place_TJ3) - 1, count).round().astype(int)
    side = _sideways(place_TJ3)
    metres = 1.5 * seconds[-1] / count  # a person is less than two thirds of a metre wide
    for frame in frames:
        _skeleton(top, side[frame], at=seconds[frame], scale=metres)
    top.set(ylabel="height (m)", ylim=(-0.05, None))
    top.set_title("A motion, its blocks, and what decides them")
    for joint, colour, name in ((0, INK, "pelvis"), (10, LEFT, "left ankle"),
                                (17, RIGHT, "right ankle")):  # fmt: skip
        bottom.plot(seconds, place_TJ3[:, joint, 2], color=colour, lw=1.6, label=name)
    bottom.set(ylabel="height (m)", xlabel="time (s)", xlim=(-metres / 2, seconds[-1] + metres / 2))
    bottom.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=9)
    return figure


def _sideways(place_TJ3: np.ndarray) -> np.ndarray:
    """Return [T, J, 2]: along the direction that the body faces in the first frame, and up."""
    hips = place_TJ3[0, CANONICAL.index("left_hip")] - place_TJ3[0, CANONICAL.index("right_hip")]
    forward = np.array([hips[1], -hips[0]]) / np.hypot(*hips[:2])
    along = (place_TJ3[..., :2] - place_TJ3[:, :1, :2]) @ forward
    return np.stack([along, place_TJ3[..., 2]], -1)


def _skeleton(ax: Axes, place_J2: np.ndarray, *, at: float, scale: float) -> None:
    for joint, parent in enumerate(CANONICAL_TREE.parents):
        if parent < 0:
            continue
        name = CANONICAL[joint]
        colour = LEFT if name.startswith("left") else RIGHT if name.startswith("right") else TRUNK
        ends = place_J2[[parent, joint]]
        ax.plot(at + scale * ends[:, 0], ends[:, 1], color=colour, lw=2, solid_capstyle="round")
    head = place_J2[CANONICAL.index("head")]
    ax.plot(at + scale * head[0], head[1] + 0.08, "o", color=TRUNK, markersize=6)


def _shade(ax: Axes, blocks: Sequence[Block], rate: float, names: bool = False) -> None:
    for number, block in enumerate(blocks):
        first, last = block.first / rate, block.last / rate
        ax.axvspan(first, last, color=KIND_COLOURS[block.kind], alpha=0.55, lw=0, zorder=0)
        if names:
            height = 1.01 if number % 2 else 1.09  # short neighbours would write over each other
            at = {"x": (first + last) / 2, "y": height, "s": block.kind}
            ax.text(**at, ha="center", fontsize=8.5, transform=ax.get_xaxis_transform())


@style()
def plot_alias(
    true: tuple[np.ndarray, np.ndarray], sampled: Mapping[str, tuple[np.ndarray, np.ndarray]]
) -> Axes:
    """Draw a signal and what different ways of sampling make of it.

    Args:
        true: times in s and the signal in N m that belongs there.
        sampled: way -> (times, values).
    """
    _, ax = plt.subplots(figsize=(10, 3.4), layout="constrained")
    ax.plot(*true, color=GREY, lw=6, alpha=0.4, label="what is there", solid_capstyle="round")
    colours, marks = ("#d55e00", "#e69f00", "#0072b2", "#009e73"), "ox^s"
    for (name, (times, values)), colour, mark in zip(sampled.items(), colours, marks):
        ax.plot(times, values, color=colour, lw=1.2, marker=mark, markersize=4, label=name)
    ax.set(xlabel="time (s)", ylabel="torque (N m)")
    ax.set_title("A torque stream of 1000 Hz read at 120 Hz")
    ax.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=9)
    return ax


@style()
def plot_hit_rates(rates: Mapping[str, Mapping[str, float]], share: float) -> Axes:
    """Draw the hit rate of every policy on every trace.

    Args:
        rates: trace -> policy -> hit rate.
        share: of the data that the cache holds.
    """
    policies = list(next(iter(rates.values())))
    _, ax = plt.subplots(figsize=(10, 3.6), layout="constrained")
    colours = (GREY, "#999999", "#56b4e9", "#0072b2", "#e69f00", "#009e73", INK)
    width = 0.86 / len(policies)
    for i, (policy, colour) in enumerate(zip(policies, colours)):
        x = np.arange(len(rates)) + (i - (len(policies) - 1) / 2) * width
        heights = [found[policy] for found in rates.values()]
        ax.bar(x, heights, width * 0.92, color=colour, label=policy)
        for place, height in zip(x, heights):
            ax.text(place, height + 0.01, f"{height:.2f}".lstrip("0"), ha="center", fontsize=7.5)
    ax.axhline(share, color=INK, lw=0.8, ls=":")
    ax.text(len(rates) - 0.4, share, " cache / data", va="center", fontsize=9)
    ax.set_xticks(range(len(rates)), list(rates))
    ax.set(ylabel="hit rate", ylim=(0, 1), xlim=(-0.6, len(rates) - 0.4))
    ax.set_title("The sampler decides what a cache can do")
    ax.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=9)
    return ax


@style()
def plot_times(times_ms: Mapping[str, float], title: str) -> Axes:
    """Draw times on a logarithmic axis, one bar a way, with the factor over the last one."""
    _, ax = plt.subplots(figsize=(8, 1.3 + 0.42 * len(times_ms)), layout="constrained")
    least = list(times_ms.values())[-1]
    colours = plt.get_cmap("viridis")(np.linspace(0.15, 0.75, len(times_ms)))
    for y, (time, colour) in enumerate(zip(times_ms.values(), colours)):
        ax.barh(y, time, height=0.62, color=colour)
        ratio = time / least
        text = " ".join(f"{x:,.0f}{u}" if x >= 100 else f"{x:.3g}{u}"
                        for x, u in ((time, " ms  "), (ratio, "×")))  # fmt: skip
        ax.text(time * 1.08, y, text, va="center", color=INK)
    ax.set(
        xscale="log",
        xlabel="ms, logarithmic",
        xlim=(min(times_ms.values()) / 3, 12 * max(times_ms.values())),
    )
    ax.set_yticks(range(len(times_ms)), list(times_ms))
    ax.set_ylim(len(times_ms) - 0.4, -0.6)
    ax.set_title(title)
    return ax


@style()
def plot_matrix(matrix: np.ndarray, title: str, *, edges: Sequence[int] = ()) -> Axes:
    """Draw which entries are not zero, with lines before the rows and columns `edges`."""
    _, ax = plt.subplots(figsize=(4.6, 4.6), layout="constrained")
    ax.imshow(matrix != 0, cmap="Blues", vmin=0, vmax=1.6, interpolation="nearest")
    for edge in edges:
        ax.axhline(edge - 0.5, color="#d55e00", lw=0.8)
        ax.axvline(edge - 0.5, color="#d55e00", lw=0.8)
    ax.set_title(title)
    ax.set_xticks([])
    ax.set_yticks([])
    return ax


@style()
def plot_errors(records: Sequence[Record], line_cm: float = 2.3) -> Axes:
    """Draw held-out errors beside the body that stands still, and the article's line."""
    shown = [r for r in records if r.extra.get("mpjpe_cm") is not None]
    _, ax = plt.subplots(figsize=(8, 1.5 + 0.42 * len(shown)), layout="constrained")
    for y, record in enumerate(shown):
        error, hold = record.extra["mpjpe_cm"], record.extra["hold_cm"]
        ax.barh(y, error, height=0.62, color="#0072b2")
        ax.plot([hold, hold], [y - 0.4, y + 0.4], color=INK, lw=2)
        ax.text(max(error, hold) * 1.02, y, f"{error:.1f} cm", va="center")
    ax.set_xlim(0, 1.15 * ax.get_xlim()[1])
    ax.plot([], [], color=INK, lw=2, label="standing still")
    ax.axvline(line_cm, color="#d55e00", ls="--", label=f"the article's {line_cm} cm")
    ax.set_yticks(range(len(shown)), [r.name for r in shown])
    ax.set_ylim(len(shown) - 0.4, -0.6)
    ax.set_xlabel("MPJPE on held-out motions (cm)")
    ax.set_title("How well a motion is continued")
    ax.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=9)
    return ax


def ledger_table(records: Sequence[Record], elsewhere: Sequence[Record] = ()) -> str:
    """Return the ledger of claims as an HTML table.

    Args:
        records: of scope "motion", measured on this machine.
        elsewhere: committed records of another machine, in a column of its name.
    """
    titles = ["the article says", "its own numbers say", "measured here"]
    columns = [ledger(records)]
    if elsewhere:
        devices = dict.fromkeys(r.device for r in elsewhere)
        titles.append(f"measured on {', '.join(devices)}")
        columns.append(ledger(elsewhere))
    head = "".join(f"<th>{html.escape(title)}</th>" for title in titles)
    lines = ((*first, *(row[2] for row in rest)) for first, *rest in zip(*columns))
    cells = ("".join(f'<td style="text-align:left;vertical-align:top">{html.escape(c)}</td>'
                     for c in line) for line in lines)  # fmt: skip
    rows = "\n".join(f"<tr>{c}</tr>" for c in cells)
    return f"<table><thead><tr>{head}</tr></thead><tbody>\n{rows}\n</tbody></table>"
