"""The training loop: resume, step, log, save, validate, stop.

It knows a model by `loss(batch, draws)`, `blocks()` and `frozen()` alone. Everything random comes
from (seed, step, sample id) and every loss is a mean over the global batch; so the numbers do not
depend on how the batch is split over micro-batches and ranks.
"""

import contextlib
import gc
import importlib
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn

from wamlab.config import ConfigError, from_dict, replace, save_json
from wamlab.data.data_config import prepare_workers
from wamlab.data.loader import Loader
from wamlab.dist import device as pick_device
from wamlab.dist import print0, rank
from wamlab.measure import Record, StepClock, Timing, append_jsonl, reset_peak, stamp, synchronize
from wamlab.model.stored import CheckpointError
from wamlab.train import memory, wrap
from wamlab.train.build import build_model, export, with_prompt_template
from wamlab.train.checkpoint import Checkpoints, load, read_marker
from wamlab.train.communication import StopSignal, training_group, with_links
from wamlab.train.config import TrainConfig
from wamlab.train.metrics import LOSSES, TRACKERS, StepLog, StepNumbers
from wamlab.train.optim import lr_at
from wamlab.train.optimizations import build_optimizations, build_plan, check_needs
from wamlab.train.peers import PeerWatch
from wamlab.train.step import TorchStep
from wamlab.train.wait import measure_wait, worst


def train(config: TrainConfig | Mapping[str, Any]) -> Record:
    """Train as the configuration says, on every rank of the run; the target of `launch`.

    Args:
        config: a TrainConfig or its JSON object.

    Returns:
        The run's record.
    """
    if not isinstance(config, TrainConfig):
        config = from_dict(TrainConfig, config)
    with training_group(pick_device(config.device), config.timeout_s):
        return Trainer(config).fit()


