"""The ratios of the motion track, each against its baseline in the same run: scope "motion".

Every case also says how far its numbers are from the baseline's: a ratio between unequal results
would mean nothing.
"""

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from wamlab.data.eviction import POLICIES, make_trace, simulate
from wamlab.draws import Draws
from wamlab.measure import (
    Record,
    Timing,
    device_name,
    exact_fp32,
    measure_ms,
    peak_gib,
    reset_peak,
    stamp,
)
from wamlab.motion.augment import AugmentConfig, Window, augment
from wamlab.motion.dynamics import JACOBIANS, Frames, exp, jacobian, pull, push
from wamlab.motion.model import (
    MOTION_SIZES,
    MotionDenoiser,
    block_levels,
    dense_mask,
    fixed_blocks,
)
from wamlab.motion.skeleton import CANONICAL_TREE
from wamlab.motion.synthetic import offsets
from wamlab.train.motion import MotionRun, TaskConfig, train_motion
from wamlab.train.motion_loader import MotionData, open_windows

CUTS = (0.0, 0.07, 0.22, 0.3, 0.42, 0.58, 0.7, 0.77, 0.93)  # where nine uneven blocks begin


@dataclasses.dataclass(frozen=True, kw_only=True)
class MotionCase:
    """Sizes of the measurements; the defaults suit a CPU."""

    device: str = "cpu"
    folder: str = "data_samples/mocap"
    frames: int = 8  # of the Jacobian
    size: str = "tiny"
    batch: int = 4
    window: int = 96
    clips: int = 16  # of the augmentation
    repeats: int = 5
    steps: int = 5  # of the data path's runs
    seeds: int = 1  # of the cache's traces


ON_GPU = MotionCase(
    device="cuda",
    frames=64,
    size="base",
    batch=8,
    window=240,
    clips=64,
    repeats=10,
    steps=12,
    seeds=5,
)


def measure_jacobian(case: MotionCase) -> Record:
    """Time the five ways to the same Jacobian, and to its products."""
    dev = torch.device(case.device)
    with exact_fp32():
        frames = _random_frames(case.frames, dev)
        found: dict[str, Tensor] = {}
        times = {}
        for how in JACOBIANS:
            few = {"warmup": 0, "repeats": 1} if how == "serial" else {"repeats": case.repeats}

            def compute(how: str = how) -> None:
                found[how] = jacobian(frames, how)

            times[how] = measure_ms(compute, dev=dev, **few)
        far = max((j - found["serial"]).abs().max().item() for j in found.values())
        vector = torch.randn_like(frames.offsets)
        both = measure_ms(
            lambda: (push(frames, vector), pull(frames, vector)), dev=dev, repeats=case.repeats
        )
    extra = {f"{how}_ms": t.median for how, t in times.items()}
    extra |= {"products_ms": both.median, "max_abs_diff": far}
    extra["over_jacrev"] = times["jacrev"].median / times["analytic"].median
    return _record("jacobian", case, times["serial"], times["analytic"],
                   baseline="serial", frames=case.frames, **extra)  # fmt: skip


