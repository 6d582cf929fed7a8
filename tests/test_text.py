"""The text encoder: cleaning, cropping, zeroing, both key layouts, checkpoints, errors."""

import json

import pytest
import torch
from conftest import ROOT
from safetensors.torch import save_file

from wamlab.config import ConfigError
from wamlab.model import text as module
from wamlab.model.stored import CheckpointError
from wamlab.model.text import (
    TextEncoder,
    clean,
    text_fingerprint,
    tokenizer_fingerprint,
)

PROMPTS = ["pick up the red cup", "a", "open the drawer and put both blocks inside, then close it"]


@pytest.fixture(scope="module")
def encoder():
    return TextEncoder("tiny")


def public_weights(encoder: TextEncoder) -> dict[str, torch.Tensor]:
    state = encoder.network.state_dict()
    parts = module._parts(encoder.network)
    return {parts[name].name: value.clone() for name, value in state.items()}


@pytest.mark.parametrize(
    "row", json.loads((ROOT / "tests/goldens/text_clean.json").read_text()), ids=lambda r: r["out"]
)
def test_cleaning(row):
    assert clean(row["in"]) == row["out"]


def test_embeddings_are_bf16_of_full_length_and_zero_past_each_prompt(encoder):
    embedding, length = encoder.encode(PROMPTS)
    assert embedding.shape == (3, 512, 64)
    assert embedding.dtype == torch.bfloat16
    assert length.tolist() == [len(p) + 1 for p in PROMPTS]  # bytes and one end-of-sequence
    for rows, n in zip(embedding, length.tolist()):
        assert (rows[:n] != 0).any(1).all()
        assert not rows[n:].any()


def test_cropping_and_batching_are_exact(encoder):
    ids, mask = encoder.tokens(PROMPTS)
    longest = int(mask.sum(1).max())
    whole, cropped = encoder(ids, mask), encoder(ids[:, :longest], mask[:, :longest])
    valid = mask[:, :longest, None]
    torch.testing.assert_close(whole[:, :longest] * valid, cropped * valid, atol=1e-5, rtol=0)
    embedding, length = encoder.encode(PROMPTS)
    for i, prompt in enumerate(PROMPTS):
        alone, n = encoder.encode([prompt], crop=False)
        torch.testing.assert_close(alone[0], embedding[i], atol=1e-5, rtol=2**-7)
        assert n == length[i]


def test_the_public_fault_zeroes_from_the_shortest_prompt(encoder):
    right, _ = encoder.encode(PROMPTS)
    faulty, same = encoder.encode(PROMPTS, zero_from="batch")
    assert same.tolist() == [2, 2, 2]
    assert torch.equal(faulty[:, :2], right[:, :2])
    assert not faulty[:, 2:].any()


def test_a_prompt_is_cut_at_the_text_length(encoder):
    embedding, length = encoder.encode(["x" * 600])
    assert length.tolist() == [512]
    assert embedding.shape == (1, 512, 64)


def test_the_seed_makes_the_weights_and_touches_no_generator(encoder):
    torch.manual_seed(3)
    want = torch.rand(1)
    torch.manual_seed(3)
    again, other = TextEncoder("tiny"), TextEncoder("tiny", seed=1)
    assert torch.equal(torch.rand(1), want)
    weights = [e.network.shared.weight for e in (encoder, again, other)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])
    assert len({e.fingerprint for e in (encoder, again, other)}) == 2
    assert not any(p.requires_grad for p in encoder.parameters())


@pytest.mark.parametrize("prefix", ["", "action_head.text_encoder."])
def test_public_weights_load(encoder, tmp_path, prefix):
    stored = {prefix + name: value for name, value in public_weights(encoder).items()}
    if prefix:
        stored["action_head.model.x"] = torch.zeros(1)
    save_file(stored, tmp_path / "t5.safetensors")
    loaded = TextEncoder("tiny", tmp_path / "t5.safetensors", seed=9)
    assert torch.equal(loaded.encode(PROMPTS)[0], encoder.encode(PROMPTS)[0])
    assert loaded.network.shared.weight is loaded.network.encoder.embed_tokens.weight
    half = TextEncoder("tiny", tmp_path / "t5.safetensors", dtype=torch.bfloat16)
    assert {p.dtype for p in half.parameters()} == {torch.bfloat16}
    close = (half.encode(PROMPTS)[0].float() - encoder.encode(PROMPTS)[0].float()).norm()
    assert close < 0.05 * encoder.encode(PROMPTS)[0].float().norm()


def test_a_checkpoint_that_does_not_fit_is_refused(encoder, tmp_path):
    stored = public_weights(encoder)
    del stored["blocks.1.attn.q.weight"]
    stored["blocks.2.norm1.weight"] = torch.zeros(64)
    stored["norm.weight"] = torch.zeros(3)
    save_file(stored, tmp_path / "t5.safetensors")
    with pytest.raises(CheckpointError, match=r"missing are blocks\.1\.attn\.q\.weight; unknown"):
        TextEncoder("tiny", tmp_path / "t5.safetensors")
    with pytest.raises(CheckpointError, match=r"norm\.weight \(3,\) for \(64,\)"):
        TextEncoder("tiny", tmp_path / "t5.safetensors")


def test_the_full_size_has_the_published_tensors():
    with torch.device("meta"):
        network = module._build(module.TEXT_SIZES["umt5-xxl"])
    parts = {part.name for part in module._parts(network).values()}
    assert len(parts) == 242
    assert round(sum(p.numel() for p in network.parameters()) / 1e9, 2) == 5.68


def test_a_fingerprint_names_encoder_and_tokenizer(encoder, tmp_path):
    save_file(public_weights(encoder), tmp_path / "t5.safetensors")
    assert encoder.fingerprint == text_fingerprint("tiny", None, 0)
    assert encoder.fingerprint != text_fingerprint("tiny", None, 1)
    assert encoder.fingerprint != text_fingerprint("tiny", tmp_path / "t5.safetensors")

    class Other:
        def __len__(self):
            return 384

        def __call__(self, text):
            return {"input_ids": [0]}

    assert tokenizer_fingerprint(Other()) != tokenizer_fingerprint(encoder.tokenizer)


def test_mistakes_are_named(monkeypatch):
    def refuse(name):
        raise OSError(f"{name}: no network")

    with pytest.raises(ConfigError, match=r"text encoder size 'umt5'.*did you mean 'umt5-xxl'"):
        TextEncoder("umt5")
    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", refuse)
    with pytest.raises(ConfigError, match="tokenizer 'no/such' is neither a folder here nor"):
        TextEncoder("tiny", tokenizer="no/such").encode(["a"])
