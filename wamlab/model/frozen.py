"""What the frozen encoders share: seeded or checked weights, and the fingerprint of either.

A cache of an encoder's outputs stores its fingerprint, which is computed without building the
network.
"""

import contextlib
import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from wamlab.config import lookup, to_dict
from wamlab.model.stored import Checkpoint, CheckpointError, StoredTensor, open_checkpoint, some

T = TypeVar("T")
_SAMPLES = 64  # values a tensor that enter a fingerprint


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
    """Where one of our parameters comes from: a stored tensor, or one of `of` equal row blocks."""

    name: str
    index: int = 0
    of: int = 1

    def fits(self, stored: StoredTensor, wanted: Tensor) -> bool:
        """Whether the stored shape, its dimensions of 1 aside, is `of` times the wanted rows."""
        rows, *rest = wanted.shape
        plain = tuple(s for s in (rows * self.of, *rest) if s != 1)
        return tuple(s for s in stored.shape if s != 1) == plain

    def take(self, value: Tensor, shape: torch.Size) -> Tensor:
        """Return this part of a stored value in our shape."""
        if self.of > 1:
            value = value.chunk(self.of)[self.index]
        return value.reshape(shape)


def sizes_of(table: Mapping[str, T], size: str | T, kind: str) -> T:
    """Return the sizes of an encoder: a row of its table by name, or sizes as they are given."""
    return lookup(table, size, kind) if isinstance(size, str) else size


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Make everything random inside a function of `seed`, and leave torch's generators as found."""
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        yield


def freeze(module: nn.Module) -> None:
    """Put a network into evaluation mode and out of reach of gradients."""
    module.eval().requires_grad_(False)


def stored_names(checkpoint: Checkpoint, prefix: str) -> dict[str, str]:
    """Return {public name: stored name} under `prefix`, or of a stand-alone file."""
    found = checkpoint.under(prefix) or checkpoint.under("")
    return {name.replace(".base_layer.", "."): stored for name, stored in found.items()}


def load_frozen(
    module: nn.Module,
    source: str | Path,
    parts: Mapping[str, Part],
    *,
    prefix: str,
    unused: Callable[[str], bool],
    dtype: torch.dtype,
    device: str | torch.device,
    beside: Sequence[str] = (),
) -> dict[str, Tensor]:
    """Fill `module` (it may be on the meta device) from a public checkpoint, checked before use.

    Args:
        module: the network; every parameter is replaced.
        source: as in `stored.open_checkpoint`.
        parts: for each of the module's state-dict names, where it comes from.
        prefix: what stands before the public names inside a full checkpoint.
        unused: says of a public name that it may be there and is not needed.
        dtype: the parameters' dtype afterwards.
        device: their device.
        beside: names of tensors that may lie beside the weights.

    Returns:
        Those of `beside` that are there.

    Raises:
        CheckpointError: tensors are missing, unknown or of another shape; nothing was changed.
    """
    checkpoint = open_checkpoint(source)
    stored = stored_names(checkpoint, prefix)
    wanted = module.state_dict(keep_vars=True)
    needed = {part.name for part in parts.values()}
    missing = needed - stored.keys()
    unknown = {n for n in stored.keys() - needed if not unused(n) and n not in beside}
    wrong = [
        f"{part.name} {checkpoint.tensors[stored[part.name]].shape} for {tuple(wanted[ours].shape)}"
        for ours, part in parts.items()
        if part.name in stored
        and not part.fits(checkpoint.tensors[stored[part.name]], wanted[ours])
    ]
    problems = [f"missing are {some(missing)}"] if missing else []
    problems += [f"unknown are {some(unknown)}"] if unknown else []
    problems += [f"of another shape are {some(wrong)}"] if wrong else []
    if problems:
        raise CheckpointError(
            f"{source} does not fit {type(module).__name__}: {'; '.join(problems)}"
        )
    values: dict[tuple[str, int], nn.Parameter] = {}  # tied parameters stay one
    for ours, part in parts.items():
        key = (part.name, part.index)
        if key not in values:
            value = part.take(checkpoint.read(stored[part.name]), wanted[ours].shape)
            value = value.to(device=device, dtype=dtype, copy=True)
            values[key] = nn.Parameter(value, requires_grad=False)
    state = {ours: values[part.name, part.index] for ours, part in parts.items()}
    module.load_state_dict(state, assign=True)
    return {name: checkpoint.read(stored[name]) for name in beside if name in stored}


def fingerprint(
    kind: str, config: Any, *, seed: int, weights: str | Path | None, prefix: str
) -> str:
    """Return 16 hexadecimal digits that name an encoder: its sizes, and its seed or its weights.

    Of each stored tensor 64 values, evenly spaced, enter; a checkpoint is not read whole.

    Args:
        kind: "text", "image" or "vae".
        config: its sizes, a dataclass.
        seed: of the weights, where `weights` is None.
        weights: the checkpoint.
        prefix: as in `load_frozen`.
    """
    digest = hashlib.sha256(json.dumps([kind, to_dict(config)], sort_keys=True).encode())
    if weights is None:
        digest.update(f"seed {seed}".encode())
        return digest.hexdigest()[:16]
    checkpoint = open_checkpoint(weights)
    for name, stored in sorted(stored_names(checkpoint, prefix).items()):
        flat = checkpoint.read(stored).flatten()
        sample = flat[:: max(1, flat.numel() // _SAMPLES)].float()
        digest.update(name.encode() + sample.numpy().tobytes())
    return digest.hexdigest()[:16]
