"""On a GPU: weights stream onto it, and a chunk is the one that the CPU samples."""

import dataclasses

import pytest
import torch

from wamlab.model.cached_dit import Conditioning
from wamlab.model.dit import MODEL_SIZES, WorldActionDiT
from wamlab.model.sampling import Sampler, SamplingConfig
from wamlab.model.weights import load_policy, save_policy

pytestmark = pytest.mark.gpu

CONFIG = dataclasses.replace(MODEL_SIZES["tiny"], num_layers=2)


def build() -> WorldActionDiT:
    torch.manual_seed(0)
    dit = WorldActionDiT(CONFIG)
    torch.nn.init.normal_(dit.head.head.weight, std=0.05)
    return dit


def test_a_meta_model_is_filled_on_the_gpu_alone(tmp_path):
    source = build()
    save_policy(source, tmp_path / "policy")
    with torch.device("meta"):
        dit = WorldActionDiT(CONFIG)
    load_policy(dit, tmp_path / "policy", device="cuda")
    assert {p.device.type for p in dit.parameters()} == {"cuda"}
    want = source.state_dict()
    assert all(torch.equal(p.cpu(), want[n]) for n, p in dit.state_dict().items())
    save_policy(dit, tmp_path / "again")
    first, again = (tmp_path / f / "model.safetensors" for f in ("policy", "again"))
    assert first.read_bytes() == again.read_bytes()


def sample(dit: WorldActionDiT, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    latent, state = torch.randn(2, 48, 1, 4, 6), torch.randn(2, 1, 64)
    lengths = torch.tensor([20, 9])
    rows = torch.randn(2, 512, 64) * (torch.arange(512) < lengths[:, None])[..., None]
    given = Conditioning(
        context=rows.to(device),
        clip_feature=torch.randn(2, 257, 64).to(device),
        negative_context=rows[:1].to(device) / 2,
        context_length=lengths.to(device),
        negative_length=lengths[:1].to(device),
    )
    sampler = Sampler(dit, SamplingConfig(steps=4, dit_steps="all"))
    # the same noise on both devices: their generators differ
    noise = torch.randn(2, 48, 2, 4, 6), torch.randn(2, 24, 32)
    sampler._noise = lambda where: [n.to(where) for n in noise]
    sampler.start(latent.to(device), given)
    chunk = sampler.sample(state.to(device))
    return chunk.latents.cpu(), chunk.actions.cpu()


@pytest.mark.parametrize(("dtype", "allowed"), [(torch.float32, 2e-3), (torch.bfloat16, 6e-2)])
def test_a_chunk_equals_the_one_of_the_cpu(dtype, allowed):
    want = sample(build(), "cpu")
    got = sample(build().to("cuda", dtype), "cuda")
    for a, b in zip(got, want):
        assert torch.linalg.norm(a - b) / torch.linalg.norm(b) <= allowed
