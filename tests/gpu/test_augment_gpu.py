"""Augmentation and the loader on a GPU: pixels of the public path, time, and the side stream."""

from pathlib import Path

import pytest
import torch

from wamlab.data.augment import Augment, augment_cpu
from wamlab.data.data_config import DataConfig
from wamlab.data.embodiment import EMBODIMENTS
from wamlab.data.loader import Loader
from wamlab.draws import Draws
from wamlab.measure import measure_ms

pytestmark = pytest.mark.gpu
SAMPLES = Path(__file__).resolve().parents[2] / "data_samples"


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch.compiler.reset()  # one process meets more robots here than Dynamo compiles graphs


def views(robot, batch: int, frames: int, size: tuple[int, int]) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    shape = (batch, len(robot.views), frames, 3, *size)
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)


@pytest.mark.parametrize("name", EMBODIMENTS)
@pytest.mark.parametrize("impl", ["batched", "compiled"])
@pytest.mark.parametrize("train", [True, False])
def test_the_device_path_equals_the_public_one(name, impl, train):
    robot, ids = EMBODIMENTS[name], torch.tensor([5, 6, 901])
    x = views(robot, 3, 4, (180, 320))
    x[0, 0, 0] = 128
    got = Augment(robot, impl=impl)(x.cuda(), Draws(1, 2, ids.cuda()), train).cpu()
    for i in range(3):
        want = augment_cpu(x[i], Draws(1, 2, ids[i : i + 1]), robot, train)
        assert (got[i].int() - want.int()).abs().max() <= 1


@pytest.mark.parametrize("name", ["toy", "droid"])
def test_a_batch_of_32_takes_less_than_10_ms_on_an_h200(name):
    if "H200" not in torch.cuda.get_device_name():
        pytest.skip("the time is stated for an H200")
    robot = EMBODIMENTS[name]
    x, ids = views(robot, 32, 33, (180, 320)).cuda(), torch.arange(32).cuda()
    augment = Augment(robot)
    timing = measure_ms(lambda: augment(x, Draws(0, 0, ids)), dev="cuda", repeats=20)
    print(f"{name}: {timing}")
    assert timing.median < 10


def test_a_run_compiles_once():
    from torch._dynamo.utils import counters

    robot = EMBODIMENTS["toy"]
    augment, x = Augment(robot), views(robot, 6, 3, (60, 80)).cuda()
    augment(x, Draws(0, 0, torch.arange(6).cuda()))
    before = counters["stats"]["unique_graphs"]
    for step in range(3):
        augment(x, Draws(0, step, torch.arange(6).cuda()))
    assert counters["stats"]["unique_graphs"] == before


@pytest.mark.parametrize("workers", [0, 2])
def test_prefetched_batches_are_those_read_one_by_one(workers):
    """The side stream hands over finished batches: compute on the main stream never races it."""
    fields = {"root": str(SAMPLES / "droid_mini"), "decoder": "torchcodec", "augment": "device"}
    sizes = {"global_batch": 2, "micro_batch": 2, "seed": 0, "device": "cuda"}
    plain = Loader(DataConfig(**fields), **sizes)
    ahead = Loader(DataConfig(**fields, workers=workers, prefetch=2), **sizes)
    busy = torch.randn(4096, 4096, device="cuda")
    for _ in range(6):
        want, got = next(plain), next(ahead)
        for _ in range(20):
            busy = busy @ busy.softmax(0)
        assert got["video"].is_cuda
        assert torch.equal(got["video"], want["video"])
        assert torch.equal(got["action"], want["action"])
    ahead.close()


def test_nvdec_batches_are_within_one_level_of_the_cpus():
    from wamlab.data.video import decoder_status

    reason = decoder_status("torchcodec-cuda")
    if reason:
        pytest.skip(reason)
    fields = {"root": str(SAMPLES / "droid_mini"), "augment": "device", "train": False}
    sizes = {"global_batch": 2, "micro_batch": 2, "seed": 0, "device": "cuda"}
    plain = Loader(DataConfig(**fields, decoder="torchcodec"), **sizes)
    nvdec = DataConfig(**fields, decoder="torchcodec-cuda", decoder_cache=6, prefetch=1)
    ahead = Loader(nvdec, **sizes)
    for _ in range(3):
        off = (next(ahead)["video"].int() - next(plain)["video"].int()).abs()
        assert off.float().mean() < 2  # its conversion to RGB rounds in another way
    ahead.close()
