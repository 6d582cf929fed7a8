"""The network in training: precision, sharding, recompute, compilation, loss."""

import dataclasses

import pytest
import torch
from tiny_dit import CONFIG, assert_same, batch, build, outcome
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from wamlab.config import ConfigError
from wamlab.draws import Draws
from wamlab.model import flow_matching
from wamlab.model.dit import PUBLIC, DiTConfig, ModelOptions, WorldActionDiT
from wamlab.model.reference import time_sinusoid


@pytest.fixture(scope="module")
def plain() -> dict:
    return outcome(build(), batch())


def test_times_stay_exact_and_rounding_them_is_a_choice():
    """F1: bf16 times are refused, since 747.55 would become 748; `time_dtype` reproduces that."""
    dit, given = build(ModelOptions()).bfloat16(), batch()
    given["timestep"][:] = 747.55
    rounded = given | {"timestep": torch.full_like(given["timestep"], 748.0)}
    with pytest.raises(ConfigError, match=r"arrived as torch.bfloat16.*cast_forward_inputs=False"):
        dit(**(given | {"timestep": given["timestep"].bfloat16()}))
    with torch.no_grad():
        ours, exact = dit(**given)[0], dit(**rounded)[0]
        dit.set_options(ModelOptions(time_dtype="bf16"))
        public, same = dit(**given)[0], dit(**rounded)[0]
    assert not torch.equal(ours, exact)
    assert torch.equal(public, same), "0.45 away, and the network cannot tell"


@pytest.fixture
def one_rank(tmp_path):
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


@pytest.mark.filterwarnings("ignore:FSDP2 pre-backward hook")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.filterwarnings("ignore:.*returned a view tensor")
@pytest.mark.parametrize(
    ("cast", "compiled"),
    [(False, False), (True, False), pytest.param(False, True, marks=pytest.mark.slow)],
    ids=["ours", "public", "ours-compiled"],
)
def test_sharded_in_bf16_times_arrive_as_they_are(one_rank, cast, compiled):
    """F1 under FSDP2 itself: with its input cast the times would be bf16; they are refused."""
    dit, given, seen = build(ModelOptions()), batch(), []
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, cast_forward_inputs=cast)
    for block in dit.blocks():
        block.recompute = "selective"
        if compiled:
            block.forward = torch.compile(block.forward, backend="aot_eager", fullgraph=True)
        fully_shard(block, mesh=one_rank, mp_policy=policy)
    fully_shard(dit, mesh=one_rank, mp_policy=policy)
    dit.time_embedding.register_forward_pre_hook(lambda m, args: seen.append(args[0]))
    if cast:
        with pytest.raises(ConfigError, match=r"times arrived as torch\.bfloat16"):
            dit(**given)
        return
    video, action = dit(**given)
    (video.float().square().mean() + action.float().square().mean()).backward()
    assert video.dtype == torch.bfloat16
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in dit.parameters())
    exact = time_sinusoid(given["timestep"], CONFIG.freq_dim)
    assert torch.equal(seen[0][:, 1:6], exact.bfloat16())


def test_bf16_stays_near_fp32(plain):
    given = batch()
    for options in (PUBLIC, ModelOptions()):
        with torch.no_grad():
            video, action = build(options).bfloat16()(**given)
        for got, want in ((video, plain["video"]), (action, plain["action"])):
            assert (got - want).norm() / want.norm() < 0.05


@pytest.mark.parametrize("recompute", ["full", "selective"])
@pytest.mark.parametrize("options", [PUBLIC, ModelOptions()], ids=["public", "ours"])
def test_recompute_changes_nothing_and_runs_twice(recompute, options, plain):
    dit = build(options)
    calls = []
    for block in dit.blocks():
        block.recompute = recompute
    dit.blocks[0].cross_attn.register_forward_hook(lambda m, args, out: calls.append(1))
    assert_same(outcome(dit, batch()), plain)
    assert len(calls) == 2
    with torch.no_grad():
        dit(**batch())
    assert len(calls) == 3, "nothing is kept, so nothing is computed again"


def test_selective_recompute_keeps_products_and_attention():
    def backward_flops(recompute: str) -> int:
        dit = build(ModelOptions())
        for block in dit.blocks():
            block.recompute = recompute
        with sdpa_kernel(SDPBackend.MATH):
            video, action = dit(**batch())
            with FlopCounterMode(display=False) as counter:
                (video.sum() + action.sum()).backward()
        return counter.get_total_flops()

    kept = backward_flops("none")
    assert backward_flops("selective") == kept
    assert backward_flops("full") > 1.2 * kept


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize(
    "recompute", ["none", pytest.param("full", marks=pytest.mark.slow), "selective"]
)
def test_compiled_blocks_share_their_graph_and_never_recompile(recompute):
    config = dataclasses.replace(CONFIG, num_layers=3)
    want = outcome(build(config=config), batch())
    dit = build(ModelOptions(attention="prefix"), config)
    torch._dynamo.reset()
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    for block in dit.blocks():
        block.recompute = recompute
        block.forward = torch.compile(block.forward, backend=backend, fullgraph=True, dynamic=False)
    for _ in range(2):
        assert_same(outcome(dit, batch()), want)
    assert len(graphs) == 2, "one for all blocks but the last, one for the last"


@pytest.mark.slow
def test_flex_compiles_inside_the_blocks(plain):
    """Traced whole; what a GPU makes of it is a matter of tests/gpu."""
    dit = build(ModelOptions(attention="flex"))
    for block in dit.blocks():
        block.forward = torch.compile(block.forward, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        outputs = dit(**batch())
    for got, name in zip(outputs, ("video", "action")):
        torch.testing.assert_close(got, plain[name], rtol=1e-4, atol=1e-4)


def training_batch(config: DiTConfig) -> dict:
    given = batch(config)
    return {
        "latents": given["x"],
        "action": given["action"].tanh(),
        "action_mask": torch.ones_like(given["action"], dtype=torch.bool),
        "has_real_action": torch.ones(2, dtype=torch.bool),
        "prompt_embedding": given["context"],
        "prompt_length": given["context_length"],
        **{name: given[name] for name in ("state", "clip_feature")},
    }


def test_a_batch_without_actions_leaves_no_parameter_without_gradient():
    """Sharded ranks reduce together: one whose clips have no actions must reduce all the same."""
    dit, data = build(ModelOptions()), training_batch(CONFIG)
    for name in ("action", "state", "action_mask", "has_real_action"):
        del data[name]
    losses = flow_matching.loss(dit, data, Draws(0, 0, torch.arange(2)))
    losses["loss"].backward()
    assert losses["action_loss"] == 0
    assert all(p.grad is not None for p in dit.parameters())
    assert dit.action_decoder.layer2.W.grad.abs().max() == 0


@pytest.mark.parametrize("mode", flow_matching.MODES)
def test_training_loss_falls(mode):
    torch.manual_seed(0)
    config = dataclasses.replace(CONFIG, num_layers=1)
    dit, size, data = WorldActionDiT(config), 2, training_batch(config)
    optimizer, losses = torch.optim.AdamW(dit.parameters(), lr=3e-3), []
    for step in range(60):
        found = flow_matching.loss(dit, data, Draws(0, step % 4, torch.arange(size)), mode=mode)
        found["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(found["loss"].detach()))
    assert sum(losses[-8:]) < 0.75 * sum(losses[:8])
