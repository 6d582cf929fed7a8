"""The official baseline for real: the same model and data under DeepSpeed ZeRO-2, optimizer on the
CPU.

The settings are the public training code's: bf16 weights, float32 masters and moments in host
memory, reduction in buckets of 1e8 elements without overlap, micro-batches of 1. Extra `baseline`.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from wamlab.config import ConfigError
from wamlab.draws import Draws
from wamlab.measure import StepClock
from wamlab.train.config import TrainConfig
from wamlab.train.optim import OptimConfig, decay_groups
from wamlab.train.optimizations import MissingNeedError, Optimization, StepPlan, recompute_of
from wamlab.train.step import in_order


def settings(optim: OptimConfig, accumulation: int) -> dict[str, Any]:
    """Return DeepSpeed's configuration for ZeRO-2 with optimizer offload."""
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": optim.clip_norm,
        "bf16": {"enabled": True},
        "zero_optimization": {
            "stage": 2,
            "offload_optimizer": {"device": "cpu", "pin_memory": True},
            "overlap_comm": False,
            "contiguous_gradients": True,
            "reduce_bucket_size": int(1e8),
            "allgather_bucket_size": int(1e8),
        },
        "steps_per_print": 10**9,
    }


class _Loss(nn.Module):
    """DeepSpeed's engine calls `forward`; the trainer's protocol has `loss`."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: dict[str, Any], draws: Draws) -> dict[str, Tensor]:
        return self.model.loss(batch, draws)


class DeepSpeedStep:
    """Steps a model under a DeepSpeed engine; the interface is TorchStep's, without checkpoints.

    Args:
        model: as in TorchStep.
        plan: the official one; other plans are refused.
        optimizations: must be empty: this is the baseline.
        config: the run.
        device: this rank's GPU.
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
        _check(config, device)
        self.config, self.device, self.model = config, device, model
        for module in model.frozen():
            module.requires_grad_(False).eval()
        for index, block in enumerate(model.blocks()):
            block.recompute = recompute_of(plan.recompute, index)
        self.parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
        self.optimizer = self  # `set_lr` is all that the trainer asks of it
        self.clock: StepClock | None = None
        self._engine: Any = None

    def _start(self, accumulation: int) -> None:
        import deepspeed
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        optim, groups = self.config.optim, decay_groups(self.parameters)
        rates = {"lr": optim.lr, "betas": optim.betas, "eps": optim.eps}
        adam = DeepSpeedCPUAdam(groups, weight_decay=optim.weight_decay, adamw_mode=True, **rates)
        frozen = [(p, p.dtype) for m in self.model.frozen() for p in m.parameters()]
        self._engine, *_ = deepspeed.initialize(
            model=_Loss(self.model), optimizer=adam, config=settings(optim, accumulation)
        )
        for parameter, dtype in frozen:  # the engine cast them too; encoders keep their precision
            parameter.data = parameter.data.to(dtype)

    def set_lr(self, lr: float) -> None:
        """Set the learning rate of the next step."""
        self._lr = lr
        for group in self._engine.optimizer.param_groups if self._engine else ():
            group["lr"] = lr

    def run(self, batches: Iterator[dict[str, Any]], count: int, step: int) -> dict[str, Any]:
        """Run one optimizer step; see `TorchStep.run`."""
        if self._engine is None:
            self._start(count)
            self.set_lr(self._lr)
        losses_K, micro_losses, sample_ids = 0.0, [], []
        for _ in range(count):
            batch = next(batches)
            losses = self._engine(batch, Draws(self.config.seed, step, batch["sample_id"]))
            self._engine.backward(losses["loss"])
            self._engine.step()
            micro_K = in_order(losses)
            losses_K = losses_K + micro_K.double() / count
            micro_losses.append(micro_K[0])
            sample_ids.append(batch["sample_id"])
        if torch.distributed.get_world_size() > 1:
            torch.distributed.all_reduce(losses_K, torch.distributed.ReduceOp.AVG)
        norm = torch.as_tensor(self._engine.get_global_grad_norm() or 0.0, device=self.device)
        bad = ~(torch.isfinite(norm) & torch.isfinite(losses_K[0]))
        found = {"losses": losses_K, "norm": norm.float(), "bad": bad}
        return {**found, "micro_losses": torch.stack(micro_losses), "sample_ids": sample_ids}


def _check(config: TrainConfig, device: torch.device) -> None:
    if device.type != "cuda" or config.precision != "bf16":
        raise MissingNeedError("the DeepSpeed baseline needs a CUDA GPU and precision bf16")
    try:
        import deepspeed  # noqa: F401
    except ImportError as error:
        raise MissingNeedError(
            "the DeepSpeed baseline needs deepspeed: pip install 'wamlab[baseline]'"
        ) from error
    if config.optimizations or config.save_every or config.parts_steps or config.validate_every:
        raise ConfigError(
            "the DeepSpeed baseline takes no optimizations, checkpoints, validation or parts_steps"
        )
