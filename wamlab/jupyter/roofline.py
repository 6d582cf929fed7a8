"""What a machine reaches at best: arithmetic, memory traffic and all-reduce, and the roofline plot.

A roofline says what bounds an operation: with `intensity` FLOP for every byte it moves, it cannot
do more than min(peak FLOP/s, intensity x peak bytes/s). Source: Williams, Waterman and Patterson,
"Roofline: an insightful visual performance model", CACM 52(4), 2009.
"""

from collections.abc import Callable, Mapping, Sequence

import matplotlib.pyplot as plt
import torch
import torch.distributed as dist
from matplotlib.axes import Axes

from wamlab.dist import device, process_group, rank, world_size
from wamlab.jupyter.plot import COLOURS, GREY, INK, style
from wamlab.measure import Record, measure_ms, stamp

Cost = tuple[Callable[[], object], float, float]  # the work, its FLOPs, the bytes it must move


def measure_op(name: str, cost: Cost, dev: torch.device, repeats: int = 10) -> Record:
    """Time one operation alone.

    Args:
        name: what the record and the plot call it.
        cost: the work, its floating-point operations, and the bytes it must read and write.
        dev: where it runs.
        repeats: timed calls, after 3 that are not.

    Returns:
        Record of scope "op" with `gflops`, `gb_per_s` and `intensity` (FLOP a byte).
    """
    fn, flops, byte_count = cost
    timing = measure_ms(fn, dev=dev, repeats=repeats)
    rates = {"gflops": flops / timing.median / 1e6, "gb_per_s": byte_count / timing.median / 1e6}
    extra = {**rates, "intensity": flops / byte_count}
    return stamp(Record(name=name, scope="op", device=dev.type, step_ms=timing, extra=extra))


def matmul(size: int, dev: torch.device, dtype: torch.dtype = torch.float32) -> Cost:
    """Return the product of two square matrices with `size` rows, and what it costs."""
    a, b = (torch.randn(size, size, device=dev, dtype=dtype) for _ in range(2))
    return lambda: a @ b, 2.0 * size**3, 3.0 * size**2 * a.element_size()


def copy(mib: int, dev: torch.device) -> Cost:
    """Return the copy of a buffer of `mib` MiB, and what it costs."""
    source = torch.ones(mib * 2**18, device=dev)
    target = torch.empty_like(source)
    return lambda: target.copy_(source), 0.0, 2.0 * source.nbytes


def gelu(mib: int, dev: torch.device) -> Cost:
    """Return GELU over a buffer of `mib` MiB, and what it costs (about 10 FLOP an element)."""
    x = torch.randn(mib * 2**18, device=dev)
    return lambda: torch.nn.functional.gelu(x), 10.0 * x.numel(), 2.0 * x.nbytes


def allreduce(config: Mapping[str, object]) -> list[Record]:
    """Time all-reduces of several sizes, on every rank of a run; a target for `launch`.

    Args:
        config: `device` ("cpu" or "cuda") and `kib`, the buffers' sizes in KiB.

    Returns:
        Records of scope "allreduce" with `kib` and `bus_gb_per_s`: bytes that each rank must send,
        2 (n - 1) / n times the buffer, over the time.
    """
    dev, records = device(config["device"]), []
    with process_group(dev):
        for kib in config["kib"]:
            buffer = torch.ones(kib * 256, device=dev)
            timing = measure_ms(lambda b=buffer: dist.all_reduce(b), dev=dev)
            sent = 2 * (world_size() - 1) / world_size() * buffer.nbytes
            extra = {"kib": kib, "bus_gb_per_s": sent / timing.median / 1e6}
            name = f"all-reduce {kib} KiB"
            values = {"scope": "allreduce", "dimension": "communication", "device": dev.type}
            records.append(
                Record(name=name, world_size=world_size(), step_ms=timing, extra=extra, **values)
            )
    return [stamp(record) for record in records] if rank() == 0 else []


@style()
def plot_roofline(records: Sequence[Record], ax: Axes | None = None) -> Axes:
    """Draw operations under the roof that the fastest of them make.

    Args:
        records: of scope "op"; the highest rates among them are the roof.
        ax: where to draw.

    Returns:
        The axes: GFLOP/s over FLOP a byte, both logarithmic.
    """
    if ax is None:
        ax = plt.subplots(figsize=(8, 4), layout="constrained")[1]
    peak = max(r.extra["gflops"] for r in records)
    band = max(r.extra["gb_per_s"] for r in records)
    shown = [r for r in records if r.extra["intensity"] > 0]
    intensities = [r.extra["intensity"] for r in shown]
    ridge = peak / band
    left, right = min(*intensities, ridge) / 3, max(*intensities, ridge) * 3
    ax.plot([left, ridge, right], [left * band, peak, peak], color=INK, lw=2)
    ax.fill_between([left, ridge, right], [left * band, peak, peak], color=GREY, alpha=0.12)
    for record in shown:
        x, y = record.extra["intensity"], record.extra["gflops"]
        ax.plot(x, y, "o", color=COLOURS["compute" if x > ridge else "data"], markersize=7)
        ax.annotate(f" {record.name}", (x, y), xytext=(4, -10), textcoords="offset points")
    ax.set(xscale="log", yscale="log", xlim=(left, right))
    ax.set_xlabel("FLOP for every byte moved")
    ax.set_ylabel("GFLOP/s")
    ax.set_title(f"Roof: {peak:,.0f} GFLOP/s and {band:,.1f} GB/s; they meet at {ridge:.0f}")
    return ax


@style()
def plot_allreduce(records: Sequence[Record], ax: Axes | None = None) -> Axes:
    """Draw all-reduce bandwidth over the buffer's size.

    Returns:
        The axes: GB/s that each rank sends, over KiB, x logarithmic.
    """
    if ax is None:
        ax = plt.subplots(figsize=(8, 3.2), layout="constrained")[1]
    sizes = [r.extra["kib"] for r in records]
    ax.plot(sizes, [r.extra["bus_gb_per_s"] for r in records], "o-", color=COLOURS["communication"])
    ax.set(xscale="log", ylim=(0, None))
    ax.set_xlabel("size of the buffer (KiB)")
    ax.set_ylabel("sent by each rank (GB/s)")
    ax.set_title(f"All-reduce among {records[0].world_size} ranks")
    ax.grid(color="#e3e6ea", lw=0.8)
    return ax
