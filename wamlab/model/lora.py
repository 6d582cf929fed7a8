"""Low-rank adapters: y = W x + (alpha / rank) B A x, with W frozen.

Names are PEFT's (`q.base_layer.weight`, `q.lora_A.default.weight`), so that a state dict of an
adapted DiT is a public LoRA checkpoint but for its prefix.
Source: Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", ICLR 2022.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from wamlab import dist
from wamlab.model.stored import Checkpoint, CheckpointError, open_checkpoint
from wamlab.model.weights import (
    ACTION_MODULES,
    PEFT_PREFIX,
    PREFIX,
    LoadReport,
    check_fit,
    dit_names,
    fill,
    initial_value,
    plain_name,
    save_tensors,
    wholly_missing,
)

TARGETS = ("q", "k", "v", "o", "ffn.0", "ffn.2")
_DOWN, _UP = ".lora_A.weight", ".lora_B.weight"


@dataclass(frozen=True, kw_only=True)
class LoRAConfig:
    """The adapters' size.

    Args:
        rank: inner width of an adapter.
        alpha: the adapter's output is scaled by alpha / rank.
        seed: of A's initial values; B starts at 0, so that the model starts unchanged.
    """

    rank: int = 4
    alpha: float = 4.0
    seed: int = 0


class LoRALinear(nn.Module):
    """A frozen linear layer with an adapter beside it; `weight` and `bias` read as the sum.

    Args:
        base_layer: the layer it replaces.
        config: rank and scale.
    """

    def __init__(self, base_layer: nn.Linear, config: LoRAConfig) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.rank, self.scale = config.rank, config.alpha / config.rank
        self.lora_A = nn.ModuleDict({"default": _linear(base_layer.in_features, config.rank)})
        self.lora_B = nn.ModuleDict({"default": _linear(config.rank, base_layer.out_features)})
        self.lora_A.to_empty(device=base_layer.weight.device)
        self.lora_B.to_empty(device=base_layer.weight.device)

    @property
    def change(self) -> Tensor:
        """Return [out, in], what the adapter adds to the weight."""
        return self.scale * (self.lora_B["default"].weight @ self.lora_A["default"].weight)

    @property
    def weight(self) -> Tensor:
        """Return [out, in], the weight a caller that bypasses `forward` must use."""
        return self.base_layer.weight + self.change.to(self.base_layer.weight.dtype)

    @property
    def bias(self) -> Tensor | None:
        """Return [out]."""
        return self.base_layer.bias

    def forward(self, x: Tensor) -> Tensor:
        """Return W x + b + scale * B A x."""
        return self.base_layer(x) + self.scale * self.lora_B["default"](self.lora_A["default"](x))


def _linear(inputs: int, outputs: int) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=False, device="meta", dtype=torch.float32)


def targets(model: nn.Module) -> dict[str, nn.Linear]:
    """Return {name: layer} of the linear layers that take an adapter: q, k, v, o and the FFN's."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and f".{name}".endswith(tuple(f".{t}" for t in TARGETS))
    }


def inject(model: nn.Module, config: LoRAConfig = LoRAConfig()) -> None:
    """Put adapters into a DiT and freeze all but them and the action and state modules.

    All parameters become fp32 (FSDP2 shards one dtype a group). Call it before `fully_shard`.

    Args:
        model: a WorldActionDiT; changed in place.
        config: rank, alpha, seed.
    """
    model.float()
    for name, layer in targets(model).items():
        model.set_submodule(name, LoRALinear(layer, config))
    for name, parameter in model.named_parameters():
        if ".lora_" in name and not parameter.is_meta:
            value = initial_value(plain_name(name), parameter.shape, config.seed)
            parameter.data.copy_(value)
        parameter.requires_grad_(".lora_" in name or name.startswith(ACTION_MODULES))


def adapters(model: nn.Module) -> dict[str, LoRALinear]:
    """Return {name: layer} of the adapted layers."""
    return {n: m for n, m in model.named_modules() if isinstance(m, LoRALinear)}


@torch.no_grad()
def merge(model: nn.Module) -> None:
    """Add every adapter to its weight and take it out; what was frozen stays frozen.

    Raises:
        CheckpointError: the parameters are sharded.
    """
    _refuse_shards(model)
    for name, layer in adapters(model).items():
        layer.base_layer.weight += layer.change.to(layer.base_layer.weight.dtype)
        model.set_submodule(name, layer.base_layer)


