"""UniPC's tables and steps, and the chunked rollout with its KV cache."""

import pytest
import torch

from golden_kinds.golden import Golden, assert_close
from wamlab.model.unipc import UniPC, shifted_sigmas


def unipc_cases(golden: Golden) -> list:
    names = sorted({key.split("/")[0] for key in golden.tensors("unipc")})
    return [
        pytest.param(lambda g, n=int(name): check_unipc(g, n), id=f"unipc{name}") for name in names
    ]


def check_unipc(golden: Golden, steps: int) -> None:
    want = golden.tensors(f"unipc{steps}/")
    sampler = UniPC(shifted_sigmas(steps))
    decoupled = UniPC(shifted_sigmas(steps, last_sigma=0.8))
    for got, prefix, suffix in ((sampler, "", ""), (decoupled, "decoupled_video_", "_0.8")):
        sigmas = want[f"{prefix}sigmas{suffix}"]
        torch.testing.assert_close(torch.tensor(got.sigmas), sigmas, atol=1e-6, rtol=0)
        assert got.timesteps == want[f"{prefix}timesteps{suffix}"].tolist()
    x = want["samples"][0]
    for i, velocity in enumerate(want["model_outputs"]):
        x = sampler.step(x, velocity)
        assert_close(x, want["samples"][i + 1], 2e-5, f"sample after step {i}")


KINDS = {"scheduler": unipc_cases}
