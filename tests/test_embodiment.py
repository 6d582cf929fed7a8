from dataclasses import replace

import numpy as np
import pytest

from wamlab.config import ConfigError
from wamlab.data.augment import LAYOUTS
from wamlab.data.embodiment import EMBODIMENTS, Embodiment, Part, clean_instruction

TOY = EMBODIMENTS["toy"]


def grid_hw(e: Embodiment) -> tuple[int, int]:
    rows, (height, width) = LAYOUTS[e.layout], e.view_hw
    return len(rows) * height, max(map(len, rows)) * width


@pytest.mark.parametrize("name", EMBODIMENTS)
def test_every_row_spreads_its_frames_evenly_over_its_actions(name):
    e = EMBODIMENTS[name]
    offsets = np.array(e.frame_offsets())
    assert len(offsets) == e.frames == 33
    assert (np.diff(offsets) == e.horizon // 8).all()
    assert offsets[-1] == e.blocks * e.horizon
    # block k's eight frames lie inside the span of its own actions
    blocks = offsets[:-1].reshape(e.blocks, 8)
    assert (blocks[:, 0] == np.arange(e.blocks) * e.horizon).all()
    assert (blocks[:, -1] < (np.arange(e.blocks) + 1) * e.horizon).all()


@pytest.mark.parametrize("name", EMBODIMENTS)
def test_every_row_names_its_views_and_says_its_task(name):
    e = EMBODIMENTS[name]
    text = e.prompt_text("Put it There")
    assert text.count("put it there") == 2
    assert e.views_text in text
    assert all(size % 16 == 0 for size in grid_hw(e))


def test_grids():
    assert grid_hw(EMBODIMENTS["droid"]) == (352, 640)
    assert grid_hw(EMBODIMENTS["libero"]) == (256, 512)
    assert grid_hw(TOY) == (176, 320)
    assert grid_hw(EMBODIMENTS["so101"]) == (192, 256)


@pytest.mark.parametrize(
    ("written", "clean"),
    [
        ("Put the  RED cube\n down.", "put the red cube down"),
        ("['Open it', 'Pull the handle']", "open it"),
        ('("close it",)', "close it"),
        ("[not a list", "[not a list"),
        ("(carefully) lift", "(carefully) lift"),
        ("itâ€™s here", "it's here"),
        ("", ""),
    ],
)
def test_instructions_are_cleaned(written, clean):
    assert clean_instruction(written) == clean


def test_a_row_that_cannot_work_is_refused():
    with pytest.raises(ConfigError, match=r"horizon 12 is not a multiple of 8"):
        replace(TOY, horizon=12)
    with pytest.raises(ConfigError, match=r"'single' takes 1 views, got 3"):
        replace(TOY, layout="single")
    with pytest.raises(ConfigError, match=r"unknown layout 'singel'.*did you mean 'single'"):
        replace(TOY, layout="singel")
    with pytest.raises(ConfigError, match=r"may use \{instruction\} and \{views\} only"):
        replace(TOY, prompt="do {task}")
    with pytest.raises(ConfigError, match=r"40 action dimensions, the model takes 32"):
        replace(TOY, action=(Part(name="a", column="action", start=0, end=40),))
    with pytest.raises(ConfigError, match=r"relative action 'a' needs a state part"):
        replace(TOY, action=(Part(name="a", column="action", start=0, end=4, relative=True),))
    with pytest.raises(ConfigError, match=r"unknown normalization 'q98'.*did you mean 'q99'"):
        Part(name="a", column="action", start=0, end=4, normalization="q98")
    with pytest.raises(ConfigError, match=r"\[4, 4\) is not a slice"):
        Part(name="a", column="action", start=4, end=4)
