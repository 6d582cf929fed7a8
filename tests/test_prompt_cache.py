"""The prompt cache: equal to the encoder, resumed after an interruption, refused for another."""

import pytest
import torch
from safetensors import safe_open

from wamlab.__main__ import main
from wamlab.draws import Draws
from wamlab.model import prompt_cache
from wamlab.model.prompt_cache import (
    PromptCache,
    PromptCacheError,
    build_prompt_cache,
    cache_meta,
    encoder_meta,
)
from wamlab.model.text import TextEncoder
from wamlab.model.wam import WAMConfig, WorldActionModel

PROMPTS = ["lift the cup", "a", "put the ball on the plate", "lift  the cup", "a"]


@pytest.fixture(scope="module")
def encoder():
    return TextEncoder("tiny")


def test_rows_of_the_file_are_the_encoders(encoder, tmp_path):
    path = tmp_path / "deep" / "prompts.safetensors"
    cache = build_prompt_cache(path, PROMPTS, encoder)
    assert len(cache) == 3  # repeats, also after cleaning, are one prompt
    want, length = encoder.encode(PROMPTS)
    got, same = PromptCache(encoder_meta("tiny", None), path).lookup(PROMPTS, "cpu")
    assert got.dtype == torch.bfloat16
    assert got.shape == want.shape
    torch.testing.assert_close(got, want, atol=1e-5, rtol=2**-7)
    assert torch.equal(length, same)
    with safe_open(path, "pt") as file:
        rows = sorted(file.get_slice(k).get_shape()[0] for k in file.keys())  # noqa: SIM118
    assert rows == sorted({len(" ".join(p.split())) + 1 for p in PROMPTS})  # valid rows alone


def test_a_build_continues_after_an_interruption(encoder, tmp_path, monkeypatch):
    monkeypatch.setattr(prompt_cache, "FLUSH", 4)
    prompts, path = [f"prompt {i}" for i in range(10)], tmp_path / "p.safetensors"
    encoded = []

    def stop_at(count):
        def encode(some, **how):
            if len(encoded) + len(some) > count:
                raise KeyboardInterrupt
            encoded.extend(some)
            return TextEncoder.encode(encoder, some, **how)

        return encode

    monkeypatch.setattr(encoder, "encode", stop_at(6))
    with pytest.raises(KeyboardInterrupt):
        build_prompt_cache(path, prompts, encoder, batch=2)
    assert not path.exists()
    assert len(list((tmp_path / "p.safetensors.parts").iterdir())) == 2
    seen = []
    monkeypatch.setattr(encoder, "encode", stop_at(99))
    build_prompt_cache(path, prompts, encoder, batch=2, progress=lambda *n: seen.append(n))
    assert seen == [(2, 4), (4, 4)]
    assert sorted(encoded) == prompts  # each once
    assert not (tmp_path / "p.safetensors.parts").exists()
    build_prompt_cache(path, [*prompts, "one more"], encoder)
    assert encoded[10:] == ["one more"]
    assert len(PromptCache(cache_meta(encoder), path)) == 11


def test_a_cache_of_another_encoder_or_tokenizer_is_refused(encoder, tmp_path):
    path = tmp_path / "p.safetensors"
    build_prompt_cache(path, PROMPTS, encoder)
    with pytest.raises(PromptCacheError, match=r"made by another text encoder: its encoder is"):
        PromptCache(encoder_meta("tiny", None, seed=1), path)
    with pytest.raises(PromptCacheError, match=r"another text encoder: its encoder"):
        build_prompt_cache(path, PROMPTS, TextEncoder("tiny", seed=1))

    class Other(type(encoder.tokenizer)):
        def __call__(self, text, **how):
            return {"input_ids": [7]}

    other = TextEncoder("tiny", tokenizer=Other())
    with pytest.raises(PromptCacheError, match=r"another text encoder: its tokenizer"):
        build_prompt_cache(path, PROMPTS, other)


def test_training_reads_the_file_and_builds_no_text_encoder(encoder, tmp_path):
    path = tmp_path / "p.safetensors"
    build_prompt_cache(path, PROMPTS, encoder)
    config = WAMConfig(layers=1, target_hw=(32, 32))
    online = WorldActionModel(config)
    cached = WorldActionModel(WAMConfig(layers=1, target_hw=(32, 32), prompt_cache=str(path)))
    assert cached.text is None
    assert len(cached.frozen()) == 2
    batch = {
        "video": torch.randint(0, 256, (2, 9, 32, 32, 3), dtype=torch.uint8),
        "prompt": PROMPTS[:2],
        "state": torch.zeros(2, 1, 64),
        "action": torch.zeros(2, 24, 32),
        "action_mask": torch.ones(2, 24, 32, dtype=torch.bool),
        "has_real_action": torch.ones(2, dtype=torch.bool),
    }
    draws = Draws(0, 0, torch.arange(2))
    with torch.no_grad():
        torch.testing.assert_close(cached.loss(batch, draws), online.loss(batch, draws))
    with pytest.raises(PromptCacheError, match=r"p\.safetensors lacks the prompt 'unknown'"):
        cached.encode(batch | {"prompt": ["unknown", "a"]})


def test_files_that_are_no_cache_are_named(encoder, tmp_path):
    meta = encoder_meta("tiny", None)
    with pytest.raises(PromptCacheError, match=r"no such prompt cache: .*encode-prompts"):
        PromptCache(meta, tmp_path / "none.safetensors")
    (tmp_path / "cut.safetensors").write_bytes(b"\0" * 9)
    with pytest.raises(PromptCacheError, match=r"cut\.safetensors is no whole safetensors file"):
        PromptCache(meta, tmp_path / "cut.safetensors")
    weights = tmp_path / "weights.safetensors"
    prompt_cache.save_file({"a": torch.zeros(1)}, weights)
    with pytest.raises(PromptCacheError, match=r"is not a prompt cache"):
        PromptCache(meta, weights)


def test_the_command_encodes_a_data_set(tmp_path, monkeypatch, capsys):
    class Fake:
        def __init__(self, root, robot):
            assert root == "DATA"
            robots.append(robot)

        def prompts(self):
            return PROMPTS

    monkeypatch.setattr("wamlab.cli.encode_prompts.LeRobotDataset", Fake)
    out, robots = tmp_path / "p.safetensors", []
    command = ["encode-prompts", "DATA", "--out", str(out), "--device", "cpu"]
    assert main([*command, "--prompt", "Do {instruction}."]) == 0
    assert robots[0].prompt_text("Lift it.") == "Do lift it."
    said = capsys.readouterr().out
    assert "3 prompts, 41 rows of 64" in said
    assert said.startswith("embodiment toy, text encoder tiny, RANDOM weights of seed 0")
    assert main([*command, "--seed", "1"]) == 2
    assert "made by another text encoder" in capsys.readouterr().err
