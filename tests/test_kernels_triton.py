"""The hand-written kernels equal reference, forward and every gradient, and repeat bit for bit.

Without a GPU: `TRITON_INTERPRET=1 pytest tests/test_kernels_triton.py -m "slow or not slow"`.
"""

import importlib.util
import os

import pytest
import torch

from wamlab.config import ConfigError
from wamlab.model import reference
from wamlab.model.dit import ModelOptions

HAS_TRITON = importlib.util.find_spec("triton") is not None
GPU = torch.cuda.is_available()
needs_triton = pytest.mark.skipif(
    not HAS_TRITON or not (GPU or os.environ.get("TRITON_INTERPRET") == "1"),
    reason="needs the package triton, and a GPU or TRITON_INTERPRET=1",
)
DEV = "cuda" if GPU else "cpu"
SEGMENTS = {
    "ordered": [0] * 11 + [1] * 3 + [2] * 7,
    "one row": [0] * 21,
    "scattered": [2, 0, 1] * 7,
    "a row nobody reads": [0] * 5 + [2] * 16,
}


def inputs(width, segment, dtype, tables):
    torch.manual_seed(0)
    rows = max(segment) + 1
    shapes = [(2, len(segment), width)] * (3 - tables)
    values = [torch.randn(s) for s in shapes]
    table = torch.randn(2, rows, 6, width)  # rows as the block makes them: slices of one table
    values += list(table.unbind(2)[:tables])
    made = [v.to(DEV, dtype).detach().requires_grad_() for v in values]
    return made, torch.tensor(segment, device=DEV), torch.randn(shapes[0]).to(DEV, dtype)


def outcome(ops, op, made, segment, weights):
    extra = {"eps": 1e-6} if op == "norm_modulate" else {}
    out = getattr(ops, op)(*made, segment, **extra)
    return [out.detach(), *torch.autograd.grad(out, made, weights)]


@needs_triton
@pytest.mark.parametrize("op", ["norm_modulate", "gated_residual"])
@pytest.mark.parametrize("segment", SEGMENTS)
@pytest.mark.parametrize(("width", "dtype"), [(48, torch.float32), (130, torch.bfloat16)])
def test_forward_and_every_gradient_equal_reference(op, segment, width, dtype):
    from wamlab.model import kernels_triton

    tables = 2 if op == "norm_modulate" else 1
    made, rows, weights = inputs(width, SEGMENTS[segment], dtype, tables)
    found = outcome(kernels_triton, op, made, rows, weights)
    exact = [m.detach().float().requires_grad_() for m in made]
    expected = outcome(reference, op, exact, rows, weights.float())
    close = {"rtol": 2e-5, "atol": 2e-5} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 4e-2}
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.dtype == dtype
        torch.testing.assert_close(mine.float(), theirs, **close)
    again = outcome(kernels_triton, op, made, rows, weights)
    assert all(torch.equal(a, b) for a, b in zip(found, again))


@needs_triton
@pytest.mark.slow  # minutes under the interpreter
@pytest.mark.skipif(GPU, reason="tests/gpu compares the whole network there")
def test_the_whole_network_equals_reference():
    from tiny_dit import assert_same, batch, build
    from tiny_dit import outcome as run

    inputs = batch()
    expected = run(build(ModelOptions(impl="reference")).to(DEV), inputs)
    assert_same(run(build(ModelOptions(impl="triton")).to(DEV), inputs), expected)


@needs_triton
def test_without_shared_rows_it_is_refused():
    with pytest.raises(ConfigError, match=r"impl 'triton' .* needs distinct_times"):
        ModelOptions(impl="triton", distinct_times=False)


@pytest.mark.skipif(HAS_TRITON, reason="triton is installed")
def test_without_triton_the_option_is_refused():
    with pytest.raises(ConfigError, match="impl 'triton' needs the package triton"):
        ModelOptions(impl="triton")
