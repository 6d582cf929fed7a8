"""The decode benchmark: equal samples, frames compared, honest about what cannot run."""

import barcode
import numpy as np
import pytest
import torch

from wamlab.__main__ import main
from wamlab.cli.bench_decode import print_decode, print_sweep
from wamlab.config import ConfigError
from wamlab.data import bench_decode
from wamlab.data.bench_decode import (
    PATTERNS,
    draw_samples,
    frames_decoded,
    gain_parts,
    re_encode,
    time_decoders,
    view_sets,
)
from wamlab.data.bench_workers import launches_per_s, sweep_workers
from wamlab.data.frame_times import frame_times
from wamlab.data.transcode import TranscodeConfig
from wamlab.data.video import DECODERS, PyAV
from wamlab.measure import Record, Timing, read_records


@pytest.fixture(scope="module")
def clip(tmp_path_factory):
    folder = tmp_path_factory.mktemp("clip")
    return barcode.write(folder / "clip.mp4", frames=110, gop=250, b_frames=0)


def test_patterns_draw_what_training_reads():
    rng = np.random.default_rng(0)
    window = PATTERNS["window"](110, rng)
    assert len(window) == 33
    assert set(np.diff(window)) == {3}
    assert set(np.diff(PATTERNS["consecutive"](110, rng))) == {1}
    assert len(PATTERNS["one"](110, rng)) == 1
    assert len(PATTERNS["episode"](110, rng)) == 110
    assert 33 < len(PATTERNS["union"](200, rng)) <= 4 * 33
    assert PATTERNS["window"](20, rng).tolist() == list(range(20))
    assert PATTERNS["window"](1, rng).tolist() == [0]
    for pattern in PATTERNS.values():
        for count in (1, 34, 66, 98):
            drawn = pattern(count, rng)
            assert drawn.min() >= 0
            assert drawn.max() < count


def test_samples_are_a_function_of_the_seed(clip):
    assert draw_samples(clip, "window", count=5) == draw_samples(clip, "window", count=5)
    assert draw_samples(clip, "window", count=5) != draw_samples(clip, "window", count=5, seed=1)


def test_views_of_an_episode_belong_together(tmp_path):
    for name in ("a", "b"):
        for number in (0, 1):
            file = tmp_path / "videos" / "chunk-000" / name / f"episode_{number}.mp4"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(b"")
    sets = view_sets(tmp_path)
    assert [[p.parent.name for p in views] for views in sets] == [["a", "b"], ["a", "b"]]
    with pytest.raises(ConfigError, match="neither a video file nor a folder"):
        view_sets(tmp_path / "nothing")


def test_frames_decoded_counts_from_keyframes(tmp_path):
    times = frame_times(barcode.write(tmp_path / "a.mp4", frames=40, gop=10, b_frames=0))
    assert np.flatnonzero(times.key).tolist() == [0, 10, 20, 30]
    assert frames_decoded(times, [5]) == 6
    assert frames_decoded(times, [5, 8]) == 9
    assert frames_decoded(times, [5, 25]) == 12  # not what lies between


def test_records_of_each_decoder(clip):
    names = ["pyav-naive", "pyav", "torchcodec", "torchcodec-cuda"]
    records = time_decoders(clip, names, samples=3, warmup=1)
    assert [r.name for r in records] == names
    for record in records[:3]:
        assert record.wrong is None
        assert record.step_ms.n == 3
        assert record.extra["max_diff"] == 0
        assert record.extra["cpu_ms"]["median"] > 0
        assert record.extra["frames_per_view"] == 33
        assert record.versions is not None
    if not torch.cuda.is_available():
        assert records[3].reason == "needs an NVIDIA GPU"
    parts = gain_parts(records)
    product = parts["not converting unwanted frames"] * parts["the library"]
    assert parts["total"] == pytest.approx(product)


@pytest.mark.parametrize("options", [{"cached": True}, {"views_at_once": True}, {"threads": 2}])
def test_ways_of_decoding(clip, options):
    records = time_decoders([clip, clip], ["pyav"], "consecutive", samples=2, warmup=0, **options)
    assert records[0].wrong is None
    assert records[0].extra["views"] == 2
    for name, value in options.items():
        assert records[0].extra[name] == value


class _Late(PyAV):
    """Returns the frame after the one that was asked for."""

    name = "late"

    def frames_at(self, timestamps_s):
        return super().frames_at(np.asarray(timestamps_s) + 1 / 15)


