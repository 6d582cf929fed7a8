"""`wamlab train-vae DATASET`: train the tiny VAE on a data set's videos."""

import argparse
import dataclasses

from wamlab.config import natural, positive, positive_int
from wamlab.train.train_vae import VAETrainConfig, train_vae


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `wamlab train-vae`."""
    default = {f.name: f.default for f in dataclasses.fields(VAETrainConfig)}
    parser.add_argument("datasets", nargs="+", help="folders or hub ids of LeRobot data sets")
    helps = {
        "embodiment": "robot: how columns and cameras are named",
        "decoder": "reads the videos",
        "out": "file of the result",
        "log": "folder of evaluations and sample sheets",
        "device": "auto, cpu or cuda",
    }
    for name, text in helps.items():
        parser.add_argument(
            f"--{name}", default=default[name], help=f"{text} (default {default[name]})"
        )
    parser.add_argument("--weights", help="an earlier result to start from")
    parser.add_argument("--minutes", type=positive, default=default["minutes"], help="of training")
    parser.add_argument(
        "--steps", type=positive_int, help="train this many steps instead of by the clock"
    )
    parser.add_argument(
        "--clips", type=positive_int, default=default["clips"], help="9-frame clips a step"
    )
    parser.add_argument("--lr", type=positive, default=default["lr"], help="learning rate")
    parser.add_argument(
        "--seed", type=natural, default=default["seed"], help="of weights and draws"
    )


def run(args: argparse.Namespace) -> int:
    """Train and save; the last line gives the held-out PSNR."""
    train_vae(VAETrainConfig(**vars(args) | {"datasets": tuple(args.datasets)}))
    return 0
