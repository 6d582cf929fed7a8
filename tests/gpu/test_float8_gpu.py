"""float8 on a GPU: a compiled network trains a step, and its loss stays near bf16's."""

import importlib.util

import pytest

from wamlab.train.bench_dit import DiTCase, measure_dit

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not importlib.util.find_spec("torchao"), reason="torchao is not installed"),
]


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_a_compiled_network_in_float8(recipe):
    case = {"name": "x", "way": "compiled", "layers": 2, "precision": "bf16", "device": "cuda"}
    exact = measure_dit(DiTCase(**case, repeats=2)).extra["output_sum"]
    found = measure_dit(DiTCase(**case, float8=recipe, repeats=2))
    assert found.precision == "float8"
    assert "float8" in found.optimizations
    assert found.extra["output_sum"] == pytest.approx(exact, abs=0.2 * abs(exact) + 20)
