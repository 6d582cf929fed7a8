"""From a configuration to a model that is ready to step: weights, adapters, options, wrappers,
optimizer."""

import torch
from torch import nn

from wamlab.model import lora
from wamlab.model.wam import WorldActionModel
from wamlab.model.weights import load_backbone, load_policy, save_policy
from wamlab.train.communication import data_mesh
from wamlab.train.config import TrainConfig
from wamlab.train.optim import AdamW, SplitAdamW, split_master
from wamlab.train.optimizations import Optimization, StepPlan
from wamlab.train.wire import Wires
from wamlab.train.wrap import wrap


def build_model(config: TrainConfig, device: torch.device) -> WorldActionModel:
    """Build the run's world action model on a device, with the weights it starts from."""
    stored = config.policy or config.backbone
    with device:
        model = WorldActionModel(config.model, dit_device="meta" if stored else None)
    if config.policy:
        load_policy(model.dit, config.policy, device=device)
    elif config.backbone:
        load_backbone(model.dit, config.backbone, device=device, seed=config.model.seed)
    if config.lora:
        lora.inject(model.dit, config.lora)
    return model


def prepare(
    model: nn.Module,
    plan: StepPlan,
    optimizations: tuple[Optimization, ...],
    *,
    config: TrainConfig,
    device: torch.device,
) -> tuple[dict[str, nn.Parameter], AdamW | SplitAdamW, Wires | None]:
    """Optimize and wrap a model in place and build its optimizer.

    Args:
        model: with the trainer's protocol.
        plan: how a step is computed.
        optimizations: what else to apply to the model.
        config: the run.
        device: this rank's.

    Returns:
        The trained parameters by name, the optimizer over this rank's shards, and what travels
        between shards (None without sharding).
    """
    for optimization in optimizations:
        optimization.apply_model(model)
    for module in model.frozen():
        module.requires_grad_(False).eval()
    split = plan.optimizer == "split"
    low = {n: split_master(p) for n, p in _trained(model).items()} if split else None
    mesh = data_mesh(device, plan.fsdp.replicate) if plan.fsdp else None
    wires = wrap(model, plan, mesh, config.precision)
    parameters = _trained(model)
    if split:
        second = torch.bfloat16 if plan.second_moment == "bf16" else torch.float32
        optimizer = SplitAdamW(parameters, config.optim, low=low, second=second, seed=config.seed)
    else:
        optimizer = AdamW(parameters, config.optim, fused=plan.optimizer == "fused")
    return parameters, optimizer, wires


def _trained(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def export(model: WorldActionModel, folder: str) -> None:
    """Write the trained weights under the public names: a policy, or the adapters alone."""
    if lora.adapters(model.dit):
        lora.save_lora(model.dit, folder, adapters_only=True)
    else:
        save_policy(model.dit, folder)
