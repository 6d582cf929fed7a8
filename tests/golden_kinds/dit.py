"""The DiT: training forward with every gradient, loss, attention masks, training tables."""

import dataclasses
import functools

import pytest
import torch

from golden_kinds.golden import (
    Golden,
    assert_close,
    assert_gradients_close,
    relative_l2,
    smallest_of_kind,
)
from wamlab.config import replace
from wamlab.model import flow_matching
from wamlab.model.attention import IMPLEMENTATIONS, Layout, build_attention
from wamlab.model.dit import PUBLIC, DiTConfig, ModelOptions, WorldActionDiT

# every way to compute that has a backward on a CPU; the GPU's own are in tests/gpu
WAYS = {
    "public": PUBLIC,
    "reference": ModelOptions(impl="reference"),
    **{f"fused-{impl}": ModelOptions(attention=impl) for impl in ("dense", "loops", "prefix")},
}
RECOMPUTE = ("full", "selective")
MAY_WARN = [
    # Dynamo looks at .grad of the inputs, and hides torch's warning only where warnings may pass
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    # the public rotation is complex: the compiler leaves it as it is, and says so
    pytest.mark.filterwarnings("ignore:Torchinductor does not support code generation for complex"),
]


@dataclasses.dataclass(frozen=True)
class Run:
    """One way to run a golden."""

    options: ModelOptions
    recompute: str = "none"
    compiler: str | None = None
    device: str = "cpu"

    def given(self, golden: Golden) -> dict[str, torch.Tensor]:
        return {name: value.to(self.device) for name, value in golden.tensors("in/").items()}


def runs(golden: Golden) -> list:
    """All ways eagerly; compiled and with recompute for one golden of a kind, else marked slow.

    Inductor takes up to a minute a case: one forward golden goes through it in every way, the
    others through the same graphs, partitions and recompute without its code generation.
    """
    small = smallest_of_kind(golden)
    cases = [(name, Run(options), False) for name, options in WAYS.items()]
    for recompute in RECOMPUTE:
        cases.append((f"{recompute}-recompute", Run(ModelOptions(), recompute), not small))
    untrimmed = ModelOptions(attention="prefix", trim_last_block=False)  # one graph for all blocks
    compiler = "inductor" if small and golden.sidecar["kind"] == "forward_train" else "aot_eager"
    cases.append(("compiled", Run(untrimmed, "selective", compiler), not small))
    for recompute in ("none", *RECOMPUTE):
        for name, options in WAYS.items():
            run = Run(options, recompute, compiler)
            cases.append((f"{name}-{recompute}-compiled", run, True))
    return cases


def cases_with(check, golden: Golden) -> list:
    return [
        pytest.param(
            functools.partial(check, run=run),
            id=name,
            marks=[*MAY_WARN, pytest.mark.slow] if slow else MAY_WARN,
        )
        for name, run, slow in runs(golden)
    ]


def build(golden: Golden, weights: Golden, run: Run) -> WorldActionDiT:
    sizes = golden.sidecar["config"]
    names = {f.name for f in dataclasses.fields(DiTConfig)}
    config = DiTConfig(**{k: v for k, v in sizes.items() if k in names})
    assert (config.in_dim, sizes["patch_size"]) == (sizes["in_dim"], [1, 2, 2])
    # without a window the public clean stream is causal token by token
    dit = WorldActionDiT(config, replace(run.options, clean_token_causal=config.window < 0))
    dit.load_state_dict(weights.tensors("state/"))
    if run.compiler:
        torch.compiler.reset()  # the limit of graphs is one case's, not all cases' together
    for block in dit.blocks():
        block.recompute = run.recompute
        if run.compiler:
            how = {"backend": run.compiler, "fullgraph": True, "dynamic": False}
            block.forward = torch.compile(block.forward, **how)
    return dit.to(run.device)


def check_forward(golden: Golden, run: Run) -> None:
    dit = build(golden, golden, run)
    inputs, differentiated = run.given(golden), golden.tensors("grad_in/")
    for name in differentiated:
        inputs[name].requires_grad_()
    video, action = dit(**inputs)
    assert_close(video, golden.tensors("out/")["video"], 2e-5, "video")
    assert_close(action, golden.tensors("out/")["action"], 2e-5, "action")
    weight = {name: w.to(run.device) for name, w in golden.tensors("loss_w/").items()}
    ((video * weight["video"]).sum() + (action * weight["action"]).sum()).backward()
    got = {name: p.grad for name, p in dit.named_parameters()}
    assert_gradients_close(got, golden.tensors("grad/"))
    assert_gradients_close({name: inputs[name].grad for name in differentiated}, differentiated)


def check_inside(golden: Golden) -> None:
    """Every intermediate value that the file holds, so that a wrong step shows where it is."""
    dit = build(golden, golden, Run(PUBLIC))
    seen: dict[str, torch.Tensor] = {}

    def watch(module: torch.nn.Module, name: str) -> None:
        module.register_forward_hook(lambda m, args, out: seen.__setitem__(name, out))

    for i, block in enumerate(dit.blocks()):
        watch(block, f"block{i}_out")
    first = dit.blocks[0]
    watch(first.self_attn, "block0_self_attn_out")
    watch(first.cross_attn, "block0_cross_attn_out")
    watch(first.ffn[2], "block0_ffn_out")
    for name, module in (("action_tokens", dit.action_encoder), ("text_ctx", dit.text_embedding)):
        watch(module, name)
    watch(dit.state_encoder, "state_tokens")
    watch(dit.img_emb, "img_ctx")
    dit(**golden.tensors("in/"))
    mids, sizes = golden.tensors("mid/"), golden.sidecar
    order = layout_of(sizes["config"], sizes["num_blocks"]).public_order()
    for name, value in mids.items():
        if name in seen:
            got = seen[name][:, order] if name.startswith("block") else seen[name]
            assert_close(got, value, 2e-5, name)
    assert not mids or len(set(seen) & set(mids)) >= 8, sorted(seen)


