"""Every exact shortcut equals the plain form, forward and backward, and saves what it says."""

import dataclasses

import pytest
import torch
from tiny_dit import CONFIG, LENGTHS, assert_same, batch, build, coupled, outcome

from wamlab.config import ConfigError
from wamlab.model.dit import PUBLIC, SHORTCUTS, ModelOptions
from wamlab.model.plan import count_text_rows, text_count_bias


@pytest.fixture(scope="module")
def plain() -> dict:
    return outcome(build(), batch())


@pytest.mark.parametrize("name", SHORTCUTS)
def test_each_shortcut_is_exact_forward_and_backward(name, plain):
    assert_same(outcome(build(dataclasses.replace(PUBLIC, **{name: True})), batch()), plain)


@pytest.mark.parametrize("attention", ["auto", "dense", "loops", "prefix"])
def test_all_shortcuts_together_are_exact(attention, plain):
    assert_same(outcome(build(ModelOptions(attention=attention)), batch()), plain)


def test_shortcuts_are_on_by_default_and_off_in_public():
    assert all(getattr(ModelOptions(), name) for name in SHORTCUTS)
    assert not any(getattr(PUBLIC, name) for name in SHORTCUTS)
    booleans = {f.name for f in dataclasses.fields(ModelOptions) if f.default is True}
    assert booleans == set(SHORTCUTS)


@pytest.mark.parametrize("options", [PUBLIC, ModelOptions()], ids=["public", "ours"])
def test_one_time_a_block_needs_few_rows(options):
    """F10: publicly modulation is a row a token; coupled times leave one a block and two."""
    given = coupled(batch())
    want = outcome(build(), given)
    dit, rows = build(options), []
    dit.time_projection.register_forward_hook(lambda m, args, out: rows.append(out.shape[1]))
    assert_same(outcome(dit, given | {"coupled_times": True}), want)
    tokens = 2 * 5 * 6 + 2 * (4 + 1)
    assert rows == [tokens if options is PUBLIC else 2 + 2]
    dit(**given)
    assert rows[1:] == [tokens if options is PUBLIC else 1 + 5 + 8]


def test_the_last_block_skips_only_what_is_discarded():
    dit, seen = build(ModelOptions()), []
    for block in dit.blocks():
        block.ffn[0].register_forward_hook(lambda m, args, out: seen.append(out.shape[1]))
    dit(**batch())
    assert seen == [70, 40]


def test_padding_rows_are_one_key(plain):
    """Few text rows go through the network, whatever their number; the result is that of all."""
    dit, rows = build(ModelOptions()), []
    dit.text_embedding.register_forward_hook(lambda m, args, out: rows.append(out.shape[1]))
    given = batch()
    assert_same(outcome(dit, given), plain)
    short = given | {"context": given["context"][:, :12]}  # a cache keeps no padding
    assert_same(outcome(dit, short), plain)
    longer = given | {"context_length": torch.tensor([5, 20])}
    assert_same(outcome(dit, longer), plain)
    assert_same(outcome(dit, given), plain)
    assert rows == [18, 18, 34, 34], "the number of rows grows with the prompts, and never shrinks"
    del given["context_length"]
    assert_same(outcome(dit, given), plain)
    assert rows[-1] == CONFIG.text_len, "without lengths nothing is left out"


def test_padding_shortcut_with_a_known_longest_prompt():
    options = ModelOptions(longest_prompt=11)
    assert count_text_rows(options, LENGTHS, 512) == 18
    assert count_text_rows(options, torch.empty(2, device="meta"), 512) == 18, "reads no device"
    with pytest.raises(ConfigError, match="prompt has 11 tokens, but longest_prompt is 8: raise"):
        count_text_rows(ModelOptions(longest_prompt=8), LENGTHS, 512)


@pytest.mark.parametrize("kept", [18, 50, 500])
def test_counted_keys_weigh_right_even_in_bf16(kept):
    bias = text_count_bias(kept, 512)
    for dtype, tolerance in ((torch.float32, 1e-6), (torch.bfloat16, 5e-4)):
        count = bias.to(dtype).double().exp().sum()
        assert count == pytest.approx(512, rel=tolerance)
    one_key = torch.tensor(float(512 - kept + 1)).log().bfloat16().double().exp()
    assert kept == 500 or abs(one_key / (512 - kept + 1) - 1) > 1e-3, "what a single key would lose"
    assert text_count_bias(512, 512) is None
