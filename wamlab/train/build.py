"""From a configuration to a model that is ready to step: weights, adapters, options, wrappers,
optimizer."""

import torch
from torch import nn

from wamlab.config import replace
from wamlab.data.data_config import DataConfig
from wamlab.dist import print0
from wamlab.model import lora
from wamlab.model.stored import locate
from wamlab.model.wam import WorldActionModel
from wamlab.model.weights import load_backbone, load_policy, prompt_template, save_policy
from wamlab.train.communication import data_mesh
from wamlab.train.config import TrainConfig
from wamlab.train.optim import AdamW, SplitAdamW, split_master
from wamlab.train.optimizations import Optimization, StepPlan
from wamlab.train.wire import Wires
from wamlab.train.wrap import wrap


def with_prompt_template(config: TrainConfig) -> TrainConfig:
    """Return the run with the prompt template of the policy that it starts from.

    It is what the policy's experiment configuration names, for every data set of the run that
    states none itself. Where neither says one, the embodiment's is used, and a warning says so.

    Raises:
        CheckpointError: the configuration beside the policy cannot be read, or names two.
        ConfigError: its template has other fields than {instruction} and {views}.
    """
    if not config.policy or config.data is None or config.data.prompt is not None:
        return config
    found = prompt_template(locate(config.policy))
    if found is None:
        print0(
            f"WARNING: {config.policy} has no experiment_cfg that names its prompt template. "
            f"Training uses that of embodiment {config.data.embodiment!r}; if the policy was "
            "trained with another, every prompt is off its distribution: set data.prompt."
        )
        return config
    given = {name: _with_prompt(getattr(config, name), found) for name in ("data", "validation")}
    return replace(config, given)


def _with_prompt(data: DataConfig | None, prompt: str) -> DataConfig | None:
    if data is None:
        return None
    mixture = tuple(replace(source, prompt=source.prompt or prompt) for source in data.mixture)
    return replace(data, prompt=data.prompt or prompt, mixture=mixture)


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