def layout_of(sizes: dict, blocks: int) -> Layout:
    names = DiTConfig.__dataclass_fields__
    config = DiTConfig(**{k: v for k, v in sizes.items() if k in names})
    return Layout(
        frames=1 + blocks * config.num_frame_per_block,
        frame_tokens=sizes["frame_seqlen"],
        frames_per_block=config.num_frame_per_block,
        actions_per_block=config.num_action_per_block,
        states_per_block=config.num_state_per_block,
        window=config.window,
        clean_token_causal=config.window < 0,
    )


def check_loss(golden: Golden, run: Run) -> None:
    dit = build(golden, golden.sibling(golden.sidecar.get("weights_from", golden.name)), run)
    given, want, mode = run.given(golden), golden.tensors("out/"), golden.sidecar["mode"]
    per_block, registers = dit.config.num_frame_per_block, dit.config.num_action_per_block
    beta = flow_matching.beta_index(given["beta_sample_raw"])
    video = flow_matching.share_in_blocks(
        given["timestep_id_raw"] if mode == "standard" else beta, per_block
    )
    coupled = mode != "decoupled"
    action = (
        flow_matching.follow_blocks(video, per_block, registers)
        if coupled
        else given["timestep_action_id_raw"]
    )
    assert torch.equal(video.cpu(), want["timestep_id"])
    assert torch.equal(action.cpu(), want["timestep_action_id"])
    noised = flow_matching.add_noise(
        given["latents"],
        given["noise"],
        given["action"],
        given["noise_action"],
        index=(video, action),
    )
    for got, name in (
        (noised.video, "noisy_latents"),
        (noised.action, "noisy_actions"),
        (noised.video_time, "timestep"),
        (noised.action_time, "timestep_action"),
        (noised.video_weight, "weight_video"),
        (noised.action_weight, "weight_action"),
    ):
        assert_close(got, want[name], 1e-6, name)
    shared = {k: given[k] for k in ("context", "clip_feature", "y")}
    velocity, moves = dit(
        noised.video,
        given["latents"],
        noised.video_time,
        noised.action,
        noised.action_time,
        given["state"],
        coupled_times=coupled,
        **shared,
    )
    assert_close(velocity, want["video_pred"], 2e-5, "video velocity")
    assert_close(moves, want["action_pred"], 2e-5, "action velocity")
    masks = {k: given[k] for k in ("action_mask", "has_real_action")}
    losses = flow_matching.velocity_losses(velocity, moves, noised, **masks)
    for name, value in losses.items():
        assert relative_l2(value, want[name][0]) <= 1e-5, name
    losses["loss"].backward()
    got = {name: p.grad for name, p in dit.named_parameters()}
    assert_gradients_close(got, golden.tensors("grad/"))


def check_masks(golden: Golden) -> None:
    for name, mask in golden.tensors("mask/").items():
        case = golden.sidecar["cases"][name]
        layout = Layout(
            frames=case["latent_frames"],
            frame_tokens=case["frame_seqlen"],
            frames_per_block=case["num_frame_per_block"],
            actions_per_block=case["num_action_per_block"],
            states_per_block=case["num_state_per_block"],
            window=case["local_attn_size"],
            clean_token_causal=case["local_attn_size"] < 0,
        )
        order = layout.public_order()
        assert torch.equal(layout.mask()[order][:, order], mask), f"mask {name} differs"
        for impl in IMPLEMENTATIONS:
            assert torch.equal(probed_mask(layout, impl)[order][:, order], mask), (name, impl)


def probed_mask(layout: Layout, impl: str) -> torch.Tensor:
    """Read a mask off an implementation: with equal scores and one-hot values, who is averaged?"""
    tokens = layout.tokens
    value = torch.eye(tokens)[None, :, None]
    flat = torch.zeros(1, tokens, 1, tokens)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("wamlab.model.attention._compiled_flex", lambda: plain_flex)
        return build_attention(layout, impl)(flat, flat, value)[0, :, 0] > 0


def plain_flex(q, k, v, *, block_mask):
    """FlexAttention's meaning without its compiler."""
    prefix = block_mask.mask_mod(0, 0, torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2]))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=prefix)


def check_tables(golden: Golden) -> None:
    want, got = golden.tensors("train/"), flow_matching.schedule()
    for name, table in (("sigmas", got.sigma), ("timesteps", got.time), ("weights", got.weight)):
        torch.testing.assert_close(table, want[name], rtol=1e-6, atol=1e-6)


KINDS = {
    "forward_train": lambda golden: [
        *cases_with(check_forward, golden),
        pytest.param(check_inside, id="inside"),
    ],
    "training_loss": lambda golden: cases_with(check_loss, golden),
    "attention_mask": lambda golden: [pytest.param(check_masks, id="masks")],
    "scheduler": lambda golden: [pytest.param(check_tables, id="training-tables")],
}
