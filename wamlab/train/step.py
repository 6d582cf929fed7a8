"""One optimizer step of a wrapped model: micro-batches, gradient average, norm, skip flag, update.

Nothing in a step waits for the device. What a step gives back stays on it.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from wamlab.config import ConfigError
from wamlab.draws import Draws
from wamlab.measure import StepClock
from wamlab.train.build import prepare
from wamlab.train.communication import average_gradients
from wamlab.train.compression import Compression, replicate
from wamlab.train.config import TrainConfig
from wamlab.train.metrics import LOSSES
from wamlab.train.optim import reduce_step
from wamlab.train.optimizations import Optimization, StepPlan

EAGER_STEPS = 4  # real steps before a capture: compilation, FSDP2's lazy set-up, allocator


class TorchStep:
    """Steps a model as the plan says.

    Args:
        model: has `loss(batch, draws)`, `blocks()`, `frozen()`, and maybe `encode(batch)`, the part
            of `loss` that needs no gradient; is changed in place.
        plan: how a step is computed.
        optimizations: what else to apply to the model.
        config: the run.
        device: this rank's.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: StepPlan,
        optimizations: tuple[Optimization, ...],
        *,
        config: TrainConfig,
        device: torch.device,
    ) -> None:
        self.model, self.plan, self.config, self.device = model, plan, config, device
        self.parameters, self.optimizer, self._wires = prepare(
            model, plan, optimizations, config=config, device=device
        )
        self.compression = self._ddp = None
        if plan.ddp and dist.get_world_size() > 1:
            self.compression = Compression(plan.ddp, self.parameters, config.steps, config.seed)
            self._ddp = replicate(model, plan.ddp, self.compression)
        self._watches_activity = self.compression is not None and plan.ddp.gate == "activity"
        self._activity: Tensor | float = 0.0
        self.clock: StepClock | None = None
        self._graph = _Graph(self._compute, device) if plan.cuda_graph else None
        if self._graph:
            _check_capture(plan)

    def run(self, batches: Iterator[dict[str, Any]], count: int, step: int) -> dict[str, Any]:
        """Run one optimizer step over `count` micro-batches of equal size.

        Args:
            batches: yields micro-batches on the device.
            count: how many make this rank's share of the global batch.
            step: the step's number.

        Returns:
            `losses` float64 [K] over the global batch, `norm`, `bad`, `micro_losses` float32
            [count] and `sample_ids` (a list), the fields of StepNumbers.
        """
        if self._graph:
            return self._replay(batches, count, step)
        if self.compression:
            self.compression.step = step
        losses_K, micro_losses, sample_ids = 0.0, [], []
        for index in range(count):
            batch = self._next(batches)
            with self._exchange(last=index == count - 1):
                micro_K = self._forward_backward(batch, step, 1.0 / count)
            losses_K = losses_K + micro_K.double() / count
            micro_losses.append(micro_K[0])
            sample_ids.append(batch["sample_id"])
        with self._part("optimizer"):
            losses_K, norm, bad = self._update(losses_K)
        found = {"losses": losses_K, "norm": norm, "bad": bad}
        return {**found, "micro_losses": torch.stack(micro_losses), "sample_ids": sample_ids}

    def rehearsal(
        self, batches: Iterator[dict[str, Any]], count: int, step: int
    ) -> Callable[[bool], None] | None:
        """Return a function that runs a step's forward, backward and exchange, and forgets them.

        Its argument says whether to communicate; without it every collective is cut out, and the
        gradients are wrong. None for a captured step, whose collectives cannot be cut out.

        Args:
            batches, count, step: as for `run`.
        """
        if self._graph:
            return None
        taken = [self._next(batches) for _ in range(count)]

        def rehearse(communicate: bool) -> None:
            if self._wires and not communicate:
                self._wires.cut()
            for index, batch in enumerate(taken):
                last = index == count - 1 and (communicate or self._ddp is None)
                with self._exchange(last=last):
                    micro_K = self._forward_backward(batch, step, 1.0 / count)
            if communicate:
                self._reduce(micro_K.double())
            elif self._wires:
                self._wires.join()
            self.model.zero_grad(set_to_none=True)

        return rehearse

    def _next(self, batches: Iterator[dict[str, Any]]) -> dict[str, Any]:
        with self._part("data_wait"):
            batch = next(batches)
        if not hasattr(self.model, "encode"):
            return batch
        with self._part("encoders"), self._autocast():
            return self.model.encode(batch)

    def _forward_backward(self, batch: dict[str, Any], step: int | Tensor, weight: float) -> Tensor:
        draws = Draws(self.config.seed, step, batch["sample_id"])
        with self._part("forward"), self._autocast():
            losses = (self._ddp or self.model.loss)(batch, draws)
        with self._part("backward"):
            (losses["loss"] * weight).backward()
        if self._watches_activity:
            self._activity = self._activity + _activity(losses) * weight
        return in_order(losses)

    def _exchange(self, *, last: bool) -> contextlib.AbstractContextManager:
        """Return the context of a micro-batch; gradients kept back travel with the last one's."""
        if self._ddp and not last:
            return self._ddp.no_sync()
        if self.plan.fsdp and self.plan.fsdp.defer_sync and self.plan.fsdp.root:
            self.model.set_requires_gradient_sync(last)
        return contextlib.nullcontext()

    def _reduce(self, losses_K: Tensor) -> tuple[Tensor, Tensor]:
        if self._ddp is None:
            average_gradients(self.parameters.values())
        if self.compression:
            self.compression.observe()
        if not self._watches_activity:
            return reduce_step(self.parameters, losses_K)
        norm, reduced = reduce_step(self.parameters, torch.cat([losses_K, self._activity[None]]))
        self.compression.note_activity(reduced[-1])
        self._activity = 0.0
        return norm, reduced[:-1]

    def _update(self, losses_K: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        norm, losses_K = self._reduce(losses_K)
        bad = ~(torch.isfinite(norm) & torch.isfinite(losses_K[0]))
        self.optimizer.step(norm, bad)
        self.model.zero_grad(set_to_none=True)
        if self._wires:
            self._wires.advance()
        return losses_K, norm, bad

    def _compute(self, batch: dict[str, Any], step: Tensor) -> tuple[Tensor, ...]:
        micro_K = self._forward_backward(batch, step, 1.0)
        return *self._update(micro_K.double()), micro_K[:1]

    def _replay(self, batches: Iterator[dict[str, Any]], count: int, step: int) -> dict[str, Any]:
        if count != 1:
            raise ConfigError(f"cuda_graph captures one micro-batch a step, this run has {count}")
        batch = self._next(batches)
        with self._part("graph"):
            losses_K, norm, bad, micro_losses = self._graph(batch, step)
        found = {"losses": losses_K, "norm": norm, "bad": bad, "micro_losses": micro_losses}
        return {**found, "sample_ids": [batch["sample_id"]]}

    @torch.no_grad()
    def evaluate(self, batch: dict[str, Any], step: int) -> Tensor:
        """Return the losses of one micro-batch, float32 [K], and keep no whole weights after it."""
        draws = Draws(self.config.seed, step, batch["sample_id"])
        with self._autocast():
            losses = in_order(self.model.loss(batch, draws))
        if self.plan.fsdp:
            for module in (*self.model.blocks(), self.model):
                module.reshard()
        return losses

    def state(self) -> dict[str, Tensor]:
        """Return what a checkpoint holds, live: trained parameters, the optimizer's state, and what
        compression remembers."""
        parameters = {f"model.{n}": p.detach() for n, p in self.parameters.items()}
        optimizer = {f"optimizer.{n}": t for n, t in self.optimizer.state().items()}
        compression = self.compression.state() if self.compression else {}
        return parameters | optimizer | {f"compression.{n}": t for n, t in compression.items()}

    def _autocast(self) -> contextlib.AbstractContextManager:
        # FSDP2 and the split optimizer hold bf16 weights to compute with
        held = self.plan.fsdp is not None or self.plan.optimizer == "split"
        if self.config.precision == "bf16" and not held:
            return torch.autocast(self.device.type, dtype=torch.bfloat16)
        return contextlib.nullcontext()

    def _part(self, name: str) -> contextlib.AbstractContextManager:
        return self.clock.part(name) if self.clock else contextlib.nullcontext()


def in_order(losses: Mapping[str, Tensor]) -> Tensor:
    """Return the detached float32 losses in the order of LOSSES, NaN for one that is not given."""
    none = torch.full_like(losses["loss"].detach(), torch.nan)
    return torch.stack([losses.get(name, none).detach().float() for name in LOSSES])


def _activity(losses: Mapping[str, Tensor]) -> Tensor:
    if "activity" not in losses:
        raise ConfigError(
            "ddp.gate 'activity' needs a model whose loss also returns `activity`, how much a "
            "batch moves; use high, low, random or always"
        )
    return losses["activity"].detach().double()


def _check_capture(plan: StepPlan) -> None:
    """Refuse a plan whose step cannot be captured in a CUDA graph."""
    if plan.ddp:
        raise ConfigError("cuda_graph cannot hold ddp's hooks: leave one of them out")
    if plan.optimizer == "adamw":
        raise ConfigError(
            "cuda_graph needs an optimizer that skips on the device: add fused_adamw or split_adamw"
        )
    if plan.fsdp and plan.fsdp.keep_unsharded >= 0:
        raise ConfigError(
            "cuda_graph needs weights that stay gathered over the forward: "
            'use {"name": "fsdp2", "keep_unsharded": -1}'
        )


class _Graph:
    """Runs `compute(batch, step)` eagerly a few times, then captures it once and replays it.

    Args:
        compute: a step as a function of tensors of fixed shape; returns tensors.
        device: a GPU.
    """

    def __init__(self, compute: Any, device: torch.device) -> None:
        self.compute, self.calls, self.graph = compute, 0, None
        self.stream = torch.cuda.Stream(device)
        self.step = torch.zeros((), dtype=torch.int64, device=device)
        self.inputs: dict[str, Tensor] = {}

    def __call__(self, batch: dict[str, Any], step: int) -> tuple[Tensor, ...]:
        self.step.fill_(step)
        self._load({k: v for k, v in batch.items() if isinstance(v, Tensor)})
        self.calls += 1
        if self.calls <= EAGER_STEPS:
            return self._eagerly()
        if self.graph is None:
            self.graph = torch.cuda.CUDAGraph()
            # other threads (loader, checkpoint) go on using the device during the capture
            with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
                self.outputs = self.compute(self.inputs, self.step)
        self.graph.replay()
        return tuple(output.clone() for output in self.outputs)

    def _load(self, tensors: dict[str, Tensor]) -> None:
        if not self.inputs:
            self.inputs = {k: v.clone() for k, v in tensors.items()}
        for name, static in self.inputs.items():
            if static.shape != tensors[name].shape:
                raise ConfigError(
                    f"cuda_graph needs batches of one shape: {name} was {tuple(static.shape)}, "
                    f"now {tuple(tensors[name].shape)}"
                )
            static.copy_(tensors[name])

    def _eagerly(self) -> tuple[Tensor, ...]:
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            outputs = self.compute(self.inputs, self.step)
        torch.cuda.current_stream().wait_stream(self.stream)
        return outputs
