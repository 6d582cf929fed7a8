"""The trainer on a GPU: the wrapper matrix, one CUDA graph, the predicted memory."""

import dataclasses
import itertools

import pytest
import torch
from torch._dynamo.utils import counters
from toy_model import ToyLoader, ToyModel

from wamlab.config import ConfigError
from wamlab.train.communication import training_group
from wamlab.train.config import TrainConfig
from wamlab.train.optim import OptimConfig
from wamlab.train.trainer import Trainer

pytestmark = pytest.mark.gpu
CONFIG = TrainConfig(
    model=None,
    data=None,
    device="cuda",
    precision="bf16",
    steps=10,
    warmup_steps=5,
    global_batch=4,
    optim=OptimConfig(lr=1e-3),
)
WHOLE = {"name": "fsdp2", "keep_unsharded": -1}


def run(*optimizations, **changes):
    config = dataclasses.replace(CONFIG, optimizations=optimizations, **changes)
    with training_group(torch.device("cuda")):
        return Trainer(config, ToyModel(), ToyLoader).fit()


def recompute(mode):
    return {"name": "recompute", "mode": mode}


@pytest.mark.parametrize(
    ("mode", "compiled", "sharded"),
    list(itertools.product(("none", "selective", "full"), ((), ("compile",)), ((), ("fsdp2",)))),
)
def test_recompute_compile_shard_matrix(mode, compiled, sharded):
    """D16 on a GPU, bf16: every combination, no recompilation after warm-up."""
    torch._dynamo.reset()
    counters.clear()
    got = run(*compiled, *sharded, recompute(mode), "micro_batch")
    want = run(*sharded, recompute("none"), "micro_batch")
    torch.testing.assert_close(
        torch.tensor(got.losses), torch.tensor(want.losses), rtol=1e-2, atol=0
    )
    assert got.extra["recompiles"] == 0


@pytest.mark.parametrize("sharded", [(), (WHOLE,)], ids=["plain", "fsdp2"])
@pytest.mark.parametrize("optimizer", ["fused_adamw", "split_adamw"])
def test_a_captured_step_trains_as_the_eager_one(sharded, optimizer):
    entries = ("micro_batch", optimizer, *sharded)
    got, want = run(*entries, "cuda_graph"), run(*entries)
    torch.testing.assert_close(
        torch.tensor(got.losses), torch.tensor(want.losses), rtol=1e-2, atol=0
    )


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        (("fused_adamw",), r"cuda_graph captures one micro-batch a step, this run has 4"),
        (("micro_batch",), r"cuda_graph needs an optimizer that skips on the device"),
        (("micro_batch", "fused_adamw", "fsdp2"), r"weights that stay gathered over the forward"),
    ],
)
def test_what_cannot_be_captured_is_refused(entries, message):
    with pytest.raises(ConfigError, match=message):
        run(*entries, "cuda_graph")
