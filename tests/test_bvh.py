"""The BVH contract: rules of reading, each with a made-up file; real clips where present."""

import warnings

import numpy as np
import pybvh
import pytest
from conftest import shared_dir
from scipy.spatial.transform import Rotation

from wamlab.motion import bvh
from wamlab.motion.bvh import TO_Z_UP, BVHError, BVHWarning, read_bvh, write_bvh
from wamlab.motion.skeleton import (
    CANONICAL,
    SkeletonError,
    Tree,
    canonical_joints,
    mirror_index,
    to_canonical,
)
from wamlab.motion.synthetic import make

CLIPS = ("cmu_12_01_walk", "cmu_131_03_hop", "fair1_jumping")
SMALL = """HIERARCHY
ROOT Hips
{
  OFFSET 1.0 2.0 3.0
  CHANNELS 6 Xposition Yposition Zposition Zrotation Yrotation Xrotation
  JOINT Chest
  {
    OFFSET 0 1.0e-14 10
    CHANNELS 3 Yrotation Xrotation Zrotation
    JOINT Zero
    {
      OFFSET 0 0 0
      CHANNELS 3 Xrotation Yrotation Zrotation
      End Site
      {
        OFFSET 0 0 5
      }
    }
  }
}
MOTION
Frames: 3
Frame Time: .0083333
0 0 1 10 20 30 40 50 60 0 0 90
0 1 1 10 20 31 40 50 60 0 0 90
0 2 1 10 20 32 40 50 60 0 0 90
"""


def write(tmp_path, text, name="clip.bvh"):
    path = tmp_path / name
    path.write_bytes(text.encode())
    return path


def read(tmp_path, text, **options):
    return read_bvh(write(tmp_path, text), **({"unit_m": 1.0, "up": "+z"} | options))


def real(name):
    folder = shared_dir("mocap")
    if folder is None:
        pytest.skip("the real clips are not here")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BVHWarning)
        return read_bvh(folder / f"{name}.bvh"), folder / f"{name}.bvh"


def foreign(clip):
    """The clip under names that tell no source."""
    return type(clip)(**{**vars(clip), "names": tuple(n.title() for n in clip.names)})


def test_each_joint_has_its_own_channel_order(tmp_path):
    clip = read(tmp_path, SMALL)
    wanted = Rotation.from_euler("ZYX", [10, 20, 30], degrees=True).as_matrix()
    np.testing.assert_allclose(clip.local_rot[0, 0], wanted, atol=1e-12)
    wanted = Rotation.from_euler("YXZ", [40, 50, 60], degrees=True).as_matrix()
    np.testing.assert_allclose(clip.local_rot[0, 1], wanted, atol=1e-12)


def test_root_positions_replace_its_offset(tmp_path):
    clip = read(tmp_path, SMALL)
    np.testing.assert_allclose(clip.positions()[:, 0], [[0, 0, 1], [0, 1, 1], [0, 2, 1]])


def test_dt_is_kept_as_read(tmp_path):
    assert read(tmp_path, SMALL).dt == 0.0083333
    assert read(tmp_path, SMALL.replace(".0083333", "0.008342")).dt == 0.008342


def test_freedoms_of_the_format(tmp_path):
    """Mixed line ends, tabs, lower-case keywords, zero-length joints."""
    lower = SMALL.replace("\n", "\r\n", 9).replace("  ", "\t")
    for word in ("ROOT", "JOINT", "OFFSET", "CHANNELS"):
        lower = lower.replace(word, word.lower())
    a, b = read(tmp_path, SMALL), read(tmp_path, lower)
    np.testing.assert_array_equal(a.positions(), b.positions())
    np.testing.assert_array_equal(a.positions()[:, 1], a.positions()[:, 2])
    assert a.end_sites[0][0] == 2


@pytest.mark.parametrize(
    ("old", "new", "line", "match"),
    [
        ("Frames: 3", "Frames: 4", 22, "promises 4 frames, 3 follow"),
        ("0 1 1 10 20 31", "0 1 1 10 20 nan", 25, "nan in Hips Xrotation"),
        ("0 1 1 10", "0 1 10", 25, "11 values, the channels ask for 12"),
        ("0 1 1 10", "0 1 1 1O", 25, "could not convert"),
        ("JOINT Zero", "ROOT Zero", 10, "a second ROOT 'Zero'"),
        ("JOINT Zero", "JOINT Chest", 10, "'Chest' is empty or taken"),
        ("Frame Time: .0083333", "Frame Time: 0", 23, "no positive number"),
        ("CHANNELS 3 Y", "CHANNELS 4 Y", 9, "CHANNELS 4 lists 3"),
        ("OFFSET 0 0 5", "OFFSET 0 0", 14, "OFFSET must have 3 values"),
        ("OFFSET 0 0 0", "OFFSET 0 0 zero", 12, "could not convert"),
        ("Frame Time: .0083333", "", 26, "ends before 'Frame Time:'"),
    ],
)
def test_a_faulty_file_is_refused_with_its_line(tmp_path, old, new, line, match):
    assert old in SMALL
    with pytest.raises(BVHError, match=match) as caught:
        read(tmp_path, SMALL.replace(old, new, 1))
    assert caught.value.line == line
    assert f"clip.bvh, line {line}: " in str(caught.value)


def test_files_that_are_no_bvh(tmp_path):
    with pytest.raises(BVHError, match="no such file"):
        read_bvh(tmp_path / "none.bvh")
    (tmp_path / "binary.bvh").write_bytes(b"\xff\xfe\x00\x81")
    with pytest.raises(BVHError, match="not a text file"):
        read_bvh(tmp_path / "binary.bvh")


MOVING = SMALL.replace("CHANNELS 3 Yrotation", "CHANNELS 6 Xposition Yposition Zposition Yrotation")


