import pickle
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import shared_dir
from counted_data import read_barcodes, write_counted

from wamlab.config import ConfigError
from wamlab.data.embodiment import EMBODIMENTS
from wamlab.data.lerobot import LeRobotDataset
from wamlab.data.lerobot_write import Clip, Episode, write_dataset
from wamlab.data.metadata import DatasetError
from wamlab.data.windows import Mixture, WindowDataset, WindowIndex

SMALL = replace(
    EMBODIMENTS["toy"], views=("front", "wrist"), layout="side_by_side", horizon=8, blocks=2
)


@pytest.fixture(scope="module")
def shared(tmp_path_factory) -> WindowDataset:
    """Three episodes that share one file a view."""
    root = tmp_path_factory.mktemp("shared") / "data"
    write_counted(root, SMALL, [20, 33, 24], version="v3.0")
    return WindowDataset(LeRobotDataset(root, SMALL))


def anchors_by_definition(i: int, labels: np.ndarray, horizon: int, blocks: int) -> list[int]:
    """The rule as it is written down: candidates 0, -1, +1, -2, ... of which the first K count."""
    length, stopped, found = len(labels), set(), []
    for n in range(2 * (length + blocks)):
        direction = 0 if n == 0 else (-1 if n % 2 else 1)
        anchor = i + direction * ((n + 1) // 2) * horizon
        if direction in stopped:
            continue
        if not 0 <= anchor < length or labels[anchor] != labels[i]:
            stopped.add(direction)
            continue
        last_frame, last_action = anchor + 7 * horizon // 8, anchor + horizon - 1
        if max(last_frame, last_action) < length and anchor + horizon < length:
            found.append(anchor)
    return sorted(found[:blocks]) if len(found) >= blocks else []


@pytest.mark.parametrize("seed", range(12))
def test_valid_starts_and_anchors_follow_the_rule(seed):
    rng = np.random.default_rng(seed)
    horizon, blocks = [(8, 2), (8, 4), (16, 3), (8, 1)][seed % 4]
    lengths = rng.integers(1, (blocks + 3) * horizon, 14)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    labels = np.zeros(offsets[-1], np.int64)
    if seed % 3:  # words that change inside an episode, and may come back
        labels = rng.integers(0, 2, offsets[-1]) if seed % 3 == 1 else labels
        labels[rng.integers(0, offsets[-1], 3)] = 5
        for cut in np.sort(rng.integers(0, offsets[-1], 6)):
            labels[cut : cut + horizon * 2] = rng.integers(0, 2)
    skip = np.unique(rng.integers(0, offsets[-1], 40)) if seed % 2 else []
    index = WindowIndex.build(offsets, [labels], horizon=horizon, blocks=blocks, skip=skip)
    expected = []
    for episode, (a, b) in enumerate(pairwise(offsets)):
        for i in range(b - a):
            anchors = anchors_by_definition(i, labels[a:b], horizon, blocks)
            if anchors and a + i not in skip:
                assert (np.diff(anchors) == horizon).all()
                expected.append((episode, anchors[0], a + i))
    assert [index.locate(n) for n in range(len(index))] == expected
    low, high = index.episode_bounds
    assert (high - low).tolist() == [sum(e[0] == n for e in expected) for n in range(len(lengths))]
    with pytest.raises(IndexError, match=f"sample {len(expected)} of {len(expected)}"):
        index.locate(len(expected))


def test_away_from_the_edges_the_window_lies_around_its_start():
    index = WindowIndex.build(np.array([0, 400]), [np.zeros(400)], horizon=24, blocks=4)
    assert len(index) == 400
    assert index.locate(200) == (0, 200 - 48, 200)
    assert index.locate(0) == (0, 0, 0)
    assert index.locate(399)[1] == 399 - 96


def test_an_episode_of_one_sample_and_of_none():
    for length, count in ((96, 0), (97, 5), (98, 10), (120, 120)):
        index = WindowIndex.build(np.array([0, length]), [np.zeros(length)], horizon=24, blocks=4)
        assert len(index) == count  # 97 frames: starts 0, 24, ..., 96, all the same window


def test_every_frame_state_and_action_of_a_sample_is_the_right_one(shared):
    """An episode inside a shared file: nothing crosses its borders."""
    codec, horizon = shared.dataset.codec, SMALL.horizon
    for index in range(0, len(shared), 7):
        sample = shared[index]
        episode, anchor, _ = shared.index.locate(index)
        steps = anchor + np.arange(0, 17)
        for view in (0, 1):
            assert read_barcodes(sample["views"][view]) == [(view, episode, t) for t in steps]
        anchors = anchor + horizon * np.arange(2)
        state = 100.0 * episode + anchors[:, None] + np.arange(8) / 16
        np.testing.assert_array_equal(sample["state"], codec.encode_state(state))
        action = codec.decode_action(sample["action"].numpy(), state)
        steps = anchors[:, None] + np.arange(horizon)
        inside = np.abs(sample["action"].numpy()[:, 7].reshape(2, horizon)) < 1  # not clipped
        written = 100.0 * episode + steps + 7 / 16
        np.testing.assert_allclose(action[..., 7][inside], written[inside], atol=1e-3)


def test_shapes_masks_and_ranges_are_those_of_every_sample(shared):
    for sample in (shared[0], shared[len(shared) - 1]):
        shapes = {k: tuple(v.shape) for k, v in sample.items() if isinstance(v, torch.Tensor)}
        assert shapes == {
            "views": (2, 17, 3, 32, 96),
            "state": (2, 64),
            "state_mask": (2, 64),
            "action": (16, 32),
            "action_mask": (16, 32),
            "has_real_action": (),
            "sample_id": (),
            "embodiment_id": (),
        }
        assert sample["action"].dtype == sample["state"].dtype == torch.float32
        assert sample["action"].abs().max() <= 1
        for what, width in (("state", 8), ("action", 8)):
            assert sample[f"{what}_mask"].sum(-1).unique().tolist() == [width]
            assert not sample[what][~sample[f"{what}_mask"]].any()
    assert shared[3]["sample_id"] == 3


def test_relative_actions_refer_to_their_own_blocks_anchor(shared):
    """In the counted data an action minus its anchor's state is the step inside the block."""
    stats = shared.dataset.codec.action[0]
    for index in (0, len(shared) // 2, len(shared) - 1):
        joint = shared[index]["action"][:, 0].reshape(2, 8).numpy()
        by_hand = 2 * (np.arange(8) - stats.q01[0]) / (stats.q99[0] - stats.q01[0]) - 1
        np.testing.assert_allclose(joint, np.tile(np.clip(by_hand, -1, 1), (2, 1)), atol=1e-5)


def test_a_libero_blocks_frames_are_the_time_of_its_actions(tmp_path):
    """The public default lets a block's frames run into the next: stride 16, offsets to 21."""
    libero = replace(EMBODIMENTS["libero"], blocks=4)
    root = write_counted(tmp_path / "libero", libero, [70, 81])
    windows = WindowDataset(LeRobotDataset(root, libero))
    for index in (0, len(windows) - 1):
        steps = [step for _, _, step in read_barcodes(windows[index]["views"][0])]
        assert (np.diff(steps) == 2).all()
        blocks = np.array(steps[:-1]).reshape(4, 8)
        assert (blocks.max(1) < blocks.min(1) + 16).all()
        assert steps[-1] == blocks[-1, 0] + 16


def test_a_step_before_the_start_repeats_the_first_frame(shared):
    """Never the last frame of anything: a negative index must not count from the end."""
    data = shared.dataset
    rows = data.rows(1, [-30, -1, 0, 32, 33, 99])
    assert rows.tolist() == [20, 20, 20, 52, 52, 52]
    frames = data.frames(1, "front", np.array([-3, -1, 0, 1]), shared.open_video)
    assert read_barcodes(frames) == [(0, 1, 0), (0, 1, 0), (0, 1, 0), (0, 1, 1)]


def test_a_union_decodes_a_shared_frame_once(shared):
    opened = []
    windows = WindowDataset(
        shared.dataset, open_video=lambda span: opened.append(span) or shared.open_video(span)
    )
    ids = [40, 3, 41, 44, 3]
    found = windows.samples(ids)
    assert len(opened) == 2 * len({windows.index.locate(i)[0] for i in ids})
    for index, sample in zip(ids, found):
        for key, value in shared[index].items():
            same = torch.equal(value, sample[key]) if key != "prompt" else value == sample[key]
            assert same, key


def test_labels_of_all_paraphrases_must_hold():
    labels = [np.zeros(40, int), np.repeat([0, 1], 20)]
    index = WindowIndex.build(np.array([0, 40]), labels, horizon=8, blocks=2)
    for n in range(len(index)):
        _, anchor, row = index.locate(n)
        assert (anchor + 8 < 20) == (row < 20)


@pytest.mark.parametrize("name", EMBODIMENTS)
def test_every_embodiment_gives_a_sample(name, tmp_path):
    e = EMBODIMENTS[name]
    length = (e.blocks + 1) * e.horizon + 2
    version = "v2.1" if len(e.views) % 2 else "v3.0"
    root = write_counted(tmp_path / name, e, [length], version=version)
    sample = WindowDataset(LeRobotDataset(root, e))[length // 2]
    assert sample["views"].shape[:3] == (len(e.views), 33, 3)
    assert sample["action"].shape == (4 * e.horizon, 32)
    assert sample["prompt"] == e.prompt_text("pick it")


def test_starts_are_kept_beside_the_columns_and_workers_share_them(shared, monkeypatch):
    def refuse(*args, **settings):
        raise AssertionError("the starts are found again")

    monkeypatch.setattr(WindowIndex, "build", refuse)
    again = pickle.loads(pickle.dumps(WindowDataset(shared.dataset)))
    assert len(again) == len(shared)
    assert torch.equal(again[5]["action"], shared[5]["action"])


def test_no_sample_at_all_and_views_of_two_sizes_are_refused(shared, tmp_path):
    longer = replace(SMALL, blocks=5)
    data = LeRobotDataset(shared.dataset.root, longer)
    with pytest.raises(DatasetError, match=r"needs 41 frames of one task.*longest has 33"):
        WindowDataset(data)

    class Square:
        def __init__(self, size: int) -> None:
            self.size = size

        def frames_at(self, times):
            return torch.zeros(len(times), 3, self.size, self.size, dtype=torch.uint8)

    windows = WindowDataset(
        shared.dataset, open_video=lambda span: Square(8 if "front" in str(span.path) else 16)
    )
    with pytest.raises(DatasetError, match=r"one size, got front 8x8, wrist 16x16"):
        windows[0]


def test_a_mixture_numbers_its_parts_one_after_the_other(shared, tmp_path):
    root = write_counted(tmp_path / "b", SMALL, [25], tasks=["place it"])
    other = WindowDataset(LeRobotDataset(root, SMALL))
    both = Mixture([shared, other], [4, 1])
    assert len(both) == len(shared) + len(other)
    assert both.weights.tolist() == [0.8, 0.2]
    ids = [len(shared) + 2, 1, len(shared) - 1]
    for index, sample in zip(ids, both.samples(ids, paraphrases=[0, 0, 0])):
        assert sample["sample_id"] == index
        part, own = (shared, index) if index < len(shared) else (other, index - len(shared))
        assert torch.equal(sample["views"], part[own]["views"])
        assert sample["prompt"] == part[own]["prompt"]
    assert torch.equal(both[ids[0]]["action"], other[2]["action"])
    with pytest.raises(ConfigError, match=r"2 data sets takes as many positive weights, got \[1\]"):
        Mixture([shared, other], [1])
    with pytest.raises(ConfigError, match=r"positive weights"):
        Mixture([shared, other], [1, 0])
    wide = WindowDataset(LeRobotDataset(root, replace(SMALL, horizon=16, blocks=1)))
    with pytest.raises(ConfigError, match=r"same blocks x steps x views, got toy 2 x 8 x 2, toy 1"):
        Mixture([shared, wide])


@pytest.mark.parametrize(("folder", "name"), [("droid_mini", "toy"), ("libero_mini", "libero")])
def test_the_data_samples_give_samples(data_samples: Path, folder, name):
    e = EMBODIMENTS[name]
    windows = WindowDataset(LeRobotDataset(data_samples / folder, e, progress=False))
    assert len(windows) > 500
    sample = windows[len(windows) // 2]
    size = (180, 320) if name == "toy" else (256, 256)
    assert sample["views"].shape == (len(e.views), 33, 3, *size)
    real = sample["action"][:, : 8 if name == "toy" else 7]
    assert (real.abs() < 1).float().mean() > 0.7  # statistics that fit the data hardly clip
    assert real.std() > 0.1


def test_a_data_set_made_of_real_footage_gives_samples(tmp_path):
    footage = shared_dir("droid", "exterior_image_1_left.mp4")
    if footage is None:
        pytest.skip("the extra footage is not here")
    toy, length = EMBODIMENTS["toy"], 419
    rows = np.sin(np.arange(length)[:, None] / 20 + np.arange(8))
    clip = Clip(footage.read_bytes(), (180, 320, 3))
    write_dataset(
        [
            Episode(
                "do it",
                {"observation.state": rows, "action": rows},
                {f"observation.images.{name}": clip for name in toy.views},
            )
        ],
        root=tmp_path / "real",
        version="v2.1",
        fps=15,
        embodiment=toy,
        names={name: [f"d{i}" for i in range(8)] for name in ("observation.state", "action")},
    )
    windows = WindowDataset(LeRobotDataset(tmp_path / "real", toy))
    assert len(windows) == length
    views = windows[length - 1]["views"]
    assert views.shape == (3, 33, 3, 180, 320)
    assert views.float().std() > 20
