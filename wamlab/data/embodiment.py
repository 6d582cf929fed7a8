"""A robot as the model sees it: cameras and their grid, state and action parts, horizon, prompt.

Adding a robot is one row of EMBODIMENTS. A data set's own meta/modality.json wins over the column
slices given here.
"""

import ast
import re
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

import ftfy

from wamlab.config import ConfigError, lookup
from wamlab.data.normalize import NORMALIZATIONS

STATE_DIM, ACTION_DIM = 64, 32  # widths that the model pads state and action to
FRAMES_PER_BLOCK = 8  # two latent frames of four video frames

Layout = Literal["single", "side_by_side", "droid", "three_view"]


@dataclass(frozen=True, kw_only=True)
class Part:
    """A named slice of a packed state or action column.

    Args:
        name: its key in meta/modality.json, and its name in statistics.
        column: the packed column, used when the data set has no modality.json.
        start, end: dimensions [start, end) of the column, likewise.
        relative: (actions) the target is the action minus the state part of the same name at its
            block's anchor.
        normalization: a key of NORMALIZATIONS.
    """

    name: str
    column: str
    start: int
    end: int
    relative: bool = False
    normalization: str = "q99"

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.end:
            raise ConfigError(f"part {self.name!r}: [{self.start}, {self.end}) is not a slice")
        lookup(NORMALIZATIONS, self.normalization, "normalization")

    @property
    def width(self) -> int:
        """Number of dimensions."""
        return self.end - self.start


@dataclass(frozen=True, kw_only=True)
class Embodiment:
    """One robot.

    Args:
        name: its key in EMBODIMENTS.
        id: the number that the public code gives it (only picks the prompt there).
        fps: frames a second of its data.
        horizon: H, action steps a block; a multiple of 8, because a block shows 8 frames spread
            over its H steps.
        blocks: K, blocks a sample.
        views: video names in the order of the batch's V axis.
        view_hw: what each view is resized to before the grid, pixels.
        layout: where each view stands in the grid. "droid" takes exterior, exterior, wrist and
            puts the wrist on top, twice as wide; "three_view" takes head, left and right hand.
        views_text: the sentence that tells the text encoder which camera is where.
        state, action: parts in the order of the model's vector.
        language: task columns; more than one means paraphrases, of which a sample takes one.
        prompt: template with {instruction} and {views}.
    """

    name: str
    id: int
    fps: float
    horizon: int
    blocks: int = 4
    views: tuple[str, ...]
    view_hw: tuple[int, int]
    layout: Layout
    views_text: str
    state: tuple[Part, ...]
    action: tuple[Part, ...]
    language: tuple[str, ...] = ("task_index",)
    prompt: str = (
        "A robot seen from several cameras is doing: {instruction}. Views: {views}. "
        "Task: {instruction}."
    )

    def __post_init__(self) -> None:
        if self.horizon % FRAMES_PER_BLOCK or self.horizon <= 0:
            raise ConfigError(
                f"embodiment {self.name!r}: horizon {self.horizon} is not a multiple of "
                f"{FRAMES_PER_BLOCK}: a block's {FRAMES_PER_BLOCK} frames must be evenly spaced"
            )
        views = {"single": 1, "side_by_side": 2, "droid": 3, "three_view": 3}
        wanted = lookup(views, self.layout, "layout")
        if len(self.views) != wanted:
            raise ConfigError(
                f"embodiment {self.name!r}: layout {self.layout!r} takes {wanted} views, "
                f"got {len(self.views)}: {', '.join(self.views)}"
            )
        for what, most in (("state", STATE_DIM), ("action", ACTION_DIM)):
            width = sum(p.width for p in getattr(self, what))
            if width > most:
                raise ConfigError(
                    f"embodiment {self.name!r}: {width} {what} dimensions, the model takes {most}"
                )
        states = {p.name for p in self.state}
        for part in self.action:
            if part.relative and part.name not in states:
                raise ConfigError(
                    f"embodiment {self.name!r}: relative action {part.name!r} needs a state part "
                    f"of that name; it has {', '.join(sorted(states))}"
                )
        try:
            self.prompt.format(instruction="", views="")
        except (KeyError, IndexError, ValueError) as error:
            raise ConfigError(
                f"embodiment {self.name!r}: prompt {self.prompt!r} may use {{instruction}} and "
                f"{{views}} only ({error!r})"
            ) from error

    @property
    def frames(self) -> int:
        """Video frames a sample: 8 a block and the boundary frame."""
        return FRAMES_PER_BLOCK * self.blocks + 1

    def frame_offsets(self) -> tuple[int, ...]:
        """Return the steps of a sample's frames after its first anchor: H/8 apart, up to K*H."""
        step = self.horizon // FRAMES_PER_BLOCK
        return tuple(range(0, self.blocks * self.horizon + 1, step))

    def prompt_text(self, instruction: str) -> str:
        """Return the full prompt for a task as the data set words it."""
        return self.prompt.format(instruction=clean_instruction(instruction), views=self.views_text)


