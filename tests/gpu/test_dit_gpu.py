"""The DiT on a GPU: goldens on every attention, compiled blocks, no hidden synchronisation."""

import dataclasses
from pathlib import Path

import pytest
import torch
from golden_kinds.dit import Run, check_forward, check_loss
from golden_kinds.golden import Golden
from tiny_dit import assert_same, batch, build, outcome

from wamlab.draws import Draws
from wamlab.model import flow_matching
from wamlab.model.attention import IMPLEMENTATIONS, Layout, build_attention, full
from wamlab.model.dit import MODEL_SIZES, PUBLIC, ModelOptions, WorldActionDiT

pytestmark = pytest.mark.gpu
GOLDENS = Path(__file__).resolve().parent.parent / "goldens"
WAYS = {
    "public": PUBLIC,
    **{
        f"{impl}-{attention}": ModelOptions(impl=impl, attention=attention)
        for impl in ("reference", "fused")
        for attention in IMPLEMENTATIONS
    },
}
LIKE_5B = dataclasses.replace(
    MODEL_SIZES["dreamzero-5b"], dim=512, num_heads=4, num_layers=3, ffn_dim=1024, text_dim=64
)


@pytest.fixture(autouse=True)
def exact_fp32():
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    torch.compiler.reset()
    yield
    torch.backends.cudnn.allow_tf32 = before


def golden(name: str) -> Golden:
    return Golden(GOLDENS / f"{name}.safetensors", (GOLDENS,))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["fwd_ti2v_window9", "fwd_i2v_concat"])
def test_forward_goldens(name, way):
    check_forward(golden(name), Run(WAYS[way], device="cuda"))


@pytest.mark.parametrize("attention", IMPLEMENTATIONS)
@pytest.mark.parametrize("recompute", ["none", "full", "selective"])
def test_compiled_goldens(attention, recompute):
    options = ModelOptions(attention=attention)
    check_forward(golden("fwd_ti2v_window9"), Run(options, recompute, "inductor", "cuda"))


def test_loss_golden():
    check_loss(golden("loss_ti2v_high_noise"), Run(ModelOptions(), "selective", "inductor", "cuda"))


@pytest.mark.parametrize("frame_tokens", [50, 220])
@pytest.mark.parametrize("actions", [24, 16, 0])
@pytest.mark.parametrize("impl", [i for i in IMPLEMENTATIONS if i != "dense"])
def test_attention_at_public_shapes(impl, actions, frame_tokens):
    """bf16, heads of 128: as near to fp32 as the dense call, forward and backward."""
    layout = Layout(
        frames=9,
        frame_tokens=frame_tokens,
        frames_per_block=2,
        actions_per_block=actions,
        states_per_block=int(actions > 0),
        window=9,
    )
    torch.manual_seed(0)
    shape = (2, layout.tokens, 3, 128)
    given = [torch.randn(shape, device="cuda").bfloat16().requires_grad_() for _ in range(3)]
    weight = torch.randn(shape, device="cuda")
    exact = [x.detach().float().requires_grad_() for x in given]
    want = full(*exact, layout.mask().cuda())
    wanted = [want, *torch.autograd.grad(want, exact, weight)]
    got = build_attention(layout, impl, "cuda")(*given)
    found = [got, *torch.autograd.grad(got, given, weight.bfloat16())]
    for ours, theirs in zip(found, wanted):
        assert (ours.float() - theirs).norm() / theirs.norm() < 0.01


@pytest.mark.parametrize("attention", ["flex", "prefix"])
@pytest.mark.parametrize("recompute", ["none", "selective"])
def test_compiled_blocks_never_recompile(attention, recompute):
    dit = build(ModelOptions(attention=attention)).cuda()
    given = {k: v.cuda() for k, v in batch().items()}
    want = outcome(build(PUBLIC).cuda(), given)
    for block in dit.blocks():
        block.recompute = recompute
        block.forward = torch.compile(block.forward, fullgraph=True, dynamic=False)
    assert_same(outcome(dit, given), want, 1e-4)
    with torch.compiler.set_stance("fail_on_recompile"):
        assert_same(outcome(dit, given), want, 1e-4)


def training_batch(config) -> dict:
    given = {k: v.cuda() for k, v in batch(config, frames=9, hw=(10, 20)).items()}
    return {
        "latents": given["x"],
        "action_mask": torch.ones_like(given["action"], dtype=torch.bool),
        "has_real_action": torch.ones(2, dtype=torch.bool, device="cuda"),
        "prompt_embedding": given["context"],
        "prompt_length": given["context_length"],
        **{name: given[name] for name in ("action", "state", "clip_feature")},
    }


def run_step(dit: WorldActionDiT, data: dict) -> float:
    losses = flow_matching.loss(dit, data, Draws(0, 0, torch.arange(2, device="cuda")))
    losses["loss"].backward()
    return losses["loss"].detach()


def test_a_step_with_a_known_longest_prompt_never_synchronises():
    data = training_batch(LIKE_5B)
    dit = build(ModelOptions(longest_prompt=11), LIKE_5B).cuda().bfloat16()
    run_step(dit, data)
    try:
        torch.cuda.set_sync_debug_mode("error")
        run_step(dit, data)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_bf16_compiled_step_equals_the_public_one():
    data = training_batch(LIKE_5B)
    torch.manual_seed(0)
    losses = []
    for options, compiled in ((PUBLIC, False), (ModelOptions(), True)):
        torch.manual_seed(0)
        dit = WorldActionDiT(LIKE_5B, options).cuda().bfloat16()
        torch.nn.init.normal_(dit.head.head.weight, std=0.02)
        for block in dit.blocks():
            if compiled:
                block.forward = torch.compile(block.forward, fullgraph=True, dynamic=False)
        losses.append(float(run_step(dit, data)))
    assert losses[1] == pytest.approx(losses[0], rel=2e-3)
