"""The decoder cache: bounded, safe after a fork, right to the frame."""

import pickle
import resource
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import av
import numpy as np
import pytest
import torch
from barcode import picture
from barcode import read as read_numbers

from wamlab.config import ConfigError
from wamlab.data.cache import DecoderCache
from wamlab.data.container import VideoError
from wamlab.data.metadata import VideoSpan

FRAMES = 12


def write_clip(path: Path, frames: list[np.ndarray], *, gop: int, crf: int) -> None:
    options = {"preset": "ultrafast", "tune": "zerolatency", "crf": str(crf)}
    with av.open(str(path), "w") as file:
        stream = file.add_stream("libx264", rate=15, options=options)
        stream.height, stream.width = frames[0].shape[:2]
        stream.pix_fmt, stream.codec_context.gop_size = "yuv420p", gop
        for frame in frames:
            file.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        file.mux(stream.encode())


@pytest.fixture(scope="module")
def clips(tmp_path_factory) -> list[Path]:
    folder = tmp_path_factory.mktemp("clips")
    paths = [folder / f"{i}.mp4" for i in range(6)]
    for i, path in enumerate(paths):
        write_clip(path, [picture(i * FRAMES + k) for k in range(FRAMES)], gop=4, crf=18)
    return paths


def read(cache: DecoderCache, path: Path, index: list[int], *part: float) -> list[int]:
    frames = cache(VideoSpan(path, *part)).frames_at([k / 15 for k in index])
    return read_numbers(frames)


def test_it_keeps_the_last_used_and_closes_the_rest(clips):
    cache = DecoderCache("pyav", size=2)
    for i in (0, 1, 0, 2, 0):
        assert read(cache, clips[i], [7, 1]) == [i * FRAMES + 7, i * FRAMES + 1]
    assert (len(cache), cache.opened) == (2, 3)
    read(cache, clips[1], [0])  # had been closed for 2
    assert cache.opened == 4
    cache.close()
    assert len(cache) == 0


def test_size_0_opens_a_fresh_decoder_every_time(clips):
    cache = DecoderCache("pyav-naive", size=0)
    for _ in range(3):
        assert read(cache, clips[3], [5]) == [3 * FRAMES + 5]
    assert (len(cache), cache.opened) == (0, 3)


def test_parts_of_one_file_have_decoders_of_their_own(clips):
    cache = DecoderCache("pyav", size=8)
    assert read(cache, clips[1], [0, 1], 0.4, 0.8) == [FRAMES + 6, FRAMES + 7]
    assert read(cache, clips[1], [0, 1]) == [FRAMES, FRAMES + 1]
    assert len(cache) == 2


def test_a_decoder_that_failed_is_not_kept(clips):
    cache = DecoderCache("pyav", size=8)
    with pytest.raises(VideoError, match="no frame at 99 s"):
        read(cache, clips[0], [99 * 15])
    assert len(cache) == 0
    assert read(cache, clips[0], [2]) == [2]


def test_the_open_file_limit_wins_over_the_size():
    handles = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    assert DecoderCache("pyav", size=10**9).limit == handles // 2


def test_it_travels_to_another_process_empty(clips):
    cache = DecoderCache("pyav", size=3, threads=2)
    read(cache, clips[0], [0])
    copy = pickle.loads(pickle.dumps(cache))
    assert (len(copy), copy.size, copy.threads, copy.decoder) == (0, 3, 2, "pyav")


def test_threads_never_share_a_decoder(clips):
    cache = DecoderCache("pyav", size=2)

    def work(seed: int) -> bool:
        rng = np.random.default_rng(seed)
        i, index = int(rng.integers(3)), rng.integers(FRAMES, size=4).tolist()
        return read(cache, clips[i], index) == [i * FRAMES + k for k in index]

    with ThreadPoolExecutor(6) as pool:
        assert all(pool.map(work, range(60)))
    assert len(cache) == 2


def test_what_it_refuses():
    with pytest.raises(ConfigError, match=r"unknown decoder 'pyavv'.*did you mean 'pyav'"):
        DecoderCache("pyavv")
    with pytest.raises(ConfigError, match="size -1 must be 0 or more"):
        DecoderCache("pyav", size=-1)


class Frames(torch.utils.data.Dataset):
    def __init__(self, cache: DecoderCache, path: Path, count: int) -> None:
        self.cache, self.path, self.count = cache, path, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, i: int) -> int:
        return read(self.cache, self.path, [i])[0]


LARGE = 500


@pytest.fixture(scope="module")
def large(tmp_path_factory) -> Path:
    rng = np.random.default_rng(0)
    noise = [rng.integers(-25, 25, (240, 320, 3)) for _ in range(4)]
    path = tmp_path_factory.mktemp("large") / "large.mp4"
    frames = [np.uint8(picture(k, 240, 320) + noise[k % 4]) for k in range(LARGE)]
    write_clip(path, frames, gop=5, crf=0)
    assert path.stat().st_size > 40e6
    return path


@pytest.mark.parametrize("decoder", ["pyav", "torchcodec"])
@pytest.mark.filterwarnings("ignore:.*fork", "ignore:This DataLoader will create")
def test_d7_workers_forked_from_a_process_that_had_read(decoder, large):
    """D7: a file above 40 MB, item 0 read first, then 4 forked workers: no wrong frame."""
    data = Frames(DecoderCache(decoder), large, LARGE)
    assert data[0] == 0
    order = np.random.default_rng(1).permutation(LARGE)[:48].tolist()
    loader = torch.utils.data.DataLoader(
        data, batch_size=4, sampler=order, num_workers=4, multiprocessing_context="fork"
    )
    assert torch.cat(list(loader)).tolist() == order
    assert data[7] == 7


D9 = """
import os, psutil, random, resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
from pathlib import Path
from wamlab.data.cache import DecoderCache
from wamlab.data.metadata import VideoSpan
paths = sorted(Path(sys.argv[1]).iterdir())
random.Random(0).shuffle(paths)
cache, me, seen = DecoderCache("pyav", size=1000), psutil.Process(), []
for number, path in enumerate(paths, 1):
    cache(VideoSpan(path)).frames_at([0.1])
    if number % (len(paths) // 4) == 0 and number > 130:
        seen.append((me.num_fds(), me.memory_info().rss / 2**20))
print(*[f"{fds} {rss:.0f}" for fds, rss in seen], sep="\\n")
"""


@pytest.mark.parametrize("count", [400, pytest.param(2000, marks=pytest.mark.slow)])
def test_d9_memory_and_open_files_level_off(count, clips, tmp_path):
    """D9: 2,000 small clips in random order, 256 open files allowed, a cache of 1,000 asked."""
    for i in range(count):
        (tmp_path / f"{i}.mp4").hardlink_to(clips[i % len(clips)])
    run = subprocess.run(
        [sys.executable, "-c", D9, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    seen = [tuple(map(int, line.split())) for line in run.stdout.splitlines()]
    files, memory = zip(*seen)
    assert max(files) < 200
    assert max(files) - files[0] <= 4
    assert memory[-1] - memory[0] < 12, seen
