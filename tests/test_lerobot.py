import json
import os
import pickle
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from counted_data import counted_episodes, read_barcodes, write_counted

from wamlab.config import ConfigError
from wamlab.data import columns as columns_module
from wamlab.data import metadata
from wamlab.data.embodiment import EMBODIMENTS
from wamlab.data.lerobot import LeRobotDataset, find_root
from wamlab.data.lerobot_write import Writer
from wamlab.data.metadata import DatasetError
from wamlab.data.normalize import Statistics, relative_rows
from wamlab.data.windows import WindowDataset

TOY = replace(
    EMBODIMENTS["toy"], views=("front", "wrist"), layout="side_by_side", horizon=8, blocks=2
)
LENGTHS = [30, 21, 40, 24]


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> dict[str, Path]:
    """The same episodes as v2.1, v3.0, and v3.0 with images in the tables."""
    root = tmp_path_factory.mktemp("made")
    settings = {"tasks": ["pick it", "place it", "pick it", "push it"]}
    return {
        "v2.1": write_counted(root / "v21", TOY, LENGTHS, **settings),
        "v3.0": write_counted(root / "v30", TOY, LENGTHS, version="v3.0", **settings),
        "images": write_counted(root / "png", TOY, LENGTHS, images=True, **settings),
    }


@pytest.fixture
def copy(made, tmp_path):
    def make(name: str) -> Path:
        shutil.copytree(made[name], tmp_path / name, ignore=shutil.ignore_patterns(".wamlab"))
        return tmp_path / name

    return make


def edit(path: Path, **changes) -> None:
    values = json.loads(path.read_text())
    path.write_text(json.dumps(values | changes))


def rewrite(path: Path, change) -> None:
    """Change one Parquet file."""
    pq.write_table(change(pq.read_table(path)), path)


@pytest.mark.parametrize("name", ["v2.1", "v3.0", "images"])
def test_rows_words_and_frames_are_those_that_were_written(made, name):
    data = LeRobotDataset(made[name], TOY)
    windows = WindowDataset(data)
    assert data.episodes.lengths.tolist() == LENGTHS
    for episode, written in enumerate(counted_episodes(TOY, LENGTHS)):
        rows = data.rows(episode, np.arange(LENGTHS[episode]))
        np.testing.assert_array_equal(
            data.state(rows), written.columns["observation.state"].astype(np.float32)
        )
        np.testing.assert_array_equal(
            data.action(rows), written.columns["action"].astype(np.float32)
        )
        steps = np.array([0, 1, LENGTHS[episode] - 1])
        for number, view in enumerate(TOY.views):
            frames = data.frames(episode, view, steps, windows.open_video)
            assert frames.dtype == torch.uint8
            assert read_barcodes(frames) == [(number, episode, t) for t in steps]
    assert data.instruction(int(data.episodes.offsets[3])) == "push it"
    assert [p.split("doing: ")[1][:7] for p in data.prompts()] == ["pick it", "place i", "push it"]


def test_v21_and_v30_and_images_of_the_same_episodes_give_the_same_samples(made):
    data = {name: WindowDataset(LeRobotDataset(path, TOY)) for name, path in made.items()}
    assert {len(d) for d in data.values()} == {len(data["v2.1"])}
    for index in range(0, len(data["v2.1"]), 17):
        samples = {name: d[index] for name, d in data.items()}
        for name in ("v3.0", "images"):
            for key, value in samples["v2.1"].items():
                other = samples[name][key]
                if key == "views" and name == "images":
                    assert (value.int() - other.int()).abs().max() < 40  # H.264 against PNG
                else:
                    assert value == other if isinstance(value, str) else torch.equal(value, other)


def test_v20_is_read_as_v21(copy):
    root = copy("v2.1")
    edit(root / "meta/info.json", codebase_version="v2.0")
    (root / "meta/episodes_stats.jsonl").unlink()
    assert LeRobotDataset(root, TOY).episodes.lengths.tolist() == LENGTHS


