"""Checkpoints opened: formats, the hub, and every way in which files can disagree."""

import json
import sys
import types
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from wamlab.model import stored
from wamlab.model.stored import CheckpointError, open_checkpoint

INDEX = "model.safetensors.index.json"
SHARDS = [f"model-{i:05d}-of-00003.safetensors" for i in (1, 2, 3)]


def tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {f"layer{i}.weight": torch.randn(4, 3 + i) for i in range(6)}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three shards of two tensors each, with their index."""
    values = tensors()
    names = list(values)
    weight_map = {}
    for i, shard in enumerate(SHARDS):
        part = {n: values[n] for n in names[2 * i : 2 * i + 2]}
        save_file(part, tmp_path / shard)
        weight_map |= dict.fromkeys(part, shard)
    (tmp_path / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return tmp_path


def edit_index(folder: Path, change) -> None:
    index = json.loads((folder / INDEX).read_text())
    change(index["weight_map"])
    (folder / INDEX).write_text(json.dumps(index))


def test_every_form_of_a_checkpoint_reads_the_same(folder, tmp_path_factory):
    values = tensors()
    other = tmp_path_factory.mktemp("single")
    save_file(values, other / "diffusion_pytorch_model.safetensors")
    pth = tmp_path_factory.mktemp("pth") / "full_weights.pt"
    torch.save({"state_dict": values}, pth)
    for source in (folder, folder / INDEX, other, str(pth), pth.parent):
        checkpoint = open_checkpoint(source)
        assert checkpoint.tensors.keys() == values.keys()
        for name, value in values.items():
            assert checkpoint.tensors[name].shape == value.shape
            assert torch.equal(checkpoint.read(name), value)


@pytest.mark.parametrize("dtype", sorted(stored.DTYPES))
def test_every_dtype_reads_bit_for_bit(dtype, tmp_path):
    bits = torch.arange(8, dtype=torch.uint8) % 2
    value = bits.repeat(8).view(stored.DTYPES[dtype])
    save_file({"x": value, "empty": value[:0].clone()}, tmp_path / "a.safetensors")
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.read("x").dtype == value.dtype
    assert torch.equal(checkpoint.read("x").view(torch.uint8), value.view(torch.uint8))
    assert checkpoint.read("empty").shape == (0,)


def test_the_default_device_does_not_change_what_is_read(folder):
    """Weights read while a model was built under `torch.device("cuda")` could not be filled."""
    with torch.device("meta"):
        checkpoint = open_checkpoint(folder)
        read = {name: checkpoint.read(name) for name in checkpoint.tensors}
    assert read.keys() == tensors().keys()
    assert all(torch.equal(read[name], value) for name, value in tensors().items())


def test_a_scalar_and_a_remapped_pth_are_read(tmp_path, monkeypatch):
    save_file({"s": torch.tensor(2.5)}, tmp_path / "a.safetensors")
    assert open_checkpoint(tmp_path).read("s") == 2.5
    monkeypatch.setattr(stored, "_REMAP_BYTES", 0)
    torch.save(tensors(), tmp_path / "b.pth")
    checkpoint = open_checkpoint(tmp_path / "b.pth")
    assert all(torch.equal(checkpoint.read(n), v) for n, v in tensors().items())


def test_a_missing_shard_is_named_with_its_tensors(folder):
    """D20: shard 2 of 3 is deleted."""
    (folder / SHARDS[1]).unlink()
    with pytest.raises(
        CheckpointError, match=f"{SHARDS[1]} is missing .* layer2.weight, layer3.weight"
    ):
        open_checkpoint(folder)


def test_an_index_that_names_an_absent_tensor_is_refused(folder):
    """D20: an index naming an absent tensor."""
    edit_index(folder, lambda m: m.update({"ghost.weight": SHARDS[2]}))
    with pytest.raises(CheckpointError, match=f"ghost.weight into {SHARDS[2]}"):
        open_checkpoint(folder)


def test_an_extra_tensor_in_a_shard_is_refused(folder):
    """D20: an extra tensor."""
    edit_index(folder, lambda m: m.pop("layer4.weight"))
    with pytest.raises(CheckpointError, match=f"{SHARDS[2]} holds layer4.weight"):
        open_checkpoint(folder)


def test_a_stale_index_is_refused(folder):
    """D20: the index of an older save, of two shards, or with tensors in other shards."""
    edit_index(folder, lambda m: m.update({"layer0.weight": SHARDS[1]}))
    with pytest.raises(CheckpointError, match=r"puts layer0.weight into .*; .* holds layer0"):
        open_checkpoint(folder)
    edit_index(folder, lambda m: m.update({"layer0.weight": SHARDS[0]}))
    edit_index(folder, lambda m: [m.pop(f"layer{i}.weight") for i in (4, 5)])
    with pytest.raises(CheckpointError, match=f"{SHARDS[2]} is not in the index"):
        open_checkpoint(folder)


@pytest.mark.parametrize("keep", [4, 40, -1])
def test_a_truncated_shard_is_refused(folder, keep):
    data = (folder / SHARDS[0]).read_bytes()
    (folder / SHARDS[0]).write_bytes(data[:keep])
    with pytest.raises(CheckpointError, match=f"{SHARDS[0]} is truncated"):
        open_checkpoint(folder)


def test_what_is_cut_from_a_truncated_file_is_named(folder):
    data = (folder / SHARDS[0]).read_bytes()
    (folder / SHARDS[0]).write_bytes(data[:-1])
    with pytest.raises(CheckpointError, match=r"cut are layer1\.weight"):
        open_checkpoint(folder)


def test_bytes_after_the_last_tensor_are_refused(folder):
    with (folder / SHARDS[0]).open("ab") as file:
        file.write(b"\0" * 8)
    with pytest.raises(CheckpointError, match="bytes after its last tensor"):
        open_checkpoint(folder)


@pytest.mark.parametrize("name", [SHARDS[1], INDEX])
def test_a_git_lfs_pointer_is_named(folder, name):
    (folder / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    with pytest.raises(CheckpointError, match=f"{name} is a Git-LFS pointer.*git lfs pull"):
        open_checkpoint(folder)


def test_broken_files_are_named(folder, tmp_path):
    (folder / SHARDS[0]).write_bytes(b"")
    with pytest.raises(CheckpointError, match=f"{SHARDS[0]} is empty"):
        open_checkpoint(folder)
    (folder / SHARDS[0]).write_bytes((4).to_bytes(8, "little") + b"abcd")
    with pytest.raises(CheckpointError, match="no valid safetensors header"):
        open_checkpoint(folder)
    header = json.dumps({"x": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}}).encode()
    (folder / SHARDS[0]).write_bytes(len(header).to_bytes(8, "little") + header + b"\0" * 8)
    with pytest.raises(CheckpointError, match="does not fill"):
        open_checkpoint(folder)
    (folder / INDEX).write_text('{"weight_map": {"a": "../elsewhere.safetensors"}}')
    with pytest.raises(CheckpointError, match="names of files beside it"):
        open_checkpoint(folder)
    (folder / INDEX).write_text("[]")
    with pytest.raises(CheckpointError, match="not a safetensors index"):
        open_checkpoint(folder)


class Evil:
    def __reduce__(self):
        return (print, ("executed",))


def test_a_pth_is_read_as_tensors_alone(tmp_path, capsys):
    path = tmp_path / "a.pth"
    torch.save({"x": torch.ones(2), "evil": Evil()}, path)
    with pytest.raises(CheckpointError, match="file of tensors alone"):
        open_checkpoint(path)
    assert "executed" not in capsys.readouterr().out
    torch.save({"x": torch.ones(2), "epoch": 3}, path)
    with pytest.raises(CheckpointError, match="must hold a dict of tensors"):
        open_checkpoint(path)
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(CheckpointError, match=r"a\.pth cannot be read.*truncated"):
        open_checkpoint(path)


def test_a_folder_must_hold_one_checkpoint(tmp_path):
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        open_checkpoint(tmp_path)
    for name in ("a", "b"):
        save_file(tensors(), tmp_path / f"{name}.safetensors")
    with pytest.raises(CheckpointError, match=r"a\.safetensors, b\.safetensors.*give the file"):
        open_checkpoint(tmp_path)
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(CheckpointError, match=r"a\.txt is not a checkpoint: allowed are"):
        open_checkpoint(tmp_path / "a.txt")
    with pytest.raises(CheckpointError, match="no such checkpoint: /nowhere"):
        open_checkpoint("/nowhere")


def fake_hub(monkeypatch, **functions) -> None:
    hub = types.SimpleNamespace(**functions)
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)


def test_a_hub_id_is_fetched(folder, monkeypatch):
    asked = []

    def snapshot_download(repo, *, revision, allow_patterns):
        asked.append((repo, revision))
        assert "*.safetensors" in allow_patterns
        return str(folder)

    def hf_hub_download(repo, filename, *, revision):
        asked.append((repo, filename, revision))
        return str(folder / SHARDS[0])

    fake_hub(monkeypatch, snapshot_download=snapshot_download, hf_hub_download=hf_hub_download)
    assert len(open_checkpoint("org/some-model", revision="v1").tensors) == 6
    assert len(open_checkpoint("org/some-model/sub/a.safetensors").tensors) == 2
    assert asked == [("org/some-model", "v1"), ("org/some-model", "sub/a.safetensors", None)]


def test_hub_failures_say_what_to_do(monkeypatch):
    def snapshot_download(repo, **kwargs):
        raise OSError("404: no such repository")

    fake_hub(monkeypatch, snapshot_download=snapshot_download)
    with pytest.raises(CheckpointError, match=r"org/typo is neither .* 404"):
        open_checkpoint("org/typo")
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(CheckpointError, match=r"pip install 'wamlab\[hub\]'"):
        open_checkpoint("org/typo")