def measure_block_parallel(case: MotionCase, precision: str = "fp32") -> Record:
    """Time a training pass over nine uneven blocks, one after the other and all at once."""
    dev = torch.device(case.device)
    torch.manual_seed(0)
    net = MotionDenoiser(MOTION_SIZES[case.size]).to(dev)
    with torch.no_grad():
        for p in net.parameters():
            p.normal_(std=net.config.dim**-0.5)  # a fresh block would be the identity
    starts = [round(c * case.window) for c in CUTS]
    block = torch.zeros(case.batch, case.window, dtype=torch.int64, device=dev)
    for start in starts[1:]:
        block[:, start:] += 1
    causal = fixed_blocks(case.batch, case.window, 1, dev)
    clean, noisy = torch.randn(2, case.batch, case.window, net.config.features, device=dev)
    level = block_levels(torch.rand(case.batch, case.window, device=dev), block)

    def step(mode: str, cut: Tensor = block) -> Tensor:
        net.mode = mode
        net.zero_grad(set_to_none=True)
        with torch.autocast(dev.type, torch.bfloat16, enabled=precision == "bf16"):
            net(clean, noisy, level, cut, 60.0).float().square().mean().backward()
        return torch.cat([p.grad.flatten() for p in net.parameters()])

    with exact_fp32():
        serial, grads = step("serial"), {m: step(m) for m in ("parallel", "serial-detached")}
        far = {m: ((g - serial).norm() / serial.norm()).item() for m, g in grads.items()}
        times = {m: measure_ms(lambda m=m: step(m), dev=dev, repeats=case.repeats)
                 for m in ("serial", "parallel")}  # fmt: skip
        whole = measure_ms(lambda: step("parallel", causal), dev=dev, repeats=case.repeats)
    seen = dense_mask(block[:1]).float().mean().item()
    return _record("block_parallel", case, times["serial"], times["parallel"],
                   baseline="serial", precision=precision, full_causal_ms=whole.median,
                   gradient_rel_diff=far["parallel"], detached_rel_diff=far["serial-detached"],
                   mask_share=seen, padding_share=0.0)  # fmt: skip


def measure_augmentation(case: MotionCase) -> Record:
    """Time augmentation clip by clip on the CPU against one batch on the device; ms a clip."""
    dev, amounts = torch.device(case.device), AugmentConfig()
    windows = open_windows(MotionData(folder=case.folder, frames=120, source="packed"))
    ids = torch.arange(case.clips)
    batch = windows.batch([i % len(windows) for i in range(case.clips)])
    there, ids_there = batch.to(dev), ids.to(dev)

    def apart() -> Window:
        made = [augment(Window(*(x[i : i + 1] for x in batch)), Draws(0, 0, ids[i : i + 1]),
                        amounts)[0] for i in range(case.clips)]  # fmt: skip
        return Window(*(torch.cat(x) for x in zip(*made)))

    def at_once() -> Window:
        return augment(there, Draws(0, 0, ids_there), amounts)[0]

    with exact_fp32():
        slow = measure_ms(apart, dev=dev, warmup=1, repeats=3)
        fast = measure_ms(at_once, dev=dev, repeats=case.repeats)
        a, b = apart().motion().place, at_once().motion().place.cpu()
    per_clip = [_scaled(t, 1 / case.clips) for t in (slow, fast)]
    return _record("augmentation", case, *per_clip, baseline="clip by clip on the CPU",
                   clips=case.clips, max_abs_diff_m=(a - b).abs().max().item())  # fmt: skip


def measure_data_path(case: MotionCase) -> Record:
    """Train with windows parsed at every access, and resident on the device, in turns.

    The share of waiting is 1 - t(resident) / t(arm), beside the time blocked in `next`.
    """
    arms: dict[str, dict[str, Any]] = {
        "text": {"source": "text", "prefetch": 0},
        "packed": {"source": "packed", "prefetch": 0},
        "prefetch": {"source": "packed", "prefetch": 2},
        "resident": {"source": "resident", "prefetch": 0},
    }
    times: dict[str, list[float]] = {arm: [] for arm in arms}
    blocked: dict[str, list[float]] = {arm: [] for arm in arms}
    task = TaskConfig(size=case.size, mode="parallel", jacobian="products", dynamics_frames=12)
    for arm in [*arms, *arms]:  # A B C D A B C D: a drift of the machine meets every arm
        data = MotionData(folder=case.folder, frames=48, held_out=0, augment="device", **arms[arm])
        record = train_motion(MotionRun(data=data, task=task, steps=case.steps, warmup_steps=2,
                                        global_batch=case.batch, device=case.device))  # fmt: skip
        times[arm].append(record.step_ms.median)
        blocked[arm].append(record.data_wait_share)
    best = {arm: min(t) for arm, t in times.items()}
    shares = {f"{arm}_wait_share": max(0.0, 1 - best["resident"] / t) for arm, t in best.items()}
    waits = {f"{arm}_blocked_share": min(b) for arm, b in blocked.items()}
    return _record("data_path", case, Timing.of(times["text"]), Timing.of(times["prefetch"]),
                   baseline="text", **shares, **waits)  # fmt: skip


