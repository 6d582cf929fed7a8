"""The training loop. It knows a model by `loss(batch, draws)`, `blocks()` and `frozen()` alone.

A step is: micro-batches until the rank's share is done (forward, backward), gradient average, one
reduction for norm, losses and the skip flag, clip and update. Everything random comes from (seed,
step, sample id) and every loss is a mean over the global batch; so the numbers do not depend on how
the batch is split over micro-batches and ranks.
"""

import contextlib
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from wamlab.config import ConfigError, from_dict, save_json
from wamlab.data.loader import Loader
from wamlab.dist import device as pick_device
from wamlab.dist import gather, rank
from wamlab.draws import Draws
from wamlab.measure import Record, StepClock, Timing, reset_peak, stamp, synchronize
from wamlab.model.wam import WorldActionModel
from wamlab.train.communication import average_gradients, data_mesh, training_group
from wamlab.train.config import TrainConfig
from wamlab.train.metrics import LOSSES, TRACKERS, StepLog, StepNumbers
from wamlab.train.optim import AdamW, lr_at, reduce_step
from wamlab.train.optimizations import StepPlan, build_optimizations, check_needs, wrap


def train(config: TrainConfig | Mapping[str, Any]) -> Record:
    """Train as the configuration says, on every rank of the run; the target of `launch`.

    Args:
        config: a TrainConfig or its JSON object.

    Returns:
        The run's record, the same on every rank but for its own peak memory.
    """
    if not isinstance(config, TrainConfig):
        config = from_dict(TrainConfig, config)
    device = pick_device(config.device)
    sharded = plan_of(config).fsdp is not None
    with training_group(device, sharded=sharded, timeout_s=config.timeout_s):
        return Trainer(config).fit()


def plan_of(config: TrainConfig) -> StepPlan:
    """Return the step's plan after all of the configuration's optimizations."""
    plan = StepPlan()
    for optimization in build_optimizations(config.optimizations):
        plan = optimization.apply_step(plan)
    return plan


