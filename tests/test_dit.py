"""The network: public names and counts, its start, who depends on whom, refusals."""

import copy
import dataclasses

import pytest
import torch
from tiny_dit import CONFIG, assert_same, batch, build, outcome

from wamlab.config import ConfigError
from wamlab.model.dit import MODEL_SIZES, PUBLIC, ModelOptions, WorldActionDiT


@pytest.mark.parametrize(
    ("size", "count", "tensors", "per_block"),
    [
        ("dreamzero-5b", 5_606_692_832, 997, 182_540_288),
        ("dreamzero-14b", 16_484_292_448, 1317, 403_838_464),
    ],
)
def test_public_sizes_tensor_for_tensor(size, count, tensors, per_block):
    """F11: the checkpoint's 14B has 40 layers of 40 heads, whatever a table may say."""
    with torch.device("meta"):
        dit = WorldActionDiT(MODEL_SIZES[size])
    state = dit.state_dict()
    assert sum(p.numel() for p in state.values()) == count
    assert len(state) == tensors
    assert not list(dit.buffers())
    assert sum(p.numel() for p in dit.blocks[0].parameters()) == per_block
    registers = ("action_encoder", "state_encoder", "action_decoder")
    assert (
        sum(p.numel() for n, p in state.items() if n.startswith(registers))
        == {
            "dreamzero-5b": 34_813_984,
            "dreamzero-14b": 89_413_664,
        }[size]
    )
    config = dit.config
    width, hidden = config.dim, config.hidden_size
    for name, shape in {
        "patch_embedding.weight": (width, config.in_dim, 1, 2, 2),
        "action_encoder.W2.W": (1, 2 * width, width),
        "state_encoder.layer2.W": (1, hidden, width),
        "action_decoder.layer2.b": (1, config.action_dim),
        f"blocks.{config.num_layers - 1}.cross_attn.norm_k_img.weight": (width,),
        "blocks.0.ffn.2.weight": (width, config.ffn_dim),
        "head.head.weight": (4 * config.out_dim, width),
        "img_emb.proj.4.weight": (width,),
        "time_projection.1.weight": (6 * width, width),
    }.items():
        assert state[name].shape == shape, name
    assert (config.num_layers, config.num_heads) == {3072: (30, 24), 5120: (40, 40)}[width]


def test_small_sizes():
    count = {}
    for size in ("tiny", "small"):
        with torch.device("meta"):
            count[size] = sum(p.numel() for p in WorldActionDiT(MODEL_SIZES[size]).parameters())
    assert count["tiny"] < 3e6
    assert count["small"] == pytest.approx(50e6, rel=0.05)


def test_a_fresh_model_starts_as_the_public_one():
    dit = WorldActionDiT(dataclasses.replace(MODEL_SIZES["tiny"], num_layers=1))
    state = dit.state_dict()
    assert state["head.head.weight"].abs().max() == 0
    assert state["blocks.0.modulation"].std() == pytest.approx(128**-0.5, rel=0.15)
    assert state["action_encoder.W2.W"].std() == pytest.approx(0.02, rel=0.1)
    bound = (6 / (128 + 512)) ** 0.5
    assert state["blocks.0.ffn.0.weight"].abs().max() == pytest.approx(bound, rel=0.01)
    patch = (6 / (128 + 48 * 4)) ** 0.5
    assert state["patch_embedding.weight"].abs().max() == pytest.approx(patch, rel=0.02)
    assert state["time_embedding.0.weight"].std() == pytest.approx(0.02, rel=0.1)
    for name in ("blocks.0.norm3", "img_emb.proj.4"):
        assert (state[f"{name}.weight"] == 1).all()
        assert (state[f"{name}.bias"] == 0).all()
    assert 0 < state["patch_embedding.bias"].abs().max() <= (48 * 4) ** -0.5


def test_a_fresh_image_branch_speaks_unless_silenced():
    """F9: a cold start draws the image branch at random, which enters every cross-attention."""
    config = dataclasses.replace(MODEL_SIZES["tiny"], num_layers=1)

    def effect(options: ModelOptions) -> float:
        torch.manual_seed(0)
        block = WorldActionDiT(config, options).blocks[0].cross_attn
        image = torch.randn(1, 257, config.dim)
        return float(block.v_img(image).detach().abs().max())

    assert effect(ModelOptions()) > 0.1
    assert effect(ModelOptions(zero_init_img_branch=True)) == 0


def effect(dit: WorldActionDiT, given: dict, changes: dict) -> tuple[list[int], list[int]]:
    """Return which latent frames and which action tokens of the outputs a change reaches."""
    with torch.no_grad():
        before, after = dit(**given), dit(**(given | changes))
    video = (before[0] - after[0]).abs().amax(dim=(0, 1, 3, 4)) > 0
    action = (before[1] - after[1]).abs().amax(dim=(0, 2)) > 0
    return video.nonzero().flatten().tolist(), action.nonzero().flatten().tolist()


def changed(given: dict, name: str, place: int) -> dict:
    value = given[name].clone()
    (value[:, :, place] if value.dim() == 5 else value[:, place]).add_(1.0)
    return {name: value}


