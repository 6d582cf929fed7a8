"""Pictures of a world action model: a sample, its mask, one block, the schedule, what it imagines.

The four kinds of tokens keep one colour each in every picture: clean video, noisy video, actions,
states (Okabe and Ito's palette, as in `plot`).
"""

from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.patches import Patch
from torch import Tensor

from wamlab.jupyter.plot import GREY, INK, style
from wamlab.model.attention import Layout
from wamlab.model.flow_matching import STEPS, Schedule

KINDS: dict[str, tuple[str, str]] = {
    "C": ("clean video", "#0072b2"),
    "N": ("noisy video", "#e69f00"),
    "A": ("actions", "#009e73"),
    "S": ("states", "#cc79a7"),
}


@style()
def plot_sample(
    views_VT3HW: Tensor,
    action_AE: Tensor,
    *,
    prompt: str,
    fps: float,
    cameras: Sequence[str],
    channels: Sequence[str],
) -> Axes:
    """Draw one training sample: each camera at four moments, and the actions below.

    Args:
        views_VT3HW: uint8 [cameras, frames, 3, height, width].
        action_AE: normalised actions [steps, channels], real channels only.
        prompt: the text.
        fps: actions a second.
        cameras: their names.
        channels: names of the action channels.

    Returns:
        The axes of the actions; x is seconds.
    """
    columns, frames = 4, views_VT3HW.shape[1]
    seconds = len(action_AE) / fps
    rows = len(cameras)
    size = (9, 1.15 * rows + 2)
    figure = plt.figure(figsize=size, layout="constrained", dpi=50)  # photographs make big files
    grid = figure.add_gridspec(rows + 1, columns, height_ratios=[1.1] * rows + [1.8])
    for column, t in enumerate(np.linspace(0, frames - 1, columns).round().astype(int)):
        for row, camera in enumerate(cameras):
            ax = figure.add_subplot(grid[row, column])
            ax.imshow(views_VT3HW[row, t].permute(1, 2, 0).numpy())
            ax.set(xticks=[], yticks=[])
            ax.spines[:].set_visible(False)
            if column == 0:
                ax.set_ylabel(camera, fontsize=8)
            if row == 0:
                ax.set_title(f"{t / (frames - 1) * seconds:.1f} s", fontsize=9)
    ax = figure.add_subplot(grid[rows, :])
    ax.plot(np.arange(len(action_AE)) / fps, action_AE.numpy(), lw=1, label=list(channels))
    ax.set(xlabel="time (s)", ylabel="action, normalised", xlim=(0, seconds), ylim=(-1.1, 1.1))
    ax.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=7)
    figure.suptitle(prompt, fontsize=9, wrap=True, color=INK)
    return ax


@style()
def plot_mask(layout: Layout, ax: Axes | None = None) -> Axes:
    """Draw who sees whom: a row is a query, a coloured cell a key that it sees.

    Args:
        layout: the sequence.
        ax: where to draw.

    Returns:
        The axes; groups are labelled C0 (clean frame 0), N1 (noisy frames of block 1), and so on.
    """
    ax = ax or plt.subplots(figsize=(6, 6), layout="constrained")[1]
    groups = layout.groups()
    kind_T = np.concatenate(
        [[list(KINDS).index(g.name[0]) + 1] * (g.last - g.first) for g in groups]
    )
    ax.imshow(
        layout.mask().numpy() * kind_T,
        cmap=ListedColormap(["white", *(colour for _, colour in KINDS.values())]),
        vmin=0,
        vmax=len(KINDS),
        interpolation="nearest",
    )
    centres = [(g.first + g.last - 1) / 2 for g in groups]
    names = [g.name for g in groups]
    ax.set_xticks(centres, names, fontsize=8)
    ax.set_yticks(centres, names, fontsize=8)
    ax.tick_params(length=0)
    for g in groups[1:]:
        ax.axhline(g.first - 0.5, color=GREY, lw=0.4)
        ax.axvline(g.first - 0.5, color=GREY, lw=0.4)
    ax.set(xlabel="key: who is seen (coloured by its kind)", ylabel="query: who looks")
    handles = [Patch(color=colour, label=label) for label, colour in KINDS.values()]
    ax.legend(
        handles=handles, ncols=4, loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False
    )
    return ax


