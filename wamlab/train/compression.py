"""What a gradient travels as in replicated training, and when: the hook of DDP's buckets.

A compressed gradient is wrong by what was left out. Error feedback keeps that and adds it to the
next gradient, so that nothing is lost, only late. All memory is kept per parameter, not per bucket:
DDP rebuilds its buckets after the first step, and a checkpoint must not depend on them.
"""

import contextlib
import inspect
import math
import random
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from wamlab.train.communication import mean_over_ranks
from wamlab.train.optimizations import Ddp

WINDOW = 50  # steps that a gate's threshold looks back
HYSTERESIS = 0.05  # quantiles between opening and closing
SMOOTH = 0.1  # of the running mean that a gradient is compared with: raw ones always differ
HALF = {"fp16": torch.float16, "bf16": torch.bfloat16}


class Gate:
    """Decides, alike on every rank, which buckets are compressed at which step.

    A signal's threshold is the quantile of its own last WINDOW values that lets the wanted share
    pass, and a little more or less to make up for a signal that rises or falls: so every kind of
    gate sends equally many bytes.

    Args:
        kind: "always", "high" or "low" (large or small signal), "activity" (large) or "random".
        share: of the decisions that shall be True.
        seed: of the random gate.
    """

    def __init__(self, kind: str, share: float, seed: int = 0) -> None:
        self.kind, self.share, self.seed = kind, share, seed
        self._seen: dict[int, deque[float]] = {}
        self._open: dict[int, bool] = {}
        self._owed: dict[int, float] = {}  # openings that were due and did not come

    def decide(self, bucket: int, step: int, signal: float | None) -> bool:
        """Return whether to compress `bucket` at `step`, given what is known of the last step."""
        if self.kind == "always":
            return True
        if self.kind == "random":
            return random.Random(f"{self.seed}/{step}/{bucket}").random() < self.share
        if signal is None:
            return False
        value = -signal if self.kind == "low" else signal
        seen = self._seen.setdefault(bucket, deque(maxlen=WINDOW))
        seen.append(value)
        was_open = self._open.get(bucket, False)
        owed = self._owed.get(bucket, 0.0)
        passing = self.share + (HYSTERESIS if was_open else -HYSTERESIS) + 2 * owed / WINDOW
        rank = sum((other > value) + 0.5 * (other == value) for other in seen)
        self._open[bucket] = rank < passing * len(seen)
        self._owed[bucket] = owed + self.share - self._open[bucket]
        return self._open[bucket]


class _Late:
    """Numbers of the last step, on their way from the device: reading them waits for no kernel."""

    def __init__(self) -> None:
        self._found: tuple[list[int], Tensor, torch.cuda.Event | None] | None = None

    def set(self, places: list[int], values: Tensor) -> None:
        host = torch.empty(len(places), pin_memory=values.is_cuda)
        host.copy_(values, non_blocking=True)
        event = torch.cuda.current_stream().record_event() if values.is_cuda else None
        self._found = (places, host, event)

    def get(self, place: int) -> float | None:
        if self._found is None or place not in self._found[0]:
            return None
        places, host, event = self._found
        if event is not None:
            event.synchronize()  # recorded a whole step ago
        return host[places.index(place)].item()


