"""`wamlab check`: each kind of fault made on purpose, found, and named with file and episode."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import barcode
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import shared_dir
from counted_data import ROBOT, write_counted

from wamlab.__main__ import main
from wamlab.data.check import check_dataset
from wamlab.data.embodiment import EMBODIMENTS
from wamlab.data.metadata import DatasetError

LENGTHS = [30, 21, 40, 24]
VIDEO = "videos/chunk-000/observation.images.{}/episode_{:06d}.mp4"
TABLE = "data/chunk-000/episode_{:06d}.parquet"


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("made")
    return {
        "v2.1": write_counted(root / "v21", ROBOT, LENGTHS),
        "v3.0": write_counted(root / "v30", ROBOT, LENGTHS, version="v3.0"),
        "images": write_counted(root / "png", ROBOT, LENGTHS, images=True),
    }


@pytest.fixture(scope="module")
def short(tmp_path_factory) -> Path:
    """One episode, just long enough for a sample."""
    return write_counted(tmp_path_factory.mktemp("short") / "data", ROBOT, [18])


def check(root: Path, robot=ROBOT, **options) -> list[str]:
    return [str(f) for f in check_dataset(root, robot, progress=False, **options)]


def edit_json(path: Path, change) -> None:
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values))


def edit_column(path: Path, name: str, change) -> None:
    """Change one column of a table, given and returned as a list of rows."""
    table = pq.read_table(path)
    rows = change(table[name].to_pylist())
    place = table.column_names.index(name)
    column = pa.array(rows, table.schema.field(name).type)
    pq.write_table(table.set_column(place, name, column), path)


@pytest.mark.parametrize("name", ["v2.1", "v3.0", "images"])
def test_a_sound_data_set_has_no_fault(name, made):
    assert check(made[name]) == []
    assert check(made[name], None) == []


@pytest.mark.parametrize("name", ["droid_mini", "libero_mini"])
def test_the_samples_have_no_fault(name, data_samples, capsys):
    if not (data_samples / name).is_dir():
        pytest.skip(f"{name} is not there yet")
    assert main(["check", str(data_samples / name)]) == 0
    assert "0 faults that would spoil training, 0 notes" in capsys.readouterr().out


def test_d5_broken_clips_and_a_missing_table_are_listed_in_one_pass(copy, tmp_path):
    """D5: truncated, no index, LFS pointer, empty; and episode 2 has no parquet."""
    root = copy()
    (root / TABLE.format(2)).unlink()
    good = (root / VIDEO.format("front", 0)).read_bytes()
    front = [root / VIDEO.format("front", e) for e in range(4)]
    front[0].write_bytes(good[: len(good) * 6 // 10])  # its moov box, at the end, is gone too
    whole = barcode.write(tmp_path / "fast.mp4", muxer={"movflags": "faststart"}).read_bytes()
    front[1].write_bytes(whole[: len(whole) * 6 // 10])
    front[2].write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    front[3].write_bytes(b"")
    (root / VIDEO.format("wrist", 1)).unlink()
    found = check(root)
    for line in (
        f"{TABLE.format(2)} (episode 2): episode has no table (40 frames expected): missing",
        f"{VIDEO.format('front', 2)} (episode 2): a Git-LFS pointer, not the video",
        f"{VIDEO.format('front', 3)} (episode 3): empty (0 bytes)",
        f"{VIDEO.format('wrist', 1)} (episode 1): cannot be read: No such file",
    ):
        assert sum(f.startswith(line) for f in found) == 1, (line, found)
    cut = [f for f in found if VIDEO.format("front", 0) in f]
    assert len(cut) == 1
    assert "(30 frames expected)" in cut[0]
    cut = [f for f in found if VIDEO.format("front", 1) in f]
    assert len(cut) == 1
    assert "60 frames expected" in cut[0]
    assert "readable" in cut[0]
    assert len(found) == 6


@pytest.mark.skipif(shared_dir("clips") is None, reason="the shared clips are not here")
@pytest.mark.parametrize("clip", ["truncated", "no_index", "lfs_pointer", "empty"])
def test_d5_the_reported_clips(clip, copy):
    """D5: the four broken clips, each as an episode's video."""
    root = copy()
    (root / VIDEO.format("wrist", 3)).write_bytes(shared_dir("clips", f"{clip}.mp4").read_bytes())
    found = check_dataset(root, ROBOT, progress=False)
    assert [(f.file, f.episode, f.spoils) for f in found] == [
        (VIDEO.format("wrist", 3), 3, True)
    ], found


