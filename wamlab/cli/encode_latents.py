"""`wamlab encode-latents DATASET`: encode every un-augmented sample once, for training to read."""

import argparse
import hashlib
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from wamlab import dist
from wamlab.config import positive, positive_int
from wamlab.data.augment import Augment
from wamlab.data.data_config import DataConfig, open_data
from wamlab.data.embodiment import EMBODIMENTS
from wamlab.data.windows import WindowDataset
from wamlab.draws import Draws
from wamlab.model.dit import MODEL_SIZES
from wamlab.model.latent_cache import Kind, LatentCache
from wamlab.model.wam import WAMConfig, WorldActionModel, latent_meta


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `wamlab encode-latents`."""
    parser.add_argument("dataset", help="folder or hub id of a LeRobot data set")
    parser.add_argument("--embodiment", default="toy", help=f"robot: {', '.join(EMBODIMENTS)}")
    parser.add_argument("--decoder", default="torchcodec", help="reads the videos")
    parser.add_argument(
        "--out", type=Path, default=Path("runs/latents"), help="folder of the cache"
    )
    parser.add_argument("--size", default="tiny", help=f"model: {', '.join(MODEL_SIZES)}")
    parser.add_argument("--vae-weights", help="VAE checkpoint; without one, random weights")
    parser.add_argument("--image-weights", help="CLIP checkpoint; without one, random weights")
    parser.add_argument("--seed", type=int, default=0, help="of random weights")
    parser.add_argument("--batch", type=positive_int, default=8, help="samples encoded at once")
    parser.add_argument("--max-gib", type=positive, default=100.0, help="largest size on disk")
    parser.add_argument(
        "--device", default="auto", choices=("auto", "cpu", "cuda"), help="of the encoders"
    )


def run(args: argparse.Namespace) -> int:
    """Encode what the cache lacks; an interrupted run continues where it stopped."""
    device = dist.device(args.device)
    data = open_data(
        DataConfig(
            root=args.dataset,
            embodiment=args.embodiment,
            decoder=args.decoder,
            decoder_cache=8,
            augment="device",
            train=False,
        )
    )
    config = WAMConfig(
        size=args.size,
        seed=args.seed,
        vae_weights=args.vae_weights,
        image_weights=args.image_weights,
    )
    with device:
        model = WorldActionModel(config, dit_device="meta")
    for option in ("batched_encoders", "skip_unused_y", "compile_encoders"):
        model.set_option(option, True)
    sample = encode(model, data, [0] * args.batch, device)
    kinds = {
        name: Kind(shape=tuple(value.shape[1:]), dtype=value.dtype)
        for name, value in sample.items()
    }
    meta = latent_meta(config) | {"data": identity(data)}
    cache = LatentCache.create(args.out, meta, kinds, samples=len(data), max_gib=args.max_gib)
    todo = cache.missing()
    for start in tqdm(range(0, len(todo), args.batch), unit="batch", desc="encode"):
        ids = todo[start : start + args.batch].tolist()
        ids += ids[-1:] * (args.batch - len(ids))  # one batch size, so one compiled graph
        cache.put(torch.tensor(ids), encode(model, data, ids, device))
    size = cache.rows * sum(kind.nbytes for kind in kinds.values()) / 2**30
    print(f"{args.out}: {cache.rows} of {len(data)} samples, {size:.2f} GiB")
    return 0


def encode(
    model: WorldActionModel, data: WindowDataset, ids: list[int], device: torch.device
) -> dict[str, Tensor]:
    """Return the encoders' outputs of plain samples."""
    views = torch.stack([sample["views"] for sample in data.samples(ids)]).to(device)
    draws = Draws(0, 0, torch.tensor(ids, device=device))
    return model.encode_video(Augment(data.embodiment)(views, draws, train=False))


def identity(data: WindowDataset) -> str:
    """Return 16 hexadecimal digits that name the samples: episodes, starts and layout of views."""
    robot, digest = data.embodiment, hashlib.sha256()
    for array in (data.index.offsets, data.index.starts, data.index.ends):
        digest.update(array.tobytes())
    layout = (robot.views, robot.view_hw, robot.layout, robot.frame_offsets())
    return hashlib.sha256(digest.digest() + repr(layout).encode()).hexdigest()[:16]
