"""NVDEC: the same frames as on the CPU, left on the GPU."""

import barcode
import numpy as np
import pytest
import torch

from wamlab.data.bench_decode import time_decoders
from wamlab.data.bench_workers import sweep_workers
from wamlab.data.frame_times import frame_times
from wamlab.data.video import DECODERS, VideoError, decoder_status

pytestmark = pytest.mark.gpu
SIZE = (240, 320)  # the least that NVDEC takes for AV1 is 128 x 128
VARIABLE = [512 * k for k in range(20)] + [512 * (20 + 3 * k) for k in range(20)]
CLIPS = {
    "b_frames": {},
    "gop_250": {"gop": 250, "b_frames": 0},
    "variable": {"times": VARIABLE},
    "offset": {"times": [153600 + 1024 * k for k in range(40)]},
    "hevc": {"codec": "libx265", "options": {"x265-params": "log-level=none"}},
    "av1": {"codec": "libsvtav1", "gop": 2, "b_frames": 0, "options": {"preset": "12"}},
    "turned": {"rotation": 90},
    "half_turn": {"rotation": 180},
}


@pytest.fixture(scope="module")
def clips(tmp_path_factory):
    folder = tmp_path_factory.mktemp("clips")
    return {
        name: barcode.write(folder / f"{name}.mp4", frames=40, size=SIZE, **options)
        for name, options in CLIPS.items()
    }


@pytest.fixture(params=["torchcodec-cuda", "pynvvideocodec"])
def decoder(request) -> str:
    status = decoder_status(request.param)
    if status:
        pytest.skip(f"{request.param}: {status}")
    return request.param


@pytest.mark.parametrize("name", CLIPS)
def test_every_frame_at_its_time(decoder, name, clips):
    seconds = frame_times(clips[name]).seconds
    reader = DECODERS[decoder](clips[name])
    if name == "av1":
        try:
            reader.frames_at(seconds[:1])
        except VideoError as error:
            if "fell back to the CPU" not in str(error):
                raise
            pytest.skip(str(error))  # torchcodec 0.17 with PyAV's FFmpeg on an H200
    turn = CLIPS[name].get("rotation", 0)
    frames = reader.frames_at(seconds)
    assert frames.device.type == "cuda"
    assert barcode.read(frames.cpu(), turn) == list(range(40))
    order = np.random.default_rng(0).permutation(40)[:20]
    assert barcode.read(reader.frames_at(seconds[order]).cpu(), turn) == order.tolist()
    assert barcode.read(reader.frames_at(seconds[[7, 7, 3]]).cpu(), turn) == [7, 7, 3]
    reader.close()


def test_pixels_are_near_those_of_the_cpu(decoder, clips):
    seconds = frame_times(clips["b_frames"]).seconds[::5]
    gpu = DECODERS[decoder](clips["b_frames"]).frames_at(seconds).cpu().float()
    cpu = DECODERS["torchcodec"](clips["b_frames"]).frames_at(seconds).float()
    assert (gpu - cpu).abs().mean() < 3.0  # another conversion to RGB


def test_frames_go_to_the_stated_device(clips):
    for name in ("torchcodec-cuda", "torchcodec", "pyav"):
        for device in ("cpu", "cuda"):
            frames = DECODERS[name](clips["b_frames"], device=device).frames_at([0.5])
            assert frames.device.type == device


def test_what_nvdec_cannot_decode_is_refused(tmp_path):
    clip = barcode.write(tmp_path / "a.mkv", codec="ffv1", gop=1, b_frames=0, size=SIZE)
    with pytest.raises(VideoError, match="torchcodec-cuda"):
        DECODERS["torchcodec-cuda"](clip).frames_at([0.0])


def test_the_benchmark_on_the_gpu(clips):
    names = ["torchcodec", "torchcodec-cuda"]
    records = time_decoders(clips["gop_250"], names, samples=3, device="cuda", cached=True)
    assert [r.wrong for r in records] == [None, None]
    rows = sweep_workers(clips["gop_250"], ["torchcodec-cuda"], [1], seconds=1.0, device="cuda")
    assert rows[0].samples_per_s > 0
    assert torch.cuda.is_available()
