"""Trains the motion transformer through the same trainer as the world action model.

`MotionTask` has the trainer's protocol; `train_motion` is what a ladder starts; `RUNGS` is the
ladder of the motion track, from naive code to everything at once, with a competent baseline beside.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from wamlab.config import check_name, from_dict, lookup, replace
from wamlab.dist import device as pick_device
from wamlab.draws import Draws
from wamlab.measure import Record
from wamlab.motion.augment import AugmentConfig, Window, augment
from wamlab.motion.dynamics import WAYS, Truth, dynamics_loss
from wamlab.motion.features import (
    Normalizer,
    accel_err,
    from_features,
    mpjpe_cm,
    pa_mpjpe_cm,
    skate,
    to_features,
    vel_err,
)
from wamlab.motion.model import (
    MOTION_SIZES,
    MotionDenoiser,
    block_levels,
    fixed_blocks,
    generate,
)
from wamlab.motion.segments import KINDS, G
from wamlab.motion.skeleton import CANONICAL_TREE
from wamlab.motion.windows import Windows
from wamlab.train.communication import training_group
from wamlab.train.config import TrainConfig
from wamlab.train.motion_loader import MotionData, MotionLoader, open_windows
from wamlab.train.optim import OptimConfig
from wamlab.train.trainer import Trainer

FLIGHT = KINDS.index("flight")
STATISTICS = 256  # windows that mean and deviation are measured on


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaskConfig:
    """What is learned and how it is computed; the defaults are the slow way of naive code."""

    size: str = "tiny"
    mode: str = "serial"  # a key of motion.model.MODES
    jacobian: str = "serial"  # one of motion.dynamics.WAYS
    block_frames: int = 0  # 0: blocks by dynamics; else of this length
    vel: float = 1e-2  # weights of the dynamics terms, each over its own scale
    fly: float = 1e-4
    dynamics_frames: int = 0  # first frames of a window that the dynamics terms see; 0: all
    augment: AugmentConfig = dataclasses.field(default_factory=AugmentConfig)

    def __post_init__(self) -> None:
        lookup(MOTION_SIZES, self.size, "motion model size")
        check_name(self.jacobian, WAYS, "Jacobian")


@dataclasses.dataclass(frozen=True, kw_only=True)
class MotionRun:
    """One training run of the motion track."""

    name: str = "motion"
    data: MotionData = dataclasses.field(default_factory=MotionData)
    task: TaskConfig = dataclasses.field(default_factory=TaskConfig)
    optimizations: tuple[str | dict[str, Any], ...] = ()
    optim: OptimConfig = dataclasses.field(default_factory=lambda: OptimConfig(lr=1e-3))
    steps: int = 5
    warmup_steps: int = 2
    global_batch: int = 2
    seed: int = 0
    device: Literal["auto", "cpu", "cuda"] = "auto"
    precision: Literal["fp32", "bf16"] = "fp32"
    save_every: int = 0
    out: str | None = None


class MotionTask(nn.Module):
    """The denoiser, its statistics and its losses: the trainer's protocol.

    Args:
        config: what to compute.
        normalizer: of the training windows' features.
        speed: mean square joint speed of the training windows, (m/s)^2.
        rate: Hz.
    """

    def __init__(
        self, config: TaskConfig, normalizer: Normalizer, speed: float, rate: float
    ) -> None:
        super().__init__()
        self.config, self.rate, self.speed = config, rate, speed
        self.denoiser = MotionDenoiser(MOTION_SIZES[config.size], config.mode)
        self.register_buffer("mean", normalizer.mean)
        self.register_buffer("std", normalizer.std)

    @property
    def normalizer(self) -> Normalizer:
        """Mean and deviation of the features."""
        return Normalizer(self.mean, self.std)

    def blocks(self) -> list[nn.Module]:
        """Return the transformer blocks."""
        return list(self.denoiser.layers)

    def frozen(self) -> list[nn.Module]:
        """Return nothing: all is trained."""
        return []

    def loss(self, batch: Mapping[str, Tensor], draws: Draws) -> dict[str, Tensor]:
        """Return the losses of a micro-batch.

        Args:
            batch: the fields of `Window`; with `seen` it is augmented already.
            draws: of the step's samples.
        """
        exact = functools.partial(torch.autocast, self.mean.device.type, enabled=False)
        with exact():
            window = Window(*(batch[name] for name in Window._fields))
            if "seen" in batch:
                seen = batch["seen"]
            else:
                window, seen = augment(window, draws, self.config.augment)
            features, block = self.features(window)
            noise = draws.normal("noise", features.shape[1:])
            level = block_levels(draws.uniform("level", features.shape[1:2]), block)
            mix = level[..., None]
            noisy = (1 - mix) * features + mix * noise
            shown = features * self._shown(seen)[:, None]
        velocity = self.denoiser(shown, noisy, level, block, self.rate).float()
        with exact():
            recon = (velocity - (noise - features)).square().mean()
            dynamics = self._dynamics(noisy - mix * velocity, window)
        return {"loss": recon + dynamics, "dynamics_loss": dynamics}

    def features(self, window: Window) -> tuple[Tensor, Tensor]:
        """Return normalised features [B, T, D] and blocks [B, T]."""
        features = self.normalizer(to_features(window.motion(), self.rate))
        block = window.block
        if self.config.block_frames:
            block = fixed_blocks(*block.shape, self.config.block_frames, block.device)
        return features, block

    def _shown(self, seen_BJ: Tensor) -> Tensor:
        """Return which features a window shows, [B, D]: none of a joint that is not seen."""
        joints = [seen_BJ.repeat_interleave(n, 1) for n in (6, 3, 3)]
        always = torch.ones_like(seen_BJ[:, :1])
        return torch.cat([always.expand(-1, 4), *joints, always.expand(-1, 4)], 1).float()

    def _dynamics(self, clean: Tensor, window: Window) -> Tensor:
        """Return the weighted dynamics terms of the denoised motion."""
        part = slice(self.config.dynamics_frames or None)
        found = from_features(self.normalizer.undo(clean), self.rate)
        true = from_features(to_features(window.motion(), self.rate), self.rate)
        terms = dynamics_loss(
            found.rot[:, part],
            found.place[:, part, 0],
            window.offsets,
            Truth(true.place[:, part], window.kind[:, part] == FLIGHT),
            tree=CANONICAL_TREE,
            rate=self.rate,
            how=self.config.jacobian,
        )
        return self.config.vel * terms.vel / self.speed + self.config.fly * terms.fly / G**2


def build_task(config: TaskConfig, windows: Windows, seed: int) -> MotionTask:
    """Build the task with the statistics of its training windows, augmented once."""
    ids = torch.linspace(0, len(windows) - 1, min(len(windows), STATISTICS)).long()
    # plain windows would not do: what never turns in them, a knee's twist, turns when augmented
    motion = augment(windows.batch(ids.tolist()), Draws(seed, -1, ids), config.augment)[0].motion()
    normalizer = Normalizer.of(to_features(motion, windows.rate).flatten(0, 1))
    speed = motion.place.diff(dim=1).mul(windows.rate).square().sum(-1).mean().item()
    torch.manual_seed(seed)
    return MotionTask(config, normalizer, speed, windows.rate)


@torch.no_grad()
def evaluate(task: MotionTask, windows: Windows, steps: int = 10) -> dict[str, float]:
    """Return the errors of continuing held-out motions, block by block, from their clean past.

    Position errors are over the frames that were made; the first block is given. `hold_cm` is the
    error of a body that stays as it is when a block begins: what to beat.

    Args:
        task: trained.
        windows: held out; all of them go through the model at once.
        steps: Euler steps from noise to motion.
    """
    device = task.mean.device
    window = windows.batch(range(len(windows))).to(device)
    features, block = task.features(window)
    ids = torch.arange(len(windows), device=device)
    noise = Draws(0, 0, ids).normal("noise", features.shape[1:])
    made = generate(task.denoiser, features, noise, block, rate=task.rate, steps=steps)
    place = from_features(task.normalizer.undo(made), task.rate).place
    true, made_BT1 = window.motion().place, (block > 0)[..., None]
    return {
        "mpjpe_cm": mpjpe_cm(place, true, made_BT1),
        "pa_mpjpe_cm": pa_mpjpe_cm(place, true),
        "vel_err_cm_s": vel_err(place, true, task.rate),
        "accel_err_m_s2": accel_err(place, true, task.rate),
        "skate_cm_s": skate(place, window.contact, task.rate),
        "hold_cm": mpjpe_cm(_held(true, block), true, made_BT1),
    }


def _held(place_BTJ3: Tensor, block_BT: Tensor) -> Tensor:
    """Return each block frozen at the frame before it; block 0 as it is."""
    index = torch.arange(block_BT.shape[1], device=block_BT.device).expand_as(block_BT)
    begins = torch.nn.functional.pad(block_BT.diff(dim=1) > 0, (1, 0))
    start = torch.where(begins, index - 1, 0).cummax(1).values
    at = torch.where(block_BT == 0, index, start)
    return place_BTJ3.gather(1, at[..., None, None].expand_as(place_BTJ3))


def train_motion(run: MotionRun | Mapping[str, Any]) -> Record:
    """Train as the run says, on every rank; the target of `launch` and of a ladder.

    Returns:
        A record of scope "step" with the errors on held-out motions beside it.
    """
    run = run if isinstance(run, MotionRun) else from_dict(MotionRun, run)
    with training_group(pick_device(run.device), 600.0):
        windows = open_windows(run.data)
        # statistics are the same for every arm: read from the packed arrays
        packed = open_windows(replace(run.data, source="packed"))
        task = build_task(run.task, packed, run.seed)
        amounts = run.task.augment
        trainer = Trainer(
            _train_config(run),
            task,
            lambda _, **options: MotionLoader(run.data, amounts, windows, **options),
        )
        record = trainer.fit()
        errors = {}
        if trainer.plan.fsdp is None and run.data.held_out:
            errors = evaluate(task, open_windows(replace(run.data, train=False, source="packed")))
    rate = record.samples_per_s
    found = {"frames_per_s": rate and rate * run.data.frames, **errors}
    return replace(record, model=run.task.size, extra={**record.extra, **found})


def _train_config(run: MotionRun) -> TrainConfig:
    named = {o if isinstance(o, str) else o["name"] for o in run.optimizations}
    always: dict[str, dict[str, Any]] = {
        "micro_batch": {"name": "micro_batch"},  # the whole share at once
        "recompute": {"name": "recompute", "mode": "none"},
    }
    rest = tuple(o for name, o in always.items() if name not in named)
    return TrainConfig(
        name=run.name,
        model=None,
        data=None,
        optimizations=(*run.optimizations, *rest),
        optim=run.optim,
        steps=run.steps,
        warmup_steps=run.warmup_steps,
        global_batch=run.global_batch,
        seed=run.seed,
        device=run.device,
        precision=run.precision,
        save_every=run.save_every,
        out=run.out,
        log_every=1,
    )


EXACT = 1e-5  # of a loss: what rounding alone may change

# what each rung changes over the rung before; the fields of jupyter.ladder.Row
RUNGS: tuple[dict[str, Any], ...] = (
    {"name": "R0 naive"},
    {
        "name": "R1 packed, prefetch",
        "dimension": "data",
        "changes": {"data.source": "packed", "data.prefetch": 2},
        "tolerance": EXACT,
    },
    {
        "name": "R2 augment on device",
        "dimension": "data",
        "changes": {"data.augment": "device"},
        "tolerance": EXACT,
    },
    {
        "name": "R3 batched Jacobian",
        "dimension": "compute",
        "changes": {"task.jacobian": "analytic"},
        "tolerance": EXACT,
    },
    {
        "name": "R4 block-parallel",
        "dimension": "parallel",
        "changes": {"task.mode": "parallel"},
        "tolerance": EXACT,
    },
    {
        "name": "R5 bf16, compiled",
        "dimension": "compute",
        "optimizations": ("compile", "fused_adamw"),
        "changes": {"precision": "bf16"},
        "tolerance": 0.1,
    },
)
OVERLAP: dict[str, Any] = {  # R6: needs more than one rank
    "name": "R6 overlap, bf16 gradients",
    "dimension": "communication",
    "optimizations": ({"name": "fsdp2", "reduce_dtype": "bf16"},),
    "tolerance": 0.1,
}
COMPETENT: dict[str, Any] = {  # stands beside and changes R0
    "name": "C0 competent",
    "changes": {
        "data.source": "packed",
        "data.prefetch": 2,
        "data.augment": "device",
        "task.jacobian": "jacrev",
    },
    "tolerance": EXACT,
}
