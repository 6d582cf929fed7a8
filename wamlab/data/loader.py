"""Batches for training: workers decode, a thread assembles, the next batch waits on the device.

Which samples a step sees follows from (seed, step) alone, and rank r takes its share of them: so
neither the number of ranks, nor workers, nor the micro-batch changes what is trained.
"""

import contextlib
import queue
import signal
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from wamlab.config import ConfigError, UserError, to_dict
from wamlab.data.augment import Augment, augment_cpu
from wamlab.data.data_config import (
    GPU_DECODERS,
    DataConfig,
    embodiment_of,
    open_data,
    prepare_workers,
)
from wamlab.data.metadata import DatasetError
from wamlab.data.sampler import Sampler, share_of
from wamlab.data.windows import Mixture, WindowDataset
from wamlab.draws import Draws

FRAMES = ("views", "video")  # what is worth shared memory between processes
_LAYOUT = ("ranks", "micro_batch")  # may change between steps
Item = tuple[int, tuple[int, ...]]  # a step, and the samples of it that are read together


class _Reader:
    """Reads items; in a worker it opens the data itself, so that nothing large is sent there."""

    def __init__(self, config: DataConfig, seed: int, data: WindowDataset | Mixture) -> None:
        self.config, self.seed, self.data = config, seed, data

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"data": None}

    def __getitem__(self, item: Item) -> "tuple[int, list[dict[str, Any]]] | _Failure":
        step, ids = item
        which = f"sample {', '.join(map(str, ids))} (step {step})"
        try:
            if self.data is None:
                self.data = open_data(self.config)
            return step, self._read(step, ids)
        except UserError as error:
            return _Failure(type(error), f"{which}: {error}")
        except Exception as error:
            raise RuntimeError(f"{which} cannot be read: {error!r}") from error

    def _read(self, step: int, ids: tuple[int, ...]) -> list[dict[str, Any]]:
        words = None
        if self.config.train:
            draws = Draws(self.seed, step, torch.tensor(ids))
            words = draws.integers("data.paraphrase", 2**20, (1,))[:, 0].tolist()
        samples = self.data.samples(ids, paraphrases=words, videos=self.config.videos)
        if self.config.augment == "cpu" and self.config.videos:
            for i, sample in zip(ids, samples):
                draws = Draws(self.seed, step, torch.tensor([i]))
                views, robot = sample.pop("views"), embodiment_of(self.data)
                sample["video"] = augment_cpu(views, draws, robot, self.config.train)
        return [{k: _packed(k, v) for k, v in sample.items()} for sample in samples]


def _packed(name: str, value: Any) -> Any:
    # A tensor between processes costs a file handle and a mapping: only frames are worth it.
    return value.numpy() if isinstance(value, Tensor) and name not in FRAMES else value


@dataclass(frozen=True)
class _Failure:
    """A user's error on its way out of a worker, still one line."""

    kind: type[UserError]
    message: str


@dataclass(frozen=True)
class _Share:
    """What one rank takes of each step: `micro` samples at a time, `share` in all."""

    global_batch: int
    micro: int
    share: int
    rank: int


def _plan(sampler: Sampler, share: _Share, step: int, done: int) -> Iterator[Item]:
    """Yield what a rank reads, without end, from its batch number `done` of `step` on."""
    group, first = sampler.strategy.group, share.rank * share.share
    while True:
        ids = sampler.ids_of_step(step, share.global_batch)[first : first + share.share].tolist()
        for i in range(done * share.micro, share.share, group):
            yield step, tuple(ids[i : i + group])
        step, done = step + 1, 0


class Ahead:
    """Items that a thread takes ahead from an iterator; what goes wrong there, `get` raises.

    Args:
        items: where they come from.
        depth: items that wait at most.
        stream: what a GPU works on in the thread.
    """

    def __init__(
        self, items: Iterator[Any], depth: int, stream: torch.cuda.Stream | None = None
    ) -> None:
        self._stop, self._error = threading.Event(), None
        self._queue: queue.Queue = queue.Queue(depth)
        self._thread = threading.Thread(target=self._fill, args=(items, stream), daemon=True)
        self._thread.start()

    def _fill(self, items: Iterator[Any], stream: torch.cuda.Stream | None) -> None:
        try:
            with torch.cuda.stream(stream):
                for item in items:
                    if not self._put(item):
                        return
        except BaseException as error:  # the training thread raises it
            self._put(error)

    def _put(self, value: Any) -> bool:
        while not self._stop.is_set():
            with contextlib.suppress(queue.Full):
                self._queue.put(value, timeout=0.1)
                return True
        return False

    def get(self) -> Any:
        """Return the next item, waiting for it."""
        if self._error is None:
            value = self._queue.get()
            if not isinstance(value, BaseException):
                return value
            self._error = value
        raise self._error

    def poll(self) -> Any | None:
        """Return the next item if it is there already."""
        if self._error is not None or self._queue.empty():  # nobody else takes from it
            return None
        value = self._queue.get_nowait()
        if not isinstance(value, BaseException):
            return value
        self._error = value
        return None

    def close(self) -> None:
        """End the thread."""
        self._stop.set()
        if self._thread is not threading.current_thread():
            self._thread.join()


