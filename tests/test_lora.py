"""Low-rank adapters: what they touch, what they leave alone, in and out of files."""

import copy
import dataclasses
import json

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from wamlab.model.dit import MODEL_SIZES, WorldActionDiT
from wamlab.model.lora import (
    LoRAConfig,
    LoRALinear,
    adapters,
    inject,
    load_lora,
    merge,
    save_lora,
    targets,
)
from wamlab.model.stored import CheckpointError
from wamlab.model.weights import ACTION_MODULES, load_policy, save_policy

CONFIG = dataclasses.replace(
    MODEL_SIZES["tiny"], dim=16, num_heads=2, num_layers=2, ffn_dim=24, freq_dim=8
)
BLOCK_TARGETS = {
    *(f"{a}.{p}" for a in ("self_attn", "cross_attn") for p in "qkvo"),
    "ffn.0",
    "ffn.2",
}


def build(seed: int) -> WorldActionDiT:
    torch.manual_seed(seed)
    model = WorldActionDiT(CONFIG)
    torch.nn.init.normal_(model.head.head.weight)
    return model


def adapted(seed: int) -> WorldActionDiT:
    """A model whose adapters say something."""
    model = build(seed)
    inject(model, LoRAConfig(rank=3, alpha=6.0))
    for layer in adapters(model).values():
        torch.nn.init.normal_(layer.lora_B["default"].weight, std=0.1)
    return model


def run(model: WorldActionDiT) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(9)
    video, times = torch.randn(1, 48, 3, 4, 4), torch.full((1, 3), 500.0)
    action = torch.randn(1, 24, 32)
    return model(
        video, video, times, action, torch.full((1, 24), 500.0), torch.randn(1, 1, 64),
        torch.randn(1, 8, 64), torch.randn(1, 5, 64),
    )  # fmt: skip


def assert_equal_outputs(got: WorldActionDiT, want: WorldActionDiT) -> None:
    for a, b in zip(run(got), run(want)):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


def assert_same_state(got: WorldActionDiT, want: dict[str, torch.Tensor]) -> None:
    state = got.state_dict()
    assert state.keys() == want.keys()
    assert [n for n in want if not torch.equal(state[n], want[n])] == []


def test_adapters_sit_where_they_should_and_change_nothing_yet():
    model, plain = build(1).bfloat16(), build(1).bfloat16().float()
    names = set(targets(model))
    assert names == {f"blocks.{i}.{t}" for i in range(2) for t in BLOCK_TARGETS}
    inject(model)
    assert set(adapters(model)) == names
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert_equal_outputs(model, plain)


def test_only_adapters_and_action_modules_learn():
    model = adapted(1)
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad == (".lora_" in name or name.startswith(ACTION_MODULES))
    sum(out.square().sum() for out in run(model)).backward()
    for name, parameter in model.named_parameters():
        assert (parameter.grad is not None) == parameter.requires_grad, name


def test_initial_adapters_follow_the_seed_alone():
    first, second, other = build(1), build(2), build(1)
    inject(first, LoRAConfig(seed=4))
    inject(second, LoRAConfig(seed=4))
    inject(other, LoRAConfig(seed=5))
    name = "blocks.1.ffn.0.lora_A.default.weight"
    assert torch.equal(first.get_parameter(name), second.get_parameter(name))
    assert not torch.equal(first.get_parameter(name), other.get_parameter(name))
    again = first.get_parameter("blocks.0.ffn.0.lora_A.default.weight")
    assert not torch.equal(first.get_parameter(name), again)


def test_the_weight_of_an_adapted_layer_is_the_sum():
    layer = next(iter(adapters(adapted(1)).values()))
    x = torch.randn(5, layer.base_layer.in_features)
    want = torch.nn.functional.linear(x, layer.weight, layer.bias)
    torch.testing.assert_close(layer(x), want)


def test_merging_keeps_the_function():
    model = adapted(1)
    merged = copy.deepcopy(model)
    merge(merged)
    assert not any(isinstance(m, LoRALinear) for m in merged.modules())
    assert merged.state_dict().keys() == build(1).state_dict().keys()
    assert_equal_outputs(merged, model)


