"""Public checkpoints in and out: names, checks before any change, streaming, round trips."""

import dataclasses
import json
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from wamlab.model.dit import MODEL_SIZES, WorldActionDiT
from wamlab.model.stored import CheckpointError
from wamlab.model.weights import (
    ACTION_MODULES,
    IMAGE_MODULES,
    PREFIX,
    load_backbone,
    load_policy,
    prompt_template,
    save_policy,
)

CONFIG = dataclasses.replace(
    MODEL_SIZES["tiny"], dim=16, num_heads=2, num_layers=2, ffn_dim=24, freq_dim=8
)
SHARDS = [f"model-{i:05d}-of-00003.safetensors" for i in (1, 2, 3)]


def build(seed: int, **changes) -> WorldActionDiT:
    torch.manual_seed(seed)
    model = WorldActionDiT(dataclasses.replace(CONFIG, **changes))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    return model


def build_meta() -> WorldActionDiT:
    with torch.device("meta"):
        return WorldActionDiT(CONFIG)


def state(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def assert_same(got: dict, want: dict) -> None:
    assert got.keys() == want.keys()
    assert [n for n in want if not torch.equal(got[n], want[n])] == []


@pytest.fixture(scope="module")
def source() -> WorldActionDiT:
    return build(1)


@pytest.fixture
def policy(source, tmp_path) -> Path:
    """A policy checkpoint of three shards."""
    size = sum(p.nbytes for p in source.parameters())
    save_policy(source, tmp_path / "policy", shard_bytes=int(size / 2.5))
    assert sorted(p.name for p in (tmp_path / "policy").glob("*.safetensors")) == SHARDS
    return tmp_path / "policy"


def rewrite(file: Path, change) -> None:
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)


def test_a_policy_makes_the_round_trip(policy, source):
    model = build(2)
    report = load_policy(model, policy)
    assert_same(state(model), state(source))
    assert set(report.loaded) == set(state(source))
    assert (report.fresh, report.kept, report.ignored) == ((), (), ())
    index = json.loads((policy / "model.safetensors.index.json").read_text())
    assert all(name.startswith("action_head.model.") for name in index["weight_map"])
    assert index["metadata"]["total_size"] == sum(p.nbytes for p in source.parameters())


def test_a_pth_with_encoders_and_peft_names_loads(source, tmp_path):
    tensors = {}
    for name, value in state(source).items():
        name = name.replace("self_attn.q.", "self_attn.q.base_layer.")
        tensors[f"{PREFIX}base_model.model.{name}"] = value
    tensors["action_head.vae.model.conv1.weight"] = torch.ones(3)
    torch.save(tensors, tmp_path / "full_weights.pt")
    model = build(2)
    report = load_policy(model, tmp_path / "full_weights.pt")
    assert_same(state(model), state(source))
    assert report.ignored == ("action_head.vae.model.conv1.weight",)


def test_a_hub_id_loads(policy, source, monkeypatch):
    hub = types.SimpleNamespace(snapshot_download=lambda repo, **how: str(policy))
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    model = build(2)
    load_policy(model, "org/dreamzero")
    assert_same(state(model), state(source))


def test_a_meta_model_gets_memory_and_weights(policy, source):
    model = build_meta()
    load_policy(model, policy)
    assert_same(state(model), state(source))


def test_a_model_keeps_its_dtype(policy, source):
    model = build(2).bfloat16()
    load_policy(model, policy)
    want = {n: v.bfloat16() for n, v in state(source).items()}
    assert_same(state(model), want)
    save_policy(model, policy.parent / "half")
    again = build(3)
    load_policy(again, policy.parent / "half")
    assert_same(state(again), {n: v.float() for n, v in want.items()})


def test_fewer_layers_must_be_asked_for(policy, source):
    model = build(2, num_layers=1)
    with pytest.raises(CheckpointError, match=r"does not have: action_head\.model\.blocks\.1"):
        load_policy(model, policy)
    report = load_policy(model, policy, fewer_layers=True)
    assert torch.equal(model.head.head.weight, source.head.head.weight)
    assert report.ignored
    assert all(".blocks.1." in name for name in report.ignored)


