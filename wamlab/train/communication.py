"""Process groups and meshes for training, and the gradient average of what is not sharded."""

import contextlib
from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from wamlab.config import ConfigError
from wamlab.dist import process_group


@contextlib.contextmanager
def training_group(
    device: torch.device, *, sharded: bool, timeout_s: float = 600.0
) -> Iterator[None]:
    """Join the run's process group for a training run.

    One process that shards (for FSDP2's mixed precision on one GPU) gets a group of one over an
    in-process store; a group that the caller has already made is used as it is.
    """
    if dist.is_initialized():
        yield
        return
    with process_group(device, timeout_s):
        alone = sharded and not dist.is_initialized()
        if alone:
            backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        try:
            yield
        finally:
            if alone:
                dist.destroy_process_group()


def data_mesh(device: torch.device, replicate: int = 1) -> DeviceMesh:
    """Return the mesh that FSDP2 shards over: one dimension, or (replicate, shard) for HSDP.

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
    shape = (replicate, world // replicate)
    return init_device_mesh(device.type, shape, mesh_dim_names=("replicate", "shard"))


@torch.no_grad()
def average_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Average over ranks the gradients that FSDP2 does not: those of plain parameters, in one flat
    all-reduce a dtype."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is not None and not isinstance(parameter, DTensor):
            by_dtype.setdefault(parameter.grad.dtype, []).append(parameter.grad)
    for grads in by_dtype.values():
        flat = torch.cat([g.reshape(-1) for g in grads])
        dist.all_reduce(flat)
        flat /= dist.get_world_size()
        for grad, part in zip(grads, flat.split([g.numel() for g in grads])):
            grad.copy_(part.view_as(grad))