class Compression:
    """DDP's communication hook, with its memory.

    Args:
        config: what travels and when.
        parameters: the trained parameters by name.
        total_steps: of the run; `config.start` is a share of them.
        seed: of the random gate and of the first low-rank factors.

    Attributes:
        step: the optimizer step, set by who steps.
        sent_bytes, dense_bytes: what one rank gave to all-reduce so far, and what it would have
            given uncompressed.
    """

    def __init__(
        self, config: Ddp, parameters: Mapping[str, nn.Parameter], total_steps: int, seed: int
    ) -> None:
        self.config, self.parameters = config, dict(parameters)
        self.names = {id(p): name for name, p in self.parameters.items()}
        self.gate = Gate(config.gate, config.share, seed)
        self.first = round(config.start * total_steps)
        self.step = 0
        self.sent_bytes = self.dense_bytes = 0
        lossy = config.wire != "same"
        own = self.parameters if lossy and config.error_feedback else {}
        self.errors = {n: torch.zeros_like(p, requires_grad=False) for n, p in own.items()}
        watched = self.parameters if lossy and config.gate in ("high", "low") else {}
        self.means = {n: torch.zeros_like(p, requires_grad=False) for n, p in watched.items()}
        self.factors = {}
        if config.wire == "lowrank":
            pays = {n: p for n, p in self.parameters.items() if pays_off(p, config.rank)}
            self.factors = {n: _first_factor(n, p, config.rank, seed) for n, p in pays.items()}
        self._buckets: dict[int, list[str]] = {}
        self._changes, self._activity = _Late(), _Late()
        self._side: torch.cuda.Stream | None = None

    def reduce(self, state: object, bucket: dist.GradBucket) -> Future[Tensor]:
        """Average one bucket over the ranks: the hook itself."""
        names = [self.names[id(p)] for p in bucket.parameters()]
        self._buckets[bucket.index()] = names
        grads = dict(zip(names, bucket.gradients()))
        self.dense_bytes += bucket.buffer().numel() * bucket.buffer().element_size()
        if self.config.wire == "same" or not self._opens(bucket.index()):
            self.sent_bytes += bucket.buffer().numel() * bucket.buffer().element_size()
            self._flush(grads)
            return allreduce_hook(None, bucket)
        buffer = bucket.buffer()
        if not buffer.is_cuda:
            # gloo matches collectives by the order in which they start: finish before the next
            self._compress(grads)
            done: Future[Tensor] = Future()
            done.set_result(buffer)
            return done
        self._side = self._side or torch.cuda.Stream(buffer.device)
        self._side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._side):
            self._compress(grads)
            done = Future(devices=[buffer.device])
            done.set_result(buffer)  # records the side stream; DDP makes its own wait for it
        return done

    def _opens(self, bucket: int) -> bool:
        if self.step < self.first:
            return False
        late, place = self._changes, bucket
        if self.config.gate == "activity":
            late, place = self._activity, 0
        return self.gate.decide(bucket, self.step, late.get(place))

    def note_activity(self, value: Tensor) -> None:
        """Note how much the whole batch of this step moved."""
        self._activity.set([0], value[None])

    @torch.no_grad()
    def observe(self) -> None:
        """Note the reduced gradients' change, bucket by bucket; call it after each backward."""
        if not self.means:
            return
        changes = []
        for names in self._buckets.values():
            means = [self.means[n] for n in names if self.parameters[n].grad is not None]
            grads = [g for n in names if (g := self.parameters[n].grad) is not None]
            torch._foreach_lerp_(means, grads, SMOOTH)
            apart = torch._foreach_sub(grads, means)
            changes.append(_norm(apart) / _norm(means).clamp(min=1e-30))
        self._changes.set(list(self._buckets), torch.stack(changes))

    @contextlib.contextmanager
    def untouched(self) -> Iterator[None]:
        """Let the body run steps that the memory forgets."""
        memory = [t for part in (self.errors, self.means, self.factors) for t in part.values()]
        before = [t.clone() for t in memory], self.sent_bytes, self.dense_bytes
        yield
        for tensor, old in zip(memory, before[0]):
            tensor.copy_(old)
        self.sent_bytes, self.dense_bytes = before[1:]

    def _flush(self, grads: Mapping[str, Tensor]) -> None:
        """Add what was held back to a gradient that travels whole."""
        for name, grad in grads.items():
            if name in self.errors:
                grad += self.errors[name]
                self.errors[name].zero_()

    def _compress(self, grads: dict[str, Tensor]) -> None:
        """Replace gradients by their compressed mean over the ranks."""
        whole = {}
        for name in self.errors.keys() & grads.keys():
            grads[name] += self.errors[name]
            whole[name] = grads[name].clone()
        passed = _WIRES[self.config.wire](self, grads)
        for name, gradient in whole.items():
            # what is not in `passed` travelled whole
            torch.sub(gradient, passed.get(name, gradient), out=self.errors[name])

    def _rounded(self, grads: dict[str, Tensor]) -> dict[str, Tensor]:
        dtype, world = HALF[self.config.wire], dist.get_world_size()
        small = [(g / world).to(dtype) for g in grads.values()]
        passed = {n: s.to(g.dtype) * world for (n, g), s in zip(grads.items(), small)}
        flat = torch.cat([s.reshape(-1) for s in small])
        self.sent_bytes += flat.numel() * flat.element_size()
        dist.all_reduce(flat)
        for grad, part in zip(grads.values(), flat.split([g.numel() for g in grads.values()])):
            grad.copy_(part.view_as(grad))
        return passed

    def _largest(self, grads: dict[str, Tensor]) -> dict[str, Tensor]:
        flat = torch.cat([g.reshape(-1) for g in grads.values()])
        count = max(1, round(self.config.keep * flat.numel()))
        least = flat.abs().topk(count).values[-1]
        for grad in grads.values():
            grad *= grad.abs() >= least
        passed = {n: g.clone() for n, g in grads.items()}
        self.sent_bytes += count * (flat.element_size() + 4)  # a value and its place
        mean_over_ranks(list(grads.values()))
        return passed

    def _low_rank(self, grads: dict[str, Tensor]) -> dict[str, Tensor]:
        """PowerSGD, one power iteration a step. Source: Vogels et al. 2019, algorithm 1."""
        matrices = {n: as_matrix(g) for n, g in grads.items() if n in self.factors}
        columns = [m @ self.factors[n] for n, m in matrices.items()]
        rest = [g for n, g in grads.items() if n not in matrices]
        mean_over_ranks([*columns, *rest])
        for column in columns:
            orthonormalise(column)
        rows = [m.T @ c for m, c in zip(matrices.values(), columns)]
        if rows:
            mean_over_ranks(rows)
        for (name, matrix), column, row in zip(matrices.items(), columns, rows):
            torch.mm(column, row.T, out=matrix)
            self.factors[name].copy_(row)
        sent = [*columns, *rest, *rows]
        self.sent_bytes += sum(t.numel() * t.element_size() for t in sent)
        # what all ranks now hold, so that the errors' mean is what the mean gradient lacks
        return {n: grads[n] for n in matrices}

    def state(self) -> dict[str, Tensor]:
        """Return what a checkpoint must hold, live: errors (one a rank), means, factors."""
        if not (self.errors or self.means or self.factors):
            return {}
        parts = {"mean": self.means, "factor": self.factors}
        found = {f"{n}.{key}": t for key, tensors in parts.items() for n, t in tensors.items()}
        device = next(iter(self.parameters.values())).device
        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        for name, error in self.errors.items():
            found[f"{name}.error"] = DTensor.from_local(error[None], mesh, [Shard(0)])
        return found