def test_inner_positions_near_the_offset_are_translations(tmp_path):
    text = MOVING.replace(" 40 50 60", " 0.1 0 9.5 40 50 60")
    clip = read(tmp_path, text)
    np.testing.assert_allclose(clip.translations[:, 1], [[0.1, 0, 9.5]] * 3)
    length = np.linalg.norm(clip.positions()[:, 1] - clip.positions()[:, 0], axis=-1)
    np.testing.assert_allclose(length, np.hypot(0.1, 9.5))
    with pytest.raises(BVHError, match="cannot be written"):
        write_bvh(clip, tmp_path / "out.bvh")


def test_inner_positions_that_are_absolute_are_refused(tmp_path):
    text = MOVING.replace(" 40 50 60", " 30 20 90 40 50 60")
    with pytest.raises(BVHError, match="'Chest' has position channels that lie 8"):
        read(tmp_path, text)


def test_a_first_t_pose_is_dropped(tmp_path):
    made = make(0).clip
    pose = made.local_rot.copy()
    pose[0] = np.eye(3)
    pose[0, 5] = Rotation.from_euler("x", 90, degrees=True).as_matrix()
    write_bvh(type(made)(**{**vars(made), "local_rot": pose}), tmp_path / "t.bvh")
    options = {"unit_m": 0.01, "up": "+z"}
    assert len(read_bvh(tmp_path / "t.bvh", **options)) == len(made) - 1
    assert len(read_bvh(tmp_path / "t.bvh", **options, drop_tpose=False)) == len(made)
    write_bvh(made, tmp_path / "m.bvh")
    assert len(read_bvh(tmp_path / "m.bvh", **options)) == len(made)


@pytest.mark.parametrize("unit", bvh.UNITS)
@pytest.mark.parametrize("up", ["+z", "+y", "-x"])
def test_unit_and_up_are_estimated_aloud(tmp_path, unit, up):
    made, unit_m = foreign(make(1).clip), bvh.UNITS[unit]
    turn = TO_Z_UP[up].T.astype(float)
    local = made.local_rot.copy()
    local[:, 0] = turn @ local[:, 0]
    turned = type(made)(**{**vars(made), "local_rot": local, "root_pos": made.root_pos @ turn.T})
    write_bvh(turned, tmp_path / "a.bvh", unit_m)
    with pytest.warns(BVHWarning, match="up: estimate, unit: estimate"):
        clip = read_bvh(tmp_path / "a.bvh")
    assert (clip.meta["up"], clip.meta["unit_m"]) == (up, unit_m)
    found = clip.positions()[:, clip.names.index("Head")]
    np.testing.assert_allclose(found, made.positions()[:, CANONICAL.index("head")], atol=2e-5)


def test_a_height_of_no_person_needs_the_unit(tmp_path):
    write_bvh(foreign(make(1).clip), tmp_path / "a.bvh", unit_m=0.3)
    with pytest.raises(BVHError, match="fits no unit of m, inch, cm, CMU, mm: give unit_m"):
        read_bvh(tmp_path / "a.bvh")
    with pytest.raises(BVHError, match="up='z' is none of"):
        read_bvh(tmp_path / "a.bvh", up="z")


def test_round_trip(tmp_path):
    made = make(3).clip
    write_bvh(made, tmp_path / "a.bvh")
    clip, valid, error = to_canonical(read_bvh(tmp_path / "a.bvh", 0.01, "+z"))
    assert np.abs(clip.positions() - made.positions()).max() < 1e-6
    assert valid.all()
    assert error < 1e-12


@pytest.mark.parametrize("name", CLIPS)
def test_a_real_clip_agrees_with_pybvh_and_round_trips(name, tmp_path):
    clip, path = real(name)
    theirs = pybvh.read_bvh_file(path, world_up="+y").joint_positions()[-len(clip) :]
    wanted = theirs @ TO_Z_UP[clip.meta["up"]].T * clip.meta["unit_m"]
    assert np.abs(clip.positions() - wanted).max() < 1e-9
    unit_m = clip.meta["unit_m"]
    write_bvh(clip, tmp_path / "a.bvh", unit_m)
    again = read_bvh(tmp_path / "a.bvh", unit_m, "+z", drop_tpose=False)
    assert np.abs(again.positions() - clip.positions()).max() / unit_m < 1e-6
    _, valid, error = to_canonical(clip)
    assert valid.all()
    assert error < 0.01


def test_what_the_real_clips_are():
    walk, _ = real("cmu_12_01_walk")
    assert (len(walk), walk.meta["unit"], walk.meta["tpose_dropped"]) == (523, "table", True)
    jump, _ = real("fair1_jumping")
    assert (jump.meta["unit_m"], jump.meta["up"], jump.dt) == (0.0254, "+z", 0.008342)


def test_canonical_names():
    assert canonical_joints(["mixamorig:Hips", "mixamorig:LeftUpLeg"])[0] == 0
    found = dict(zip(CANONICAL, canonical_joints(["Hips", "LeftShoulder", "LeftArm"])))
    assert found["left_shoulder"] == 2
    found = dict(zip(CANONICAL, canonical_joints(["Hips", "LeftCollar", "LeftShoulder"])))
    assert found["left_shoulder"] == 2
    twice = [mirror_index()[i] for i in mirror_index()]
    assert twice == list(range(len(CANONICAL)))


def test_a_skeleton_without_legs_is_refused(tmp_path):
    with pytest.raises(SkeletonError, match="no joint for left_hip, left_knee"):
        to_canonical(read(tmp_path, SMALL))
    with pytest.raises(SkeletonError, match="joint 1 has parent 2"):
        Tree((-1, 2, 0))
