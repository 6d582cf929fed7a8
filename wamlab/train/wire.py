"""What weights and gradients travel as under FSDP2, through its own hooks.

gather    float8 with one scale for 256 weights; the error joins the next step's weights
scatter   bf16 or float8 to the rank that owns a part, which adds up in float32
between   HSDP's mean between islands, rounded, its error carried along
cut       no communication at all: wrong numbers in the right time, to measure the wait
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_collectives import (
    DefaultAllGather,
    DefaultAllocMixin,
    DefaultReduceScatter,
)

from wamlab.train.compression import HALF
from wamlab.train.optimizations import Fsdp2

CHUNK = 256  # values that share one float32 scale: 1.6 % more bytes
LARGEST = 448.0  # of float8 e4m3
Group = dist.ProcessGroup

# renamed in torch 2.13, where the old name warns
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def to_float8(values: Tensor) -> tuple[Tensor, Tensor]:
    """Round values to float8 e4m3 with one scale a chunk.

    Args:
        values: [..., N].

    Returns:
        float8 [..., C, CHUNK], the last chunk padded with zeros, and scales fp32 [..., C, 1].
    """
    padding = -values.shape[-1] % CHUNK
    padded = nn.functional.pad(values.float(), (0, padding)).unflatten(-1, (-1, CHUNK))
    scales = padded.abs().amax(-1, keepdim=True).clamp(min=1e-30) / LARGEST
    return (padded / scales).to(torch.float8_e4m3fn), scales


def from_float8(small: Tensor, scales: Tensor, count: int) -> Tensor:
    """Return the `count` fp32 values of each row that `to_float8` has rounded."""
    return (small.float() * scales).flatten(-2)[..., :count]


def pack(values: Tensor, kind: str) -> Tensor:
    """Return rows of values as bytes, uint8 [..., bytes]: "bf16" or "float8" with its scales."""
    if kind == "bf16":
        return values.to(torch.bfloat16).view(torch.uint8)
    small, scales = to_float8(values)
    return torch.cat([small.flatten(-2).view(torch.uint8), scales[..., 0].view(torch.uint8)], -1)


def unpack(packed: Tensor, kind: str, count: int) -> Tensor:
    """Return fp32 [..., count] from what `pack` has made."""
    if kind == "bf16":
        return packed.view(torch.bfloat16).float()
    chunks = -(-count // CHUNK)
    small = packed[..., : chunks * CHUNK].view(torch.float8_e4m3fn).unflatten(-1, (-1, CHUNK))
    scales = packed[..., chunks * CHUNK :].contiguous().view(torch.float32)[..., None]
    return from_float8(small, scales, count)


class CutGather(DefaultAllocMixin, AllGather):
    """Copies this rank's part into every other's place."""

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Group, **_: Any) -> None:
        """Fill `output_tensor` without communication."""
        for place, part in enumerate(output_tensor.chunk(group.size())):
            if place != group.rank():  # its own part lies there already
                part.copy_(input_tensor)


class Float8Gather(DefaultAllocMixin, AllGather):
    """Gathers float8 weights of one FSDP module.

    All gathers of a step send the same bytes: forward, backward and every micro-batch must see the
    same weights. `advance` ends the step. What rounding took from a weight is added to the next
    step's, so that over the steps the network sees the true weights on average.
    """

    def __init__(self) -> None:
        self.error: Tensor | None = None
        self._packed: Tensor | None = None

    def advance(self) -> None:
        """Let the next gather read the weights anew."""
        self._packed = None

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Group, **_: Any) -> None:
        """Fill `output_tensor` with every rank's rounded part, this rank's own included."""
        if self._packed is None:
            wanted = input_tensor.float()
            if self.error is not None:
                wanted = wanted + self.error
            self._packed = pack(wanted, "float8")
            left = wanted - unpack(self._packed, "float8", wanted.numel())
            self.error = left.to(input_tensor.dtype)
        packed = self._packed.new_empty(group.size() * self._packed.numel())
        _all_gather(packed, self._packed, group=group)
        rows = packed.view(group.size(), -1)
        whole = unpack(rows, "float8", input_tensor.numel())
        output_tensor.copy_(whole.reshape(-1))


class CutScatter(DefaultAllocMixin, ReduceScatter):
    """Keeps this rank's part of its own gradients."""

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Group, **_: Any) -> None:
        """Fill `output_tensor` without communication."""
        output_tensor.copy_(input_tensor.chunk(group.size())[group.rank()])


