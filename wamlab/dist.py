"""The process group, and what every rank must agree on.

torchrun sets RANK, WORLD_SIZE and LOCAL_RANK; without them a run is one process and no group is
made.
"""

import contextlib
import gc
import os
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from wamlab.config import ConfigError, check_name


def rank() -> int:
    """Return this process's global rank (0 without torchrun)."""
    return int(os.environ.get("RANK", 0))


def local_rank() -> int:
    """Return this process's rank on its host (0 without torchrun)."""
    return int(os.environ.get("LOCAL_RANK", 0))


def world_size() -> int:
    """Return the number of processes of the run (1 without torchrun)."""
    return int(os.environ.get("WORLD_SIZE", 1))


def device(kind: str = "auto") -> torch.device:
    """Return this rank's device: `cuda:LOCAL_RANK`, or the CPU.

    Args:
        kind: "auto", "cpu" or "cuda".

    Raises:
        ConfigError: another kind; or "cuda" where there is none, or fewer GPUs than ranks.
    """
    check_name(kind, ("auto", "cpu", "cuda"), "device")
    if kind == "cpu" or (kind == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError(
            "device 'cuda' was asked for, but torch sees no CUDA GPU; `wamlab doctor` says why"
        )
    if local_rank() >= torch.cuda.device_count():
        raise ConfigError(
            f"local rank {local_rank()} has no GPU: this host has {torch.cuda.device_count()}; "
            "start as many ranks a host as it has GPUs"
        )
    return torch.device("cuda", local_rank())


@contextlib.contextmanager
def process_group(
    dev: torch.device, timeout_s: float = 600.0, *, alone: bool = False
) -> Iterator[None]:
    """Join the torchrun group (NCCL on GPUs, gloo on CPUs) and leave it, also after an error.

    Args:
        dev: this rank's device.
        timeout_s: of one collective.
        alone: a process without torchrun gets a group of one, over an in-process store; else none.
    """
    on_gpu = dev.type == "cuda"
    if on_gpu:
        dev = torch.device("cuda", torch.cuda.current_device() if dev.index is None else dev.index)
        torch.cuda.set_device(dev)
    how: dict[str, Any] = {"timeout": timedelta(seconds=timeout_s)}
    how["device_id"] = dev if on_gpu else None
    if world_size() == 1 and "MASTER_ADDR" not in os.environ:
        if not alone:
            yield
            return
        # no device_id: NCCL starts with the first collective of a GPU, most runs alone have none
        how = {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo", **how)
    try:
        yield
    finally:
        # FSDP2's states are cycles that hold the group: left to the interpreter's end, a thread of
        # gloo that still lets go of a tensor there aborts the rank (pytorch/pytorch#179291)
        gc.collect()
        dist.destroy_process_group()


def print0(*args: Any, **kwargs: Any) -> None:
    """Print on rank 0 only."""
    if rank() == 0:
        print(*args, **kwargs, flush=True)


def barrier() -> None:
    """Wait for every rank; nothing without others."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.barrier()


def gather(value: Any) -> list[Any]:
    """Return the picklable `value` of every rank, in rank order, on every rank."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values