@pytest.mark.parametrize(
    ("shape", "names"),
    [
        ([180, 320, 3], ["height", "width", "channel"]),
        ([180, 320, 3], ["height", "width", "channels"]),
        ([3, 180, 320], ["channels", "height", "width"]),
        ([320, 180, 3], ["width", "height", "channels"]),
        ([3, 180, 320], None),
        ([180, 320, 3], None),
    ],
)
def test_height_and_width_are_never_exchanged(copy, shape, names):
    """The public metadata tool writes [H, W] where [W, H] is read; square views hide it."""
    root = copy("v2.1")
    info = json.loads((root / "meta/info.json").read_text())
    feature = info["features"]["observation.images.front"]
    feature |= {"shape": shape, "names": names, "video_info": feature.pop("info")}
    (root / "meta/info.json").write_text(json.dumps(info))
    read = metadata.read_info(root)
    assert read.frame_hw("observation.images.front") == (180, 320)


def test_columns_that_follow_from_the_episodes_may_be_absent(copy):
    root = copy("v2.1")
    for path in root.glob("data/*/*.parquet"):
        rewrite(path, lambda t: t.drop_columns(["index", "frame_index", "timestamp"]))
    data = LeRobotDataset(root, TOY)
    np.testing.assert_allclose(data.timestamps(1, [0, 3]), [0, 0.2])
    assert WindowDataset(data)[0]["views"].shape == (2, 17, 3, 32, 96)


def test_tasks_may_be_a_column_or_the_tables_index(copy):
    root = copy("v3.0")
    first = LeRobotDataset(root, TOY).tasks
    rewrite(root / "meta/tasks.parquet", lambda t: t.rename_columns(["task_index", "task"]))
    assert LeRobotDataset(root, TOY).tasks == first
    rewrite(root / "meta/tasks.parquet", lambda t: t.select(["task_index"]))
    with pytest.raises(DatasetError, match=r"tasks.parquet: needs task_index and a column of text"):
        LeRobotDataset(root, TOY)


def test_modality_slices_win_over_the_embodiments(copy):
    root = copy("v2.1")
    path = root / "meta/modality.json"
    values = json.loads(path.read_text())
    values["state"]["gripper_position"] = {"start": 0, "end": 1}
    values["state"]["joint_position"] |= {"start": 1, "end": 8}
    path.write_text(json.dumps(values))
    data = LeRobotDataset(root, TOY)
    assert data.state(data.rows(0, [0]))[0].tolist() == [i / 16 for i in (*range(1, 8), 0)]
    values["state"].pop("gripper_position")
    path.write_text(json.dumps(values))
    with pytest.raises(
        DatasetError, match=r"modality.json: no state 'gripper_position'.*joint_pos"
    ):
        LeRobotDataset(root, TOY)
    values["state"]["gripper_position"] = {"start": 7, "end": 9}
    path.write_text(json.dumps(values))
    with pytest.raises(DatasetError, match=r"dimensions 7 to 9 of observation.state, which has 8"):
        LeRobotDataset(root, TOY)


def test_what_the_embodiment_needs_and_the_data_lacks_is_named(made, copy):
    with pytest.raises(DatasetError, match=r"info.json: no camera 'side'; it has .*images.front"):
        LeRobotDataset(made["v2.1"], replace(TOY, views=("front", "side")))
    with pytest.raises(DatasetError, match=r"parquet: no column 'words', needed for the task"):
        LeRobotDataset(made["v2.1"], replace(TOY, language=("words",)))
    root = copy("v2.1")
    for path in root.glob("data/*/*.parquet"):
        rewrite(path, lambda t: t.drop_columns(["action"]))
    with pytest.raises(
        DatasetError,
        match=r"episode_000000.parquet: no column 'action', needed for action 'joint_position'; "
        r"it has observation.state",
    ):
        LeRobotDataset(root, TOY)


def test_language_may_be_words_or_paraphrases_in_columns_of_their_own(copy):
    root = copy("v2.1")
    words = [f"annotation.task_{n}" for n in "ab"]
    for path in root.glob("data/*/*.parquet"):
        rewrite(
            path,
            lambda t: t.append_column(words[0], pa.array(["Lift It"] * len(t))).append_column(
                words[1], t["task_index"]
            ),
        )
    windows = WindowDataset(LeRobotDataset(root, replace(TOY, language=tuple(words))))
    assert "doing: lift it. " in windows.sample(0)["prompt"]
    assert "doing: pick it. " in windows.sample(0, paraphrase=1)["prompt"]
    assert "doing: lift it. " in windows.sample(0, paraphrase=2)["prompt"]
    assert len(windows.dataset.prompts()) == 4
    rewrite(
        root / "data/chunk-000/episode_000000.parquet",
        lambda t: t.set_column(t.column_names.index(words[0]), words[0], pa.array([" "] * len(t))),
    )
    windows = WindowDataset(LeRobotDataset(root, replace(TOY, language=tuple(words))))
    assert "doing: pick it. " in windows.sample(0)["prompt"]  # an empty paraphrase gives way
    path = root / "meta/tasks.jsonl"
    path.write_text(path.read_text().splitlines()[0] + "\n")
    windows = WindowDataset(LeRobotDataset(root, replace(TOY, language=("task_index",))))
    with pytest.raises(DatasetError, match=r"has task_index 1, which is none of the 1 tasks"):
        windows[int(windows.index.episode_bounds[0][1])]


