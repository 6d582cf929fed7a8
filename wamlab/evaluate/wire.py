"""MessagePack with NumPy arrays, as the clients of openpi and RoboArena write and read it.

An array is a map of its bytes, dtype and shape under byte-string keys; so no code travels, and what
comes in is checked against its own size before an array is made of it.
"""

import math
from typing import Any

import msgpack
import numpy as np

from wamlab.config import UserError

REFUSED = "VOc"  # kinds of dtype: void (records among them), object and complex


class WireError(UserError):
    """A message that is not MessagePack, or an array in it that is not one."""


def packb(value: Any) -> bytes:
    """Return a value as one message.

    Args:
        value: what MessagePack takes, and NumPy arrays and scalars anywhere in it.

    Raises:
        WireError: a dtype or a type that the protocol has no form for.
    """
    try:
        return msgpack.packb(value, default=_pack)
    except (TypeError, OverflowError) as error:
        raise WireError(f"no message can be made of this: {error}") from error


def unpackb(data: bytes) -> Any:
    """Return the value of one message; its arrays are read-only views of the message.

    Raises:
        WireError: not MessagePack, or an array whose dtype, shape and bytes do not belong together.
    """
    try:
        return msgpack.unpackb(data, object_hook=_unpack)
    except WireError:
        raise
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
        text = str(error) or type(error).__name__
        raise WireError(f"{len(data)} bytes are no MessagePack message: {text}") from error


def _pack(value: Any) -> Any:
    if not isinstance(value, np.ndarray | np.generic):
        raise TypeError(f"{type(value).__name__} has no form in MessagePack")
    if value.dtype.kind in REFUSED:
        raise WireError(f"dtype {value.dtype} is not allowed in a message")
    if isinstance(value, np.ndarray):
        data = {b"__ndarray__": True, b"data": value.tobytes(), b"dtype": value.dtype.str}
        return data | {b"shape": value.shape}
    return {b"__npgeneric__": True, b"data": value.item(), b"dtype": value.dtype.str}


def _unpack(value: dict[Any, Any]) -> Any:
    if b"__ndarray__" in value:
        dtype, data, shape = _dtype(value), value.get(b"data"), value.get(b"shape")
        if not isinstance(data, bytes) or not isinstance(shape, list):
            raise WireError("an array is a map with data (bytes), dtype and shape")
        if not all(isinstance(n, int) and n >= 0 for n in shape):
            raise WireError(f"an array's shape is a list of sizes, got {shape!r}"[:200])
        if math.prod(shape) * dtype.itemsize != len(data):
            raise WireError(f"an array of {len(data)} bytes cannot be {dtype} {shape}"[:200])
        return np.ndarray(tuple(shape), dtype, data)
    if b"__npgeneric__" in value:
        if not isinstance(value.get(b"data"), bool | int | float | str | bytes):
            raise WireError("a scalar is a map with data (one value) and dtype")
        return _dtype(value).type(value[b"data"])
    return value


def _dtype(value: dict[Any, Any]) -> np.dtype:
    name = value.get(b"dtype")
    try:
        dtype = np.dtype(name) if isinstance(name, str) else None
    except (TypeError, ValueError, SyntaxError):
        dtype = None
    if dtype is None or dtype.kind in REFUSED or not dtype.itemsize:
        raise WireError(f"an array's dtype is a number type such as '<f4', got {name!r}"[:200])
    return dtype