def shorter(root: Path) -> None:
    barcode.write(root / VIDEO.format("front", 1), frames=18, size=(32, 96))


def longer(root: Path) -> None:
    barcode.write(root / VIDEO.format("front", 1), frames=22, size=(32, 96))


def other_size(root: Path) -> None:
    barcode.write(root / VIDEO.format("front", 1), frames=21, size=(48, 96))


def other_rate(root: Path) -> None:
    barcode.write(root / VIDEO.format("front", 1), frames=21, size=(32, 96), fps=10)


def late(root: Path) -> None:
    times = [k * 1024 for k in range(21)]
    times[9:] = [t + 1024 for t in times[9:]]
    barcode.write(root / VIDEO.format("front", 1), times=times, size=(32, 96))


def column(name: str, change):
    return lambda root: edit_column(root / TABLE.format(1), name, change)


def put(row: int, value):
    return lambda rows: [*rows[:row], value, *rows[row + 1 :]]


def dimension(row: int, value: float):
    return lambda rows: [*rows[:row], [value, *rows[row][1:]], *rows[row + 1 :]]


def statistics(name: str, change):
    return lambda root: edit_json(root / "meta" / name, change)


def narrow(values: dict) -> None:
    s = values["observation.state"]
    s["q01"], s["q99"] = s["mean"], [m + 1e-3 for m in s["mean"]]


def wide(values: dict) -> None:
    values["action"]["q99"] = [9e6] * len(values["action"]["q99"])


def absolute(values: dict) -> None:
    values["joint_position"] = {
        k: [v] * 7
        for k, v in {"mean": 160, "std": 90, "min": 0, "max": 324, "q01": 1, "q99": 322}.items()
    }