_WIRES: dict[str, Callable[[Compression, dict[str, Tensor]], dict[str, Tensor]]] = {
    "fp16": Compression._rounded,
    "bf16": Compression._rounded,
    "topk": Compression._largest,
    "lowrank": Compression._low_rank,
}


def as_matrix(tensor: Tensor) -> Tensor:
    """Return a view with two dimensions, as square as its shape allows: fewest rows and columns."""
    splits = [math.prod(tensor.shape[:k]) for k in range(1, tensor.ndim)]
    return tensor.view(min(splits, key=lambda rows: rows + tensor.numel() / rows), -1)


def pays_off(parameter: Tensor, rank: int) -> bool:
    """Say whether `rank` columns and rows are less than half of a matrix."""
    if parameter.ndim < 2:
        return False
    return 2 * rank * sum(as_matrix(parameter).shape) < parameter.numel()


def orthonormalise(columns: Tensor) -> None:
    """Make the columns [n, r] orthonormal in place (Gram and Schmidt); a zero column stays zero."""
    for index in range(columns.shape[1]):
        column, before = columns[:, index], columns[:, :index]
        column -= before @ (before.T @ column)
        column /= column.norm() + 1e-12


def _first_factor(name: str, parameter: Tensor, rank: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed}/{name}".encode()))
    factor = torch.randn(as_matrix(parameter).shape[1], rank, generator=generator)
    return factor.to(parameter.device, parameter.dtype)


def _norm(tensors: list[Tensor]) -> Tensor:
    return torch.stack(torch._foreach_norm(tensors, dtype=torch.float32)).norm()


class _Loss(nn.Module):
    """A model's loss as the forward that DDP calls."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: object, draws: object) -> object:
        # or Dynamo would cut every compiled block at DDP's bucket boundaries
        with torch._dynamo.config.patch(optimize_ddp=False):
            return self.model.loss(batch, draws)


def replicate(model: nn.Module, config: Ddp, hook: Compression) -> DistributedDataParallel:
    """Return a module whose call is the model's loss and whose backward averages gradients.

    Weights are not broadcast: they come from the same seed or file on every rank.
    """
    known = inspect.signature(DistributedDataParallel).parameters
    # renamed in torch 2.13, where the old name warns
    name = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
    module = DistributedDataParallel(
        _Loss(model),
        bucket_cap_mb=config.bucket_mb,
        gradient_as_bucket_view=True,
        init_sync=False,
        **{name: False},
    )
    module.register_comm_hook(None, hook.reduce)
    return module
