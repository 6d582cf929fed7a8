"""Small data sets whose frames and rows say which step, episode and view they are."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from wamlab.data.embodiment import EMBODIMENTS, Embodiment
from wamlab.data.lerobot_write import Episode, write_dataset

ROBOT = replace(
    EMBODIMENTS["toy"], views=("front", "wrist"), layout="side_by_side", horizon=8, blocks=2
)
BITS, BAR = 12, 8  # bars of 8 pixels: 2 bits of the view, 2 of the episode, 8 of the step
HEIGHT = 32


def barcode(number: int) -> np.ndarray:
    """Return uint8 [32, 96, 3]: bar i is bright where bit i of the number is set."""
    bits = (number >> np.arange(BITS)) & 1
    row = np.repeat(np.where(bits, 220, 30).astype(np.uint8), BAR)
    return np.broadcast_to(row[None, :, None], (HEIGHT, BITS * BAR, 3)).copy()


def read_barcodes(frames_TCHW: torch.Tensor) -> list[tuple[int, int, int]]:
    """Return (view, episode, step) of each frame."""
    middle = frames_TCHW[:, :, 8:24].float().mean((1, 2))
    bars = middle.unflatten(-1, (BITS, BAR))[..., 2:6].mean(-1) > 128
    numbers = (bars.long() << torch.arange(BITS)).sum(-1)
    return [(n >> 10, n >> 8 & 3, n & 255) for n in numbers.tolist()]


def widths(parts) -> dict[str, int]:
    """Return how wide each packed column must be to hold the parts."""
    found: dict[str, int] = {}
    for part in parts:
        found[part.column] = max(found.get(part.column, 0), part.end)
    return found


def counted_episodes(embodiment: Embodiment, lengths: list[int], tasks=None) -> list[Episode]:
    """Return episodes whose columns hold 100 * episode + step + dimension / 16."""
    columns = widths((*embodiment.state, *embodiment.action))
    found = []
    for episode, length in enumerate(lengths):
        steps = np.arange(length)
        rows: dict[str, Any] = {
            name: 100.0 * episode + steps[:, None] + np.arange(width) / 16
            for name, width in columns.items()
        }
        for number, name in enumerate(n for n in embodiment.language if n != "task_index"):
            rows[name] = np.full(length, number, np.int64)
        views = {
            f"observation.images.{name}": np.stack(
                [barcode(view << 10 | episode << 8 | t) for t in steps]
            )
            for view, name in enumerate(embodiment.views)
        }
        found.append(Episode((tasks or ["Pick it."] * 9)[episode], rows, views))
    return found


def write_counted(root: Path, embodiment: Embodiment, lengths: list[int], **settings: Any) -> Path:
    """Write such a data set; `settings` are fields of Writer, and `tasks` one a episode."""
    columns = widths((*embodiment.state, *embodiment.action))
    write_dataset(
        counted_episodes(embodiment, lengths, settings.pop("tasks", None)),
        root=root,
        fps=int(embodiment.fps),
        embodiment=embodiment,
        names={name: [f"d{i}" for i in range(width)] for name, width in columns.items()},
        **{"version": "v2.1"} | settings,
    )
    return root
