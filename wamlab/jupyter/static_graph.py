"""The contract of a CUDA graph, kept on a CPU: the same operations, again, into the same memory.

A CUDA graph is a recording. Capture notes every kernel with the addresses that it reads and writes;
replay starts those kernels again without asking Python, autograd or the allocator. What follows
from that (inputs must be copied in, results are overwritten, gradients behave by what existed at
capture) follows here in the same way. What does not: capture here also runs the operations once
(CUDA's only notes them), and a replay is no faster.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from wamlab.config import ConfigError


class StaticGraph:
    """A recording of one call.

    Args:
        fn: called once, with no argument; reads and writes tensors that the caller keeps.

    Attributes:
        calls: every recorded operation.

    Raises:
        ConfigError: `fn` reads a value back to the host, which no recording can repeat.
    """

    def __init__(self, fn: Callable[[], Any]) -> None:
        with _Recorder() as recorder:
            fn()
        self.calls: list[tuple[Callable, tuple, dict, Any]] = recorder.calls

    @torch.no_grad()
    def replay(self) -> None:
        """Run the recorded operations again, each into the memory that it wrote at capture."""
        for operation, args, kwargs, outputs in self.calls:
            again = operation(*args, **kwargs)
            for old, new in zip(tree_leaves(outputs), tree_leaves(again)):
                # views and in-place operations already work on recorded memory
                if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


class _Recorder(TorchDispatchMode):
    """Notes operations below autograd, backward included; kept outputs keep their memory."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Callable, tuple, dict, Any]] = []

    def __torch_dispatch__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            raise ConfigError(
                "capture met .item(): the host cannot wait for a value inside a recording"
            )
        outputs = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, outputs))
        return outputs
