"""Motion on a GPU: the same numbers as on the CPU, and the ratios that the track promises."""

import pytest
import torch
from conftest import ROOT

from wamlab.config import replace
from wamlab.draws import Draws
from wamlab.motion.augment import AugmentConfig, Window, augment
from wamlab.motion.features import to_features
from wamlab.motion.model import MOTION_SIZES, MotionDenoiser, block_levels
from wamlab.train.bench_motion import (
    ON_GPU,
    measure_augmentation,
    measure_block_parallel,
    measure_data_path,
    measure_jacobian,
)
from wamlab.train.motion import MotionRun, TaskConfig, train_motion
from wamlab.train.motion_loader import MotionData, open_windows

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def case():
    return replace(ON_GPU, folder=str(ROOT / "data_samples" / "mocap"))


@pytest.fixture(autouse=True)
def exact_fp32():
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


@pytest.mark.parametrize("frames", [48, 200])  # a dense mask, FlexAttention
def test_a_gpu_agrees_with_the_cpu(frames):
    """The masked pass against the CPU's dense mask, ragged blocks."""
    torch.manual_seed(0)
    net = MotionDenoiser(MOTION_SIZES["tiny"])
    for p in net.parameters():
        torch.nn.init.normal_(p, std=0.1)
    clean, noisy = torch.randn(2, 3, frames, 236)
    block = (torch.rand(3, frames) < 0.05).long().cumsum(1)
    level = block_levels(torch.rand(3, frames), block)
    wanted = net(clean, noisy, level, block, 60.0)
    found = net.cuda()(*(x.cuda() for x in (clean, noisy, level, block)), 60.0).cpu()
    assert (found - wanted).abs().max() / wanted.abs().max() < 1e-4


def test_augmentation_and_features_agree_with_the_cpu(case):
    windows = open_windows(MotionData(folder=case.folder, frames=60, source="packed"))
    window, ids = windows.batch(range(8)), torch.arange(8)
    there = Window(*(x.cuda() for x in window))
    a, seen_a = augment(window, Draws(0, 0, ids), AugmentConfig())
    b, seen_b = augment(there, Draws(0, 0, ids.cuda()), AugmentConfig())
    assert torch.equal(seen_a, seen_b.cpu())
    assert (a.motion().place - b.motion().place.cpu()).abs().max() < 1e-4
    features = [to_features(w.motion(), 60.0).cpu() for w in (a, b)]
    assert (features[0] - features[1]).abs().max() < 2e-2  # velocities: differences times 60


def test_jacobian_ratios(case):
    record = measure_jacobian(case)
    assert record.extra["max_abs_diff"] <= 1e-6
    assert record.extra["ratio"] > 20
    assert record.extra["over_jacrev"] > 3


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_blocks_in_parallel(case, precision):
    record = measure_block_parallel(case, precision)
    assert record.extra["ratio"] > 3
    if precision == "fp32":
        assert record.extra["gradient_rel_diff"] <= 1e-5


def test_augmentation_takes_under_a_millisecond_a_clip(case):
    record = measure_augmentation(case)
    assert record.step_ms.median < 1.0
    assert record.extra["max_abs_diff_m"] < 1e-3


def test_waiting_for_data(case):
    record = measure_data_path(case)
    assert record.extra["text_wait_share"] > 0.5
    assert record.extra["resident_blocked_share"] < 0.02


def test_a_compiled_bf16_run_stays_near_fp32(case):
    data = MotionData(folder=case.folder, frames=64, augment="device", source="resident")
    task = TaskConfig(size="small", mode="parallel", jacobian="products")
    run = MotionRun(data=data, task=task, steps=6, global_batch=8, device="cuda")
    plain = train_motion(run).losses
    fast = train_motion(
        replace(run, precision="bf16", optimizations=("compile", "fused_adamw"))
    ).losses
    assert fast == pytest.approx(plain, rel=0.1)