@pytest.mark.parametrize("options", [PUBLIC, ModelOptions()], ids=["public", "ours"])
def test_a_block_sees_the_clean_past_and_itself(options):
    dit, given = build(options), batch()
    first, second = [0, 1, 2, 3], [4, 5, 6, 7]
    assert effect(dit, given, changed(given, "clean_x", 0)) == ([1, 2, 3, 4], first + second)
    assert effect(dit, given, changed(given, "clean_x", 2)) == ([3, 4], second)
    assert effect(dit, given, changed(given, "clean_x", 4)) == ([], []), "its own targets"
    assert effect(dit, given, changed(given, "x", 0)) == ([0], []), "K6"
    assert effect(dit, given, changed(given, "x", 1)) == ([1, 2], first)
    assert effect(dit, given, changed(given, "action", 5)) == ([3, 4], second)
    assert effect(dit, given, changed(given, "state", 0)) == ([1, 2], first)
    assert effect(dit, given, changed(given, "timestep_action", 4)) == ([3, 4], second), "K10"


def test_all_blocks_at_once_give_the_gradients_of_one_at_a_time():
    """Teacher forcing: a block's loss has the same gradients in a clip that ends with it."""
    dit, given = build(), batch()
    video, action = dit(**given)
    (video[:, :, 1:3].sum() + action[:, :4].sum()).backward()
    whole = {n: p.grad.clone() for n, p in dit.named_parameters()}
    dit.zero_grad()
    cut = {"x": 3, "clean_x": 3, "timestep": 3, "action": 4, "timestep_action": 4, "state": 1}
    short = {
        name: value[:, :, : cut[name]] if value.dim() == 5 else value[:, : cut.get(name)]
        for name, value in given.items()
        if name != "context_length"
    }
    video, action = dit(**short)
    (video[:, :, 1:3].sum() + action.sum()).backward()
    assert_same({n: p.grad for n, p in dit.named_parameters()}, whole)


def test_samples_do_not_meet():
    dit, given = build(ModelOptions()), batch()
    with torch.no_grad():
        both = dit(**given)
        alone = dit(**{k: v[1:] for k, v in given.items()})
    for together, single in zip(both, alone):
        torch.testing.assert_close(together[1:], single, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("options", [PUBLIC, ModelOptions()], ids=["public", "ours"])
def test_clips_without_actions(options):
    """F4 and F5: no leak of the targets, and it runs with and without gradients or recompute."""
    dit, given = build(options), batch()
    given |= dict.fromkeys(("action", "timestep_action", "state"))
    video, action = dit(**given)
    assert (video.shape, action.shape) == (given["x"].shape, (2, 0, 7))
    with torch.no_grad():
        torch.testing.assert_close(dit(**given)[0], video)
    assert effect(dit, given, changed(given, "clean_x", 4))[0] == []
    assert effect(dit, given, changed(given, "clean_x", 0))[0] == [1, 2, 3, 4]


def test_odd_heights_drop_their_last_row():
    """F8: 176 pixels are 11 latent rows, of which 10 are read and predicted; 160 are 10."""
    dit, given = build(ModelOptions()), batch(hw=(5, 6))
    video, _ = dit(**given)
    assert video.shape[-2:] == (4, 6)
    cropped = given | {name: given[name][..., :4, :] for name in ("x", "clean_x")}
    torch.testing.assert_close(dit(**cropped)[0], video)


@pytest.mark.parametrize(
    "changes",
    [
        {"num_action_per_block": 16},
        {"concat_first_frame_latent": True},
        {"num_state_per_block": 2},
        {"max_chunk_size": 1},
        {"max_chunk_size": -1},
    ],
    ids=lambda c: "-".join(f"{k}={v}" for k, v in c.items()),
)
def test_other_shapes_agree_too(changes):
    config = dataclasses.replace(CONFIG, **changes)
    given = batch(config, frames=7, size=1)
    assert_same(
        outcome(build(ModelOptions(), config), given), outcome(build(PUBLIC, config), given)
    )


def test_a_copy_is_independent():
    dit = build(ModelOptions())
    dit(**batch())
    twin = copy.deepcopy(dit)
    twin.set_options(PUBLIC)
    assert dit.options == ModelOptions()
    assert twin.blocks() == list(twin.blocks)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(2, 4, 4, 4, 6)}, "4 latent frames do not divide"),
        ({"action": torch.zeros(2, 6, 7)}, "6 action and 2 state tokens for 2 blocks of 4 and 1"),
        ({"state": torch.zeros(2, 3, 9)}, "8 action and 3 state tokens"),
    ],
)
def test_refused_shapes(change, message):
    with pytest.raises(ConfigError, match=message):
        build(ModelOptions())(**(batch() | change))


def test_refused_options():
    config = dataclasses.replace(CONFIG, concat_first_frame_latent=True)
    with pytest.raises(ConfigError, match=r"pass y \[B, 4\+C, F, Y, X\]"):
        build(ModelOptions(), config)(**batch())
    for wrong, message in (
        ({"impl": "fusd"}, "unknown impl 'fusd'.*did you mean 'fused'"),
        ({"attention": "prefx"}, "attention implementation 'prefx'.*did you mean 'prefix'"),
        ({"time_dtype": "fp16"}, "unknown time_dtype 'fp16'"),
    ):
        with pytest.raises(ConfigError, match=message):
            ModelOptions(**wrong)


def test_a_block_refuses_a_time_row_for_less_than_every_token():
    """F13: publicly a modulation of another length is cut or repeated in silence."""
    dit, given = build(PUBLIC), batch()
    dit.blocks[0].register_forward_pre_hook(lambda m, args: (args[0], args[1][:, :1], *args[2:]))
    with pytest.raises(AssertionError, match="one time row a token"):
        dit(**given)
