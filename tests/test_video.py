"""Right to the frame: every decoder that works here, on clips whose frames show their number."""

import contextlib
import gc
import multiprocessing
import os
import struct
import warnings
from collections import OrderedDict
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path

import barcode
import numpy as np
import psutil
import pytest
import torch
from conftest import shared_dir

from wamlab.config import ConfigError
from wamlab.data import frame_times as times_module
from wamlab.data.frame_times import frame_times
from wamlab.data.video import DECODERS, VideoError, decoder_status

FPS = 15
WORKING = [n for n in DECODERS if "cuda" not in n and decoder_status(n) is None]
# what a library cannot read exactly, it must refuse by name
MAY_REFUSE = {("decord", "edited"), ("opencv", "av1"), ("decord", "half_turn")}
VARIABLE = [512 * k for k in range(20)]
VARIABLE += [512 * (20 + 3 * k) for k in range(20)] + [512 * (80 + k) for k in range(20)]


def cut_start(clip: Path, frames: int) -> Path:
    """Let the clip's edit list begin `frames` later, inside a group of pictures."""
    data = bytearray(clip.read_bytes())
    edit, header = data.index(b"elst"), data.index(b"tkhd")
    length, start = struct.unpack(">Ii", data[edit + 12 : edit + 20])
    length -= round(1000 * frames / FPS)
    data[edit + 12 : edit + 20] = struct.pack(">Ii", length, start + 1024 * frames)
    data[header + 24 : header + 28] = struct.pack(">I", length)
    clip.write_bytes(data)
    return clip


CLIPS = {
    "b_frames": lambda d: barcode.write(d / "b_frames.mp4"),
    "gop_250": lambda d: barcode.write(d / "gop.mp4", gop=250, b_frames=0),
    "variable": lambda d: barcode.write(d / "variable.mp4", times=VARIABLE),
    "hevc": lambda d: barcode.write(
        d / "hevc.mp4", codec="libx265", options={"x265-params": "log-level=none"}
    ),
    "av1": lambda d: barcode.write(
        d / "av1.mp4", codec="libsvtav1", gop=2, b_frames=0, options={"preset": "12"}
    ),
    "offset_mkv": lambda d: barcode.write(
        d / "offset.mkv", times=[153600 + 1024 * k for k in range(60)]
    ),
    "offset_mp4": lambda d: barcode.write(
        d / "offset.mp4", times=[153600 + 1024 * k for k in range(60)]
    ),
    "odd_rate": lambda d: barcode.write(
        d / "odd.mp4", times=[1001 * k for k in range(60)], time_base=Fraction(1, 30000)
    ),
    "turned": lambda d: barcode.write(d / "turned.mp4", rotation=90),
    "half_turn": lambda d: barcode.write(d / "half.mp4", rotation=180),
    "edited": lambda d: cut_start(barcode.write(d / "edited.mp4"), 17),
    "fragmented": lambda d: barcode.write(
        d / "fragmented.mp4", muxer={"movflags": "frag_keyframe+empty_moov"}
    ),
    "odd_size": lambda d: barcode.write(d / "size.mp4", size=(90, 322)),
}
TURNS = {"turned": 90, "half_turn": 180}
FIRST = {"edited": 17}