class _Host:
    """Micro-batches in host memory: read in this process or by workers, by a thread or on call."""

    def __init__(
        self,
        reader: _Reader,
        plan: Iterator[Item],
        *,
        micro: int,
        pin: bool,
        stream: torch.cuda.Stream | None,
    ) -> None:
        config = reader.config
        items = _start_workers(reader, plan) if config.workers else map(reader.__getitem__, plan)
        self._batches = _assemble(items, micro, pin)
        self._ahead = Ahead(self._batches, config.prefetch, stream) if config.prefetch else None

    def get(self) -> tuple[int, dict[str, Any]]:
        """Return the next batch and its step, waiting for it."""
        return self._ahead.get() if self._ahead else next(self._batches)

    def poll(self) -> tuple[int, dict[str, Any]] | None:
        """Return the next batch if it is there already."""
        return self._ahead.poll() if self._ahead else None

    def close(self) -> None:
        """End the thread and the workers."""
        if self._ahead:
            self._ahead.close()
        self._batches.close()
        self._batches = iter(())


def _start_workers(reader: _Reader, plan: Iterator[Item]) -> Iterator[Any]:
    prepare_workers(reader.config)
    return iter(
        DataLoader(
            reader,
            batch_size=None,
            sampler=plan,
            num_workers=reader.config.workers,
            collate_fn=_as_it_is,
            multiprocessing_context=reader.config.start_method,
            worker_init_fn=_ignore_interrupts,
            generator=torch.Generator(),  # or it would draw from the global one
        )
    )


def _as_it_is(item: Any) -> Any:
    return item


def _ignore_interrupts(_: int) -> None:
    # Ctrl-C reaches the whole process group; the training process ends its workers itself.
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _assemble(items: Iterator[Any], micro: int, pin: bool) -> Iterator[tuple[int, dict[str, Any]]]:
    samples: list[dict[str, Any]] = []
    for item in items:
        if isinstance(item, _Failure):
            raise item.kind(item.message)
        step, found = item
        samples += found
        while len(samples) >= micro:  # an item never reaches into the next step
            now, samples = samples[:micro], samples[micro:]
            yield step, {k: _stack(k, [s[k] for s in now], pin) for k in now[0]}


def _stack(name: str, values: Sequence[Any], pin: bool) -> Tensor | list[Any]:
    if isinstance(values[0], str):
        return list(values)
    if isinstance(values[0], np.ndarray):
        stacked = torch.from_numpy(np.stack(values))
        return stacked.pin_memory() if pin else stacked
    shapes = {tuple(v.shape) for v in values}
    if len(shapes) > 1:
        raise DatasetError(
            f"{name} of one batch have sizes {' and '.join(str(list(s)) for s in sorted(shapes))}: "
            "views of different sizes need augment='cpu'"
        )
    if values[0].is_cuda or not pin:
        return torch.stack(values)
    out = torch.empty((len(values), *values[0].shape), dtype=values[0].dtype, pin_memory=True)
    return torch.stack(values, out=out)


@dataclass(frozen=True)
class _Staged:
    """A batch on its way to the device; `event` marks its arrival on the side stream."""

    batch: dict[str, Any]
    event: torch.cuda.Event | None

    def take(self) -> dict[str, Any]:
        """Return the batch, ready for what the current stream does next."""
        if self.event is not None:
            stream = torch.cuda.current_stream(self.batch["sample_id"].device)
            stream.wait_event(self.event)
            for value in self.batch.values():
                if isinstance(value, Tensor):
                    value.record_stream(stream)
        return self.batch


