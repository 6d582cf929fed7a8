"""Pictures of communication: ranks side by side in time, waits, meshes and a judgement."""

from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import Patch, Rectangle

from wamlab.jupyter.plot import GREY, INK, MARKERS, PART_COLOURS, style
from wamlab.measure import Record
from wamlab.train.topology import MeshPlan

EXCHANGE = PART_COLOURS["communication"]
SENDS = "#56b4e9"


@style()
def plot_timelines(found: Mapping[str, Mapping[str, Any]]) -> Sequence[Axes]:
    """Draw one step of every rank on a common axis of time, one panel a case.

    Args:
        found: name -> `ranks`, for each a list of (what, start, end) in milliseconds, and
            `step_ms`.

    Returns:
        One axes a case.
    """
    size = (9.5, 0.6 + 1.15 * len(found))
    _, axes = plt.subplots(len(found), figsize=size, sharex=True, layout="constrained")
    axes = [axes] if len(found) == 1 else list(axes)
    for ax, (name, case) in zip(axes, found.items()):
        for y, rows in enumerate(case["ranks"]):
            for what, start, end in sorted(rows, key=lambda row: row[0] == "exchange"):
                exchange = what == "exchange"
                colour = EXCHANGE if exchange else PART_COLOURS[what]
                look = {"height": 0.34 if exchange else 0.7, "color": colour}
                ax.barh(y, end - start, left=start, edgecolor="white", lw=0.4, **look)
        ax.set_yticks(range(len(case["ranks"])), [f"rank {r}" for r in range(len(case["ranks"]))])
        ax.invert_yaxis()
        ax.set_title(f"{name}: {case['step_ms']:.0f} ms", fontsize=10)
    axes[-1].set_xlabel("milliseconds since the step began")
    parts = ("data_wait", "forward", "backward", "optimizer")
    legend = [Patch(color=PART_COLOURS[p], label=p.replace("_", " ")) for p in parts]
    legend.append(Patch(color=EXCHANGE, label="exchange"))
    axes[0].figure.legend(handles=legend, loc="outside upper right", ncols=len(legend), fontsize=8)
    return axes


@style()
def plot_waits(records: Sequence[Record], ax: Axes | None = None) -> Axes:
    """Draw each row's exposed share of the step, by trace and by ablation.

    Args:
        records: measured rows with `wait_share_ablation`.
        ax: where to draw.

    Returns:
        The axes; x is a share in percent.
    """
    if ax is None:
        _, ax = plt.subplots(figsize=(8.5, 0.9 + 0.5 * len(records)), layout="constrained")
    for y, record in enumerate(records):
        share = 100 * record.exposed_comm_share
        ablation = 100 * max(record.extra["wait_share_ablation"])
        ax.barh(y, share, height=0.6, color=EXCHANGE)
        ax.plot(ablation, y, "D", color=INK, ms=5, label=None if y else "by ablation")
        sent = record.extra.get("wire_bytes_share")
        text = f"{share:.0f} %   {record.step_ms.median:.0f} ms a step"
        text += f"   {sent:.0%} of the bytes" if sent is not None else ""
        ax.text(max(share, ablation) + 3, y, text, va="center", fontsize=9, color=INK)
    ax.set_yticks(range(len(records)), [r.name for r in records])
    ax.invert_yaxis()
    ax.set_xlim(0, 135)
    ax.set_xticks(range(0, 101, 20))
    ax.set_xlabel("exposed communication, % of the step (bar: from the trace, slowest rank)")
    ax.legend(loc="lower right")
    return ax


@style()
def plot_meshes(machines: Mapping[str, tuple[Sequence[Sequence[float]], MeshPlan]]) -> list[Axes]:
    """Draw the links of each machine as a matrix, and a frame around each planned group.

    Args:
        machines: name -> (links in GB/s, plan).

    Returns:
        One axes a machine.
    """
    size = (3.1 * len(machines), 3.3)
    _, axes = plt.subplots(1, len(machines), figsize=size, layout="constrained")
    axes = [axes] if len(machines) == 1 else list(axes)
    for ax, (name, (links, plan)) in zip(axes, machines.items()):
        order = [rank for group in plan.groups for rank in group]
        ax.imshow([[links[a][b] for b in order] for a in order], cmap="Blues", vmin=0)
        start = 0
        for group in plan.groups:
            corner = (start - 0.5, start - 0.5)
            frame = Rectangle(corner, len(group), len(group), fill=False, ec=EXCHANGE, lw=2.5)
            ax.add_patch(frame)
            start += len(group)
        ax.set_xticks(range(len(order)), order)
        ax.set_yticks(range(len(order)), order)
        ax.tick_params(length=0, labelsize=7)
        copies = "1 copy" if plan.replicate == 1 else f"{plan.replicate} copies"
        ax.set_title(f"{name}\n{copies}, {plan.shard} shards each", fontsize=10)
        ax.set_xlabel("rank")
    return axes


@style()
def plot_judgement(rows: Sequence[Mapping[str, Any]]) -> list[Axes]:
    """Draw every arm's final loss relative to dense, with its spread over seeds.

    Args:
        rows: from `verdicts`.

    Returns:
        One axes an optimizer; x is the loss over the dense arm's.
    """
    optimizers = list(dict.fromkeys(row["optimizer"] for row in rows))
    _, axes = plt.subplots(
        1, len(optimizers), figsize=(9.5, 3.2), sharey=True, layout="constrained"
    )
    axes = [axes] if len(optimizers) == 1 else list(axes)
    for ax, optimizer in zip(axes, optimizers):
        mine = [row for row in rows if row["optimizer"] == optimizer]
        dense = next(row["final_loss"] for row in mine if row["arm"] == "dense")
        for y, (row, marker) in enumerate(zip(mine, MARKERS)):
            colour = GREY if row["arm"] in ("dense", "random") else SENDS
            ratio, spread = row["final_loss"] / dense, row["spread"] / dense
            ax.errorbar(ratio, y, xerr=spread, fmt=marker, color=colour, ecolor=INK, capsize=3)
        ax.axvline(1.0, color=INK, lw=0.8, ls=":", zorder=0)
        ax.set_yticks(range(len(mine)), [f"{r['arm']} ({r['bytes']:.0%})" for r in mine])
        ax.set_title(optimizer)
        ax.set_xlabel("final loss (× dense)")
    axes[0].invert_yaxis()
    return axes
