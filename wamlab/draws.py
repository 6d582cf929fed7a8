"""Random numbers drawn from (seed, step, sample id) and from nothing else.

Equal work needs equal noise: a sample must see the same noise, timesteps and augmentation whichever
rank, worker or micro-batch it falls into. A torch.Generator is a sequence, so its draws depend on
the order of the calls. Here each value is a hash of its coordinates (a counter-based generator):
batched over samples, the same on every device up to the last bit of log and cos, and capturable in
a CUDA graph because seed, step and ids are ordinary tensors.

The mixing function is SplitMix64's finaliser (Steele, Lea and Flood, OOPSLA 2014), in wrapping
int64 arithmetic.
"""

import hashlib
import math
from collections.abc import Sequence

import torch
from torch import Tensor

_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed 64-bit number
_MIX_1 = -4658895280553007687  # 0xBF58476D1CE4E5B9
_MIX_2 = -7723592293110705685  # 0x94D049BB133111EB


def _shift_right(x: Tensor, bits: int) -> Tensor:
    return (x >> bits) & ((1 << (64 - bits)) - 1)  # torch shifts arithmetically


def _mix(x: Tensor) -> Tensor:
    x = (x ^ _shift_right(x, 30)) * _MIX_1
    x = (x ^ _shift_right(x, 27)) * _MIX_2
    return x ^ _shift_right(x, 31)


def _stream(name: str) -> int:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "little")


# what torch.compiler.assume_constant_result does, without its import of Dynamo: as long as torch's
_stream._dynamo_marked_constant = True


class Draws:
    """The random numbers of one training step, one independent stream per sample and per name.

    Args:
        seed: the run's seed.
        step: the optimizer step, an int or an int64 scalar tensor (keeps a CUDA graph valid).
        sample_ids: int64 [B], one id a sample; fixes the device of everything drawn.
    """

    def __init__(self, seed: int, step: int | Tensor, sample_ids: Tensor) -> None:
        self.sample_ids = sample_ids
        key = torch.full_like(sample_ids, seed)
        key = _mix(key + _GOLDEN) + step
        self._key_B = _mix(key * _GOLDEN + _MIX_1) ^ _mix(sample_ids * _GOLDEN + _MIX_2)

    def _bits(self, name: str, count: int) -> Tensor:
        key_B1 = _mix(self._key_B + _stream(name))[:, None]
        # `| 0`: else Inductor takes the product for index arithmetic, which is int32 on a GPU
        counter = torch.arange(1, count + 1, device=key_B1.device, dtype=torch.int64) | 0
        return _mix(key_B1 + counter * _GOLDEN)

    def uniform(self, name: str, shape: Sequence[int]) -> Tensor:
        """Return float32 [B, *shape], uniform on [0, 1), 24 random bits each."""
        bits = self._bits(name, math.prod(shape))
        return (_shift_right(bits, 40).float() * 2.0**-24).view(len(self.sample_ids), *shape)

    def normal(self, name: str, shape: Sequence[int]) -> Tensor:
        """Return float32 [B, *shape], standard normal (Box and Muller, 64 bits a value)."""
        bits = self._bits(name, math.prod(shape))
        radius = (_shift_right(bits, 40).float() + 0.5) * 2.0**-24
        angle = ((bits & 0xFFFFFF).float() + 0.5) * (2.0 * math.pi * 2.0**-24)
        normal = torch.sqrt(-2.0 * torch.log(radius)) * torch.cos(angle)
        return normal.view(len(self.sample_ids), *shape)

    def integers(self, name: str, high: int, shape: Sequence[int]) -> Tensor:
        """Return int64 [B, *shape], uniform on 0..high-1 (bias under high / 2^40)."""
        bits = _shift_right(self._bits(name, math.prod(shape)), 24)
        return (bits % high).view(len(self.sample_ids), *shape)
