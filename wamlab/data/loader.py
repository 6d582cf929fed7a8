"""From sample numbers to micro-batches on the device, in an order that is a pure function of
(seed, step).

The public way is the default: no workers, nothing prefetched, a fresh decoder for every view, every
frame converted, augmentation on the CPU one sample at a time. `workers` decode in processes of
their own; `prefetch` puts micro-batches on the device before they are asked for. Neither changes a
sample or its place: rank r takes the r-th contiguous share of each step's global batch, so the
order is the same for any number of ranks, workers and any micro-batch.
"""

import contextlib
import dataclasses
import queue
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_collate

from wamlab.config import ConfigError, UserError, lookup
from wamlab.data.augment import Augment, augment_cpu
from wamlab.data.cache import DecoderCache
from wamlab.data.embodiment import EMBODIMENTS
from wamlab.data.lerobot import LeRobotDataset
from wamlab.data.sampler import STRATEGIES, Sampler, mix
from wamlab.data.video import DECODERS
from wamlab.data.windows import Mixture, WindowDataset
from wamlab.draws import Draws


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
    """One data set of a mixture, and how often it is drawn."""

    root: str
    embodiment: str
    weight: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Where samples come from and how they are made; the defaults are the public way."""

    root: str = "data_samples/droid_mini"
    embodiment: str = "toy"
    mixture: tuple[Part, ...] = ()  # instead of `root`; all parts share `embodiment`'s grid
    decoder: str = "pyav-naive"
    decoder_cache: int = 0  # decoders kept open in each process; 0: a fresh one each time
    decoder_threads: int = 1  # FFmpeg threads a decoder
    augment: Literal["cpu", "device"] = "cpu"
    workers: int = 0  # processes that decode
    prefetch: int = 0  # micro-batches made ready ahead of the step
    sampling: str = "step"  # a name of STRATEGIES
    train: bool = True  # False: centre crop, no jitter

    def __post_init__(self) -> None:
        lookup(EMBODIMENTS, self.embodiment, "embodiment")
        lookup(DECODERS, self.decoder, "decoder")
        lookup(STRATEGIES, self.sampling, "sampling strategy")
        for field in ("workers", "prefetch", "decoder_cache"):
            if getattr(self, field) < 0:
                raise ConfigError(f"{field} must be 0 or more, got {getattr(self, field)}")
        if self.workers and not self.prefetch:
            raise ConfigError(f"workers={self.workers} decode ahead: set prefetch to 1 or more")


class Samples:
    """Makes micro-batches of a configuration; each process opens its own files at the first use."""

    def __init__(self, config: DataConfig, seed: int) -> None:
        self.config, self.seed = config, seed
        self.embodiment = EMBODIMENTS[config.embodiment]
        self._data: WindowDataset | Mixture | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_data": None}

    @property
    def data(self) -> WindowDataset | Mixture:
        """The data set, opened at the first use."""
        if self._data is None:
            parts = self.config.mixture
            whole = (Part(root=self.config.root, embodiment=self.config.embodiment, weight=1.0),)
            opened = [self._open(part) for part in parts or whole]
            weights = [part.weight for part in parts]
            self._data = Mixture(opened, weights) if parts else opened[0]
        return self._data

    def _open(self, part: Part) -> WindowDataset:
        config = self.config
        dataset = LeRobotDataset(part.root, lookup(EMBODIMENTS, part.embodiment, "embodiment"))
        if not config.decoder_cache:
            return WindowDataset(dataset, decoder=config.decoder)
        cache = DecoderCache(
            config.decoder, size=config.decoder_cache, threads=config.decoder_threads
        )
        return WindowDataset(dataset, open_video=cache)

    def micro_batch(self, step: int, ids: list[int]) -> dict[str, Any]:
        """Return one collated micro-batch on the CPU.

        Args:
            step: the optimizer step, from which the augmentation is drawn.
            ids: sample numbers.
        """
        paraphrases = [int(mix(self.seed, 7, step, i) >> 33) for i in ids]
        if self.config.sampling == "union" or isinstance(self.data, Mixture):
            samples = self.data.samples(ids, paraphrases=paraphrases)
        else:
            samples = [self.data.sample(i, paraphrase=p) for i, p in zip(ids, paraphrases)]
        if self.config.augment == "cpu":
            for sample in samples:
                draws = Draws(self.seed, step, sample["sample_id"][None])
                views = sample.pop("views")
                sample["video"] = augment_cpu(views, draws, self.embodiment, self.config.train)
        return default_collate(samples)


@dataclasses.dataclass
class _Failure:
    """An error on its way from a worker to the step that waits."""

    error: Exception
    ids: list[int]

    def throw(self) -> None:
        if isinstance(self.error, UserError):
            raise type(self.error)(f"{self.error} (samples {self.ids})") from self.error
        raise self.error


class _Jobs(Dataset):
    """What a worker process runs: (step, ids) -> micro-batch."""

    def __init__(self, samples: Samples) -> None:
        self.samples = samples

    def __getitem__(self, job: tuple[int, list[int]]) -> dict[str, Any] | _Failure:
        try:
            return self.samples.micro_batch(*job)
        except Exception as error:  # handed over, and raised again where the batch is asked for
            return _Failure(error, job[1])


def _start_worker(_: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the run decides
    torch.set_num_threads(1)


class Loader:
    """An endless iterator of this rank's micro-batches, on its device.

    Args:
        config: where samples come from.
        global_batch: samples a step, over all ranks.
        micro_batch: samples of one micro-batch of this rank; divides its share.
        seed: fixes the order, the choice of paraphrase and the augmentation.
        rank: this process.
        world_size: how many there are; divides the global batch.
        device: where batches go.
        start_step: the first step.

    Raises:
        ConfigError: sizes that do not divide.
        DatasetError: a data set that cannot be read.
    """

    def __init__(
        self,
        config: DataConfig,
        *,
        global_batch: int,
        micro_batch: int,
        seed: int,
        rank: int = 0,
        world_size: int = 1,
        device: torch.device | str = "cpu",
        start_step: int = 0,
    ) -> None:
        share, rest = divmod(global_batch, world_size)
        if rest or micro_batch < 1 or share % micro_batch:
            raise ConfigError(
                f"global batch {global_batch} on {world_size} ranks in micro-batches of "
                f"{micro_batch}: the ranks must divide the batch, the micro-batch a rank's share"
            )
        self.config, self.global_batch, self.micro_batch = config, global_batch, micro_batch
        self.seed, self.device = seed, torch.device(device)
        self._share = slice(rank * share, (rank + 1) * share)
        self._position = start_step * (share // micro_batch)  # micro-batches given out
        self._per_step = share // micro_batch
        self._samples = Samples(config, seed)
        self._sampler = Sampler(self._samples.data, seed=seed, strategy=config.sampling)
        self._augment = Augment(self._samples.embodiment)
        self._stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        self._source: Iterator | None = None
        self.wait_s = 0.0  # time blocked in next(), in all

    def ids_of_step(self, step: int) -> Tensor:
        """Return the sample ids of a step over all ranks, int64 [global_batch]."""
        return torch.from_numpy(self._sampler.ids_of_step(step, self.global_batch))

    def state_dict(self) -> dict[str, int]:
        """Return the position, in samples of all ranks: valid for any number of ranks."""
        done, rest = divmod(self._position, self._per_step)
        return {"step": done, "micro_batches": rest, "per_step": self._per_step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue from a position; what was prefetched is dropped.

        Raises:
            ConfigError: the position is inside a step and the micro-batches are not as they were.
        """
        if state["micro_batches"] and state["per_step"] != self._per_step:
            raise ConfigError(
                f"a position inside a step of {state['per_step']} micro-batches cannot be resumed "
                f"with {self._per_step}: save between steps, or keep ranks and micro-batch"
            )
        self.close()
        self._position = state["step"] * self._per_step + state["micro_batches"]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return self

    def __next__(self) -> dict[str, Any]:
        start = time.perf_counter()
        if self._source is None:
            self._source = self._open()
        batch = next(self._source)
        if isinstance(batch, _Failure):
            self.close()
            batch.throw()
        step = self._position // self._per_step
        self._position += 1
        batch = self._finish(batch, step)
        self.wait_s += time.perf_counter() - start
        return batch

    def _finish(self, batch: dict[str, Any], step: int) -> dict[str, Any]:
        if self._stream:
            current = torch.cuda.current_stream(self.device)
            current.wait_stream(self._stream)
            for value in batch.values():
                if isinstance(value, Tensor) and value.is_cuda:
                    value.record_stream(current)
        if "views" in batch:
            draws = Draws(self.seed, step, batch["sample_id"])
            batch["video"] = self._augment(batch.pop("views"), draws, self.config.train)
        return batch

    def _jobs(self) -> Iterator[tuple[int, list[int]]]:
        position = self._position
        while True:
            step, index = divmod(position, self._per_step)
            ids = self._sampler.ids_of_step(step, self.global_batch)[self._share]
            yield step, ids[index * self.micro_batch : (index + 1) * self.micro_batch].tolist()
            position += 1

    def _open(self) -> Iterator:
        made = self._made()
        return (
            _Ahead(made, self._to_device, self.config.prefetch)
            if self.config.prefetch
            else (map(self._to_device, made))
        )

    def _made(self) -> Iterator:
        jobs = _Jobs(self._samples)
        if not self.config.workers:
            return map(jobs.__getitem__, self._jobs())
        return iter(
            DataLoader(
                jobs,
                sampler=self._jobs(),
                batch_size=None,
                num_workers=self.config.workers,
                prefetch_factor=max(1, -(-self.config.prefetch // self.config.workers)),
                multiprocessing_context="forkserver",
                worker_init_fn=_start_worker,
                pin_memory=self.device.type == "cuda",
            )
        )

    def _to_device(self, batch: dict[str, Any] | _Failure) -> dict[str, Any] | _Failure:
        if isinstance(batch, _Failure) or self.device.type == "cpu":
            return batch
        with torch.cuda.stream(self._stream):
            return {
                k: v.to(self.device, non_blocking=True) if isinstance(v, Tensor) else v
                for k, v in batch.items()
            }

    def close(self) -> None:
        """End workers and threads; the next batch, if any is asked for, opens them again."""
        source, self._source = self._source, None
        if isinstance(source, _Ahead):
            source.close()


class _Ahead:
    """Makes items in a thread, at most `depth` ahead of the consumer."""

    def __init__(self, items: Iterator, prepare: Any, depth: int) -> None:
        self._items, self._prepare = items, prepare
        self._ready: queue.Queue = queue.Queue(maxsize=depth)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="wamlab-loader", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._ended.is_set():
            try:
                item = self._prepare(next(self._items))
            except Exception as error:  # raised again by the consumer
                item = _Failure(error, [])
            while not self._ended.is_set():
                with contextlib.suppress(queue.Full):
                    self._ready.put(item, timeout=0.1)
                    break

    def __iter__(self) -> "_Ahead":
        return self

    def __next__(self) -> Any:
        return self._ready.get()

    def close(self) -> None:
        self._ended.set()
        with contextlib.suppress(queue.Empty):
            while True:
                self._ready.get_nowait()
        self._thread.join()
        stop = getattr(self._items, "_shutdown_workers", None)  # DataLoader's iterator
        if stop:
            stop()
