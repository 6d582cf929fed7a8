"""What to train on and how to read it: DataConfig, and the data sets that it opens.

The defaults do what the public training code does: each sample opens its videos, converts every
decoded frame and is augmented on the CPU, in the training process.
"""

import multiprocessing
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import forkserver
from typing import Literal

import numpy as np
import torch

from wamlab.config import ConfigError, check_name, lookup
from wamlab.data.cache import DecoderCache
from wamlab.data.embodiment import EMBODIMENTS, Embodiment
from wamlab.data.lerobot import LeRobotDataset
from wamlab.data.metadata import DatasetError
from wamlab.data.sampler import STRATEGIES, Shards, Unions
from wamlab.data.video import DECODERS
from wamlab.data.windows import Mixture, WindowDataset

GPU_DECODERS = ("torchcodec-cuda", "pynvvideocodec")


@dataclass(frozen=True, kw_only=True)
class Source:
    """A further data set of a mixture.

    Args:
        root: its folder or hub id.
        embodiment: a key of EMBODIMENTS.
        prompt: as DataConfig's.
        weight: how often it is drawn, relative to the others.
    """

    root: str
    embodiment: str
    prompt: str | None = None
    weight: float = 1.0


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """What to train on and how to read it.

    Args:
        root: a LeRobot data set's folder, or its hub id.
        embodiment: a key of EMBODIMENTS.
        prompt: template with {instruction} and {views}; None is the embodiment's. What training
            starts from was trained with one: another is silently off its distribution.
        weight: how often it is drawn, relative to `mixture`.
        mixture: further data sets.
        episodes: only the episodes [first, stop) of the table; holds some out.
        decoder: a key of DECODERS.
        decoder_cache: decoders kept open in each process; 0 opens a fresh one each time.
        decoder_threads: FFmpeg threads a decoder.
        view_threads: views of a sample decoded at the same time.
        augment: "cpu" one sample at a time where it is read, "device" the whole batch.
        sampling: a key of STRATEGIES, or a strategy with its own settings.
        workers: processes that read samples; 0 reads in the training process.
        prefetch: batches assembled ahead by a thread, the next one already on the device; 0 none.
        start_method: how workers start. "fork" is quick, but unsafe beside threads and CUDA.
        train: random crops, jitter and paraphrases; else centre crops and the first wording.
        videos: False leaves the videos unread, for a model with a full latent cache.
    """

    root: str = "data_samples/droid_mini"
    embodiment: str = "toy"
    prompt: str | None = None
    weight: float = 1.0
    mixture: tuple[Source, ...] = ()
    episodes: tuple[int, int] | None = None
    decoder: str = "pyav-naive"
    decoder_cache: int = 0
    decoder_threads: int = 1
    view_threads: int = 1
    augment: Literal["cpu", "device"] = "cpu"
    sampling: str | Shards | Unions = "step"
    workers: int = 0
    prefetch: int = 0
    start_method: Literal["forkserver", "spawn", "fork"] = "forkserver"
    train: bool = True
    videos: bool = True

    def __post_init__(self) -> None:
        lookup(DECODERS, self.decoder, "decoder")
        for source in (self, *self.mixture):
            robot_of(source)
        check_name(self.augment, ("cpu", "device"), "place of augmentation")
        if isinstance(self.sampling, str):
            lookup(STRATEGIES, self.sampling, "sampling strategy")
        least = {"workers": 0, "prefetch": 0, "decoder_cache": 0}
        for name, low in (least | {"decoder_threads": 1, "view_threads": 1}).items():
            if getattr(self, name) < low:
                raise ConfigError(f"{name} must be {low} or more, got {getattr(self, name)}")
        if self.train and not self.videos:
            raise ConfigError(
                "videos=False needs train=False: what a latent cache keeps was not augmented"
            )
        if self.decoder in GPU_DECODERS and (self.workers or self.augment == "cpu"):
            raise ConfigError(
                f"decoder {self.decoder!r} leaves its frames on the GPU: it takes workers=0 and "
                f"augment='device', got workers={self.workers}, augment={self.augment!r}"
            )


def robot_of(source: Source | DataConfig) -> Embodiment:
    """Return the robot of a data set, with the prompt template that the configuration gives it.

    Raises:
        ConfigError: an unknown embodiment, or a template with other fields than its two.
    """
    robot = lookup(EMBODIMENTS, source.embodiment, "embodiment")
    return replace(robot, prompt=source.prompt) if source.prompt is not None else robot


def prepare_workers(config: DataConfig) -> None:
    """Start the process that workers fork from, which imports torch while the caller does more.

    Args:
        config: of the loader that will be made; without workers nothing starts.
    """
    if config.workers and config.start_method == "forkserver":
        # imports once, not once a worker
        multiprocessing.set_forkserver_preload(["wamlab.data.loader"])
        forkserver.ensure_running()


def open_data(
    config: DataConfig, *, device: torch.device | str = "cpu", progress: bool = False
) -> WindowDataset | Mixture:
    """Open the data sets of a configuration.

    Args:
        config: what to open.
        device: where frames are decoded to.
        progress: show a bar where tables have to be converted first.

    Raises:
        DatasetError: a data set that cannot be used, or parts of a mixture that make no batch.
    """
    cache = DecoderCache(
        config.decoder, size=config.decoder_cache, device=device, threads=config.decoder_threads
    )
    pool = ThreadPoolExecutor(config.view_threads) if config.view_threads > 1 else None
    parts = []
    for source in (config, *config.mixture):
        dataset = LeRobotDataset(source.root, robot_of(source), progress=progress)
        parts.append(WindowDataset(dataset, open_video=cache, map_views=pool.map if pool else map))
    if config.episodes:
        _keep_episodes(parts[0], *config.episodes)
    if not config.mixture:
        return parts[0]
    grids = {(p.embodiment.view_hw, p.embodiment.layout) for p in parts}
    if len(grids) > 1:
        raise DatasetError(
            "the data sets of a mixture need one size of view and one layout, got "
            + " and ".join(f"{h}x{w} {layout}" for (h, w), layout in sorted(grids))
        )
    return Mixture(parts, [s.weight for s in (config, *config.mixture)])


def _keep_episodes(data: WindowDataset, first: int, stop: int) -> None:
    index, count = data.index, len(data.dataset.episodes)
    if not 0 <= first < stop <= count:
        raise ConfigError(
            f"episodes [{first}, {stop}) of {data.dataset.root}: it has {count} episodes"
        )
    low, high = index.offsets[first], index.offsets[stop]
    kept = (index.starts >= low) & (index.starts < high)
    counts = np.diff(index.ends, prepend=0)[kept]
    if not len(counts):
        raise DatasetError(
            f"{data.dataset.root}: no sample in episodes [{first}, {stop}): all too short"
        )
    data.index = replace(index, starts=index.starts[kept], ends=np.cumsum(counts))


def embodiment_of(data: WindowDataset | Mixture) -> Embodiment:
    """Return the robot whose views and grid all samples share."""
    return data.parts[0].embodiment if isinstance(data, Mixture) else data.embodiment
