"""Experiments of notebook 03: what starting costs, what a formula moves, what is in a block."""

import dataclasses
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from wamlab.config import replace
from wamlab.dist import device
from wamlab.measure import Record, measure_ms, stamp, synchronize
from wamlab.model.attention import Layout, build_attention
from wamlab.model.dit import MODEL_SIZES, PUBLIC, ModelOptions, WorldActionDiT
from wamlab.model.flops import seen_pairs
from wamlab.profiler import profile_steps
from wamlab.trace import kernel_table, read_trace
from wamlab.train.bench_dit import DiTCase, random_inputs

Table = dict[str, tuple[int, float]]  # kernel -> (how often, milliseconds), as trace.kernel_table


def scaling(dev: torch.device, sizes_kib: Sequence[int]) -> dict[int, float]:
    """Return the microseconds of y = 2 x over buffers of several sizes: KiB read -> time.

    The lower quartile of the repeats: whatever disturbs a call of microseconds makes it longer.
    """
    found = {}
    for kib in sizes_kib:
        x = torch.ones(kib * 256, device=dev)
        y = torch.empty_like(x)  # a fresh one would be mapped page by page
        inner = max(1, min(200, 4096 // kib))  # to one reading of the clock, which costs too

        def run(x: Tensor = x, y: Tensor = y, inner: int = inner) -> None:
            for _ in range(inner):
                torch.mul(x, 2.0, out=y)

        found[kib] = measure_ms(run, dev=dev, warmup=3, repeats=9).q25 / inner * 1e3
    return found


def traffic(fn: Callable[..., Any], *args: Tensor) -> list[tuple[str, int]]:
    """Return what every operation of an eager call reads and writes, in bytes, in order.

    Views move nothing and are left out; a broadcast input counts with the bytes that it has.
    """
    with _Traffic() as seen:
        fn(*args)
    return seen.rows


class _Traffic(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[str, int]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        inputs = [t for t in tree_leaves((args, kwargs or {})) if isinstance(t, Tensor)]
        outputs = [t for t in tree_leaves(out) if isinstance(t, Tensor)]
        held = {t.untyped_storage().data_ptr() for t in inputs}
        view = all(t.untyped_storage().data_ptr() in held for t in outputs)
        if not view:
            tensors = {t.data_ptr(): t for t in (*inputs, *outputs)}.values()  # x * x reads x once
            moved = sum(min(t.nbytes, t.untyped_storage().nbytes()) for t in tensors)
            self.rows.append((func.overloadpacket.__name__, moved))
        return out


def attention_ways(layout: Layout, heads: int, width: int, dev: torch.device) -> list[Record]:
    """Time one layer's self-attention in each way, forward and backward.

    Returns:
        Records of scope "attention" with `calls`, and `pairs_share`: (query, key) pairs that are
        computed over those that see each other.
    """
    ways = {
        "18 calls": {"impl": "loops", "joint_queries": False, "state_is_value": False},
        "prefix": {"impl": "prefix"},
        "dense": {"impl": "dense"},
    }
    torch.manual_seed(0)
    q, k, v = (
        torch.randn(1, layout.tokens, heads, width, device=dev, requires_grad=True)
        for _ in range(3)
    )
    records = []
    for name, way in ways.items():
        attend = build_attention(layout, way.pop("impl"), dev, **way)

        def run(attend: Any = attend) -> Tensor:
            out = attend(q, k, v)
            out.sum().backward()
            return out

        calls = sum(bool(call.keys) for call in attend.calls) or 1
        pairs = layout.tokens**2 if attend.impl == "dense" else seen_pairs(layout)
        extra = {"calls": calls, "pairs_share": pairs / seen_pairs(layout), "output": run().norm()}
        extra["output"] = extra["output"].item()
        timing = measure_ms(run, dev=dev, warmup=2, repeats=7)
        records.append(stamp(Record(name=name, scope="attention", step_ms=timing, extra=extra)))
    return records


@dataclasses.dataclass(kw_only=True)
class BlockRun:
    """One block with fixed inputs: `step()` runs it forward and backward."""

    block: nn.Module
    args: tuple
    kwargs: dict[str, Any]
    weights: Tensor

    def step(self) -> None:
        """Run forward and backward once; gradients are made anew."""
        self.block.zero_grad(set_to_none=True)
        x = self.args[0].detach().requires_grad_()
        out = self.block(x, *self.args[1:], **self.kwargs)
        out.backward(self.weights)


def build_block(
    way: str, dev: torch.device, *, size: str = "tiny", micro_batch: int = 1
) -> BlockRun:
    """Build one block of a model size with what the network hands it.

    Args:
        way: "official" (the public way), "eager" (exact shortcuts and one attention call, not
            compiled) or "compiled" (the same through torch.compile).
        dev: where it runs.
        size: a key of MODEL_SIZES.
        micro_batch: samples.
    """
    torch.manual_seed(0)
    impl = "fused" if way == "compiled" else "reference"
    options = PUBLIC if way == "official" else ModelOptions(impl=impl, attention="dense")
    config = replace(MODEL_SIZES[size], num_layers=2)  # the last block is cut short: take the first
    case = DiTCase(name=way, size=size, micro_batch=micro_batch, device=dev.type)
    with dev:
        model = WorldActionDiT(config, options)
    block, caught = model.blocks()[0], []
    hook = block.register_forward_pre_hook(
        lambda module, args, kwargs: caught.append((args, kwargs)), with_kwargs=True
    )
    with torch.no_grad():
        model(**random_inputs(config, case, dev=dev, dtype=torch.float32))
    hook.remove()
    (args, kwargs) = caught[0]
    if way == "compiled":
        block.forward = torch.compile(block.forward, fullgraph=True, dynamic=False)
    args = tuple(a.clone() for a in args)
    return BlockRun(block=block, args=args, kwargs=kwargs, weights=torch.randn_like(args[0]))


def block_kernels(run: BlockRun, dev: torch.device) -> Table:
    """Return what one step of a block runs: kernels on a GPU, operators on a CPU."""
    with tempfile.TemporaryDirectory() as folder:
        path = profile_steps(run.step, folder, dev=dev, warmup=3, active=1)
        return kernel_table(read_trace(path))


def blocks(config: Mapping[str, Any]) -> dict[str, Any]:
    """Build one block in several ways, time each and list what it runs; a target of `launch`.

    What torch.compile makes for a CPU is named, so that it shows in the trace.

    Args:
        config: `device` ("cpu" or "cuda") and `ways`, see `build_block`.

    Returns:
        `tables`: way -> Table; `ms`: way -> milliseconds of forward and backward, median and
        quartiles; `first_s`: way -> seconds of the first call, compilation included.
    """
    import torch._inductor.config as settings

    torch.set_num_threads(1)
    dev, found = device(config["device"]), {"tables": {}, "ms": {}, "first_s": {}}
    with settings.patch({"cpp.enable_kernel_profile": True}):
        for way in config["ways"]:
            run, start = build_block(way, dev), time.perf_counter()
            run.step()
            synchronize(dev)
            found["first_s"][way] = time.perf_counter() - start
            timing = measure_ms(run.step, dev=dev, warmup=3, repeats=15)
            found["ms"][way] = [timing.median, timing.q25, timing.q75]
            found["tables"][way] = block_kernels(run, dev)
    return found
