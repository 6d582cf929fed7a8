"""AdamW on this rank's shards: parameter groups, schedule, global gradient norm, and a step that
skips itself.

Every optimizer here works on the local tensor of each parameter. One thousand DTensors dispatched
through eleven operations each cost 0.5 s of CPU time a step at 5B; their local shards cost one
fused kernel.

A step is skipped when the loss or a gradient is not finite. The decision is a 0-d tensor that every
rank computes from the same reduced numbers, so that no rank can disagree and (but for the public
unfused loop) no host reads it.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from wamlab.config import ConfigError, check_least


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """AdamW and its schedule; the defaults are the public recipe."""

    lr: float = 1e-5
    betas: tuple[float, float] = (0.95, 0.999)
    eps: float = 1e-8
    weight_decay: float = 1e-5
    clip_norm: float = 1.0
    schedule: Literal["cosine", "constant"] = "cosine"
    lr_warmup: float = 0.05  # share of the steps

    def __post_init__(self) -> None:
        if not 0.0 <= self.lr_warmup < 1.0:
            raise ConfigError(f"lr_warmup is a share of the steps in [0, 1), got {self.lr_warmup}")
        check_least(self, {"lr": 0, "weight_decay": 0, "eps": 0})
        if not all(0.0 <= beta < 1.0 for beta in self.betas):
            raise ConfigError(f"betas are two shares in [0, 1), got {self.betas}")
        if not self.clip_norm > 0.0:
            raise ConfigError(f"clip_norm must be above 0, got {self.clip_norm}")


def lr_at(config: OptimConfig, step: int, total: int) -> float:
    """Return the learning rate of optimizer step `step` (counted from 0) out of `total`."""
    warmup = math.ceil(config.lr_warmup * total)
    if step < warmup:
        return config.lr * (step + 1) / warmup
    if config.schedule == "constant":
        return config.lr
    progress = (step - warmup) / max(1, total - warmup)
    return config.lr * 0.5 * (1.0 + math.cos(math.pi * min(1.0, progress)))


def decays(name: str, parameter: Tensor) -> bool:
    """Say whether weight decay applies: matrices only, no norm, bias or modulation table."""
    return parameter.ndim >= 2 and name.rsplit(".", 1)[-1] not in ("bias", "b", "modulation")


def decay_groups(named: Mapping[str, Tensor]) -> list[dict[str, Any]]:
    """Return an optimizer's parameter groups: with weight decay, and without."""
    groups = [
        {"params": [p for n, p in named.items() if decays(n, p)]},
        {"params": [p for n, p in named.items() if not decays(n, p)], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor, sharing its storage (the tensor itself when it is not
    sharded)."""
    return tensor.detach().to_local() if isinstance(tensor, DTensor) else tensor.detach()


def spread(part: Tensor, parameter: Tensor) -> Tensor:
    """Return this rank's part of a state as the tensor it is a part of, sharded like its
    parameter."""
    if not isinstance(parameter, DTensor):
        return part
    return DTensor.from_local(
        part,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def owners(parameter: Tensor) -> int:
    """Return how many ranks hold the same part of a parameter: 1 when fully sharded, all of them
    when not."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    if not isinstance(parameter, DTensor):
        return world
    pairs = zip(parameter.placements, parameter.device_mesh.shape)
    return world // math.prod(size for placement, size in pairs if placement.is_shard())


def reduce_step(parameters: Mapping[str, nn.Parameter], losses_K: Tensor) -> tuple[Tensor, Tensor]:
    """Return the global gradient norm and the losses' mean over ranks, from one all-reduce.

    A parameter that several ranks hold counts once, whether it is sharded, replicated or both; one
    without a gradient counts nothing.

    Args:
        parameters: the trained parameters, DTensors or plain tensors, with gradients averaged over
            ranks.
        losses_K: float64 [K], this rank's weighted losses.

    Returns:
        Norm float32 [], losses float64 [K]; either is non-finite on every rank if it is on one.
    """
    by_owners: dict[int, list[Tensor]] = {}
    for parameter in parameters.values():
        if parameter.grad is not None:
            by_owners.setdefault(owners(parameter), []).append(local(parameter.grad))
    squares = losses_K.new_zeros(())
    for count, grads in by_owners.items():
        # float32 whatever the gradients are: a norm returned in bf16 is off by up to 0.4 %
        norms = torch.stack(torch._foreach_norm(grads, 2, dtype=torch.float32))
        squares = squares + norms.double().square().sum() / count
    total = torch.cat([squares[None], losses_K])
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(total)
        total[1:] /= dist.get_world_size()
    return total[0].sqrt().float(), total[1:]


class AdamW:
    """AdamW with float32 state, torch's own, over local shards.

    Args:
        parameters: name -> trained parameter (DTensor or plain).
        config: rates and decay.
        fused: one kernel for all parameters, which also clips and skips on the device; False is the
            public loop, one tensor after another, which reads the skip flag on the host.
    """

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], config: OptimConfig, *, fused: bool = False
    ) -> None:
        self.parameters, self.config, self.fused = dict(parameters), config, fused
        self.shards = {name: nn.Parameter(local(p)) for name, p in self.parameters.items()}
        device = next(iter(self.shards.values())).device
        self.lr = torch.tensor(config.lr, device=device) if fused else config.lr
        self.inner = torch.optim.AdamW(
            decay_groups(self.shards),
            lr=self.lr,
            betas=config.betas,
            eps=config.eps,
            weight_decay=config.weight_decay,
            fused=fused,
            foreach=False,
            capturable=fused and device.type == "cuda",  # lets a CUDA graph hold the step
        )
        for shard in self.shards.values():  # made now, so that a checkpoint can be loaded into them
            self.inner.state[shard] = {
                "step": torch.zeros((), device=shard.device if fused else "cpu"),
                "exp_avg": torch.zeros_like(shard),
                "exp_avg_sq": torch.zeros_like(shard),
            }

    def set_lr(self, lr: float) -> None:
        """Set the learning rate of the next step (in place on the device when fused: a CUDA graph
        reads it)."""
        if self.fused:
            self.lr.fill_(lr)
            return
        for group in self.inner.param_groups:
            group["lr"] = lr

    def step(self, norm: Tensor, bad: Tensor) -> None:
        """Clip to `clip_norm` and update, or change nothing at all where `bad` is true.

        Args:
            norm: float32 [], the global gradient norm.
            bad: bool [], true when this step must be skipped.
        """
        for name, parameter in self.parameters.items():
            grad = parameter.grad
            self.shards[name].grad = None if grad is None else local(grad)
        divisor = (norm / self.config.clip_norm).clamp(min=1.0)
        if self.fused:
            self.inner.grad_scale, self.inner.found_inf = divisor, bad.float()
            self.inner.step()
        elif not bad.item():
            torch._foreach_div_(
                [s.grad for s in self.shards.values() if s.grad is not None], divisor
            )
            self.inner.step()

    def state(self) -> dict[str, Tensor]:
        """Return the live state as `name.exp_avg`, `name.exp_avg_sq` (sharded like the parameter)
        and `name.step`."""
        return {
            f"{name}.{key}": value if key == "step" else spread(value, self.parameters[name])
            for name, shard in self.shards.items()
            for key, value in self.inner.state[shard].items()
        }