class Trainer:
    """One training run on this rank; made inside `training_group`.

    Args:
        config: the run.
        model: a module with the trainer's protocol; None builds `config.model`.
        loader: makes the loader, called as `Loader(config.data, **...)` is; None is that Loader.
    """

    def __init__(
        self, config: TrainConfig, model: nn.Module | None = None, loader: Any = Loader
    ) -> None:
        config = with_prompt_template(config)
        self.config, self.device = config, pick_device(config.device)
        self.world = dist.get_world_size()
        self.optimizations = build_optimizations(config.optimizations)
        check_needs(self.optimizations, self.device)
        self.plan = with_links(build_plan(self.optimizations))
        self.share, self.micro_batch = self._shares()
        self.out = Path(config.out) if config.out else None
        if loader is Loader and config.data:
            prepare_workers(self._optimized(config.data))  # both import for long
        self._memory = self._check_memory() if model is None else contextlib.nullcontext()
        self.model = (build_model(config, self.device) if model is None else model).to(self.device)
        self.stepper = _step_class(config.backend)(
            self.model, self.plan, self.optimizations, config=config, device=self.device
        )
        self.step_count = self.first_step = 0
        self.checkpoints = None
        if self.out:
            self.checkpoints = Checkpoints(self.out / "checkpoints", config.keep, self.device)
            self._resume()
        self._build_loader = loader
        self.loader = self._loader(config.data, train=True)
        self._batches = iter(self.loader)
        self.log = self._build_log()

    def _shares(self) -> tuple[int, int]:
        batch = self.config.global_batch
        share, rest = divmod(batch, self.world)
        if rest:
            raise ConfigError(f"global_batch {batch} is no multiple of the {self.world} ranks")
        micro = self.plan.micro_batch or share
        if share % micro:
            raise ConfigError(
                f"micro_batch {micro} does not divide a rank's share of {share} samples "
                f"(global_batch {batch} over {self.world} ranks)"
            )
        return share, micro

    def _check_memory(self) -> contextlib.AbstractContextManager:
        """Refuse a run that a GPU cannot hold, before anything is loaded."""
        if self.device.type != "cuda":
            return contextlib.nullcontext()
        setting = memory.Setting(
            shape=memory.shape_of(self.config.model, self.config.lora),
            plan=self.plan,
            precision=self.config.precision,
            world=self.world,
            micro_batch=self.micro_batch,
        )
        capacity = memory.usable_bytes(self.device)
        memory.check(setting, capacity)
        return memory.explained(setting, capacity, self._last_good)

    def _optimized(self, data: Any) -> Any:
        for optimization in self.optimizations:
            data = data and optimization.apply_data(data)
        return data

    def _loader(self, data: Any, *, train: bool) -> Any:
        data = self._optimized(data)
        return self._build_loader(
            data if train else data and replace(data, train=False),
            global_batch=self.config.global_batch,
            micro_batch=self.micro_batch,
            seed=self.config.seed,
            rank=rank(),
            world_size=self.world,
            device=self.device,
            start_step=self.step_count if train else 0,
        )

    def _build_log(self) -> StepLog:
        flops = getattr(self.model, "flops_per_sample", None)
        trackers = self.config.trackers if rank() == 0 else ()
        return StepLog(
            self.device,
            self.out and self.out / "steps.jsonl",
            global_batch=self.config.global_batch,
            world_size=self.world,
            flops_per_sample=flops and flops(),
            precision=self.config.precision,
            max_skipped=self.config.max_skipped,
            trackers=[TRACKERS[name](self.out and self.out / name) for name in trackers],
        )

    def fit(self) -> Record:
        """Train to the last step, or until SIGTERM or SIGINT, and return the run's record."""
        if self.out and rank() == 0:
            save_json(self.config, self.out / "run.json")
        self._start = time.perf_counter()
        self.first_step_s, self._graphs, self._clock = None, 0, None
        with contextlib.ExitStack() as stack:
            stack.callback(gc.unfreeze)
            stack.callback(self.loader.close)
            if self.checkpoints:
                stack.callback(self.checkpoints.close)
            stack.enter_context(PeerWatch(self.config.silence_s))
            stop = stack.enter_context(StopSignal())
            stack.enter_context(self._memory)
            stack.enter_context(wrap.explained())
            stopped = False
            while self.step_count < self.config.steps and not stopped:
                self.step()
                if self._clock:
                    self._clock.end_step()
                stopped = stop.agreed()
                self._between_steps(last=stopped or self.step_count == self.config.steps)
            if self.config.export and not stopped:
                export(self.model, self.out / "weights")
            waits = {} if stopped else self._measure_wait()
            parts = None if stopped else self._time_parts()
        reason = f"stopped by {stop.name or 'another rank'}" if stopped else None
        return self._result(parts, waits, reason)

    def step(self) -> None:
        """Run one optimizer step over the global batch; nothing here waits for the device."""
        waited = self.loader.wait_s
        lr = lr_at(self.config.optim, self.step_count, self.config.steps)
        self.stepper.optimizer.set_lr(lr)
        found = self.stepper.run(self._batches, self.share // self.micro_batch, self.step_count)
        numbers = StepNumbers(**found, lr=lr, data_wait_s=self.loader.wait_s - waited)
        self.log.end_step(self.step_count, numbers)
        self.step_count += 1

    def _between_steps(self, *, last: bool) -> None:
        config, done = self.config, self.step_count
        if self.first_step_s is None:
            synchronize(self.device)
            self.first_step_s = time.perf_counter() - self._start
            gc.collect()
            gc.freeze()  # a compiler leaves millions of objects that live as long as the run
        if done == self.first_step + config.warmup_steps:
            synchronize(self.device)
            reset_peak(self.device)
            self._graphs = self._compiled_graphs()
            if self.config.parts_steps and self.device.type == "cpu":
                self._clock = self.stepper.clock = StepClock(self.device)  # costs nothing there
            self.log.restart()
        if last or done % config.log_every == 0:
            self.log.flush(self._last_good())
        if config.save_every:
            self.checkpoints.poll()
            if last or done % config.save_every == 0:
                self.checkpoints.save(self.stepper.state(), done, self._marker())
                self.log.restart()
        if config.validate_every and (last or done % config.validate_every == 0):
            self.validate()
            self.log.restart()

    def _last_good(self) -> Path | None:
        return self.checkpoints.latest() if self.checkpoints else None

    def _marker(self) -> dict[str, Any]:
        fixed = {"seed": self.config.seed, "global_batch": self.config.global_batch}
        return fixed | {"world_size": self.world}

    def _resume(self) -> None:
        latest = self.checkpoints.latest() if self.config.resume else None
        steps = self.out / "steps.jsonl"
        if latest:
            marker = read_marker(latest)
            for key in ("seed", "global_batch"):
                if marker[key] != getattr(self.config, key):
                    raise CheckpointError(
                        f"{latest} was trained with {key} {marker[key]}, this run has "
                        f"{getattr(self.config, key)}: the samples would differ; use another `out`"
                    )
            load(latest, self.stepper.state())
            self.step_count = self.first_step = marker["step"]
            print0(f"resumed from {latest}")
        if rank() == 0:
            StepLog.cut(steps, self.step_count)

    def validate(self) -> dict[str, float]:
        """Return the mean losses over the first validation batches, the same ones every time.

        They are appended to validation.jsonl on rank 0.
        """
        loader = self._loader(self.config.validation, train=False)
        batches, total_K = iter(loader), 0.0
        count = self.config.validation_batches * self.share // self.micro_batch
        for index in range(count):
            # negative steps: draws that no training step makes
            losses_K = self.stepper.evaluate(next(batches), -1 - index)
            total_K = total_K + losses_K.double() / count
        loader.close()
        if self.world > 1:
            dist.all_reduce(total_K)
        values = dict(zip(LOSSES, (total_K / self.world).tolist()))
        found = {k: v for k, v in values.items() if v == v}
        if self.out and rank() == 0:
            append_jsonl(self.out / "validation.jsonl", [{"step": self.step_count, **found}])
        return found

    def _time_parts(self) -> dict[str, float] | None:
        if self._clock:
            return self._clock.median_ms()
        if not self.config.parts_steps:
            return None
        clock = self.stepper.clock = StepClock(self.device)
        for _ in range(self.config.parts_steps):
            self.step()
            clock.end_step()
        self.log.discard()
        return clock.median_ms()

    def _measure_wait(self) -> dict[str, Any]:
        """Return what communication cost every rank, as fields of a record."""
        config, found = self.config, {}
        compression = getattr(self.stepper, "compression", None)
        if compression:
            found["wire_bytes_share"] = compression.sent_bytes / max(1, compression.dense_bytes)
        fresh = self.log.records[config.warmup_steps :]
        if self.world == 1 or not config.wait_steps or not fresh:
            return found
        if not (rehearsal := getattr(self.stepper, "rehearsal", None)):
            return found
        count = self.share // self.micro_batch
        if not (rehearse := rehearsal(self._batches, count, self.step_count)):
            return found
        with compression.untouched() if compression else contextlib.nullcontext():
            return found | measure_wait(
                rehearse,
                device=self.device,
                repeats=config.wait_steps,
                step_ms=Timing.of([r.step_ms for r in fresh]).median,
                folder=self.out,
            )

    def _compiled_graphs(self) -> int:
        if not self.plan.compile:
            return 0
        from torch._dynamo.utils import counters  # importing Dynamo takes 2 s

        return counters["stats"]["unique_graphs"]

    def _result(
        self, parts_ms: dict[str, float] | None, waits: dict[str, Any], reason: str | None
    ) -> Record:
        model, fresh = self.config.model, self.log.records[self.config.warmup_steps :]
        if not fresh:
            reason = reason or f"no step to measure: the run stands at step {self.step_count}"
        record = Record(
            name=self.config.name,
            scope="step",
            reason=reason,
            model=model.size if model else type(self.model).__name__,
            layers=model.layers if model else None,
            world_size=self.world,
            device=self.device.type,
            micro_batch=self.micro_batch,
            grad_accum=self.share // self.micro_batch,
            precision=self.config.precision,
            recompute=self.plan.recompute,
            encoders="online",
            global_batch=self.config.global_batch,
            optimizations=tuple(o.name for o in self.optimizations),
            parts_ms=parts_ms,
            first_step_s=self.first_step_s,
            losses=tuple(r.loss for r in self.log.records),
            exposed_comm_share=worst(waits) if "rank_skew" in waits else None,
            extra={"recompiles": self._compiled_graphs() - self._graphs, **waits},
        )
        return stamp(replace(record, self.log.summary(fresh)))


def _step_class(backend: str) -> Any:
    if backend == "torch":
        return TorchStep
    return importlib.import_module("wamlab.train.deepspeed").DeepSpeedStep  # the extra `baseline`
