"""UniPC's tables and steps, and the chunked rollout with its KV cache."""

import functools

import pytest
import torch

from golden_kinds.dit import Run, build
from golden_kinds.golden import Golden, assert_close, smallest_of_kind
from wamlab.model.cached_dit import CachedDiT, Conditioning
from wamlab.model.dit import ModelOptions
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


def rollout_cases(golden: Golden) -> list:
    """The operations of each kind eagerly; compiled the smallest golden, the others marked slow."""
    ways = {
        "reference": (Run(ModelOptions(impl="reference")), None),
        "fused": (Run(ModelOptions()), None),
        "compiled": (Run(ModelOptions()), "aot_eager"),
        "inductor": (Run(ModelOptions()), "inductor"),
    }
    fast = {"reference", "fused"} | ({"compiled"} if smallest_of_kind(golden) else set())
    return [
        pytest.param(
            functools.partial(check_rollout, run=run, compiler=compiler),
            id=f"rollout-{name}",
            marks=() if name in fast else pytest.mark.slow,
        )
        for name, (run, compiler) in ways.items()
    ]


def check_rollout(golden: Golden, run: Run, compiler: str | None) -> None:
    dit = build(golden, golden.sibling(golden.sidecar["weights_from"]), run)
    if compiler:  # one block: each of the four calls is a graph of its own, as the cache grows
        torch.compiler.reset()
        first = dit.blocks[0]
        how = {"backend": compiler, "fullgraph": True, "dynamic": False}
        first.forward = torch.compile(first.forward, **how)
    given, want = run.given(golden), golden.tensors("out/")
    conditions = {k: given.get(k) for k in ("context", "clip_feature", "y")}
    past, got = CachedDiT(dit, Conditioning(**conditions)), {}
    frames, actions, states = (
        getattr(dit.config, f"num_{kind}_per_block") for kind in ("frame", "action", "state")
    )
    for i in range(golden.sidecar["num_blocks"]):
        now = slice(1 + i * frames, 1 + (i + 1) * frames)
        before = slice(max(now.start - frames, 0), now.start)
        got[f"prefill{i}_video"] = past.see(given["clean_x"][:, :, before])
        for name, cache in (("layer0", past.caches[0]), ("last_layer", past.caches[-1])):
            got[f"prefill{i}_cache_{name}"] = torch.stack([cache.k, cache.v])
        action = given["action"][:, i * actions : (i + 1) * actions]
        state = given["state"][:, i * states : (i + 1) * states]
        times_BG = given[f"step{i}_timestep"].float().expand(len(action), 2)
        outputs = past.predict(given["x"][:, :, now], action, state, times_BG)
        got[f"step{i}_video"], got[f"step{i}_action"] = outputs
    for name, value in want.items():
        assert_close(got[name], value, 2e-5, name)


KINDS = {"scheduler": unipc_cases, "forward_inference_kv_cache": rollout_cases}
