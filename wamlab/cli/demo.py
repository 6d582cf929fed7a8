"""`wamlab demo`: the ladder of speed-ups on a small model and real video files, measured now."""

import argparse
import sys
from pathlib import Path

import torch

from wamlab.config import ConfigError, lookup, replace
from wamlab.data.bench_decode import time_decoders
from wamlab.data.data_config import DataConfig, open_data
from wamlab.data.embodiment import EMBODIMENTS
from wamlab.data.metadata import DatasetError
from wamlab.jupyter.ladder import Row, ladder
from wamlab.jupyter.launch import LaunchError
from wamlab.jupyter.report import write_report
from wamlab.jupyter.table import print_ladder
from wamlab.measure import Record, append_jsonl, machine
from wamlab.model.dit import MODEL_SIZES
from wamlab.model.wam import WAMConfig
from wamlab.train.config import PRESETS, TrainConfig

SAMPLES = Path(__file__).resolve().parents[2] / "data_samples" / "droid_mini"
COMPUTE = ("shortcuts", "compile", "fused_adamw")
# on a CPU one compiled graph for all blocks: compiling takes longer there than the training
COMPUTE_CPU = ({"name": "shortcuts", "trim_last_block": False}, *COMPUTE[1:])
PARALLEL = ("batched_encoders", "micro_batch", "recompute", "fsdp2")
DATA = ("torchcodec", "device_augment", "prefetch")
DECODERS_SHOWN = ("pyav-naive", "pyav", "torchcodec")
WARMUP = 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `wamlab demo`."""
    parser.add_argument("--out", type=Path, default=Path("runs/demo"), help="folder of the results")
    parser.add_argument("--data", type=Path, default=SAMPLES, help="a LeRobot data set of your own")
    parser.add_argument("--embodiment", default="toy", help="how its columns and cameras are named")
    parser.add_argument("--video", type=Path, help="time decoders on it; the ladder runs too")
    parser.add_argument("--size", help="the model's row of MODEL_SIZES (default: the preset's)")
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"),
                        help="where the ladder runs (default: the GPUs, if any)")  # fmt: skip
    parser.add_argument("--repeats", type=int, default=5, help="measured steps a row (default 5)")
    parser.add_argument("--fresh", action="store_true", help="measure again what is in the cache")


def rows(on_gpu: bool) -> list[Row]:
    """Return the rows of the demo, the baseline first.

    On a CPU the parallel rows run two ranks of one thread each, against one rank of two threads.
    """
    ranks = {"nproc": torch.cuda.device_count() if on_gpu else 2, "threads": None if on_gpu else 1}
    compute = COMPUTE if on_gpu else COMPUTE_CPU
    return [
        Row(name="official", dimension=None),
        Row(name="compute", dimension="compute", optimizations=compute),
        Row(name="parallel", dimension="parallel", optimizations=PARALLEL, **ranks),
        Row(name="data", dimension="data", optimizations=DATA),
        Row(
            name="compute+parallel",
            dimension="parallel",
            optimizations=compute + PARALLEL,
            **ranks,
        ),
        Row(
            name="compute+parallel+data",
            dimension="data",
            optimizations=compute + PARALLEL + DATA,
            **ranks,
        ),
    ]


def demo_config(args: argparse.Namespace, on_gpu: bool) -> TrainConfig:
    """Return the configuration that every row starts from: the public way on this machine.

    Raises:
        ConfigError: an unknown size, or a count below 1.
    """
    if args.repeats < 1:
        raise ConfigError(f"--repeats {args.repeats}: at least 1 step must be measured")
    preset = PRESETS["gpu" if on_gpu else "cpu"]
    size = args.size or preset.model.size
    lookup(MODEL_SIZES, size, "model size")
    data = DataConfig(root=str(args.data), embodiment=args.embodiment)
    return replace(
        preset,
        name="demo",
        model=WAMConfig(size=size),
        data=data,
        optimizations=(),
        steps=WARMUP + args.repeats,
        warmup_steps=WARMUP,
        parts_steps=1,
        wait_steps=1,  # the record's share comes from the trace; more repeats would steady a check
        log_every=1,
    )


def run(args: argparse.Namespace) -> int:
    """Run the ladder, print its table and write the report."""
    on_gpu = args.device != "cpu" and torch.cuda.is_available()
    if args.device == "cuda" and not on_gpu:
        raise ConfigError("--device cuda: torch sees no CUDA GPU; `wamlab doctor` says why")
    base = demo_config(args, on_gpu)
    source = _source(args, base.data)
    print(
        f"wamlab demo on {', '.join([machine()['cpu'], *machine()['gpus'][: int(on_gpu)]])}, "
        f"{machine()['cores']} cores\n"
        f"model {base.model.size}, global batch {base.global_batch}, {WARMUP} warm-up and "
        f"{args.repeats} measured steps a row, each row in a fresh process\n"
    )
    args.out.mkdir(parents=True, exist_ok=True)
    decode = _time_decoders(source, on_gpu)
    (args.out / "records.jsonl").unlink(missing_ok=True)
    append_jsonl(args.out / "records.jsonl", decode)
    try:
        records = ladder(base, rows(on_gpu), args.out, fresh=args.fresh)
    except LaunchError as error:
        print(f"wamlab demo: the baseline failed: {error}", file=sys.stderr)
        return 1
    print_ladder(records)
    page = write_report([*records, *decode], args.out)
    print(f"\nreport   {page}\nrecords  {args.out / 'records.jsonl'}")
    print("next     `wamlab lab` opens the course; begin with 00_machine.ipynb")
    return 0


def _source(args: argparse.Namespace, data: DataConfig) -> Path:
    """Return what decoders are timed on, once it is known that the ladder can read its data."""
    if args.video and not args.video.is_file():
        raise ConfigError(f"--video {args.video}: no such file")
    if not args.data.is_dir():
        raise ConfigError(f"--data {args.data}: no such folder; it takes a LeRobot data set")
    try:
        open_data(data)
    except DatasetError as error:
        others = ", ".join(name for name in EMBODIMENTS if name != args.embodiment)
        raise ConfigError(
            f"{error} (read as --embodiment {args.embodiment}; there are also {others})"
        ) from error
    return args.video or args.data


def _time_decoders(source: Path, on_gpu: bool) -> list[Record]:
    names = DECODERS_SHOWN + (("torchcodec-cuda",) if on_gpu else ())
    records = time_decoders(source, names, samples=6)
    for record in records:
        time = f"{record.step_ms.median:.0f} ms a sample" if record.step_ms else record.reason
        print(f"decoder {record.name:<16}{time}")
    print()
    return records
