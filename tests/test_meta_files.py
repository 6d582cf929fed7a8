"""Malformed metadata: opening a data set names file, field, value and what is allowed; so does
`wamlab check`, which lists it and exits with 1."""

import json
import re
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from counted_data import ROBOT, write_counted

from wamlab.__main__ import main
from wamlab.config import ConfigError
from wamlab.data.check import check_dataset
from wamlab.data.lerobot import LeRobotDataset
from wamlab.data.metadata import DatasetError
from wamlab.data.windows import WindowDataset


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("made")
    return {v: write_counted(root / v, ROBOT, [18, 19], version=v) for v in ("v2.1", "v3.0")}


def put(name: str, *way: str | int, value):
    """Return what replaces one field of a meta file: JSON, or one JSON object a line."""

    def spoil(root: Path) -> None:
        path = root / "meta" / name
        rows = path.suffix == ".jsonl"
        text = path.read_text()
        values = [json.loads(line) for line in text.splitlines()] if rows else json.loads(text)
        inner = {"all": values}
        place = ["all", *way]
        for key in place[:-1]:
            inner = inner[key]
        inner[place[-1]] = value
        values = value if not way else values
        path.write_text("\n".join(map(json.dumps, values)) if rows else json.dumps(values))

    return spoil


def column(pattern: str, name: str, value):
    """Return what fills a column of the first such table with one value."""

    def spoil(root: Path) -> None:
        path = min(root.glob(pattern))
        table = pq.read_table(path)
        place = table.column_names.index(name)
        pq.write_table(table.set_column(place, name, pa.array([value] * len(table))), path)

    return spoil


FRONT = ("features", "observation.images.front")
TABLE, EPISODES = "data/*/*.parquet", "meta/episodes/*/*.parquet"
REFUSED = {
    "fps": (put("info.json", "fps", value=0), r"info.json: fps is 0: must be a number of frames"),
    "chunks_size": (
        put("info.json", "chunks_size", value=0),
        r"info.json: chunks_size is 0: must be a whole number, 1 or more",
    ),
    "features": (
        put("info.json", "features", value=[]),
        r"info.json: features is \[\]: must be a JSON object",
    ),
    "feature": (
        put("info.json", *FRONT, value=5),
        r"features.observation.images.front is 5: must be a JSON object",
    ),
    "shape": (
        put("info.json", *FRONT, "shape", value="x"),
        r'features.observation.images.front: shape is "x": must be a list of whole numbers',
    ),
    "data_path": (put("info.json", "data_path", value=7), r"data_path is 7: must be a text"),
    "pattern": (
        put("info.json", "data_path", value="{nope}"),
        r'data_path is "{nope}": must be a file name inside the data set, made with {episode_',
    ),
    "video_path": (
        put("info.json", "video_path", value="/{video_key}"),
        r'video_path is "/{video_key}": must be a file name .* made with {video_key}, {episode_',
    ),
    "info": (put("info.json", value=[1]), r"info.json: it is \[1\]: must be a JSON object"),
    "modality": (put("modality.json", value=[]), r"modality.json: it is \[\]: must be a JSON obj"),
    "group": (
        put("modality.json", value={"state": 5}),
        r"modality.json: state is 5: must be a JSON object",
    ),
    "slice": (
        put("modality.json", "state", "gripper_position", "end", value=0),
        r"modality.json: state.gripper_position: end is 0: must be above start, 7",
    ),
    "start": (
        put("modality.json", "action", "joint_position", "start", value="x"),
        r'modality.json: action.joint_position: start is "x": must be a whole number',
    ),
    "statistics": (put("stats.json", value=[]), r"stats.json: it is \[\]: must be a JSON object"),
    "text": (
        put("stats.json", "action", "q01", 0, value="x"),
        r"stats.json: action: q01 is \['x', .*must be a list of numbers",
    ),
    "uneven": (
        put("stats.json", "action", "q99", value=[1, 2]),
        r"stats.json: action has six lists of different lengths: mean 8, .*, q99 2",
    ),
    "relative": (
        put("relative_stats_dreamzero.json", "joint_position", value="x"),
        r'relative_stats_dreamzero.json: joint_position is "x": must be a JSON object',
    ),
    "length": (
        put("episodes.jsonl", 1, "length", value=1e300),
        r"episodes.jsonl(, |: )line 2: length is 1e\+300: must be a whole number of frames",
    ),
    "task": (
        put("tasks.jsonl", 0, "task_index", value="a"),
        r'tasks.jsonl(, |: )line 1: task_index is "a": must be a whole number, 0 or more',
    ),
    "encoding": (
        lambda root: (root / "meta/tasks.jsonl").write_bytes(b'{"task": "\xe9"}'),
        r"tasks.jsonl: not UTF-8 text \(byte 10 is 0xe9\)",
    ),
    "depth": (
        lambda root: (root / "meta/info.json").write_text("[" * 100_000),
        r"info.json: not valid JSON",
    ),
    "filter": (
        lambda root: (root / "meta/step_filter.jsonl").write_text('{"episode_index": 0}'),
        r"step_filter.jsonl(, |: )line 1: no step_indices; it has episode_index",
    ),
}
TABLES = {  # version, what spoils it, what opening says, what check says
    "text index": (
        "v2.1",
        column(TABLE, "task_index", "a"),
        r"episode_000001.parquet: task_index holds int64, which the first table does not",
        r"000000.parquet .*: task_index holds string, meta/info.json says int64",
    ),
    "list index": (
        "v3.0",
        column(TABLE, "task_index", [1, 2]),
        r"task_index holds lists of 2 values, not one value a row",
        r"task_index has 2 values a row, meta/info.json says \[1\]",
    ),
    "text action": (
        "v3.0",
        column(TABLE, "action", "a"),
        r"action 'joint_position' is of action, which holds texts",
        r"action holds string, meta/info.json says float32",
    ),
    "text time": (
        "v3.0",
        column(TABLE, "timestamp", "a"),
        r"timestamp holds texts: must be seconds",
        r"timestamp holds string, meta/info.json says float32",
    ),
    "episode": (
        "v3.0",
        column(TABLE, "episode_index", [1, 2]),
        r"episode_index holds list.*: must be whole numbers",
        r"episode_index has 2 values a row, meta/info.json says \[1\]",
    ),
    "length": (
        "v3.0",
        column(EPISODES, "length", 1e300),
        r"file-000.parquet: length of row 0 is 1e\+300: must be a whole number of frames",
        r"meta/episodes/.*: length of row 0 is 1e\+300: must be a whole number of frames",
    ),
    "seconds": (
        "v3.0",
        column(EPISODES, "videos/observation.images.front/to_timestamp", "a"),
        r"front/to_timestamp holds string: must be numbers",
        r"meta/episodes/.*front/to_timestamp holds string: must be numbers",
    ),
    "folder": (
        "v2.1",
        put("info.json", "data_path", value="meta"),
        r"meta: cannot be read: Is a directory",
        r"meta \(episode 0\): episode has no table .*: cannot be read: Is a directory",
    ),
}
LISTED = {  # found by check alone: opening does not need them
    "embodiment": (
        put("embodiment.json", value=[]),
        r"embodiment.json: it is \[\]: must be a JSON",
    ),
    "unlisted": (
        lambda root: (root / "meta/info.json").write_text(
            (root / "meta/info.json").read_text().replace('"action": {', '"other": {')
        ),
        r"meta/info.json: features lists no 'action', which the tables have",
    ),
    "unread": (
        lambda root: (root / "meta/episodes_stats.jsonl").write_bytes(b"\xff"),
        r"meta/episodes_stats.jsonl: not UTF-8 text",
    ),
    "infinite": (
        put("stats.json", "action", "q99", value=[float("inf")] * 8),
        r"meta/stats.json: action: q99 is not finite",
    ),
    "contradiction": (
        put("relative_stats_dreamzero.json", "joint_position", "q99", 0, value=1e300),
        r"relative_stats_dreamzero.json: joint_position: q99 is above max in dimension 0",
    ),
    "key": (
        put("modality.json", "state", "gripper_position", "original_key", value="x"),
        r"modality.json: state.gripper_position: original_key is 'x', which is no feature",
    ),
    "axes": (
        put("info.json", *FRONT, "shape", value=[1]),
        r"meta/info.json: observation.images.front has shape \[1\], not 3 axes",
    ),
    "checksums": (
        lambda root: (root / "meta/frame_checksums.txt").write_bytes(b"\xff"),
        r"meta/frame_checksums.txt: not UTF-8 text",
    ),
}