def test_a_cold_start_says_what_starts_fresh(source, tmp_path):
    """Wan2.2-TI2V-5B has neither action modules nor a CLIP branch."""
    parts = (*ACTION_MODULES, *IMAGE_MODULES)
    new = {n for n in state(source) if any(p in n for p in parts)}
    backbone = {n: v for n, v in state(source).items() if n not in new}
    save_file(backbone, tmp_path / "diffusion_pytorch_model.safetensors")
    model, again = build(2), build_meta()
    report = load_backbone(model, tmp_path, seed=5)
    load_backbone(again, tmp_path, seed=5)
    assert set(report.fresh) == new
    assert_same({n: state(model)[n] for n in backbone}, backbone)
    assert_same(state(model), state(again))
    check_initialisation(state(model))


def check_initialisation(values: dict[str, torch.Tensor]) -> None:
    assert values["img_emb.proj.0.weight"].eq(1).all()
    assert values["img_emb.proj.1.bias"].eq(0).all()
    assert values["blocks.1.cross_attn.norm_k_img.weight"].eq(1).all()
    k_img = values["blocks.0.cross_attn.k_img.weight"]
    bound = (6 / sum(k_img.shape)) ** 0.5
    assert 0.9 * bound < k_img.abs().max() <= bound
    assert not torch.equal(k_img, values["blocks.1.cross_attn.k_img.weight"])
    assert values["action_encoder.W2.W"].std().item() == pytest.approx(0.02, rel=0.1)
    assert values["action_decoder.layer1.b"].eq(0).all()


def test_an_image_to_video_backbone_starts_only_the_action_modules_fresh(source, tmp_path):
    backbone = {n: v for n, v in state(source).items() if not n.startswith(ACTION_MODULES)}
    save_file(backbone, tmp_path / "diffusion_pytorch_model.safetensors")
    report = load_backbone(build(2), tmp_path)
    assert set(report.fresh) == state(source).keys() - backbone.keys()


@pytest.mark.parametrize(
    "lost", ["img_emb.proj.1.weight", "blocks.1.cross_attn.v_img.bias", "blocks.0.ffn.0.weight"]
)
def test_a_backbone_with_a_hole_is_refused(source, tmp_path, lost):
    """D20: a partly missing branch is a fault, not a cold start."""
    backbone = {n: v for n, v in state(source).items() if n != lost}
    save_file(backbone, tmp_path / "a.safetensors")
    model = build(2)
    before = state(model)
    with pytest.raises(CheckpointError, match=f"1 missing: {lost}"):
        load_backbone(model, tmp_path)
    assert_same(state(model), before)


def delete_shard(folder: Path) -> None:
    (folder / SHARDS[1]).unlink()


def stale_index(folder: Path) -> None:
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"] = {n: f for n, f in index["weight_map"].items() if f != SHARDS[2]}
    path.write_text(json.dumps(index))


def absent_tensor(folder: Path) -> None:
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"][PREFIX + "blocks.9.modulation"] = SHARDS[0]
    path.write_text(json.dumps(index))


def extra_tensor(folder: Path) -> None:
    rewrite(folder / SHARDS[0], lambda t: t.update({PREFIX + "ghost": torch.ones(2)}))


def extra_tensor_in_both(folder: Path) -> None:
    extra_tensor(folder)
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"][PREFIX + "ghost"] = SHARDS[0]
    path.write_text(json.dumps(index))


def truncate(folder: Path) -> None:
    (folder / SHARDS[2]).write_bytes((folder / SHARDS[2]).read_bytes()[:-5])


def wrong_shape(folder: Path) -> None:
    name = PREFIX + "patch_embedding.weight"
    rewrite(folder / SHARDS[0], lambda t: t.update({name: torch.ones(16, 20, 1, 2, 2)}))


