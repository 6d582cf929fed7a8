"""The latent cache: what is read is what was encoded, bounded on disk, refused for another."""

import dataclasses

import pytest
import torch
from conftest import ROOT

from wamlab.cli import encode_latents
from wamlab.config import ConfigError
from wamlab.data.data_config import DataConfig
from wamlab.data.loader import Loader
from wamlab.draws import Draws
from wamlab.model.latent_cache import Kind, LatentCache, LatentCacheError
from wamlab.model.wam import WAMConfig, WorldActionModel, latent_meta

KINDS = {
    "latents": Kind(shape=(4, 3), dtype=torch.float32),
    "clip_feature": Kind(shape=(5,), dtype=torch.bfloat16),
}
META = {"vae": "abc"}


def outputs(count: int, seed: int = 0) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return {n: torch.randn(count, *k.shape, generator=g).to(k.dtype) for n, k in KINDS.items()}


def test_rows_come_back_as_they_were_put(tmp_path):
    cache = LatentCache.create(tmp_path, META, KINDS, samples=6, max_gib=1)
    assert cache.missing().tolist() == [0, 1, 2, 3, 4, 5]
    made = outputs(2)
    cache.put(torch.tensor([4, 1]), made)
    assert cache.has(torch.tensor([1, 4]))
    assert not cache.has(torch.tensor([1, 2]))
    again = LatentCache(tmp_path, META)  # as another process sees it
    got = again.get(torch.tensor([1, 4]), "cpu")
    for name, value in made.items():
        assert got[name].dtype == value.dtype
        assert torch.equal(got[name], value.flip(0))
    assert again.missing().tolist() == [0, 2, 3, 5]
    with pytest.raises(LatentCacheError, match=r"lacks some of the samples \[0, 1\]"):
        again.get(torch.tensor([0, 1]), "cpu")


def test_the_size_on_disk_is_bounded(tmp_path):
    row = sum(kind.nbytes for kind in KINDS.values()) + 1
    cache = LatentCache.create(tmp_path, META, KINDS, samples=100, max_gib=10 * row / 2**30)
    assert cache.rows == 10
    cache.put(torch.tensor([3, 50]), outputs(2))
    assert cache.has(torch.tensor([3]))
    assert not cache.has(torch.tensor([50]))
    assert sum(f.stat().st_size for f in tmp_path.glob("*.bin")) == 10 * row


def test_another_cache_or_none_is_refused_by_name(tmp_path):
    with pytest.raises(LatentCacheError, match=r"no latent cache in .*encode-latents"):
        LatentCache(tmp_path, META)
    LatentCache.create(tmp_path, META, KINDS, samples=3, max_gib=1)
    with pytest.raises(LatentCacheError, match="made with another vae: abc, wanted is xyz"):
        LatentCache(tmp_path, {"vae": "xyz"})
    (tmp_path / "latents.bin").write_bytes(b"")
    with pytest.raises(LatentCacheError, match=r"latents\.bin is missing or not of 144 bytes"):
        LatentCache(tmp_path, META)
    (tmp_path / "meta.json").write_text("{")
    with pytest.raises(LatentCacheError, match=r"meta\.json is not JSON"):
        LatentCache(tmp_path, META)
    (tmp_path / "meta.json").write_text("{}")
    with pytest.raises(LatentCacheError, match=r"is not of a latent cache"):
        LatentCache(tmp_path, META)


def test_a_model_reads_what_is_kept_and_fills_up_the_rest(tmp_path):
    config = WAMConfig(layers=1, target_hw=(32, 32), latent_cache=str(tmp_path))
    kinds = {
        "latents": Kind(shape=(48, 3, 2, 2), dtype=torch.float32),
        "clip_feature": Kind(shape=(257, 64), dtype=torch.float32),
    }
    LatentCache.create(tmp_path, latent_meta(config), kinds, samples=8, max_gib=1)
    model = WorldActionModel(config)
    batch = {
        "video": torch.randint(0, 256, (2, 9, 32, 32, 3), dtype=torch.uint8),
        "prompt": ["a", "b"],
        "sample_id": torch.tensor([2, 5]),
        "state": torch.zeros(2, 1, 64),
        "action": torch.zeros(2, 24, 32),
        "action_mask": torch.ones(2, 24, 32, dtype=torch.bool),
        "has_real_action": torch.ones(2, dtype=torch.bool),
    }
    with torch.no_grad():
        first = model.loss(batch, Draws(0, 0, batch["sample_id"]))
        assert model.latents.has(batch["sample_id"])
        del batch["video"]
        again = model.loss(batch, Draws(0, 0, batch["sample_id"]))
    torch.testing.assert_close(again, first)
    with pytest.raises(LatentCacheError, match=r"lacks some of the samples \[7\]"):
        model.encode({"prompt": ["a"], "sample_id": torch.tensor([7])})
    with pytest.raises(LatentCacheError, match="made with another vae"):
        WorldActionModel(dataclasses.replace(config, seed=1))


def test_the_command_encodes_what_is_missing(tmp_path, monkeypatch, capsys):
    parser = encode_latents.argparse.ArgumentParser()
    encode_latents.add_arguments(parser)
    root = str(ROOT / "data_samples" / "droid_mini")
    out = str(tmp_path / "latents")
    size = ["--max-gib", "0.0005", "--batch", "2"]
    args = parser.parse_args([root, "--out", out, "--device", "cpu", *size])
    assert encode_latents.run(args) == 0
    assert f"{out}: 4 of 827 samples" in capsys.readouterr().out
    cache = LatentCache(out, latent_meta(WAMConfig()))
    assert cache.missing().tolist() == []
    cache._flags[3] = 0
    calls, encode = [], encode_latents.encode
    monkeypatch.setattr(encode_latents, "encode", lambda *a: calls.append(a[2]) or encode(*a))
    assert encode_latents.run(args) == 0
    assert calls == [[0, 0], [3, 3]]  # the shapes, and what was missing
    assert cache.has(torch.tensor([3]))


def test_a_run_on_cached_latents_opens_no_video(tmp_path, monkeypatch):
    root = str(ROOT / "data_samples" / "droid_mini")
    config = WAMConfig(layers=1, latent_cache=str(tmp_path))
    kinds = {
        "latents": Kind(shape=(48, 9, 5, 10), dtype=torch.float32),
        "clip_feature": Kind(shape=(257, 64), dtype=torch.float32),
    }
    cache = LatentCache.create(tmp_path, latent_meta(config), kinds, samples=827, max_gib=1)
    every = torch.arange(cache.rows)
    rows = {n: torch.zeros(len(every), *k.shape, dtype=k.dtype) for n, k in kinds.items()}
    cache.put(every, rows)
    data = DataConfig(root=root, train=False, videos=False)
    monkeypatch.setattr("wamlab.data.windows.WindowDataset._views", None)
    batch = next(Loader(data, global_batch=2, micro_batch=2, seed=0))
    assert "video" not in batch
    encoded = WorldActionModel(config).encode(batch)
    assert encoded["latents"].shape == (2, 48, 9, 5, 10)
    with pytest.raises(ConfigError, match=r"videos=False needs train=False"):
        DataConfig(root=root, videos=False)
