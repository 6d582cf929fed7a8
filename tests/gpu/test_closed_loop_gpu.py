"""The convergence proof and a policy on a GPU."""

import numpy as np
import pytest
from test_evaluate import CONFIG

from wamlab.cli.converge import converge
from wamlab.config import replace
from wamlab.evaluate.load import open_policy
from wamlab.measure import read_records

pytestmark = pytest.mark.gpu
FULL = (
    *("shortcuts", "compile", "fused_adamw", "batched_encoders", "prompt_cache", "micro_batch"),
    *({"name": "recompute", "mode": "none"}, "cuda_graph"),
)


def test_official_and_optimised_learn_the_same_on_a_gpu(tmp_path):
    config = replace(
        CONFIG,
        {"train.device": "cuda", "train.precision": "bf16", "train.steps": 8},
        evaluate_every=4,
        workers=2,
    )
    for which, entries in (("official", ()), ("optimised", FULL)):
        converge(
            replace(config, {"train.optimizations": entries}), seed=0, which=which, out=tmp_path
        )
    official, optimised = read_records(tmp_path / "records.jsonl")
    np.testing.assert_allclose(official.losses, optimised.losses, rtol=2e-2)
    assert optimised.optimizations[-1] == "cuda_graph"
    policy = open_policy(tmp_path / "optimised_0", device="cuda")
    assert str(policy.model.dit.head.head.weight.dtype) == "torch.bfloat16"