@style()
def plot_shares(parts: Mapping[str, Mapping[str, float]], ax: Axes | None = None) -> Axes:
    """Draw what each part takes of a whole, grouped by part.

    Args:
        parts: model name -> part -> any additive quantity, such as FLOPs.
        ax: where to draw.

    Returns:
        The axes; x is percent of each model's sum.
    """
    names = list(next(iter(parts.values())))
    ax = ax or plt.subplots(figsize=(8, 0.6 * len(names) + 1), layout="constrained")[1]
    height = 0.8 / len(parts)
    colours = [colour for _, colour in KINDS.values()]
    for i, (model, values) in enumerate(parts.items()):
        share = [100 * values[n] / sum(values.values()) for n in names]
        y = np.arange(len(names)) + i * height
        bars = ax.barh(y, share, height=0.9 * height, label=model, color=colours[i])
        ax.bar_label(bars, fmt="%.0f %%", padding=3, fontsize=8)
    ax.set_yticks(np.arange(len(names)) + 0.4 - height / 2, names)
    ax.invert_yaxis()
    ax.margins(x=0.12)
    ax.set_xlabel("share (%)")
    ax.legend()
    return ax


@style()
def plot_equal(pairs: Mapping[str, tuple[float, float]], *, labels: tuple[str, str]) -> Axes:
    """Draw two measurements of many things against each other, on the diagonal where they agree.

    Args:
        pairs: name -> (first, second), both positive.
        labels: what first and second are, for the axes.

    Returns:
        The axes, both logarithmic.
    """
    ax = plt.subplots(figsize=(5, 5), layout="constrained")[1]
    first, second = np.array(list(pairs.values())).T
    low, high = min(first.min(), second.min()) / 2, max(first.max(), second.max()) * 2
    ax.plot([low, high], [low, high], color=GREY, lw=1, zorder=0)
    ax.scatter(first, second, s=14, color=KINDS["N"][1], edgecolor=INK, lw=0.3)
    ax.set(xscale="log", yscale="log", xlabel=labels[0], ylabel=labels[1])
    ax.set(xlim=(low, high), ylim=(low, high), aspect="equal")
    return ax


@style()
def plot_schedule(table: Schedule) -> Axes:
    """Draw the noise schedule: how noisy a drawn index is, and what its loss weighs.

    Args:
        table: as `flow_matching.schedule` returns it.

    Returns:
        The axes of the weights.
    """
    _, (left, right) = plt.subplots(1, 2, figsize=(8, 2.8), layout="constrained", dpi=80)
    index = np.arange(STEPS)
    left.plot(index, table.sigma.numpy(), color=KINDS["N"][1], lw=2, label="shifted (used)")
    left.plot(index, 1 - index / STEPS, color=GREY, lw=1, ls="--", label="straight")
    left.set(xlabel="drawn index k", ylabel="share of noise σ", title="Most draws are noisy")
    right.plot(table.time.numpy(), table.weight.numpy(), color=KINDS["C"][1], lw=2)
    right.set(xlabel="network time 1000 σ", ylabel="weight of the loss", title="The middle counts")
    left.legend()
    return right


@style()
def plot_latents(rows: Mapping[str, Tensor], *, titles: Sequence[str], limit: float = 2.5) -> Axes:
    """Draw latent frames as small images, one row a clip.

    Args:
        rows: label -> [frames, height, width].
        titles: one a column.
        limit: values -limit..limit span the colours.

    Returns:
        The axes at the lower left.
    """
    columns = len(titles)
    size = (1.25 * columns + 1, 1.35 * len(rows))
    _, axes = plt.subplots(
        len(rows), columns, figsize=size, layout="constrained", squeeze=False, dpi=80
    )
    for line, (label, frames) in zip(axes, rows.items()):
        for ax, frame in zip(line, frames):
            ax.imshow(frame.numpy(), cmap="PuOr_r", vmin=-limit, vmax=limit)
            ax.set(xticks=[], yticks=[])
        line[0].set_ylabel(label, rotation=0, ha="right", va="center", fontsize=9)
    for ax, title in zip(axes[0], titles):
        ax.set_title(title, fontsize=9)
    return axes[-1, 0]