def refusal(root: Path) -> str:
    with pytest.raises(DatasetError) as caught:
        WindowDataset(LeRobotDataset(root, ROBOT, progress=False))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def faults(root: Path, **options) -> list[str]:
    return [str(f) for f in check_dataset(root, ROBOT, progress=False, **options) if f.spoils]


@pytest.mark.parametrize("name", REFUSED)
def test_opening_and_check_name_the_field(name, copy):
    root, (spoil, message) = copy(), REFUSED[name]
    spoil(root)
    assert re.search(message, refusal(root)), refusal(root)
    assert any(re.search(message, f) for f in faults(root)), faults(root)


@pytest.mark.parametrize("name", TABLES)
def test_columns_of_another_kind_are_named(name, copy):
    version, spoil, opening, checking = TABLES[name]
    root = copy(version)
    spoil(root)
    assert re.search(opening, refusal(root)), refusal(root)
    assert any(re.search(checking, f) for f in faults(root)), faults(root)


@pytest.mark.parametrize("name", LISTED)
def test_what_opening_does_not_need_is_a_fault_all_the_same(name, copy):
    root, (spoil, message) = copy(), LISTED[name]
    spoil(root)
    found = faults(root, checksums="compare" if name == "checksums" else None)
    assert any(re.search(message, f) for f in found), found


def test_the_command_lists_malformed_metadata_and_exits_with_1(copy, capsys):
    root = copy()
    put("embodiment.json", value=[])(root)
    put("stats.json", value=[])(root)
    put("modality.json", value={"state": 5})(root)
    assert main(["check", str(root)]) == 1
    out = capsys.readouterr().out
    for name in ("embodiment", "stats", "modality"):
        assert re.search(rf"^fault  meta/{name}.json: .* must be a JSON object$", out, re.M), out
    assert main(["check", str(root), "--threads", "-2"]) == 2
    assert "threads is -2: must be 1 or more" in capsys.readouterr().err
    with pytest.raises(ConfigError, match=r"threads is -2: must be 1 or more"):
        check_dataset(root, threads=-2)