class PackedScatter(DefaultAllocMixin, ReduceScatter):
    """Sends each part in fewer bytes to its owner, which adds them up in float32.

    A reduce-scatter in bf16 also rounds every partial sum on its way; here only what travels is
    rounded, once.
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: Group,
        op: dist.ReduceOp,
        **_: Any,
    ) -> None:
        """Leave this rank's part of the reduced gradients in `output_tensor`."""
        packed = pack(input_tensor.view(group.size(), -1), self.kind)
        received = torch.empty_like(packed)
        dist.all_to_all_single(received, packed, group=group)
        total = unpack(received, self.kind, output_tensor.numel()).sum(0)
        if op == dist.ReduceOp.AVG:
            total /= group.size()
        output_tensor.copy_(total)


def mean_between(group: Group, kind: str) -> Callable[[Tensor], None]:
    """Return FSDP2's all-reduce hook for one module: the mean over islands of its gradients.

    Args:
        group: the ranks with the same part, one an island.
        kind: "bf16" or "fp16", with error feedback.
    """
    error: list[Tensor] = []

    def reduce(gradient: Tensor) -> None:
        wanted = gradient + error[0] if error else gradient.clone()
        small = (wanted / group.size()).to(HALF[kind])
        error[:] = [wanted - small.to(gradient.dtype) * group.size()]
        dist.all_reduce(small, group=group)
        gradient.copy_(small)

    return reduce


class Wires:
    """What travels between the ranks of a sharded model.

    Args:
        modules: its FSDP modules.
        config: says what travels.
        mesh: of the run; (replicate, shard) with `config.between`.
    """

    def __init__(self, modules: Sequence[nn.Module], config: Fsdp2, mesh: DeviceMesh) -> None:
        self.modules, self.config = list(modules), config
        self.gathers: list[AllGather] = [DefaultAllGather() for _ in modules]
        if config.gather == "float8":
            self.gathers = [Float8Gather() for _ in modules]
        self.scatter: ReduceScatter = DefaultReduceScatter()
        if config.scatter != "same":
            self.scatter = PackedScatter(config.scatter)
        self.means: list[Callable[[Tensor], None]] = []
        if config.between != "same":
            group = mesh.get_group("replicate")
            self.means = [mean_between(group, config.between) for _ in modules]
        if (config.gather, config.scatter, config.between) != ("same", "same", "same"):
            self.join()

    def join(self) -> None:
        """Let everything travel as the configuration says."""
        for module, gather in zip(self.modules, self.gathers):
            module.set_custom_all_gather(gather)
            module.set_custom_reduce_scatter(self.scatter)
            module.set_requires_all_reduce(True)
        for module, mean in zip(self.modules, self.means):
            module.set_all_reduce_hook(mean)

    def cut(self) -> None:
        """Let nothing travel, until `join`: the numbers are wrong, the work is the same."""
        for module in self.modules:
            module.set_custom_all_gather(CutGather())
            module.set_custom_reduce_scatter(CutScatter())
            module.set_requires_all_reduce(False)
            if self.means:
                module.set_all_reduce_hook(lambda gradient: None)

    def advance(self) -> None:
        """End a step: the next gathers read the weights anew."""
        for gather in self.gathers:
            if isinstance(gather, Float8Gather):
                gather.advance()