def wrong_dtype(folder: Path) -> None:
    name = PREFIX + "patch_embedding.bias"
    rewrite(folder / SHARDS[0], lambda t: t.update({name: torch.ones(16, dtype=torch.int8)}))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (delete_shard, f"shard {SHARDS[1]} is missing and with it {PREFIX}"),
        (stale_index, f"shard {SHARDS[2]} is not in the index"),
        (absent_tensor, rf"blocks\.9\.modulation into {SHARDS[0]}"),
        (extra_tensor, f"{SHARDS[0]} holds {PREFIX}ghost"),
        (extra_tensor_in_both, f"1 that the model does not have: {PREFIX}ghost"),
        (truncate, f"{SHARDS[2]} is truncated"),
        (wrong_shape, r"patch_embedding\.weight in \S+ is \[16, 20, 1, 2, 2\], the model's is"),
        (wrong_dtype, r"patch_embedding\.bias in \S+ is int8; allowed are float64, float32"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_changes(policy, damage, message):
    """D20: every disagreement names files and tensors, and leaves each bit as it was."""
    damage(policy)
    model = build(2)
    before = state(model)
    with pytest.raises(CheckpointError, match=message):
        load_policy(model, policy)
    assert_same(state(model), before)
    meta = build_meta()
    with pytest.raises(CheckpointError, match=message):
        load_policy(meta, policy)
    assert all(p.is_meta for p in meta.parameters())


def test_a_folder_with_weights_is_not_written_over(policy, source):
    with pytest.raises(CheckpointError, match="already holds safetensors files"):
        save_policy(source, policy)


def test_two_names_for_one_parameter_are_refused(source, tmp_path):
    tensors = state(source) | {"blocks.0.self_attn.q.base_layer.bias": torch.ones(16)}
    save_file(tensors, tmp_path / "a.safetensors")
    with pytest.raises(CheckpointError, match=r"are both blocks\.0\.self_attn\.q\.bias"):
        load_policy(build(2), tmp_path)


def test_a_sharded_model_loads_and_saves(policy, source, tmp_path):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = build_meta()
        mesh = init_device_mesh("cpu", (1,))
        for block in model.blocks():
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        load_policy(model, policy)
        save_policy(model, tmp_path / "again")
    finally:
        dist.destroy_process_group()
    assert_same(load_file(tmp_path / "again" / "model.safetensors"), prefixed(state(source)))


def prefixed(values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {PREFIX + name: value for name, value in values.items()}


RANK_SCRIPT = """
import sys, torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from test_weights import build_meta
from wamlab.dist import process_group
from wamlab.model.weights import load_policy, save_policy
def main():
    model, mesh = build_meta(), init_device_mesh("cpu", (2,))
    for block in model.blocks():
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    load_policy(model, sys.argv[1])
    save_policy(model, sys.argv[2])
with process_group(torch.device("cpu")):
    main()
"""


def test_two_ranks_load_their_shards(policy, source, tmp_path):
    script = tmp_path / "rank.py"
    script.write_text(
        f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n{RANK_SCRIPT}"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", script, policy, tmp_path / "again"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert_same(load_file(tmp_path / "again" / "model.safetensors"), prefixed(state(source)))


PEAK_SCRIPT = """
import re, sys, torch
from pathlib import Path
from torch import nn
from wamlab.model import stored
from wamlab.model.weights import check_fit, fill
stored._REMAP_BYTES = 2**25
def peak_bytes():  # of this program alone; getrusage starts from its parent's peak
    return 1024 * int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])
def load(path, layers):
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(2048, 2048, bias=False) for _ in range(layers)))
    checkpoint = stored.open_checkpoint(path)
    names = {f"{i}.weight": f"{i}.weight" for i in range(layers)}
    check_fit(model.state_dict(keep_vars=True), names, checkpoint)
    fill(model, checkpoint, names)
    return model
models = [load(path, 1) for path in sys.argv[1:]]
for path in sys.argv[1:]:
    before = peak_bytes()
    models.append(load(path, 16))
    print((peak_bytes() - before) / sum(p.nbytes for p in models[-1].parameters()))
"""


def test_host_memory_never_holds_the_weights_twice(tmp_path):
    """Peak resident memory grows by the 256 MiB of the weights and what torch takes once."""
    weights = {f"{i}.weight": torch.zeros(2048, 2048) for i in range(16)}
    files = tmp_path / "model.safetensors", tmp_path / "model.pth"
    save_file(weights, files[0])
    torch.save(weights, files[1])
    done = subprocess.run(
        [sys.executable, "-c", PEAK_SCRIPT, *files], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    growth = [float(line) for line in done.stdout.split()]
    assert len(growth) == 2
    assert all(0.8 < g < 1.6 for g in growth), growth


def test_the_prompt_template_comes_from_the_experiment(tmp_path):
    assert prompt_template(tmp_path) is None
    folder = tmp_path / "run" / "experiment_cfg"
    folder.mkdir(parents=True)
    (folder / "conf.yaml").write_text("data:\n  transforms:\n  - prompt_template: 'Do {instr}.'\n")
    (folder / "metadata.json").write_text('{"embodiment": 17}')
    assert prompt_template(tmp_path / "run") == "Do {instr}."
    assert prompt_template(tmp_path / "run" / "checkpoint-500") == "Do {instr}."
    (folder / "more.json").write_text('{"prompt_template": "Other {instr}"}')
    with pytest.raises(CheckpointError, match="more than one prompt template"):
        prompt_template(tmp_path / "run")
    (folder / "more.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"more\.json is not valid json"):
        prompt_template(tmp_path / "run")
