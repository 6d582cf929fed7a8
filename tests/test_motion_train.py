"""The motion task in the trainer: every rung of the ladder trains the same thing."""

import itertools

import pytest
import torch
from conftest import ROOT

from wamlab.config import ConfigError, replace
from wamlab.draws import Draws
from wamlab.motion.augment import NOTHING, AugmentConfig
from wamlab.motion.dynamics import WAYS
from wamlab.motion.model import block_levels
from wamlab.motion.synthetic import main
from wamlab.motion.windows import bvh_files
from wamlab.train.motion import (
    COMPETENT,
    RUNGS,
    MotionRun,
    TaskConfig,
    build_task,
    evaluate,
    train_motion,
)
from wamlab.train.motion_loader import MotionData, MotionLoader, open_windows

AMOUNTS = AugmentConfig()


@pytest.fixture(scope="module")
def folder():
    return str(ROOT / "data_samples" / "mocap")


@pytest.fixture(scope="module")
def base(folder):
    return MotionRun(
        data=MotionData(folder=folder, frames=32),
        task=TaskConfig(dynamics_frames=3),
        steps=3,
        warmup_steps=1,
        device="cpu",
    )


def loader(data, **options):
    plain = {"global_batch": 4, "micro_batch": 2, "seed": 3}
    return MotionLoader(data, AMOUNTS, open_windows(data), **plain | options)


def first(source, count=3):
    batches = [next(source) for _ in range(count)]
    source.close()
    return batches


def assert_equal(a, b, tolerance=0.0):
    for x, y in zip(a, b, strict=True):
        assert x.keys() == y.keys()
        for name in x:
            torch.testing.assert_close(x[name], y[name], atol=tolerance, rtol=0, msg=name)


def test_every_arm_reads_the_same(folder):
    slow = MotionData(folder=folder, frames=32, augment="device")
    wanted = first(loader(slow))
    for changes in ({"source": "packed"}, {"source": "packed", "prefetch": 2},
                    {"source": "resident"}):  # fmt: skip
        assert_equal(first(loader(replace(slow, changes))), wanted)
    assert not wanted[0]["rot"].equal(wanted[1]["rot"])


def test_ranks_and_start_share_the_steps(folder):
    data = MotionData(folder=folder, frames=32, source="packed", augment="device")
    whole = first(loader(data, micro_batch=4), 2)
    for rank in (0, 1):
        mine = first(loader(data, rank=rank, world_size=2), 2)
        for a, b in zip(mine, whole):
            assert a["sample_id"].tolist() == b["sample_id"][2 * rank :][:2].tolist()
    assert_equal(first(loader(data, micro_batch=4, start_step=1), 1), whole[1:])
    seen = torch.cat([b["sample_id"] for b in first(loader(data, micro_batch=4), 20)])
    count = len(open_windows(data))
    assert sorted(seen[:count].tolist()) == list(range(count))


def test_a_fault_in_the_thread_reaches_training(folder):
    source = loader(MotionData(folder=folder, frames=32, source="packed", prefetch=2))
    source.windows.arrays = {}
    with pytest.raises(KeyError):
        list(itertools.islice(source, 4))  # what was read ahead before is still good
    source.close()


def test_the_rungs_train_the_same(base):
    """R1 to R4 against R0's arithmetic: the losses of each step agree to 1e-5."""
    changes, losses = {"task.jacobian": "jacrev", "data.held_out": 0, "steps": 2}, []
    for rung in RUNGS[:5]:
        changes = changes | rung.get("changes", {})
        record = train_motion(replace(base, changes))
        losses.append(record.losses)
    for found in losses[1:]:
        assert found == pytest.approx(losses[0], rel=1e-5)
    unmeasured = {"data.held_out": 0, "steps": 2}
    competent = train_motion(replace(base, unmeasured | COMPETENT["changes"]))
    assert competent.losses == pytest.approx(losses[0], rel=1e-5)
    assert "frames_per_s" in competent.extra


@pytest.mark.slow
def test_twenty_steps_of_naive_code_and_of_rung_four(base):
    fast = {k: v for r in RUNGS[:5] for k, v in r.get("changes", {}).items()}
    naive, quick = (train_motion(replace(base, c, steps=20)).losses for c in ({}, fast))
    assert quick == pytest.approx(naive, rel=1e-5)


@pytest.mark.parametrize("how", WAYS[1:])
def test_gradients_do_not_depend_on_the_way(base, how):
    windows = open_windows(replace(base.data, source="packed"))
    batch = {**windows.batch([0, 5])._asdict(), "sample_id": torch.tensor([0, 5])}
    grads = []
    for way in ("analytic", how):
        task = build_task(replace(base.task, jacobian=way, mode="parallel", vel=0.1), windows, 0)
        torch.manual_seed(1)
        torch.nn.init.normal_(task.denoiser.outward.weight, std=0.01)
        task.loss(batch, Draws(0, 0, batch["sample_id"]))["loss"].backward()
        grads.append(torch.cat([p.grad.flatten() for p in task.parameters() if p.grad is not None]))
    assert (grads[0] - grads[1]).norm() / grads[0].norm() < 1e-5