class Trainer:
    """One training run on this rank; inside `training_group` when it has ranks or shards.

    Args:
        config: the run.
        model: a module with the trainer's protocol; None builds `config.model`.
        loader: yields this rank's micro-batches in order, with `wait_s` and `close()`; None builds
            `config.data`.
    """

    def __init__(
        self, config: TrainConfig, model: nn.Module | None = None, loader: Any = None
    ) -> None:
        self.config, self.device = config, pick_device(config.device)
        self.world = dist.get_world_size() if dist.is_initialized() else 1
        self.plan = plan_of(config)
        self.share = self._share()
        self.out = Path(config.out) if config.out else None
        optimizations = build_optimizations(config.optimizations)
        check_needs(optimizations, self.device)
        self.model = (WorldActionModel(config.model) if model is None else model).to(self.device)
        for optimization in optimizations:
            optimization.apply_model(self.model)
        self._wrap()
        self.next_step = 0
        self.loader = self._build_loader(optimizations) if loader is None else loader
        self._micro_batches = iter(self.loader)
        self.clock: StepClock | None = None
        self.log = self._build_log()
        self.first_step_s: float | None = None

    def _share(self) -> int:
        share, rest = divmod(self.config.global_batch, self.world)
        if rest:
            raise ConfigError(
                f"global_batch {self.config.global_batch} does not split over {self.world} ranks: "
                "use a multiple"
            )
        micro = self.plan.micro_batch or share
        if share % micro:
            raise ConfigError(
                f"micro_batch {micro} does not divide a rank's share of {share} samples "
                f"(global_batch {self.config.global_batch} over {self.world} ranks)"
            )
        return share

    @property
    def micro_batch(self) -> int:
        """Samples computed at once on a rank."""
        return self.plan.micro_batch or self.share

    def _wrap(self) -> None:
        for module in self.model.frozen():
            module.requires_grad_(False).eval()
        mesh = data_mesh(self.device, self.plan.fsdp.replicate) if self.plan.fsdp else None
        wrap(self.model, self.plan, mesh, self.config.precision)
        self.parameters = {n: p for n, p in self.model.named_parameters() if p.requires_grad}
        kind = self.plan.optimizer
        self.optimizer = AdamW(self.parameters, self.config.optim, fused=kind == "fused")

    def _build_loader(self, optimizations: tuple) -> Loader:
        data = self.config.data
        for optimization in optimizations:
            data = optimization.apply_data(data)
        return Loader(
            data,
            global_batch=self.config.global_batch,
            micro_batch=self.micro_batch,
            seed=self.config.seed,
            rank=rank(),
            world_size=self.world,
            device=self.device,
            start_step=self.next_step,
        )

    def _build_log(self) -> StepLog:
        flops = getattr(self.model, "flops_per_sample", None)
        trackers = self.config.trackers if self.out and rank() == 0 else ()
        return StepLog(
            self.device,
            self.out / "steps.jsonl" if self.out else None,
            global_batch=self.config.global_batch,
            world_size=self.world,
            flops_per_sample=flops() if flops else None,
            precision=self.config.precision,
            max_skipped=self.config.max_skipped,
            trackers=tuple(TRACKERS[name](self.out / "tracker") for name in trackers),
        )

    def fit(self) -> Record:
        """Train to the last step and return the run's record."""
        if self.out and rank() == 0:
            save_json(self.config, self.out / "run.json")
        try:
            while self.next_step < self.config.steps:
                self._one_step()
            self.log.flush()
            parts = self._time_parts()
        finally:
            self.loader.close()
        return self._result(parts)

    def _one_step(self) -> None:
        first = self.first_step_s is None
        start = time.perf_counter()
        self.step()
        if first:
            synchronize(self.device)
            self.first_step_s = time.perf_counter() - start
        if self.next_step == self.config.warmup_steps:
            synchronize(self.device)
            reset_peak(self.device)
            self.log.restart()
        if self.next_step % self.config.log_every == 0:
            self.log.flush()

    def step(self) -> None:
        """Run one optimizer step over the global batch; nothing here waits for the device."""
        waited = self.loader.wait_s
        lr = lr_at(self.config.optim, self.next_step, self.config.steps)
        self.optimizer.set_lr(lr)
        losses_K = torch.zeros(len(LOSSES), dtype=torch.float64, device=self.device)
        micro_losses, sample_ids = [], []
        count = self.share // self.micro_batch
        for index in range(count):
            with self._part("data_wait"):
                batch = next(self._micro_batches)
            self._sync_gradients(last=index == count - 1)
            losses = self._forward_backward(batch, weight=self.micro_batch / self.share)
            losses_K += losses.double() * (self.micro_batch / self.share)
            micro_losses.append(losses[0])
            sample_ids.append(batch["sample_id"])
        with self._part("optimizer"):
            norm, losses_K, bad = self._update(losses_K)
        numbers = StepNumbers(
            losses=losses_K,
            norm=norm,
            bad=bad,
            micro_losses=torch.stack(micro_losses),
            sample_ids=sample_ids,
            lr=lr,
            data_wait_s=self.loader.wait_s - waited,
        )
        self.log.end_step(self.next_step, numbers)
        self.next_step += 1

    def _forward_backward(self, batch: dict[str, Any], weight: float) -> Tensor:
        draws = Draws(self.config.seed, self.next_step, batch["sample_id"])
        with self._part("forward"), self._autocast():
            losses = self.model.loss(batch, draws)
        with self._part("backward"):
            (losses["loss"] * weight).backward()
        missing = torch.full_like(losses["loss"].detach(), torch.nan)
        return torch.stack([losses.get(name, missing).detach().float() for name in LOSSES])

    def _update(self, losses_K: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        average_gradients(self.parameters.values())
        norm, losses_K = reduce_step(self.parameters, losses_K)
        bad = ~(torch.isfinite(norm) & torch.isfinite(losses_K[0]))
        self.optimizer.step(norm, bad)
        self.model.zero_grad(set_to_none=True)
        return norm, losses_K, bad

    def _sync_gradients(self, *, last: bool) -> None:
        if self.plan.fsdp and self.plan.fsdp.defer_sync:
            self.model.set_requires_gradient_sync(last)

    def _autocast(self) -> contextlib.AbstractContextManager:
        # FSDP2 and the split optimizer hold bf16 compute weights themselves
        plain = self.plan.fsdp is None and self.plan.optimizer != "split"
        if self.config.precision == "bf16" and plain:
            return torch.autocast(self.device.type, dtype=torch.bfloat16)
        return contextlib.nullcontext()

    def _part(self, name: str) -> contextlib.AbstractContextManager:
        return self.clock.part(name) if self.clock else contextlib.nullcontext()

    def _time_parts(self) -> dict[str, float] | None:
        if not self.config.parts_steps:
            return None
        self.clock = StepClock(self.device)
        for _ in range(self.config.parts_steps):
            self.step()
            self.clock.end_step()
        self.log.discard()
        return self.clock.median_ms()

    def _result(self, parts_ms: dict[str, float] | None) -> Record:
        measured = self.log.records[self.config.warmup_steps :]
        timing = Timing.of([r.step_ms for r in measured])
        per_second = self.config.global_batch / timing.median * 1e3
        mfus = [r.mfu for r in measured if r.mfu is not None]
        model = self.config.model
        record = Record(
            name=self.config.name,
            scope="step",
            model=model.size if model else type(self.model).__name__,
            world_size=self.world,
            device=str(self.device.type),
            micro_batch=self.micro_batch,
            grad_accum=self.share // self.micro_batch,
            precision=self.config.precision,
            recompute=self.plan.recompute,
            encoders="online",
            global_batch=self.config.global_batch,
            optimizations=tuple(o.name for o in build_optimizations(self.config.optimizations)),
            step_ms=timing,
            parts_ms=parts_ms,
            samples_per_s=per_second,
            samples_per_s_per_gpu=per_second / self.world,
            mfu=sum(mfus) / len(mfus) if mfus else None,
            peak_gib=max(gather(max(r.peak_gib for r in measured))),
            data_wait_share=sum(r.data_wait_ms for r in measured)
            / sum(r.step_ms for r in measured),
            first_step_s=self.first_step_s,
            losses=tuple(r.loss for r in self.log.records),
        )
        return stamp(record)
