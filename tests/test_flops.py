"""The FLOP count: torch's own counter on the plain form, and the public models' known numbers."""

import dataclasses

import pytest
from tiny_dit import batch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from wamlab.model.attention import Layout
from wamlab.model.dit import MODEL_SIZES, PUBLIC, ModelOptions, WorldActionDiT
from wamlab.model.flops import count_flops, flops, seen_pairs

TINY = dataclasses.replace(MODEL_SIZES["tiny"], num_layers=2, text_len=24)


def counted(config, options: ModelOptions, **sizes) -> tuple[int, int]:
    dit, given = WorldActionDiT(config, options), batch(config, **{"size": 1} | sizes)
    with sdpa_kernel(SDPBackend.MATH):  # attention as plain products, on every version of torch
        with FlopCounterMode(display=False) as forward:
            video, action = dit(**given)
        with FlopCounterMode(display=False) as backward:
            (video.sum() + action.sum()).backward()
    return forward.get_total_flops(), backward.get_total_flops()


@pytest.mark.parametrize(
    ("changes", "sizes"),
    [
        ({}, {}),
        ({"concat_first_frame_latent": True, "out_dim": 16}, {"size": 2}),
        ({}, {"hw": (5, 6), "frames": 7}),
        ({"max_chunk_size": 1}, {"frames": 7}),
        ({"num_action_per_block": 16}, {}),
    ],
    ids=["plain", "first-frame", "odd-height", "window", "libero"],
)
def test_count_equals_torchs_counter(changes, sizes):
    config = dataclasses.replace(TINY, **changes)
    known = {"latent_frames": sizes.get("frames", 5), "latent_hw": sizes.get("hw", (4, 6))}
    want, samples = count_flops(config, **known), sizes.get("size", 1)
    assert counted(config, PUBLIC, **sizes) == (samples * want.forward, samples * want.backward)
    assert flops(config, samples, **known) == samples * (want.forward + want.backward)


def test_shortcuts_do_less_and_are_not_counted():
    want = count_flops(TINY, latent_frames=5, latent_hw=(4, 6))
    forward, backward = counted(TINY, ModelOptions(attention="loops"))
    assert forward < want.forward
    assert backward < want.backward


@pytest.mark.parametrize(
    ("size", "changes", "pairs", "forward", "backward", "recompute"),
    [
        ("dreamzero-5b", {}, 286_204, 10.11, 20.20, 40.25),
        ("dreamzero-5b", {"num_action_per_block": 16}, 272_092, 9.81, 19.61, 39.07),
        ("dreamzero-14b", {}, 76_580_000, 463.1, 926.1, 1846.2),
    ],
)
def test_public_sizes_have_their_known_counts(size, changes, pairs, forward, backward, recompute):
    config = dataclasses.replace(MODEL_SIZES[size], **changes)
    found = count_flops(config)
    attention = found.blocks["self attention"] / (4 * config.dim * config.num_layers)
    assert attention == pytest.approx(pairs, rel=1e-4)
    assert found.forward / 1e12 == pytest.approx(forward, abs=0.05 if forward > 100 else 0.005)
    assert found.backward / 1e12 == pytest.approx(backward, abs=0.06 if forward > 100 else 0.006)
    twice = found.total + sum(found.blocks.values())
    assert twice / 1e12 == pytest.approx(recompute, rel=2e-4)


def test_parts_of_the_5b_are_those_of_its_table():
    found = count_flops(MODEL_SIZES["dreamzero-5b"])
    tera = {name: n / 1e12 for name, n in (found.blocks | found.once).items()}
    table = {
        "self projections": 2.265,
        "self attention": 0.106,
        "cross projections": 1.132,
        "context keys and values": 0.871,
        "cross attention": 0.283,
        "feed-forward": 5.285,
        "time": 0.134,
    }
    for name, want in table.items():
        assert tera[name] == pytest.approx(want, abs=0.0006), name


def test_pairs_shrink_with_a_window_and_without_actions():
    sizes = {"frames": 7, "frame_tokens": 2, "frames_per_block": 2}
    plain = seen_pairs(Layout(**sizes))
    assert seen_pairs(Layout(**sizes, window=3)) < plain
    assert plain == int(Layout(**sizes).mask().sum())
    assert count_flops(TINY, latent_hw=(4, 6), actions=False).once["action encoder"] == 0
