"""The demo's path on real footage: one DROID camera standing for three views, states of the toy."""

import argparse
import dataclasses

import pytest
from conftest import shared_dir

from wamlab.cli.demo import DATA, demo_config
from wamlab.config import replace
from wamlab.data.check import check_dataset
from wamlab.data.embodiment import EMBODIMENTS
from wamlab.data.lerobot_write import Clip, write_dataset
from wamlab.data.toy import COLUMNS, NAMES, ToyConfig, record
from wamlab.train.trainer import train

FRAMES = 419


def write_real_footage(root, video) -> None:
    """Write a v2.1 data set of two episodes whose three views are the same file."""
    clip = Clip(video.read_bytes(), (180, 320, 3))
    write_dataset(
        (_episode(seed, clip) for seed in (0, 1)),
        root=root,
        version="v2.1",
        fps=15,
        embodiment=EMBODIMENTS["toy"],
        names=dict(zip(COLUMNS["droid"], NAMES["droid"])),
    )


def _episode(seed: int, clip: Clip):
    recorded = record(seed, config=ToyConfig(rig="small"), least=FRAMES)
    columns = {name: rows[:FRAMES] for name, rows in recorded.columns.items()}
    return dataclasses.replace(recorded, columns=columns, views=dict.fromkeys(recorded.views, clip))


@pytest.mark.slow
@pytest.mark.skipif(shared_dir("droid") is None, reason="needs the footage, which is not shipped")
def test_the_public_way_and_the_data_row_train_alike_on_real_footage(tmp_path):
    root = tmp_path / "real"
    write_real_footage(root, shared_dir("droid", "exterior_image_1_left.mp4"))
    assert not [fault for fault in check_dataset(root) if fault.spoils]
    args = argparse.Namespace(repeats=1, size=None, data=root, embodiment="toy")
    base = replace(demo_config(args, on_gpu=False), {"steps": 3, "out": str(tmp_path / "official")})
    official = train(base)
    fast = train(replace(base, {"optimizations": DATA, "out": str(tmp_path / "data")}))
    assert len(official.losses) == len(fast.losses) > 0
    for mine, theirs in zip(fast.losses, official.losses):
        assert mine == pytest.approx(theirs, rel=1e-2)