def test_the_loss_knows_no_blocks_but_the_masks(base):
    """With the mask and the noise levels held fixed, another partition has the same loss."""
    windows = open_windows(replace(base.data, source="packed"))
    task = build_task(
        replace(base.task, mode="parallel", jacobian="analytic", augment=NOTHING), windows, 0
    )
    batch = {**windows.batch([0, 5])._asdict(), "sample_id": torch.tensor([0, 5])}
    fixed = batch["block"].clone()
    draws = Draws(0, 0, batch["sample_id"])
    level = block_levels(draws.uniform("level", (32,)), fixed)
    plain = type(task.denoiser).forward

    def with_fixed(self, clean, noisy, _, block, rate):
        return plain(self, clean, noisy, level, fixed, rate)

    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(task.denoiser), "forward", with_fixed)
        patch.setattr("wamlab.train.motion.block_levels", lambda *_: level)
        for block in (fixed, torch.arange(32).expand(2, -1) // 4):
            batch["block"] = block
            found.append(task.loss(batch, draws)["loss"].item())
    assert found[0] == found[1]


def test_a_joint_that_is_not_seen_is_not_shown(base):
    windows = open_windows(replace(base.data, source="packed"))
    task = build_task(base.task, windows, 0)
    seen = torch.ones(1, 19, dtype=torch.bool)
    seen[0, 2] = False
    hidden = (task._shown(seen)[0] == 0).nonzero()[:, 0].tolist()
    assert hidden == [*range(4 + 12, 4 + 18), *range(118 + 6, 118 + 9), *range(175 + 6, 175 + 9)]


def test_held_out_motions_are_measured(base):
    held = open_windows(replace(base.data, source="packed", train=False))
    windows = open_windows(replace(base.data, source="packed"))
    assert {p.name for p in held.paths}.isdisjoint(p.name for p in windows.paths)
    found = evaluate(build_task(base.task, windows, 0), held, steps=2)
    assert found["hold_cm"] > 0.5
    assert found["mpjpe_cm"] > found["pa_mpjpe_cm"] > 0


@pytest.mark.parametrize("optimizations", [(), ({"name": "fsdp2", "reduce_dtype": "bf16"},)])
def test_bf16_stays_near_fp32(base, optimizations):
    run = replace(base, {"task.mode": "parallel", "task.jacobian": "products"})
    plain = train_motion(run)
    low = train_motion(replace(run, precision="bf16", optimizations=optimizations))
    assert low.losses == pytest.approx(plain.losses, rel=0.02)
    assert low.losses != plain.losses
    assert ("mpjpe_cm" in low.extra) == (not optimizations)  # sharded weights are not gathered


def test_the_loss_can_be_learned(base):
    """One batch with its noise held fixed is fitted."""
    windows = open_windows(replace(base.data, source="packed"))
    task = build_task(replace(base.task, mode="parallel", jacobian="products"), windows, 0)
    batch = {**windows.batch([0, 5])._asdict(), "sample_id": torch.tensor([0, 5])}
    draws, losses = Draws(0, 0, batch["sample_id"]), []
    optimizer = torch.optim.Adam(task.parameters(), lr=3e-3)
    for _ in range(20):
        optimizer.zero_grad()
        losses.append(task.loss(batch, draws)["loss"])
        losses[-1].backward()
        optimizer.step()
    assert losses[-1] < 0.7 * losses[0]


def test_what_is_refused(base, folder, tmp_path):
    with pytest.raises(ConfigError, match=r"unknown Jacobian 'analitic'.*did you mean"):
        TaskConfig(jacobian="analitic")
    with pytest.raises(ConfigError, match="resident windows are on the device"):
        MotionData(source="resident", augment="loader")
    with pytest.raises(ConfigError, match="has 6 files, 6 are held out"):
        open_windows(MotionData(folder=folder, held_out=6))
    with pytest.raises(ConfigError, match="prefetch -1 and held_out 1 must be 0 or more"):
        MotionData(prefetch=-1)


def test_the_samples_are_the_generators(folder, tmp_path):
    """One command makes the committed clips, byte for byte."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["synthetic", str(tmp_path)])
        main()
    for path in bvh_files(folder):
        mine, theirs = (p.read_text().split() for p in (tmp_path / path.name, path))
        assert len(mine) == len(theirs)
        numbers = [(float(a), float(b)) for a, b in zip(mine, theirs) if a != b]
        assert max((abs(a - b) for a, b in numbers), default=0.0) < 1e-5
    assert sum(p.stat().st_size for p in bvh_files(folder)) < 1_000_000