@pytest.fixture(scope="module")
def clips(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("clips")
    return {name: make(folder) for name, make in CLIPS.items()}


def numbers(decoder: str, clip: Path, times_s: object, name: str = "") -> list[int]:
    reader = DECODERS[decoder](clip)
    frames = reader.frames_at(times_s)
    reader.close()
    assert frames.dtype == torch.uint8
    assert frames.ndim == 4
    return barcode.read(frames, TURNS.get(name, 0))


@contextlib.contextmanager
def unless_decord_cannot_copy(decoder: str) -> Iterator[None]:
    """On some CPUs decord 3.4 fails on some widths, 96 pixels for one; it then says so."""
    try:
        yield
    except VideoError as error:
        if decoder != "decord" or "The size must exactly match" not in str(error):
            raise


@pytest.mark.parametrize("name", CLIPS)
@pytest.mark.parametrize("decoder", WORKING)
def test_every_frame_at_its_time(decoder, name, clips):
    """D1, D4, D6: variable rates, start offsets, edit lists, B-frames, turned pictures."""
    seconds = frame_times(clips[name]).seconds
    expected = list(range(FIRST.get(name, 0), 60))
    if (decoder, name) in MAY_REFUSE:
        with contextlib.suppress(VideoError):
            assert numbers(decoder, clips[name], seconds, name) == expected
    else:
        with unless_decord_cannot_copy(decoder):
            assert numbers(decoder, clips[name], seconds, name) == expected


@pytest.mark.parametrize("decoder", WORKING)
def test_any_order_repeats_and_inexact_times(decoder, clips):
    rng = np.random.default_rng(0)
    asked = rng.integers(60, size=80)
    seconds = frame_times(clips["variable"]).seconds
    gaps = np.diff(seconds, append=2 * seconds[-1] - seconds[-2])
    before = np.diff(seconds, prepend=-seconds[1])
    side = rng.uniform(-0.45, 0.45, 80)
    shifted = seconds[asked] + np.where(side > 0, gaps[asked], before[asked]) * side
    assert numbers(decoder, clips["variable"], torch.tensor(shifted)) == asked.tolist()
    reader = DECODERS[decoder](clips["variable"])
    one_by_one = [barcode.read(reader.frames_at([t]))[0] for t in shifted[:20]]
    assert one_by_one == asked[:20].tolist()
    reader.close()


@pytest.mark.parametrize("decoder", [n for n in WORKING if n != "pyav"])
def test_pixels_equal_those_of_pyav(decoder, clips):
    for name in ("b_frames", "turned", "odd_size"):
        seconds = frame_times(clips[name]).seconds[::7]
        with unless_decord_cannot_copy(decoder):
            ours = DECODERS[decoder](clips[name]).frames_at(seconds).short()
            difference = (ours - DECODERS["pyav"](clips[name]).frames_at(seconds).short()).abs()
            assert difference.float().mean() < 2.0, name  # conversions round differently
            if decoder in ("pyav-naive", "torchcodec"):
                assert difference.max() == 0, name


def test_a_turned_clip_stands_upright(clips):
    """D6: one orientation, that of the display matrix, on every decoder."""
    for decoder in WORKING:
        with unless_decord_cannot_copy(decoder):
            assert DECODERS[decoder](clips["turned"]).frames_at([0.0]).shape[2:] == (160, 96)


def test_times_past_the_end(clips):
    """D2: within half a frame of the end is the last frame; further is refused by name."""
    for time in (59 / FPS + 0.03, 4.0, 4.02, -0.03):
        assert numbers("pyav", clips["b_frames"], [time]) == [0 if time < 0 else 59]
    for time in (5.0, -0.05, float("nan"), float("inf")):
        with pytest.raises(VideoError, match=r"b_frames.mp4: no frame at .* s: .* 0 to 4 s"):
            numbers("pyav", clips["b_frames"], [time])


def test_a_missing_last_duration(tmp_path):
    """D3: the frame times are the file's own, not an average rate."""
    clip = barcode.write(tmp_path / "a.mkv", frames=31)
    asked = [k / FPS for k in range(31)]
    for decoder in WORKING:
        assert numbers(decoder, clip, asked) == list(range(31))


@pytest.mark.parametrize("decoder", WORKING)
def test_an_episode_of_a_shared_file_never_leaks(decoder, clips):
    half = {"start_s": 30 / FPS, "end_s": 50 / FPS}
    reader = DECODERS[decoder](clips["b_frames"], **half)
    assert barcode.read(reader.frames_at([k / FPS for k in range(20)])) == list(range(30, 50))
    assert barcode.read(reader.frames_at([-0.03, 20 / FPS, 20.4 / FPS])) == [30, 49, 49]
    with pytest.raises(VideoError, match=r"no frame at 1.5 s: it holds 0 to 1.33333 s"):
        reader.frames_at([1.5])
    reader.close()


def test_an_episode_that_the_file_does_not_hold(clips):
    with pytest.raises(VideoError, match=r"no part from 2 to 7 s: the file holds 0 to 4 s"):
        DECODERS["pyav"](clips["b_frames"], start_s=2.0, end_s=7.0)


def test_a_hole_is_refused(tmp_path):
    times = [1024 * k for k in range(20)] + [1024 * (60 + k) for k in range(20)]
    clip = barcode.write(tmp_path / "hole.mp4", times=times, b_frames=0)
    assert numbers("pyav", clip, [t / 15360 for t in times]) == list(range(40))
    with pytest.raises(VideoError, match=r"no frame at 2.5 s: it holds none between 1.26"):
        numbers("pyav", clip, [2.5])


def test_a_single_frame(tmp_path):
    clip = barcode.write(tmp_path / "one.mp4", frames=1)
    for decoder in WORKING:
        assert numbers(decoder, clip, [0.0]) == [0]
    with pytest.raises(VideoError, match="no frame at 1 s"):
        numbers("pyav", clip, [1.0])


def test_no_times_give_no_frames(clips):
    assert DECODERS["pyav"](clips["turned"]).frames_at([]).shape == (0, 3, 160, 96)


def test_frame_times_are_scanned_once_and_again_after_a_change(clips, tmp_path, monkeypatch):
    path = barcode.write(tmp_path / "a.mp4", frames=10)
    assert frame_times(path) is frame_times(str(path))
    barcode.write(path, frames=12)
    assert len(frame_times(path)) == 12
    monkeypatch.setattr(times_module, "CACHED_FRAMES", 100)
    monkeypatch.setattr(times_module, "_cache", OrderedDict())
    for clip in clips.values():
        frame_times(clip)
    assert sum(len(t.pts) for t in times_module._cache.values()) <= 100


@pytest.mark.parametrize("decoder", WORKING)
def test_closing_gives_the_file_back(decoder, clips):
    """D9: open files level off."""
    process = psutil.Process()

    def decode() -> int:
        for _ in range(5):
            reader = DECODERS[decoder](clips["b_frames"])
            reader.frames_at([1.0])
            reader.close()
        gc.collect()
        return process.num_fds()

    assert decode() >= decode() - 1
    assert DECODERS[decoder](clips["b_frames"]).threads == 1


class _Frames(torch.utils.data.Dataset):
    def __init__(self, decoder: object) -> None:
        self.decoder = decoder

    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.decoder.frames_at([index * 37 % 60 / FPS])[0].contiguous()


@pytest.mark.parametrize("decoder", ["pyav", "torchcodec"])
def test_a_decoder_opened_before_the_fork(decoder, tmp_path):
    """D7: the handle is not shared with the workers; a large file would show it if it were."""
    clip = barcode.write(
        tmp_path / "large.mkv", codec="rawvideo", size=(480, 640), b_frames=0, gop=1
    )
    assert clip.stat().st_size > 25e6
    reader = DECODERS[decoder](clip)
    assert barcode.read(reader.frames_at([0.0])) == [0]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # more workers than cores
        context = multiprocessing.get_context("fork")
        loader = torch.utils.data.DataLoader(
            _Frames(reader), batch_size=4, num_workers=3, multiprocessing_context=context
        )
        seen = [n for batch in loader for n in barcode.read(batch)]
    assert seen == [k * 37 % 60 for k in range(48)]
    assert barcode.read(reader.frames_at([1.0])) == [15]


def test_status_of_what_is_not_there(monkeypatch):
    assert decoder_status("pyav") is None
    monkeypatch.setattr("wamlab.ffmpeg.program", lambda: None)
    assert decoder_status("ffmpeg") == "not installed: no `ffmpeg` program"
    monkeypatch.setattr(DECODERS["opencv"], "needs", "no_such_module")
    assert decoder_status("opencv") == "not installed: no module no_such_module"
    monkeypatch.setattr(DECODERS["opencv"], "needs", "numpy")
    monkeypatch.setattr(
        "wamlab.data.video.metadata.packages_distributions", lambda: {"numpy": ["a", "b"]}
    )
    assert "a and b share one module" in decoder_status("opencv")
    with pytest.raises(ConfigError, match="did you mean 'torchcodec'"):
        decoder_status("torchcodecs")


def test_a_module_that_does_not_import(tmp_path, monkeypatch):
    (tmp_path / "broken_codec.py").write_text("raise RuntimeError('Failed to load NVENC\\nx')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(DECODERS["pynvvideocodec"], "needs", "broken_codec")
    assert decoder_status("pynvvideocodec") == "does not import: Failed to load NVENC"


def test_names_in_the_table_are_the_classes_own():
    assert {name: cls.name for name, cls in DECODERS.items()} == {n: n for n in DECODERS}


SHARED = shared_dir("clips")


@pytest.mark.skipif(SHARED is None, reason="the optional clips are not there")
@pytest.mark.parametrize("decoder", WORKING)
def test_the_optional_clips(decoder):
    """D1, D3, D4, D6: all frames by their times, 150 of 150 and 140 of 140."""
    for clip in sorted(SHARED.iterdir()):
        if clip.name.startswith(("empty", "lfs", "no_index", "truncated")):
            continue
        variable = clip.name.startswith("variable")
        asked = frame_times(clip).seconds if variable else [k / FPS for k in range(150)]
        assert len(asked) == (140 if variable else 150)
        reader = DECODERS[decoder](clip)
        if (decoder, clip.name) == ("opencv", "av1_gop2.mp4"):
            with pytest.raises(VideoError, match=r"opencv .* no frame of this av1 stream"):
                reader.frames_at(asked)
            continue
        frames = reader.frames_at(asked)
        turn = 90 if clip.name.startswith("rotated") else 0
        assert barcode.read(frames, turn) == list(range(len(asked))), clip.name
        reader.close()


@pytest.mark.skipif(SHARED is None, reason="the optional clips are not there")
def test_the_optional_clips_past_the_end():
    """D2: 149/15 + 0.03, 10.0 and 10.02 s are frame 149; 11.0 s is refused."""
    clip = SHARED / "constant_15fps.mp4"
    assert numbers("torchcodec", clip, [149 / 15 + 0.03, 10.0, 10.02]) == [149] * 3
    with pytest.raises(VideoError, match=r"constant_15fps.mp4: no frame at 11 s: .* 0 to 10 s"):
        numbers("torchcodec", clip, [11.0])
    assert os.path.exists(clip)