def _refuse_shards(model: nn.Module) -> None:
    if any(isinstance(p, DTensor) for p in model.parameters()):
        raise CheckpointError("sharded adapters cannot be merged: merge them before `fully_shard`")


def load_lora(
    model: nn.Module,
    source: str | Path | Checkpoint,
    *,
    merged: bool = False,
    alpha: float = 4.0,
    device: str | torch.device | None = None,
) -> LoadReport:
    """Load adapters, and whatever else of the DiT the checkpoint holds.

    The checkpoint holds the whole DiT, or the adapters with or without the action and state
    modules; then the rest must already be in `model` and stays as it is.

    Args:
        model: a WorldActionDiT, plain or already adapted (then it may be sharded).
        source: as in `open_checkpoint`.
        merged: add the adapters to the weights instead of keeping them apart.
        alpha: the scale's numerator where no adapter_config.json lies beside the checkpoint.
        device: as in `load_policy`.

    Raises:
        CheckpointError: it does not fit; the model is then unchanged.
    """
    if merged:
        _refuse_shards(model)
    checkpoint = source if isinstance(source, Checkpoint) else open_checkpoint(source)
    stored = dit_names(checkpoint)
    adapted = adapters(model)
    layers = {n: m.base_layer for n, m in adapted.items()} or targets(model)
    config = _config_of(checkpoint, stored, alpha)
    parameters = {plain_name(n): p for n, p in model.state_dict(keep_vars=True).items()}
    base = {n: p for n, p in parameters.items() if ".lora_" not in n}
    action = {n for n in base if n.startswith(ACTION_MODULES)}
    kept = wholly_missing([action, base.keys() - action], stored)
    wanted = {n: p for n, p in base.items() if n not in kept} | _shapes(layers, config)
    check_fit(wanted, stored, checkpoint)
    if any(base[name].is_meta for name in kept):
        raise CheckpointError(
            f"{checkpoint.root} holds adapters without their backbone: load the backbone first"
        )
    if not adapted:
        inject(model, config)
    fill(model, checkpoint, stored, device=device, kept=kept)
    for layer in adapters(model).values():
        layer.scale = config.alpha / config.rank
    if merged:
        merge(model)
    used = set(stored.values())
    return LoadReport(
        loaded=tuple(stored),
        kept=tuple(sorted(kept)),
        ignored=tuple(n for n in checkpoint.tensors if n not in used),
    )


def save_lora(
    model: nn.Module,
    folder: str | Path,
    *,
    adapters_only: bool = False,
) -> None:
    """Write an adapted DiT under PEFT's names, with adapter_config.json; see `save_policy`.

    Args:
        model: an adapted WorldActionDiT.
        folder: as in `save_policy`.
        adapters_only: leave the frozen backbone out.
    """
    rank, scale = next((m.rank, m.scale) for m in adapters(model).values())
    tensors = {
        PREFIX + PEFT_PREFIX + name: parameter
        for name, parameter in model.state_dict(keep_vars=True).items()
        if parameter.requires_grad or not adapters_only
    }
    save_tensors(tensors, folder)
    if dist.rank() == 0:
        values = {"peft_type": "LORA", "r": rank, "lora_alpha": scale * rank}
        (Path(folder) / "adapter_config.json").write_text(json.dumps(values, indent=2) + "\n")


def _config_of(checkpoint: Checkpoint, stored: dict[str, str], alpha: float) -> LoRAConfig:
    ranks = {checkpoint.tensors[at].shape[0] for n, at in stored.items() if n.endswith(_DOWN)}
    if len(ranks) != 1:
        found = f"adapters of ranks {sorted(ranks)}" if ranks else "no LoRA adapters"
        raise CheckpointError(f"{checkpoint.root} holds {found}; one rank is needed")
    path = checkpoint.root / "adapter_config.json"
    if path.is_file():
        try:
            alpha = float(json.loads(path.read_text())["lora_alpha"])
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{path} names no lora_alpha: {error!r}") from error
    return LoRAConfig(rank=ranks.pop(), alpha=alpha)


def _shapes(layers: dict[str, nn.Linear], config: LoRAConfig) -> dict[str, Tensor]:
    shapes = {}
    for name, layer in layers.items():
        shapes[name + _DOWN] = torch.empty(config.rank, layer.in_features, device="meta")
        shapes[name + _UP] = torch.empty(layer.out_features, config.rank, device="meta")
    return shapes