def measure_cache(case: MotionCase) -> Record:
    """Replay traces through every policy; own and baseline are misses an access."""
    start, rates = time.perf_counter(), {}
    for kind, alpha in (("sequential", 1.0), ("shuffled", 1.0), ("weighted", 0.5),
                        ("weighted", 1.0)):  # fmt: skip
        name = f"{kind}_{alpha:g}" if kind == "weighted" else kind
        found: dict[str, list[float]] = {p: [] for p in POLICIES}
        for seed in range(case.seeds):
            trace = make_trace(kind, 2000, 40000, seed=seed, alpha=alpha)
            for policy, values in found.items():
                values.append(simulate(trace, 400, policy, warmup=8000).hit_rate)
        rates[name] = {p: sum(v) / len(v) for p, v in found.items()}
    weighted = rates["weighted_1"]
    return stamp(
        Record(
            name="cache",
            scope="motion",
            dimension="data",
            device=device_name(torch.device("cpu")),
            extra={
                "hit_rates": rates,
                "baseline": "lru",
                "baseline_misses": 1 - weighted["lru"],
                "own": "lookahead",
                "own_misses": 1 - weighted["lookahead"],
                "ratio": (1 - weighted["lru"]) / (1 - weighted["lookahead"]),
                "seconds": time.perf_counter() - start,
            },
        )
    )


CASES: dict[str, Callable[[MotionCase], Record]] = {
    "jacobian": measure_jacobian,
    "block_parallel": measure_block_parallel,
    "augmentation": measure_augmentation,
    "data_path": measure_data_path,
    "cache": measure_cache,
}


def measure_training(case: MotionCase, steps: int) -> Record:
    """Train for good and measure held-out motions, a tenth of the files; `losses` are every
    fiftieth part's."""
    count = len(list(Path(case.folder).glob("*.bvh")))
    data = MotionData(
        folder=case.folder,
        frames=64,
        augment="device",
        source="resident",
        held_out=max(1, count // 10),
    )
    run = MotionRun(
        name="training",
        data=data,
        task=TaskConfig(size=case.size, mode="parallel", jacobian="products", dynamics_frames=16),
        optimizations=("fused_adamw",),
        steps=steps,
        global_batch=8 * case.batch,
        device=case.device,
    )
    record = train_motion(run)
    losses = record.losses[:: max(1, steps // 50)]
    return dataclasses.replace(record, scope="motion", dimension=None, losses=losses)


def _record(name: str, case: MotionCase, slow: Timing, own: Timing, **extra: Any) -> Record:
    dev = torch.device(case.device)
    precision = extra.pop("precision", "fp32")
    dimension = {"block_parallel": "parallel", "jacobian": "compute"}.get(name, "data")
    extra |= {"baseline_ms": slow.median, "ratio": slow.median / own.median}
    return stamp(
        Record(
            name=name,
            scope="motion",
            dimension=dimension,
            model=case.size,
            device=device_name(dev),
            precision=precision,
            step_ms=own,
            peak_gib=peak_gib(dev),
            extra=extra,
        )
    )


def _random_frames(count: int, dev: torch.device) -> Frames:
    """Return random poses of the made-up person."""
    reset_peak(dev)
    draw = torch.Generator().manual_seed(0)
    w = torch.randn(count, len(CANONICAL_TREE), 3, generator=draw)
    root = torch.randn(count, 3, generator=draw)
    bones = torch.as_tensor(offsets(), dtype=torch.float32).repeat(count, 1, 1)
    return Frames(*(x.to(dev) for x in (exp(0.5 * w), root, bones)), CANONICAL_TREE)


def _scaled(timing: Timing, by: float) -> Timing:
    return Timing(median=timing.median * by, q25=timing.q25 * by, q75=timing.q75 * by, n=timing.n)