class Loader:
    """An endless iterator over this rank's micro-batches, already on the device.

    A batch is a dict: `video` uint8 [B, T, H, W, 3] (if videos are read), `state` f32 [B, K, 64],
    `action` f32 [B, K*H, 32], their masks, `has_real_action` bool [B], `prompt` list of str,
    `sample_id` and `embodiment_id` int64 [B]. `wait_s` adds up the seconds that `next` took.

    Args:
        config: what to read and how.
        global_batch: samples a step, over all ranks.
        micro_batch: samples a batch; divides a rank's share of the step.
        seed: of the run.
        rank, world_size: this process among those that train.
        device: where batches go.
        start_step: the first step.

    Raises:
        ConfigError: the batch sizes do not divide.
        DatasetError: a data set that cannot be used.
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
        share = share_of(global_batch, micro_batch, world_size)
        self.config, self.seed, self.device = config, seed, torch.device(device)
        self._share = _Share(global_batch, micro_batch, share, rank)
        decode_to = self.device if config.decoder in GPU_DECODERS else "cpu"
        self.data = open_data(config, device=decode_to, progress=rank == 0)
        self.sampler = Sampler(self.data, seed=seed, strategy=config.sampling)
        self._augment = Augment(embodiment_of(self.data))
        on_side = self.device.type == "cuda" and config.prefetch > 0
        self._side = torch.cuda.Stream(self.device) if on_side else None
        self.wait_s = 0.0
        self._step, self._done = start_step, 0
        self._host: _Host | None = None
        self._ahead: _Staged | None = None

    def ids_of_step(self, step: int) -> np.ndarray:
        """Return the samples of one step over all ranks, int64 [global_batch]."""
        return self.sampler.ids_of_step(step, self._share.global_batch)

    def __iter__(self) -> "Loader":
        return self

    def __next__(self) -> dict[str, Any]:
        start = time.perf_counter()
        try:
            host = self._host or self._start()
            batch = (self._ahead or self._stage(*host.get())).take()
            ready = host.poll()
            self._ahead = self._stage(*ready) if ready else None
        except BaseException:  # also Ctrl-C: what was read ahead is lost, the place is not
            self.close()
            raise
        self._done += 1
        if self._done * self._share.micro == self._share.share:
            self._step, self._done = self._step + 1, 0
        self.wait_s += time.perf_counter() - start
        return batch

    def _start(self) -> _Host:
        reader = _Reader(self.config, self.seed, self.data)
        plan = _plan(self.sampler, self._share, self._step, self._done)
        pin, micro = self._side is not None, self._share.micro
        self._host = _Host(reader, plan, micro=micro, pin=pin, stream=self._side)
        self._closing = weakref.finalize(self, self._host.close)  # also when forgotten, or at exit
        return self._host

    def _stage(self, step: int, batch: dict[str, Any]) -> _Staged:
        with torch.cuda.stream(self._side):
            for name, value in batch.items():
                if isinstance(value, Tensor):
                    batch[name] = value.to(self.device, non_blocking=self._side is not None)
            if "views" in batch:
                draws = Draws(self.seed, step, batch["sample_id"])
                batch["video"] = self._augment(batch.pop("views"), draws, self.config.train)
            return _Staged(batch, self._side.record_event() if self._side else None)

    def state_dict(self) -> dict[str, Any]:
        """Return where the iteration stands: what `next` returned counts, what was read ahead does
        not."""
        return {"step": self._step, "done": self._done, "order": self._order()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved state, on any number of ranks.

        Raises:
            ConfigError: the state is of another order of samples, or was saved within a step by
                ranks that shared it otherwise.
        """
        own, saved = self._order(), dict(state["order"])
        same = own if state["done"] else {k: v for k, v in own.items() if k not in _LAYOUT}
        for name, value in same.items():
            if saved.get(name) != value:
                raise ConfigError(
                    f"the loader's state was saved with {name} {saved.get(name)!r}, this run has "
                    f"{value!r}: resume with the same, or start afresh"
                )
        self.close()
        self._step, self._done = int(state["step"]), int(state["done"])

    def _order(self) -> dict[str, Any]:
        strategy = self.sampler.strategy
        return {
            "seed": self.seed,
            "global_batch": self._share.global_batch,
            "samples": len(self.data),
            "sampling": [type(strategy).__name__, to_dict(strategy)],
            "ranks": self._share.global_batch // self._share.share,
            "micro_batch": self._share.micro,
        }

    def close(self) -> None:
        """End the thread and the workers; iterating again starts them from where it stood."""
        if self._host is not None:
            self._closing()
            self._host = self._ahead = None