def test_a_decoder_that_returns_other_frames_is_wrong_not_fast(clip, monkeypatch):
    monkeypatch.setitem(DECODERS, "late", _Late)
    late, good = time_decoders(clip, ["late", "pyav"], samples=2, warmup=0, seed=3)
    assert "returns another frame at" in late.wrong
    assert late.step_ms is None
    assert good.wrong is None


def test_a_refused_file_is_a_wrong_row(clip, monkeypatch):
    def refuse(self, wanted):
        raise self._error("no")

    monkeypatch.setattr(DECODERS["torchcodec"], "_decode", refuse)
    bad, good = time_decoders(clip, ["torchcodec", "pyav"], samples=1, warmup=0)
    assert "torchcodec cannot decode it exactly: no" in bad.wrong
    assert good.step_ms is not None


def test_unknown_names_and_missing_times(clip):
    with pytest.raises(ConfigError, match=r"unknown decoder 'pyaf'.*did you mean 'pyav'"):
        time_decoders(clip, ["pyaf"])
    with pytest.raises(ConfigError, match="unknown pattern 'windows'"):
        time_decoders(clip, ["pyav"], "windows")
    times = Timing.of([1.0])
    with pytest.raises(ConfigError, match="no time of pyav, torchcodec"):
        gain_parts([Record(name="pyav-naive", step_ms=times)])
    with pytest.raises(ConfigError, match="at least 1"):
        sweep_workers(clip, ["pyav"], [0])


def test_re_encoded_views_are_made_once(clip, tmp_path, monkeypatch):
    config = TranscodeConfig(gop=2, height=48, width=80)
    made = re_encode([clip, clip], tmp_path, config)
    assert [frame_times(p).height for p in made] == [48, 48]
    monkeypatch.setattr(bench_decode, "transcode_file", None)
    assert re_encode([clip, clip], tmp_path, config) == made


def test_workers_decode_beside_a_main_loop(clip):
    assert launches_per_s(0.05) > 100
    records = sweep_workers(clip, ["pyav", "torchcodec-cuda"], [1, 2], seconds=0.3)
    rows = [r for r in records if r.name == "pyav"]
    assert [r.extra["workers"] for r in rows] == [1, 2]
    for row in rows:
        assert row.samples_per_s > 0
        assert row.extra["slowdown"] > 0
        assert row.extra["rss_gib"] > 0.05


def test_the_command_writes_records(clip, tmp_path, capsys):
    out = tmp_path / "records.jsonl"
    arguments = ["bench", "decode", str(clip), "--samples", "2", "--out", str(out)]
    names = ["pyav-naive", "pyav", "torchcodec"]
    assert main([*arguments, "--pattern", "one", "--decoders", *names]) == 0
    assert [r.name for r in read_records(out)] == names
    printed = capsys.readouterr().out
    assert "not converting unwanted frames" in printed
    assert main(["bench", "decoding"]) == 2
    assert "unknown part 'decoding'" in capsys.readouterr().err
    assert main([*arguments, "--samples", "0"]) == 2


@pytest.mark.parametrize("columns", [60, 80, 200])
def test_names_stand_whole_on_a_narrow_terminal(columns, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    time = Timing(median=1234.0, q25=1200.0, q75=1300.0, n=10)
    facts = {"codec": "h264", "gop": 250, "height": 180, "width": 320, "views": 3}
    facts |= {"pattern": "window", "frames_per_view": 33, "frames_decoded": 300.0, "max_diff": 0}
    facts |= {"cpu_ms": {"median": 1234.0, "q25": 1200.0, "q75": 1300.0}}
    facts |= {"workers": 2, "cpu_ms_spread": 3.0, "rss_gib": 1.0, "slowdown": 1.25}
    why = "does not import: a long reason that takes more than one line of a narrow terminal"
    timed = [
        Record(name=n, data="a", step_ms=time, samples_per_s=1.0, extra=facts) for n in DECODERS
    ]
    failed = [Record(name=name, reason=why) for name in DECODERS]
    print_decode([timed[0], *failed])
    print_sweep([timed[0], *failed])
    out = capsys.readouterr().out
    assert all(out.count(f"{name}: does not import: a long reason") == 2 for name in DECODERS), out
    print_decode(timed)
    out = capsys.readouterr().out
    assert all(f" {name} " in out for name in DECODERS), out
    assert columns < 80 or "1200–1300" in out  # and no number is cut where there is room