def test_a_full_lora_checkpoint_makes_the_round_trip(tmp_path):
    model = adapted(1)
    save_lora(model, tmp_path / "lora")
    names = load_file(tmp_path / "lora" / "model.safetensors").keys()
    prefix = "action_head.model.base_model.model.blocks.0.self_attn.q."
    for suffix in ("base_layer.weight", "lora_A.default.weight", "lora_B.default.weight"):
        assert prefix + suffix in names
    again, merged = build(2), build(3)
    assert load_lora(again, tmp_path / "lora").kept == ()
    assert_same_state(again, model.state_dict())
    assert_equal_outputs(again, model)
    load_lora(merged, tmp_path / "lora", merged=True)
    assert_equal_outputs(merged, model)
    with pytest.raises(CheckpointError, match="holds LoRA adapters"):
        load_policy(build(2), tmp_path / "lora")


def test_adapters_alone_need_their_backbone(tmp_path):
    base, model = build(1), adapted(1)
    save_lora(model, tmp_path / "lora", adapters_only=True)
    report = load_lora(base, tmp_path / "lora")
    assert_same_state(base, model.state_dict())
    assert "blocks.0.modulation" in report.kept
    assert "action_encoder.W1.W" in report.loaded
    with torch.device("meta"):
        meta = WorldActionDiT(CONFIG)
    with pytest.raises(CheckpointError, match="load the backbone first"):
        load_lora(meta, tmp_path / "lora")
    assert all(p.is_meta for p in meta.parameters())


def test_public_adapters_without_action_modules_load(tmp_path):
    """PEFT's own file: no `.default`, its alpha beside it."""
    model = adapted(1)
    values = {
        n.replace(".default.", "."): v for n, v in model.state_dict().items() if ".lora_" in n
    }
    save_file(values, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text(json.dumps({"lora_alpha": 6}))
    again = build(1)
    load_lora(again, tmp_path)
    assert_equal_outputs(again, model)
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="names no lora_alpha"):
        load_lora(build(1), tmp_path)


def test_a_meta_model_takes_a_backbone_and_fresh_adapters(tmp_path):
    save_policy(build(1), tmp_path / "policy")
    with torch.device("meta"):
        model = WorldActionDiT(CONFIG)
    inject(model, LoRAConfig(seed=0))
    report = load_policy(model, tmp_path / "policy")
    assert "blocks.0.ffn.0.lora_A.weight" in report.fresh
    want = build(1)
    inject(want, LoRAConfig(seed=0))
    assert_same_state(model, want.state_dict())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t, p: t.pop(p + "lora_B.default.weight"), r"1 missing: .*q\.lora_B\.weight"),
        (lambda t, p: t.pop(p + "base_layer.bias"), r"1 missing: blocks\.0\.self_attn\.q\.bias"),
        (lambda t, p: t.update({p + "lora_A.default.weight": torch.ones(5, 16)}), "one rank"),
        (lambda t, p: t.update({p + "lora_B.default.weight": torch.ones(16, 4)}), r"\[16, 4\]"),
    ],
)
def test_adapters_that_do_not_fit_are_refused_before_anything_changes(tmp_path, change, message):
    save_lora(adapted(1), tmp_path / "lora")
    file = tmp_path / "lora" / "model.safetensors"
    tensors = load_file(file)
    change(tensors, "action_head.model.base_model.model.blocks.0.self_attn.q.")
    save_file(tensors, file)
    model = build(2)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(CheckpointError, match=message):
        load_lora(model, tmp_path / "lora")
    assert_same_state(model, before)


def test_sharded_adapters_load_and_are_not_merged(tmp_path):
    model = adapted(1)
    save_lora(model, tmp_path / "lora")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with torch.device("meta"):
            sharded = WorldActionDiT(CONFIG)
        inject(sharded, LoRAConfig(rank=3, alpha=6.0))
        fully_shard(sharded, mesh=init_device_mesh("cpu", (1,)))
        load_lora(sharded, tmp_path / "lora")
        got = {n: p.full_tensor() for n, p in sharded.state_dict().items()}
        with pytest.raises(CheckpointError, match="merge them before `fully_shard`"):
            load_lora(sharded, tmp_path / "lora", merged=True)
    finally:
        dist.destroy_process_group()
    assert [n for n, p in model.state_dict().items() if not torch.equal(got[n], p)] == []


def test_a_checkpoint_without_adapters_is_named(tmp_path):
    save_policy(build(1), tmp_path / "policy")
    with pytest.raises(CheckpointError, match="holds no LoRA adapters"):
        load_lora(build(2), tmp_path / "policy")
