"""The hand-written kernels on a GPU: alone, and in compiled blocks against the goldens."""

import pytest
from golden_kinds.dit import Run, check_forward
from test_dit_gpu import golden
from test_kernels_triton import SEGMENTS
from test_kernels_triton import test_forward_and_every_gradient_equal_reference as check_op

from wamlab.config import ConfigError
from wamlab.model.dit import ModelOptions
from wamlab.train.bench_ops import PASSES, OpCase, measure_op

pytestmark = pytest.mark.gpu


def needs_triton():
    try:
        ModelOptions(impl="triton")
    except ConfigError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("op", PASSES)
@pytest.mark.parametrize("segment", SEGMENTS)
@pytest.mark.parametrize("width", [48, 3072, 5120])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_an_operation_alone(op, segment, width, precision):
    import torch

    needs_triton()
    check_op(op, segment, width, torch.float32 if precision == "fp32" else torch.bfloat16)


@pytest.mark.parametrize("recompute", ["none", "full", "selective"])
def test_compiled_goldens(recompute):
    needs_triton()
    options = ModelOptions(impl="triton", attention="flex")
    check_forward(golden("fwd_ti2v_window9"), Run(options, recompute, "inductor", "cuda"))


@pytest.mark.parametrize("op", PASSES)
def test_the_bench_times_all_three_ways(op):
    needs_triton()
    records = measure_op(OpCase(op=op, precision="bf16", device="cuda", repeats=3))
    assert [r.name for r in records] == [f"{op}, {w}" for w in ("reference", "compiled", "triton")]
    assert all(r.extra["largest_error"] < 2e-2 for r in records)
