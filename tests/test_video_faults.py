"""Broken files: right frames or one named error, never a wrong frame, a crash or a hang."""

import struct
from pathlib import Path

import av
import barcode
import fuzz_video
import pytest
from conftest import shared_dir

from wamlab.data.bitstream import h264_display_order, packet_check
from wamlab.data.frame_times import frame_times
from wamlab.data.video import DECODERS, VideoError


@pytest.fixture(scope="module")
def clip(tmp_path_factory) -> Path:
    return barcode.write(tmp_path_factory.mktemp("clip") / "clip.mp4")


@pytest.fixture(scope="module")
def faststart(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("clip")
    return barcode.write(folder / "clip.mp4", muxer={"movflags": "faststart"})


def refusal(path: Path, data: bytes | None = None) -> str:
    """Return the error of every decoder that needs no optional package, proven equal."""
    if data is not None:
        path.write_bytes(data)
    said = set()
    for decoder in ("pyav-naive", "pyav", "torchcodec"):
        with pytest.raises(VideoError) as caught:
            DECODERS[decoder](path).frames_at([0.0])
        said.add(str(caught.value))
    (text,) = said
    assert text.startswith(str(path))
    return text


def test_each_cause_is_named(tmp_path, clip, faststart):
    """D5: the file, frames expected and readable, and the cause."""
    bad = tmp_path / "bad.mp4"
    assert "cannot be read: No such file" in refusal(tmp_path / "none.mp4")
    assert "cannot be read: Is a directory" in refusal(tmp_path)
    assert "empty (0 bytes)" in refusal(bad, b"")
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
    assert "a Git-LFS pointer, not the video: run `git lfs pull`" in refusal(bad, pointer)
    whole = clip.read_bytes()
    assert "no index (no moov box)" in refusal(bad, whole[: whole.index(b"moov") - 4])
    assert "truncated inside its index" in refusal(bad, whole[:-200])
    assert "not a readable video" in refusal(bad, b"just some text, no video")
    front = faststart.read_bytes()
    assert "truncated: 60 frames expected, " in refusal(bad, front[: len(front) * 9 // 10])


def test_sound_only_is_named(tmp_path):
    path = tmp_path / "sound.mkv"
    with av.open(str(path), "w") as file:
        stream = file.add_stream("pcm_s16le", rate=8000, layout="mono")
        frame = av.AudioFrame(format="s16", layout="mono", samples=800)
        frame.rate, frame.pts = 8000, 0
        file.mux(stream.encode(frame))
        file.mux(stream.encode())
    assert "holds no video" in refusal(path)


def patched(clip: Path, box: bytes, offset: int, value: int, width: int = 4) -> bytes:
    """Return the clip's bytes with the number at `offset` after a box's name replaced."""
    data = bytearray(clip.read_bytes())
    at = data.index(box) + 4 + offset
    data[at : at + width] = value.to_bytes(width, "big")
    return bytes(data)


@pytest.mark.parametrize(
    ("box", "offset", "value", "message"),
    [
        (b"stts", 8, 59, "'stts' counts 59 of 60 frames"),
        (b"stts", 12, 1100, "its header says 4.* s and its frames last"),
        (b"stsz", 8, 61, "counts 61 frames and holds fewer"),
        (b"stsz", 12, 5, "its frames overlap|damaged at frame 0|it notes"),
        (b"stsz", 12, 0, "frame 0 holds no data"),
        (b"stsc", 8, 2, "table of chunks is damaged"),
        (b"stsc", 12, 61, "chunks hold 61 of 60 frames"),
        (b"stco", 8, 60, "damaged at frame 0"),
        (b"stss", 12, 99, "keyframes is not ascending"),
        (b"ctts", 8, 2**31, "'ctts' counts .* of 60 frames"),
        (b"ctts", 12, 5000, "frames at other times"),
        (b"mdhd", 12, 0, "time scale is 0"),
        (b"mdhd", 12, 7168, "it notes .* bits a second|edit list"),
        (b"tkhd", 20, 9000, "its track lasts 9 s"),
        (b"elst", 12, 2056, "begins inside a frame"),
        (b"elst", 16, 2 << 16, "changes the speed"),
        (b"tkhd", 40, 3, "display matrix is no turn"),
    ],
)
def test_tables_that_contradict_one_another(box, offset, value, message, clip, tmp_path):
    with pytest.raises(VideoError, match=message):
        frame_times_of(tmp_path, patched(clip, box, offset, value))


def frame_times_of(folder: Path, data: bytes, name: str = "bad.mp4") -> None:
    (folder / name).write_bytes(data)
    frame_times(folder / name)


def test_matroska_checksums_and_sizes(tmp_path):
    whole = barcode.write(tmp_path / "a.mkv").read_bytes()
    scale = whole.index(bytes.fromhex("2ad7b1"))  # TimestampScale, in Info
    flipped = bytearray(whole)
    flipped[scale + 5] ^= 1
    with pytest.raises(VideoError, match="the checksum of its Info is wrong"):
        frame_times_of(tmp_path, bytes(flipped), "bad.mkv")
    with pytest.raises(VideoError, match=r"truncated: 200 of .* bytes are missing"):
        frame_times_of(tmp_path, whole[:-200], "bad.mkv")


def test_a_file_without_exact_times_is_refused(tmp_path):
    path = barcode.write(tmp_path / "raw.h264", muxer={})
    with pytest.raises(VideoError, match=r"carries no presentation time|share one"):
        frame_times(path)


def test_pictures_tell_their_own_order(clip):
    with av.open(str(clip)) as file:
        stream = file.streams.video[0]
        packets = [p for p in file.demux(stream) if p.size]
        order = h264_display_order(stream.codec_context.extradata, [bytes(p) for p in packets])
        check = packet_check("h264", stream.codec_context.extradata)
    by_pictures = sorted(range(60), key=order.__getitem__)
    assert by_pictures == sorted(range(60), key=lambda k: packets[k].pts)
    check(bytes(packets[3]))
    with pytest.raises(ValueError, match="do not add up"):
        check(bytes(packets[3])[:-1])
    assert packet_check("mpeg4", None) is None
    assert h264_display_order(struct.pack(">6B", 0, 0, 0, 1, 9, 0), []) is None


def test_200_damaged_containers():
    """D5: cut anywhere, flipped bits, wrong counts; each in a child process with a time limit."""
    outcomes = fuzz_video.run(200, ["pyav", "torchcodec"], seed=1)
    faults = [o for o in outcomes if o.is_fault]
    assert not faults, faults[:3]
    verdicts = [o.verdict for o in outcomes]
    assert verdicts.count("right") > 60  # the checks do not refuse what is harmless
    assert verdicts.count("refused") > 60


@pytest.mark.slow
def test_2000_damaged_containers_on_every_decoder():
    decoders = ["pyav-naive", "pyav", "torchcodec"]
    assert not [o for o in fuzz_video.run(2000, decoders, seed=2) if o.is_fault]


SHARED = shared_dir("clips")


@pytest.mark.skipif(SHARED is None, reason="the optional clips are not there")
def test_the_optional_broken_clips():
    """D5: the four broken clips."""
    assert "empty" in refusal(SHARED / "empty.mp4")
    assert "Git-LFS pointer" in refusal(SHARED / "lfs_pointer.mp4")
    assert "no index" in refusal(SHARED / "no_index.mp4")
    assert "truncated: 150 frames expected, 62 readable" in refusal(SHARED / "truncated.mp4")
