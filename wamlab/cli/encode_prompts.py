"""`wamlab encode-prompts DATASET`: encode each distinct prompt once, for training to read."""

import argparse
from pathlib import Path

import torch
from tqdm import tqdm

from wamlab import dist
from wamlab.config import lookup
from wamlab.data.data_config import Source, robot_of
from wamlab.data.embodiment import EMBODIMENTS
from wamlab.data.lerobot import LeRobotDataset
from wamlab.model.prompt_cache import build_prompt_cache
from wamlab.model.text import TEXT_SIZES, TextEncoder

_RANDOM = "RANDOM weights of seed {seed}: good for trying out, not for training on words"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `wamlab encode-prompts`."""
    parser.add_argument("datasets", nargs="+", help="folders or hub ids of LeRobot data sets")
    parser.add_argument("--embodiment", default="toy", help=f"robot: {', '.join(EMBODIMENTS)}")
    parser.add_argument("--prompt", help="template, as the run's `data.prompt`")
    parser.add_argument(
        "--out", type=Path, default=Path("runs/prompts.safetensors"), help="file of the embeddings"
    )
    parser.add_argument("--text", default="tiny", help=f"encoder: {', '.join(TEXT_SIZES)}")
    parser.add_argument("--weights", help="its checkpoint; without one, random weights")
    parser.add_argument("--tokenizer", help="a folder or a Hugging Face name (default: its own)")
    parser.add_argument("--seed", type=int, default=0, help="of random weights")
    parser.add_argument("--batch", type=int, default=16, help="prompts encoded at once")
    parser.add_argument(
        "--device", default="auto", choices=("auto", "cpu", "cuda"), help="of the encoder"
    )


def run(args: argparse.Namespace) -> int:
    """Encode what the file lacks; an interrupted run continues where it stopped."""
    lookup(TEXT_SIZES, args.text, "text encoder size")
    print(_what(args), flush=True)
    device = dist.device(args.device)
    sources = [
        Source(root=r, embodiment=args.embodiment, prompt=args.prompt) for r in args.datasets
    ]
    prompts = [p for s in sources for p in LeRobotDataset(s.root, robot_of(s)).prompts()]
    encoder = TextEncoder(
        args.text,
        args.weights,
        seed=args.seed,
        tokenizer=args.tokenizer,
        device=device,
        dtype=torch.bfloat16 if device.type == "cuda" else torch.float32,
    )
    with tqdm(unit="prompt", desc="encode") as bar:

        def show(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        cache = build_prompt_cache(args.out, prompts, encoder, batch=args.batch, progress=show)
    rows = sum(len(rows) for _, rows in cache.rows())
    size = args.out.stat().st_size / 2**20
    print(f"{args.out}: {len(cache)} prompts, {rows} rows of {encoder.config.dim}, {size:.1f} MiB")
    return 0


def _what(args: argparse.Namespace) -> str:
    """Return the line that says whose words are encoded, and with what."""
    weights = f"weights {args.weights}" if args.weights else _RANDOM.format(seed=args.seed)
    return f"embodiment {args.embodiment}, text encoder {args.text}, {weights}"
