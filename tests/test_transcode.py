"""Re-encoding for training: every frame at its time, all else bit by bit, interruptions
survived."""

import json
import shutil
from pathlib import Path

import barcode
import pytest

from wamlab.__main__ import main
from wamlab.config import ConfigError
from wamlab.data import transcode
from wamlab.data.container import VideoError
from wamlab.data.frame_times import frame_times
from wamlab.data.metadata import DatasetError
from wamlab.data.transcode import TranscodeConfig, transcode_dataset, transcode_file
from wamlab.data.video import DECODERS
from wamlab.measure import read_jsonl

VARIABLE = [512 * k for k in range(20)] + [512 * (20 + 3 * k) for k in range(20)]
VIEW = "observation.images.front"


@pytest.fixture
def dataset(tmp_path) -> Path:
    """A v2.1 data set of two episodes, as far as transcoding looks at it."""
    root = tmp_path / "set"
    for number in range(2):
        video = root / "videos" / "chunk-000" / VIEW / f"episode_{number:06d}.mp4"
        video.parent.mkdir(parents=True, exist_ok=True)
        barcode.write(video, frames=110, gop=250, b_frames=0)
    info = {
        "codebase_version": "v2.1",
        "fps": 15,
        "chunks_size": 1000,
        "data_path": "data/{episode_chunk:03d}/{episode_index:06d}.parquet",
        "video_path": "videos/chunk-{episode_chunk:03d}/{video_key}/{episode_index:06d}.mp4",
        "features": {
            VIEW: {
                "dtype": "video",
                "shape": [96, 160, 3],
                "names": ["height", "width", "channels"],
                "info": {"video.codec": "h264", "video.height": 96, "video.width": 160},
            }
        },
    }
    (root / "meta").mkdir()
    (root / "meta" / "info.json").write_text(json.dumps(info))
    (root / "data" / "000").mkdir(parents=True)
    (root / "data" / "000" / "000000.parquet").write_bytes(b"any bytes")
    return root


@pytest.mark.parametrize("codec", ["h264", "av1"])
def test_every_frame_keeps_its_time(codec, tmp_path):
    source = barcode.write(tmp_path / "a.mp4", times=VARIABLE, gop=250)
    row = transcode_file(
        source, tmp_path / "b.mp4", TranscodeConfig(codec=codec, gop=4, height=48, width=80)
    )
    times = frame_times(tmp_path / "b.mp4")
    assert row["after"]["codec"] == codec
    assert row["after"]["size"] == "48x80"
    assert row["after"]["gop"] == 4
    seconds = [t / 15360 for t in VARIABLE]
    assert times.seconds.tolist() == pytest.approx(seconds)
    assert barcode.read(DECODERS["pyav"](tmp_path / "b.mp4").frames_at(seconds)) == [*range(40)]


def test_a_turned_clip_is_written_upright(tmp_path):
    source = barcode.write(tmp_path / "a.mp4", rotation=90, frames=12)
    transcode_file(source, tmp_path / "b.mp4", TranscodeConfig())
    times = frame_times(tmp_path / "b.mp4")
    assert (times.rotation, times.height, times.width) == (0, 160, 96)
    frames = DECODERS["pyav"](tmp_path / "b.mp4").frames_at(times.seconds)
    assert barcode.read(frames, rotation=90) == list(range(12))


def test_a_data_set_says_what_changed(dataset, tmp_path):
    config = TranscodeConfig(gop=5, height=48, width=80)
    rows = {r["file"]: r for r in transcode_dataset(dataset, tmp_path / "new", config)}
    table = rows["data/000/000000.parquet"]
    assert table["change"] == "copied"
    assert table["sha256"]["before"] == table["sha256"]["after"]
    assert rows["meta/info.json"]["change"] == "edited"
    info = json.loads((tmp_path / "new" / "meta" / "info.json").read_text())
    assert info["features"][VIEW]["shape"] == [48, 80, 3]
    assert info["features"][VIEW]["info"] == {
        "video.codec": "h264",
        "video.height": 48,
        "video.width": 80,
    }
    video = rows[f"videos/chunk-000/{VIEW}/episode_000001.mp4"]
    assert (video["change"], video["frames"]) == ("re-encoded", 110)
    assert video["before"]["gop"] > video["after"]["gop"] == 5


def test_an_interrupted_run_goes_on(dataset, tmp_path, monkeypatch):
    real, made = transcode.transcode_file, []

    def once(source: Path, target: Path, config: TranscodeConfig) -> dict:
        if made:
            raise KeyboardInterrupt
        made.append(source)
        return real(source, target, config)

    monkeypatch.setattr(transcode, "transcode_file", once)
    with pytest.raises(KeyboardInterrupt):
        transcode_dataset(dataset, tmp_path / "new")
    monkeypatch.setattr(transcode, "transcode_file", real)
    seen = []
    rows = transcode_dataset(
        dataset, tmp_path / "new", report=lambda done, total: seen.append((done, total))
    )
    assert seen[0][0] >= 1
    assert seen[-1] == (4, 4)
    assert len(rows) == 4
    (tmp_path / "new" / rows[0]["file"]).unlink()  # a lost file is made again
    assert transcode_dataset(dataset, tmp_path / "new") == rows
    assert not list((tmp_path / "new").rglob("*.partial*"))


def test_what_is_refused(dataset, tmp_path):
    with pytest.raises(DatasetError, match="must lie outside"):
        transcode_dataset(dataset, dataset / "new")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "a").write_text("")
    with pytest.raises(DatasetError, match="holds something else"):
        transcode_dataset(dataset, tmp_path / "full")
    transcode_dataset(dataset, tmp_path / "new")
    with pytest.raises(DatasetError, match="to start anew"):
        transcode_dataset(dataset, tmp_path / "new", TranscodeConfig(gop=3))
    with pytest.raises(ConfigError, match=r"unknown codec 'h265'.*did you mean 'h264'"):
        TranscodeConfig(codec="h265")
    with pytest.raises(ConfigError, match="gop 0: at least 1"):
        TranscodeConfig(gop=0)
    with pytest.raises(ConfigError, match="height 33: an even number"):
        TranscodeConfig(height=33)


def test_a_broken_video_stops_the_run_by_name(dataset, tmp_path):
    video = dataset / "videos" / "chunk-000" / VIEW / "episode_000001.mp4"
    video.write_bytes(video.read_bytes()[:3000])
    with pytest.raises(VideoError, match=r"episode_000001.mp4: "):
        transcode_dataset(dataset, tmp_path / "new")
    assert not list((tmp_path / "new").rglob("*000001.mp4"))


def test_the_command_prints_changes_and_gain(dataset, tmp_path, capsys):
    out = tmp_path / "new"
    assert main(["transcode", str(dataset), str(out), "--samples", "2", "--decoder", "pyav"]) == 0
    printed = capsys.readouterr().out
    assert "re-encoded" in printed
    assert "ms a window before" in printed
    assert [r["name"] for r in read_jsonl(out / "decode.jsonl")] == ["pyav", "pyav"]
    shutil.rmtree(out)
    assert main(["transcode", str(dataset), str(out), "--decoder", "nothing"]) == 2
    assert "unknown decoder 'nothing'" in capsys.readouterr().err