def test_a_missing_or_broken_table_is_named(copy):
    """D5: a data set whose episode 2 has no table; pointers and empty files say what they are."""
    root = copy("v2.1")
    path = root / "data/chunk-000/episode_000002.parquet"
    kept = path.read_bytes()
    path.unlink()
    with pytest.raises(DatasetError, match=r"episode 2 .*000002.parquet: missing .*expected: 40"):
        LeRobotDataset(root, TOY)
    path.write_bytes(b"")
    with pytest.raises(DatasetError, match=r"000002.parquet: empty \(0 bytes\)"):
        LeRobotDataset(root, TOY)
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    with pytest.raises(DatasetError, match=r"000002.parquet: a Git-LFS pointer.*git lfs pull"):
        LeRobotDataset(root, TOY)
    path.write_bytes(kept[: len(kept) // 2])
    with pytest.raises(DatasetError, match=r"000002.parquet: not a readable Parquet file"):
        LeRobotDataset(root, TOY)
    path.write_bytes(kept)
    rewrite(path, lambda t: t.slice(0, 38))
    with pytest.raises(DatasetError, match=r"38 rows, but meta/ counts 40 frames for episode 2"):
        LeRobotDataset(root, TOY)
    path.write_bytes(kept)
    rewrite(path, lambda t: t.drop_columns(["action"]))
    with pytest.raises(DatasetError, match=r"000002.parquet: no column 'action', which the first"):
        LeRobotDataset(root, TOY)
    path.write_bytes(kept)
    place = pq.read_schema(path).names.index("action")
    narrow = pa.array([[0.0] * 8] * 39 + [[0.0] * 7])
    rewrite(path, lambda t: t.set_column(place, "action", narrow))
    with pytest.raises(DatasetError, match=r"action has 8 or 7 values a row, not 8 as the first"):
        LeRobotDataset(root, TOY)
    holes = pa.array([[0.0] * 8] * 39 + [None])
    rewrite(path, lambda t: t.set_column(place, "action", holes))
    with pytest.raises(DatasetError, match=r"action has 1 empty cells"):
        LeRobotDataset(root, TOY)
    rows = (root / "meta/episodes.jsonl").read_text().replace("length", "size")
    (root / "meta/episodes.jsonl").write_text(rows)
    with pytest.raises(DatasetError, match=r"episodes.jsonl, line 1: no length; it has episode_in"):
        LeRobotDataset(root, TOY)


def test_a_shared_table_out_of_order_is_refused(copy):
    root = copy("v3.0")
    path = root / "data/chunk-000/file-000.parquet"
    rewrite(path, lambda t: pa.concat_tables([t.slice(30), t.slice(0, 30)]))
    with pytest.raises(DatasetError, match=r"row 0 is of episode 1, but .* puts episode 0 there"):
        LeRobotDataset(root, TOY)


def test_what_is_no_data_set_is_refused(tmp_path, copy):
    with pytest.raises(DatasetError, match=r"nowhere: no such folder"):
        find_root(tmp_path / "nowhere")
    with pytest.raises(DatasetError, match=r"not a LeRobot data set: no meta/info.json"):
        LeRobotDataset(tmp_path, TOY)
    root = copy("v2.1")
    edit(root / "meta/info.json", codebase_version="v1.6")
    with pytest.raises(DatasetError, match=r"LeRobot v1.6: wamlab reads v2.0, v2.1, v3.0"):
        LeRobotDataset(root, TOY)
    (root / "meta/info.json").write_text("{")
    with pytest.raises(DatasetError, match=r"info.json: not valid JSON"):
        LeRobotDataset(root, TOY)
    (root / "meta/info.json").write_text("{}")
    with pytest.raises(DatasetError, match=r"info.json: no codebase_version, fps"):
        LeRobotDataset(root, TOY)
    with pytest.raises(ConfigError, match=r"writes LeRobot v2.1 or v3.0, not 'v2'"):
        Writer(root=root, version="v2", fps=15, embodiment=TOY, names={})
    with pytest.raises(ConfigError, match=r"is not empty: name a new folder"):
        Writer(root=root, version="v2.1", fps=15, embodiment=TOY, names={})


def test_a_hub_id_is_fetched_or_said_to_be_missing(made, monkeypatch):
    asked = []

    def fetch(name, repo_type):
        asked.append((name, repo_type))
        if name == "org/absent":
            raise RuntimeError("404: not found\nmore")
        return str(made["v2.1"])

    monkeypatch.setitem(sys.modules, "huggingface_hub", SimpleNamespace(snapshot_download=fetch))
    assert find_root("org/name") == made["v2.1"]
    assert asked == [("org/name", "dataset")]
    with pytest.raises(DatasetError, match=r"org/absent: .*cannot be fetched: 404: not found$"):
        find_root("org/absent")
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(DatasetError, match=r"org/name: no such folder; .* 'wamlab\[hub\]'"):
        find_root("org/name")


def test_tables_are_read_once_and_again_when_one_changes(copy, monkeypatch):
    root = copy("v2.1")
    read = []
    own = metadata.read_parquet
    monkeypatch.setattr(metadata, "read_parquet", lambda p, c=None: read.append(p) or own(p, c))
    first = LeRobotDataset(root, TOY)
    tables = [p for p in read if "data" in p.parts]
    assert len(set(tables)) == len(LENGTHS)
    read.clear()
    LeRobotDataset(root, TOY)
    assert not read
    rewrite(
        root / "data/chunk-000/episode_000001.parquet",
        lambda t: t.set_column(0, t.column_names[0], pa.array([[7.0] * 8] * len(t))),
    )
    again = LeRobotDataset(root, TOY)
    assert again.columns.folder != first.columns.folder
    assert not first.columns.folder.exists()
    assert again.state(again.rows(1, [0]))[0].tolist() == [7.0] * 8
    assert (root / ".wamlab/.gitignore").read_text() == "*\n"


@pytest.mark.parametrize("name", ["v2.1", "images"])
def test_an_interrupted_conversion_goes_on_where_it_was(copy, monkeypatch, name):
    root = copy(name)
    monkeypatch.setattr(columns_module, "SAVE_EVERY_S", -1.0)
    own, read = metadata.read_parquet, []

    def interrupted(path, columns=None):
        if path.name == "episode_000002.parquet":
            raise KeyboardInterrupt
        return own(path, columns)

    monkeypatch.setattr(metadata, "read_parquet", interrupted)
    with pytest.raises(KeyboardInterrupt):
        LeRobotDataset(root, TOY)
    monkeypatch.setattr(metadata, "read_parquet", lambda p, c=None: read.append(p) or own(p, c))
    data = LeRobotDataset(root, TOY)
    tables = sorted(p.stem for p in read if "data" in p.parts)
    assert tables == ["episode_000002", "episode_000003"]
    for episode, length in enumerate(LENGTHS):
        rows = data.rows(episode, np.arange(length))
        np.testing.assert_array_equal(data.state(rows)[:, 0], 100 * episode + np.arange(length))
    windows = WindowDataset(data)
    frames = data.frames(3, "wrist", np.array([0, 23]), windows.open_video)
    assert read_barcodes(frames) == [(1, 3, 0), (1, 3, 23)]


def test_a_data_set_that_cannot_be_written_uses_the_users_cache(copy, tmp_path, monkeypatch):
    root = copy("v2.1")
    monkeypatch.setattr(os, "access", lambda *a: False)
    monkeypatch.setattr(columns_module, "cache_dir", lambda: tmp_path / "user")
    data = LeRobotDataset(root, TOY)
    assert data.columns.folder.parent.parent == tmp_path / "user/lerobot"
    assert not (root / ".wamlab").exists()


def test_a_worker_gets_the_folder_not_the_data(made):
    data = LeRobotDataset(made["v3.0"], TOY)
    sent = pickle.dumps(data)
    assert len(sent) < 20_000
    other = pickle.loads(sent)
    rows = np.arange(50)
    np.testing.assert_array_equal(other.action(rows), data.action(rows))
    assert isinstance(other.columns.arrays["action"].base, np.memmap)


def test_relative_actions_are_normalised_by_relative_statistics(copy):
    """The public metadata tool takes absolute quantiles although the targets are relative."""
    root = copy("v2.1")
    stored = LeRobotDataset(root, TOY).codec
    for name in ("stats.json", "relative_stats_dreamzero.json"):
        (root / "meta" / name).unlink()
    data = LeRobotDataset(root, TOY)
    episodes = [np.stack([c for c in e.columns["action"]]) for e in counted_episodes(TOY, LENGTHS)]
    rows = [relative_rows(a[:, :7], a[:, :7], TOY.horizon) for a in episodes]
    relative = Statistics.of(np.concatenate(rows))
    np.testing.assert_allclose(data.codec.action[0].q99, relative.q99, atol=1e-5)
    absolute = Statistics.of(np.concatenate(episodes))
    assert absolute.q99[0] > 100 > 10 > data.codec.action[0].q99[0]
    np.testing.assert_allclose(data.codec.action[1].q99, absolute.q99[7:], atol=1e-4)
    for which in ("state", "action"):
        for a, b in zip(getattr(data.codec, which), getattr(stored, which)):
            np.testing.assert_allclose(a.q01, b.q01, atol=1e-4)
    # computed once: the next opening finds them
    assert (data.columns.folder / "statistics.json").is_file()


def test_steps_that_a_filter_names_are_no_starts(copy):
    root = copy("v2.1")
    before = WindowDataset(LeRobotDataset(root, TOY))
    path = root / "meta/step_filter.jsonl"
    path.write_text(json.dumps({"episode_index": 1, "step_indices": [*range(12)]}) + "\n")
    after = WindowDataset(LeRobotDataset(root, TOY))
    kept = [before.index.locate(i) for i in range(len(before))]
    kept = [k for k in kept if k[0] != 1 or k[2] >= 30 + 12]
    assert 0 < len(kept) < len(before)
    assert [after.index.locate(i) for i in range(len(after))] == kept
    path.write_text(json.dumps({"episode_index": 9, "step_indices": []}))
    with pytest.raises(DatasetError, match=r"step_filter.jsonl: no episode 9 among the 4"):
        WindowDataset(LeRobotDataset(root, TOY))
    path.write_text(json.dumps({"episode_index": 1, "step_indices": [3, 21]}))
    with pytest.raises(DatasetError, match=r"episode 1 has steps 3 to 21, but 21 frames"):
        WindowDataset(LeRobotDataset(root, TOY))


def test_statistics_of_another_width_are_refused(copy):
    root = copy("v2.1")
    values = json.loads((root / "meta/stats.json").read_text())
    values["action"] = {k: v[:5] for k, v in values["action"].items()}
    (root / "meta/stats.json").write_text(json.dumps(values))
    with pytest.raises(DatasetError, match=r"action has statistics of 5 dimensions.*has 8"):
        LeRobotDataset(root, TOY)


def test_the_recorded_times_are_asked_for_not_the_nominal_ones(copy):
    """Cameras that record at their own pace: a timestamp column is believed."""
    root = copy("v2.1")
    path = root / "data/chunk-000/episode_000000.parquet"
    late = np.arange(30) / 15 + 0.02
    rewrite(
        path,
        lambda t: t.set_column(t.column_names.index("timestamp"), "timestamp", pa.array(late)),
    )
    data = LeRobotDataset(root, TOY)
    np.testing.assert_allclose(data.timestamps(0, [0, 4]), late[[0, 4]], atol=1e-6)


@pytest.mark.parametrize(("folder", "name"), [("droid_mini", "toy"), ("libero_mini", "libero")])
def test_the_samples_statistics_are_those_of_their_tables(data_samples, tmp_path, folder, name):
    stored = LeRobotDataset(data_samples / folder, EMBODIMENTS[name], progress=False).codec
    skip = shutil.ignore_patterns(".wamlab", "*stats*", "*.mp4")
    shutil.copytree(data_samples / folder, tmp_path / "copy", ignore=skip)
    computed = LeRobotDataset(tmp_path / "copy", EMBODIMENTS[name]).codec
    for which in ("state", "action"):
        for a, b in zip(getattr(stored, which), getattr(computed, which)):
            for field in ("mean", "std", "min", "max", "q01", "q99"):
                np.testing.assert_allclose(getattr(a, field), getattr(b, field), atol=1e-6)