FAULTS = {
    "short video": (shorter, "front.*episode 1.: 18 frames, 21 expected: 3 are missing at its end"),
    "long video": (longer, "note .*front.*22 frames, 21 expected: the last ones have no row"),
    "size": (other_size, "note .*front.*episode 1.: 48x96, meta/info.json says 32x96"),
    "rate": (other_rate, "front.*episode 1.: frame 1, not 2, stands at 0.133333 s.* 15 fps"),
    "hole": (late, "front.*episode 1.: frame 8, not 9, stands at 0.6 s|no frame at|expected"),
    "NaN": (
        column("action", dimension(4, float("nan"))),
        r"000001.parquet .*1.: action is not finite at row 4 .1 values",
    ),
    "back": (
        column("timestamp", put(5, 0.2)),
        "parquet.*1.: timestamp goes from 0.266667 to 0.2 s at row 5",
    ),
    "shifted": (
        column("timestamp", lambda rows: [t + 1 / 15 for t in rows]),
        "parquet.*1.: timestamps are shifted by 1 frame$",
    ),
    "grid": (
        column("timestamp", put(5, 0.34)),
        "parquet.*1.: timestamp 0.34 s at row 5 is not on the grid: 0.333333 s",
    ),
    "frame index": (
        column("frame_index", put(5, 6)),
        "parquet.*1.: frame_index is 6 at row 5, 5 expected",
    ),
    "episode index": (
        column("episode_index", put(0, 2)),
        "parquet.*1.: episode_index is 2 at row 0, 1 expected",
    ),
    "index": (column("index", put(3, 0)), "note .*1.: index is 0 at row 3, 33 expected"),
    "language": (
        column("task_index", put(7, 41)),
        "parquet.*1.: task_index 41 is none of the 1 tasks in meta/",
    ),
    "narrow": (
        statistics("stats.json", narrow),
        "meta/stats.json: observation.state: the statistics do not fit .*outside q01..q99",
    ),
    "wide": (
        statistics("stats.json", wide),
        "meta/stats.json: action: .* do not fit .*q01..q99 of dimension 0 spans 9e.06, the data 3",
    ),
    "absolute": (
        statistics("relative_stats_dreamzero.json", absolute),
        "meta/relative_stats.*joint_position: these are the statistics of the absolute action",
    ),
    "totals": (
        statistics("info.json", lambda v: v.update(total_frames=7)),
        "note meta/info.json: total_frames is 7, the episode table has 115",
    ),
    "pointer": (
        lambda root: (root / TABLE.format(1)).write_text("version https://git-lfs.github.com/"),
        "parquet .episode 1.: episode has no table .21 frames expected.: a Git-LFS pointer",
    ),
    "no tasks": (
        lambda root: (root / "meta/tasks.jsonl").unlink(),
        "meta/tasks.jsonl: missing",
    ),
    "stats not JSON": (
        lambda root: (root / "meta/stats.json").write_text("{"),
        "meta/stats.json: not valid JSON",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_each_fault_is_named(name, copy):
    root, (spoil, message) = copy(), FAULTS[name]
    spoil(root)
    faults = check_dataset(root, ROBOT, progress=False)
    lines = [f"{'' if f.spoils else 'note '}{f}" for f in faults]
    assert any(re.search(message, line) for line in lines), lines
    assert len(lines) <= 2, lines


def test_faults_of_a_shared_file_name_their_episode(copy):
    root = copy("v3.0")
    path = next((root / "meta/episodes").rglob("*.parquet"))
    edit_column(
        path,
        "videos/observation.images.front/from_timestamp",
        lambda t: [t[0], t[1] - 1 / 15, *t[2:]],
    )
    found = check(root)
    assert any("episode 1): meta/episodes puts it at" in f for f in found), found
    assert any("episode 1): shares 1 frames with episode 0" in f for f in found), found
    assert any("episode 1): 22 frames, 21 expected" in f for f in found), found


def test_images_without_bytes_are_found(copy):
    root = copy("images")
    path = root / TABLE.format(1)
    edit_column(
        path, "observation.images.front", lambda rows: [{"bytes": None, "path": None}, *rows[1:]]
    )
    assert "1 images of observation.images.front have no bytes" in check(root)[0]


def test_what_the_embodiment_lacks_is_a_fault(copy):
    root = copy()
    assert any("no camera 'exterior" in f for f in check(root, EMBODIMENTS["toy"])), check(root)
    found = check(root, replace(ROBOT, fps=10, horizon=24))
    assert found[0].startswith("meta/info.json: 15 fps, embodiment 'toy' is made for 10")
    assert "no sample: one needs 49 frames" in found[1]
    found = check(root, replace(ROBOT, horizon=16))  # the statistics are of 8 steps, not of 16
    assert "joint_position: 50% of the relative actions lie outside q01..q99" in found[0]


def test_views_of_different_sizes_are_a_fault(copy):
    root = copy()
    for episode, length in enumerate(LENGTHS):
        barcode.write(root / VIDEO.format("front", episode), frames=length, size=(48, 96))
    edit_json(
        root / "meta/info.json",
        lambda v: v["features"]["observation.images.front"].update(shape=[48, 96, 3]),
    )
    assert "its views have different sizes: 32x96, 48x96" in check(root)[0]


def test_stored_checksums_find_a_changed_picture(copy):
    root = copy()
    assert check(root, checksums="write") == []
    assert check(root, checksums="compare") == []
    video = root / VIDEO.format("wrist", 2)
    barcode.write(video, frames=40, size=(32, 96), b_frames=0)
    found = check(root, checksums="compare")
    assert re.match(
        r"videos.*wrist.*2\): \d+ frames differ from their checksums, the first", found[0]
    )
    (root / "meta/frame_checksums.txt").unlink()
    faults = check_dataset(root, ROBOT, checksums="compare", progress=False)
    assert len(faults) == 8
    assert not any(f.spoils for f in faults)


def test_checksums_do_not_make_the_tables_convert_again(copy):
    root = copy()
    check(root)
    before = sorted(p.name for p in (root / ".wamlab").glob("columns-*"))
    check(root, checksums="write")
    assert sorted(p.name for p in (root / ".wamlab").glob("columns-*")) == before


def test_the_command_prints_json_and_exits_with_1(copy, capsys, monkeypatch):
    root = copy()
    monkeypatch.setitem(EMBODIMENTS, "toy", ROBOT)  # what meta/embodiment.json names
    assert main(["check", str(root), "--json"]) == 0
    (root / TABLE.format(2)).unlink()
    assert main(["check", str(root), "--json"]) == 1
    text = capsys.readouterr().out
    values = json.loads(text[text.index("}\n{") + 2 :])
    assert values["ok"] is False
    assert values["faults"][0]["episode"] == 2
    assert main(["check", str(root)]) == 1
    assert f"fault  {TABLE.format(2)} (episode 2): episode has no table" in capsys.readouterr().out


BAD = (None, 0, -1, "x", [], {}, 1e300)
UNREAD = {"robot_type", "total_tasks", "splits", "total_videos", "total_chunks", "names", "info"}
# what a value may be although it is none of the data set's own: absent, computed, or found by name
HARMLESS = {
    "info.json": r"total_(episodes|frames)=None|chunks_size=None|shape=(None|\[\])",
    "modality.json": r"^={}|(video|annotation)(\.\w+)?={}|original_key=None|start=0",
    "stats.json": r"^={}|^[\w.]+={}|(mean|std|min|max|q01|q99)\.0=(0|-1|1e\+300)",
    "relative_stats_dreamzero.json": r"^={}|(mean|std|min|max|q01|q99)\.0=(0|-1|1e\+300)",
    "tasks.jsonl": r"0\.task_index=0|0\.task='x'",
    "episodes.jsonl": r"0\.episode_index=0|tasks",
    "episodes_stats.jsonl": r"",  # its values are read by nobody
    "embodiment.json": r"='x'",
}


def places(value, here: tuple = ()):
    """Yield the way to every field of a JSON value, of a list to its first entry only."""
    yield here
    if isinstance(value, dict):
        inner = {k: v for k, v in value.items() if k not in UNREAD}.items()
    else:
        inner = enumerate(value[:1]) if isinstance(value, list) else ()
    for key, found in inner:
        yield from places(found, (*here, key))


def replaced(value, place: tuple, bad):
    if not place:
        return bad
    value = value.copy()
    value[place[0]] = replaced(value[place[0]], place[1:], bad)
    return value


def spoiled(path: Path):
    """Yield a label and the bytes of a meta file with one field replaced by something else."""
    rows = path.suffix == ".jsonl"
    text = path.read_text()
    values = [json.loads(line) for line in text.splitlines()] if rows else json.loads(text)
    ways = [w for w in places(values) if w or not rows][: 9 if "stats" in path.name else None]
    for number, way in enumerate(ways):
        for bad in BAD if len(way) < 2 else (BAD[number % 7],):  # all in turn further inside
            new = replaced(values, way, bad)
            text = "\n".join(map(json.dumps, new)) if rows else json.dumps(new)
            yield f"{'.'.join(map(str, way))}={bad!r}", text.encode()
    yield "not UTF-8", b'{"fps": "\xff"}'
    yield "empty", b"" if not rows else b"{"


@pytest.mark.parametrize("name", HARMLESS)
def test_no_value_of_a_meta_file_stops_the_check(name, short, tmp_path):
    """Every field by null, 0, -1, a text, a list, an object and 1e300: a fault, or no harm."""
    root = tmp_path / "copy"
    shutil.copytree(short, root)
    path = root / "meta" / name
    for label, data in spoiled(path):
        path.write_bytes(data)
        found = check(root)
        assert found or re.search(HARMLESS[name], label), f"{name} {label}: no fault"
        assert not any("Error(" in f or "\n" in f for f in found), found
        assert any(name in f for f in found) or not label.startswith("not UTF"), (label, found)


def test_what_is_no_data_set_is_refused(tmp_path, capsys):
    with pytest.raises(DatasetError, match="no such folder"):
        check_dataset(tmp_path / "nowhere")
    assert main(["check", str(tmp_path / "nowhere")]) == 2
    assert "no such folder" in capsys.readouterr().err
    found = check(tmp_path)
    assert "not a LeRobot data set: no meta/info.json" in found[0]