@torch.no_grad()
def split_master(parameter: nn.Parameter) -> Tensor:
    """Turn a float32 parameter into bf16, in place, and return the int16 low half that it lost."""
    master, low = parameter.data, torch.empty_like(parameter, dtype=torch.int16)
    parameter.data = torch.empty_like(master, dtype=torch.bfloat16)
    _store_master(parameter, low, master)
    return low


class SplitAdamW:
    """AdamW whose float32 master weight is a bf16 parameter plus the 16 bits that it lacks.

    A parameter costs 10 bytes with its gradient (bf16 parameter 2, gradient 2, low half 2, moments
    2 + 2) or 12 with a float32 second moment, against 16. The parameter is the master rounded to
    bf16 and `low` the signed difference of their bit patterns, so that parameter and low half give
    the master back exactly. A bf16 second moment is rounded stochastically: at beta2 = 0.999 one
    step moves it by 0.1 %, below the 0.4 % that bf16 resolves, and to-nearest rounding would freeze
    it.

    Args:
        parameters: name -> bf16 parameter (DTensor or plain).
        config: rates and decay.
        low: name -> whole int16 tensor from `split_master`; None: the masters are the parameters.
        first: dtype of the first moment.
        second: dtype of the second moment.
        seed: of the stochastic rounding.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        config: OptimConfig,
        *,
        low: Mapping[str, Tensor] | None = None,
        first: torch.dtype = torch.bfloat16,
        second: torch.dtype = torch.bfloat16,
        seed: int = 0,
    ) -> None:
        self.parameters, self.config, self.seed = dict(parameters), config, seed
        for name, p in self.parameters.items():
            if p.dtype != torch.bfloat16:
                raise ConfigError(f"split_adamw needs bf16 parameters, but {name} is {p.dtype}")
        self.shards = {name: local(p).view(-1) for name, p in self.parameters.items()}
        device = next(iter(self.shards.values())).device
        self.lr = torch.tensor(config.lr, device=device)
        self.steps = torch.zeros((), device=device)
        self.low = {n: torch.zeros_like(s, dtype=torch.int16) for n, s in self.shards.items()}
        for name, whole in (low or {}).items():
            self.low[name].copy_(_part_of(whole, self.parameters[name]).reshape(-1))
        self.exp_avg = {n: torch.zeros_like(s, dtype=first) for n, s in self.shards.items()}
        self.exp_avg_sq = {n: torch.zeros_like(s, dtype=second) for n, s in self.shards.items()}
        self.update = _split_update
        if device.type == "cuda":
            self.update = torch.compile(_split_update, fullgraph=True, dynamic=True)

    def set_lr(self, lr: float) -> None:
        """Set the learning rate of the next step, in place on the device."""
        self.lr.fill_(lr)

    def master(self, name: str) -> Tensor:
        """Return this rank's part of one float32 master, flat."""
        return _load_master(self.shards[name], self.low[name])

    def step(self, norm: Tensor, bad: Tensor) -> None:
        """Clip to `clip_norm` and update, or change nothing at all where `bad` is true; see
        `AdamW.step`."""
        self.steps += (~bad).float()
        beta1, beta2 = self.config.betas
        scalars = (
            (norm / self.config.clip_norm).clamp(min=1.0),
            bad,
            self.lr,
            self.steps,
        )
        for index, (name, shard) in enumerate(self.shards.items()):
            parameter = self.parameters[name]
            if parameter.grad is None or not shard.numel():
                continue
            decay = self.config.weight_decay if decays(name, parameter) else 0.0
            state = (shard, self.low[name], self.exp_avg[name], self.exp_avg_sq[name])
            grad = local(parameter.grad).reshape(-1)
            salt = torch.full((), self.seed * 8191 + index, dtype=torch.int32, device=shard.device)
            self.update(state, grad, scalars, (beta1, beta2, self.config.eps, decay, salt))

    def state(self) -> dict[str, Tensor]:
        """Return the live state as `name.low`, `name.exp_avg`, `name.exp_avg_sq` (sharded like the
        parameter) and `step`."""
        parts = {"low": self.low, "exp_avg": self.exp_avg, "exp_avg_sq": self.exp_avg_sq}
        found = {
            f"{name}.{key}": spread(tensors[name].view(local(parameter).shape), parameter)
            for name, parameter in self.parameters.items()
            for key, tensors in parts.items()
        }
        return found | {"step": self.steps}


