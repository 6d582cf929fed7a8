"""Process groups and meshes for training, and the gradient average of what is not sharded."""

import contextlib
import os
import signal
import threading
from collections.abc import Iterable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from wamlab.config import ConfigError, replace
from wamlab.dist import gather, local_rank, process_group
from wamlab.train.optimizations import StepPlan
from wamlab.train.topology import MeshPlan, host_name, join_hosts, local_links, plan_groups


@contextlib.contextmanager
def training_group(device: torch.device, timeout_s: float = 600.0) -> Iterator[None]:
    """Join the run's process group for a training run.

    One process without torchrun gets a group of one: FSDP2's mixed precision and the checkpoint
    writer need one. A group that the caller has made is used as it is.
    """
    if dist.is_initialized():
        yield
        return
    with process_group(device, timeout_s, alone=True):
        yield


def planned_mesh() -> MeshPlan:
    """Plan the groups of this run's ranks from the links of every host; every rank must call it."""
    per_host = int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))
    mine = (host_name(), local_rank(), *local_links(per_host))
    return plan_groups(*join_hosts(gather(mine)))


def with_links(plan: StepPlan) -> StepPlan:
    """Return the plan with `fsdp2.replicate` 0 replaced by what the links say."""
    if plan.fsdp is None or plan.fsdp.replicate:
        return plan
    return replace(plan, {"fsdp.replicate": planned_mesh().replicate})


def data_mesh(device: torch.device, replicate: int = 1) -> DeviceMesh:
    """Return the mesh that FSDP2 shards over: one dimension, or (replicate, shard) for HSDP.

    Where the links make as many islands as there are copies, each copy gets an island; else ranks
    that follow one another share a copy.

    Args:
        device: this rank's device.
        replicate: copies of the model; each copy is sharded over world size / replicate ranks.

    Raises:
        ConfigError: `replicate` does not divide the world size.
    """
    world = dist.get_world_size()
    if replicate < 1 or world % replicate:
        raise ConfigError(
            f"fsdp2.replicate {replicate} does not divide the {world} ranks of this run"
        )
    if replicate == 1:
        return init_device_mesh(device.type, (world,), mesh_dim_names=("shard",))
    plan = planned_mesh()
    groups = torch.arange(world).view(replicate, -1)
    if plan.replicate == replicate:
        groups = torch.tensor(plan.groups)
    return DeviceMesh(device.type, groups, mesh_dim_names=("replicate", "shard"))


@torch.no_grad()
def average_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Average over ranks the gradients that FSDP2 does not: those of plain parameters, in one flat
    all-reduce a dtype, after the backward."""
    if dist.get_world_size() == 1:
        return
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is not None and not isinstance(parameter, DTensor):
            by_dtype.setdefault(parameter.grad.dtype, []).append(parameter.grad)
    for grads in by_dtype.values():
        mean_over_ranks(grads)


@torch.no_grad()
def mean_over_ranks(tensors: Sequence[Tensor]) -> None:
    """Average tensors of one dtype over all ranks, in place, in one flat all-reduce."""
    flat = torch.cat([t.reshape(-1) for t in tensors])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    for tensor, part in zip(tensors, flat.split([t.numel() for t in tensors])):
        tensor.copy_(part.view_as(tensor))


class StopSignal:
    """SIGTERM and SIGINT as a request that every rank notices before the same step.

    Ranks receive a signal at different moments; one that stopped alone would leave the others in a
    collective. Each step starts a one-number reduction on the CPUs that the next step reads, so
    that nothing waits for the device. A second signal interrupts at once. Outside the main thread
    no handler can be set, and no signal is seen.
    """

    def __init__(self) -> None:
        self.name: str | None = None
        alone = dist.get_world_size() == 1
        self._group = None if alone else dist.new_group(backend="gloo")
        self._pending: tuple[dist.Work, torch.Tensor] | None = None
        self._before: dict[int, object] = {}

    def __enter__(self) -> "StopSignal":
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if self._pending and error[0] is None:
            self._pending[0].wait()

    def _note(self, number: int, frame: object) -> None:
        if self.name:
            raise KeyboardInterrupt
        self.name = signal.Signals(number).name

    def agreed(self) -> bool:
        """Say, alike on every rank, whether any rank was asked to stop one call ago."""
        if self._group is None:
            return self.name is not None
        before, flag = self._pending, torch.tensor([float(self.name is not None)])
        work = dist.all_reduce(flag, dist.ReduceOp.MAX, group=self._group, async_op=True)
        self._pending = (work, flag)
        if before is None:
            return False
        before[0].wait()
        return bool(before[1].item())