@lru_cache(maxsize=4096)
def clean_instruction(text: str) -> str:
    """Return a task in lower case, on one line, without a full stop.

    A written-out list of paraphrases gives its first item.
    """
    text = text.strip()
    if text.startswith(("[", "(")):
        try:
            items = ast.literal_eval(text)
        except (ValueError, SyntaxError):
            items = None  # a sentence in brackets is a sentence
        if isinstance(items, list | tuple) and items:
            text = str(items[0])
    return re.sub(r"\s+", " ", ftfy.fix_text(text)).strip().lower().rstrip(".")


def _parts(column: str, **slices: tuple[int, int]) -> tuple[Part, ...]:
    return tuple(Part(name=n, column=column, start=a, end=b) for n, (a, b) in slices.items())


def _joints(column: str, joint: tuple[int, int], gripper: tuple[int, int], relative: bool = False):
    return (
        Part(name="joint_position", column=column, start=joint[0], end=joint[1], relative=relative),
        Part(name="gripper_position", column=column, start=gripper[0], end=gripper[1]),
    )


_PARAPHRASES = ("", "_2", "_3")
_TWO_TEXT = "the outside camera is the left half, the wrist camera is the right half"

_TOY = Embodiment(
    name="toy",
    id=0,
    fps=15,
    horizon=24,
    views=("exterior_image_1_left", "exterior_image_2_left", "wrist_image_left"),
    view_hw=(88, 160),
    layout="droid",
    views_text=(
        "the wrist camera fills the upper half, the two outside cameras share the lower half, "
        "one left and one right; an outside camera may be black"
    ),
    state=_joints("observation.state", (0, 7), (7, 8)),
    action=_joints("action", (0, 7), (7, 8), relative=True),
)
_LIBERO = Embodiment(
    name="libero",
    id=21,
    fps=10,
    horizon=16,
    views=("image", "wrist_image"),
    view_hw=(256, 256),
    layout="side_by_side",
    views_text=_TWO_TEXT,
    state=_parts("state", state=(0, 8)),
    action=_parts("actions", actions=(0, 7)),
)
_SO101 = Embodiment(
    name="so101",
    id=0,
    fps=30,
    horizon=24,
    views=("front",),
    view_hw=(192, 256),
    layout="single",
    views_text="one camera looks at the table from the front",
    state=_joints("observation.state", (0, 5), (5, 6)),
    action=_joints("action", (0, 5), (5, 6), relative=True),
)

EMBODIMENTS: dict[str, Embodiment] = {
    e.name: e
    for e in (
        replace(
            _TOY,
            name="droid",
            id=17,
            view_hw=(176, 320),
            state=_joints("observation.state", (7, 14), (6, 7)),
            action=_joints("action", (14, 21), (12, 13), relative=True),
            language=tuple(f"annotation.language.language_instruction{n}" for n in _PARAPHRASES),
        ),
        _LIBERO,
        replace(  # a table-top Franka with one outside and one wrist camera, Cartesian deltas
            _LIBERO,
            name="franka",
            state=_parts("observation.state", state=(0, 8)),
            action=_parts("action", actions=(0, 7)),
        ),
        _TOY,
        # in a grid of 64x128, which "tiny" reads without a resize
        replace(_TOY, name="toy-small", view_hw=(32, 64)),
        _SO101,
        replace(
            _SO101,
            name="so101-dual",
            views=("front", "wrist"),
            layout="side_by_side",
            views_text=_TWO_TEXT,
        ),
    )
}
