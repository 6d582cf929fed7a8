"""`wamlab bench augment`: the public per-sample augmentation beside the batched one, compared."""

import argparse
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from wamlab.config import ConfigError, lookup, positive_int
from wamlab.data.augment import IMPLS, Augment, augment_cpu
from wamlab.data.embodiment import EMBODIMENTS, Embodiment
from wamlab.draws import Draws
from wamlab.measure import Record, Timing, append_jsonl, measure_ms, peak_gib, reset_peak, stamp

CHECKED = 2  # samples of the batch whose pixels are compared with the public path's


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `wamlab bench augment`."""
    on_gpu = torch.cuda.is_available()
    parser.add_argument("--embodiment", default="toy", help=f"robot: {', '.join(EMBODIMENTS)}")
    parser.add_argument("--native", type=positive_int, nargs=2, default=(180, 320),
                        metavar=("H", "W"),
                        help="pixels of a recorded frame (default 180 320)")  # fmt: skip
    parser.add_argument(
        "--batch", type=positive_int, default=32 if on_gpu else 2, help="samples a batch"
    )
    parser.add_argument("--device", default="cuda" if on_gpu else "cpu", choices=("cpu", "cuda"),
                        help="where the batched way runs (default: the GPU, if any)")  # fmt: skip
    parser.add_argument("--impl", nargs="+", choices=IMPLS[1:], help="only these ways")
    parser.add_argument("--chunks", type=positive_int, nargs="+", default=(1, 2, 4, 8),
                        help="samples augmented at once, each a row (default 1 2 4 8)")  # fmt: skip
    parser.add_argument("--repeats", type=positive_int, default=10, help="measured calls a row")
    parser.add_argument("--out", type=Path, help="append the records to this JSONL file")


def run(args: argparse.Namespace) -> int:
    """Measure the rows, print them, and return 1 if one is off by more than 1/255."""
    robot = lookup(EMBODIMENTS, args.embodiment, "embodiment")
    dev = torch.device(args.device)
    if dev.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: torch sees no CUDA GPU; `wamlab doctor` says why")
    views = _views(robot, args.batch, tuple(args.native))
    print(
        f"{args.batch} samples of {views.shape[1]} views x {views.shape[2]} frames, "
        f"{args.native[0]}x{args.native[1]} -> {robot.view_hw[0]}x{robot.view_hw[1]}, "
        f"{views.nbytes / 1e6:.0f} MB a batch\n"
    )
    want, record = _public(views, robot)
    records = [record]
    print(_line(record))
    for impl in args.impl or (("batched", "compiled") if dev.type == "cuda" else ("pieces",)):
        for chunk in args.chunks if impl != "pieces" else (1,):
            augment = Augment(robot, impl=impl, chunk=chunk)
            name = f"{impl} on {dev.type}" + (f", chunks of {chunk}" if impl != "pieces" else "")
            records.append(_batch(name, augment, views.to(dev), want=want, repeats=args.repeats))
            print(_line(records[-1]), flush=True)
    if dev.type == "cuda":
        pinned = views.pin_memory()
        upload = _time(lambda: pinned.to(dev, non_blocking=True), dev, args.repeats)
        records.append(_record("upload of the pinned uint8 views", upload, args.batch))
        print(_line(records[-1]))
    if args.out:
        append_jsonl(args.out, records)
    return int(any(r.wrong for r in records))


def _views(robot: Embodiment, batch: int, native: tuple[int, int]) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    shape = (batch, len(robot.views), robot.frames, 3, *native)
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)


def _public(views: Tensor, robot: Embodiment) -> tuple[Tensor, Record]:
    """Time the public path on one thread, as a worker runs it; return its pixels too."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        timing = _time(
            lambda: augment_cpu(views[0], Draws(0, 0, torch.tensor([0])), robot),
            torch.device("cpu"),
            repeats=3,
        )
    finally:
        torch.set_num_threads(threads)
    ids = range(min(CHECKED, len(views)))
    want = torch.stack([augment_cpu(views[i], Draws(0, 0, torch.tensor([i])), robot) for i in ids])
    return want, _record("public, one sample on one CPU thread", timing, batch=1)


def _batch(name: str, augment: Augment, views: Tensor, *, want: Tensor, repeats: int) -> Record:
    draws = Draws(0, 0, torch.arange(len(views), device=views.device))
    reset_peak(views.device)
    got = augment(views, draws)[: len(want)].cpu()
    off = int((got.int() - want.int()).abs().max())
    timing = _time(lambda: augment(views, draws), views.device, repeats)
    wrong = None if off <= 1 else f"pixels differ by {off}/255 from the public path's"
    return _record(name, timing, len(views), off=off, wrong=wrong, dev=views.device)


def _time(fn: Callable[[], Tensor], dev: torch.device, repeats: int) -> Timing:
    return measure_ms(fn, dev=dev, warmup=2, repeats=repeats)


def _record(
    name: str,
    timing: Timing,
    batch: int,
    *,
    off: int | None = None,
    wrong: str | None = None,
    dev: torch.device | None = None,
) -> Record:
    return stamp(
        Record(
            name=name,
            scope="augment",
            dimension="data",
            device=dev.type if dev else "cpu",
            micro_batch=batch,
            step_ms=timing,
            samples_per_s=1e3 * batch / timing.median,
            peak_gib=peak_gib(dev) if dev else None,
            wrong=wrong,
            extra={"sample_ms": timing.median / batch, "off_255": off},
        )
    )


def _line(record: Record) -> str:
    off = record.extra["off_255"]
    text = (
        f"{record.name:<40} {record.step_ms.median:9.2f} ms a batch of {record.micro_batch:<3} "
        f"{record.extra['sample_ms']:9.3f} ms a sample"
    )
    return text + ("" if off is None else f"  off by {off}/255  peak {record.peak_gib:.2f} GiB")
