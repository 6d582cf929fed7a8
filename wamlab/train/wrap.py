"""The one place that wraps a model: recompute, compile, sharding, and the reason for their
order."""

import contextlib
import re
from collections.abc import Iterator

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)

from wamlab.config import ConfigError, UserError
from wamlab.train.optimizations import Fsdp2, StepPlan, recompute_of
from wamlab.train.wire import Wires

HALF_WRITTEN = re.compile(r"(\S+\.so): (?:file too short|invalid ELF header)")


class CompileCacheError(UserError):
    """A file of the compile cache is broken."""


@contextlib.contextmanager
def explained() -> Iterator[None]:
    """Turn the failure to load a half-written file of Inductor's cache into its name and cure.

    A process that is killed while the linker writes leaves one, and it is found again for ever.

    Raises:
        CompileCacheError: the body met such a file.
    """
    try:
        yield
    except Exception as error:
        broken = HALF_WRITTEN.search(str(error))
        if not broken:
            raise
        raise CompileCacheError(
            f"{broken[1]} is half-written: a compiler was killed once; delete this file and run "
            "again"
        ) from error


def wrap(model: nn.Module, plan: StepPlan, mesh: DeviceMesh | None, precision: str) -> Wires | None:
    """Apply recompute, compile and sharding to a finished model, in place and in the order that
    works.

    1. Recompute stands inside the block's forward. Outside `fully_shard` it replays FSDP2's hooks,
       and releases that cast inputs in the forward alone then fail ("different metadata"); outside
       the compiled graph it would split it.
    2. Compile the block's forward, recompute included, as one graph. Hooks that come later stay
       outside of it.
    3. `fully_shard` each block: one all-gather and one reduce-scatter a block.
    4. `fully_shard` the root last, even if it owned no parameter: it makes the blocks one system
       that prefetches and overlaps. Without it each block is a root of its own and 98 % of the
       communication is exposed.

    Inputs are never cast by FSDP2 (`cast_forward_inputs=False`): a timestep of 999.8 would reach
    the model as 1000.

    Args:
        model: has `loss(batch, draws)`, `blocks()` and `frozen()`.
        plan: what to apply.
        mesh: one dimension, or two (replicate, shard); needed with `plan.fsdp`.
        precision: "bf16" makes FSDP2 compute in bf16.

    Returns:
        What travels between the shards; None without sharding.
    """
    blocks = list(model.blocks())
    for index, block in enumerate(blocks):
        mode = recompute_of(plan.recompute, index)
        if mode != "none" and not hasattr(block, "recompute"):
            raise ConfigError(
                f"recompute {mode!r}: {type(block).__name__} has no attribute `recompute`"
            )
        block.recompute = mode
    if plan.compile:
        for block in blocks:
            block.forward = torch.compile(block.forward, fullgraph=True, dynamic=False)
    if plan.fsdp is None:
        return None
    return _shard(model, blocks, plan.fsdp, mesh=mesh, precision=precision)


def _shard(
    model: nn.Module, blocks: list[nn.Module], fsdp: Fsdp2, *, mesh: DeviceMesh, precision: str
) -> Wires:
    over = mesh if fsdp.between == "same" else _island(mesh)
    bf16 = precision == "bf16"
    reduce_dtype = torch.bfloat16 if fsdp.reduce_dtype == "bf16" else torch.float32
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if bf16 else None,
        reduce_dtype=reduce_dtype if bf16 else None,
        cast_forward_inputs=False,
    )
    ignored = unsharded(model)
    kept = len(blocks) if fsdp.keep_unsharded < 0 else fsdp.keep_unsharded
    for index, block in enumerate(blocks):
        reshard = index < len(blocks) - kept
        fully_shard(
            block,
            mesh=over,
            mp_policy=policy,
            reshard_after_forward=reshard,
            ignored_params=ignored,
        )
    modules = list(blocks)
    if fsdp.root:
        fully_shard(
            model, mesh=over, mp_policy=policy, reshard_after_forward=False, ignored_params=ignored
        )
        register_fsdp_forward_method(model, "loss")
        modules.append(model)
    if fsdp.prefetch and fsdp.root:
        depth = fsdp.prefetch
        for index, block in enumerate(blocks):
            block.set_modules_to_forward_prefetch(blocks[index + 1 : index + 1 + depth])
            block.set_modules_to_backward_prefetch(blocks[max(0, index - depth) : index][::-1])
    return Wires(modules, fsdp, mesh)


def _island(mesh: DeviceMesh) -> DeviceMesh:
    """Return this rank's island of a mesh, whose mean with the others is not FSDP2's to take."""
    if mesh.ndim == 1:
        raise ConfigError("fsdp2.between says what travels between copies: set replicate above 1")
    return mesh["shard"]


def unsharded(model: nn.Module) -> set[nn.Parameter]:
    """Return the parameters that stay whole on every rank: the frozen modules', and scalars.

    What is frozen inside the trained network (the backbone under adapters) is sharded with it.
    """
    frozen = {p for module in model.frozen() for p in module.parameters()}
    return frozen | {p for p in model.parameters() if p.ndim == 0}  # FSDP2 shards rows