def _part_of(whole: Tensor, parameter: Tensor) -> Tensor:
    if not isinstance(parameter, DTensor):
        return whole
    mesh, placements = parameter.device_mesh, parameter.placements
    return local(distribute_tensor(whole, mesh, placements, src_data_rank=None))


def _load_master(shard: Tensor, low: Tensor) -> Tensor:
    high = shard.view(torch.int16).to(torch.int32) << 16
    return (high + low.to(torch.int32)).view(torch.float32)


def _store_master(shard: Tensor, low: Tensor, master: Tensor) -> None:
    bits = master.contiguous().view(torch.int32)
    high = (bits + 0x8000) >> 16  # half away from zero: then the difference always fits 16 bits
    low.copy_((bits - (high << 16)).to(torch.int16))
    shard.copy_(high.to(torch.int16).view(torch.bfloat16))


def _noise16(like: Tensor, steps: Tensor, salt: Tensor) -> Tensor:
    """Return int32 in [0, 65536): a hash of (position, step, salt), 32-bit finaliser of
    MurmurHash3."""
    x = torch.arange(like.numel(), dtype=torch.int32, device=like.device)
    x = x + steps.to(torch.int32) * 668265263 + salt * 374761393
    x = (x ^ ((x >> 16) & 0xFFFF)) * -2048144789
    x = (x ^ ((x >> 13) & 0x7FFFF)) * -1028477387
    return (x ^ (x >> 16)) & 0xFFFF


def _split_update(
    state: tuple[Tensor, ...], grad: Tensor, scalars: tuple[Tensor, ...], constants: tuple
) -> None:
    shard, low, exp_avg, exp_avg_sq = state
    divisor, bad, lr, steps = scalars
    beta1, beta2, eps, decay, salt = constants
    old = _load_master(shard, low)
    grad = grad.float() / divisor
    m = torch.lerp(exp_avg.float(), grad, 1.0 - beta1)
    v = exp_avg_sq.float() * beta2 + grad * grad * (1.0 - beta2)
    denominator = (v / (1.0 - beta2**steps)).sqrt() + eps
    new = old * (1.0 - lr * decay) - (lr / (1.0 - beta1**steps)) * m / denominator
    if exp_avg_sq.dtype == torch.bfloat16:
        bits = v.view(torch.int32) + _noise16(v, steps, salt)
        v = (bits & -65536).view(torch.float32)
    _store_master(shard, low, torch.where(bad, old, new))
    exp_avg.copy_(torch.where(bad, exp_avg, m.to(exp_avg.dtype)))
    exp_avg_sq.copy_(torch.where(bad, exp_avg_sq, v.to(exp_avg_sq.dtype)))
