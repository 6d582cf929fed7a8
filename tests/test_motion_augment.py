"""Augmentation keeps what must be kept, and windows come alike from every arm."""

import dataclasses
import math

import numpy as np
import pytest
import torch

from wamlab.draws import Draws
from wamlab.motion.augment import (
    NOTHING,
    AugmentConfig,
    Window,
    augment,
    mirror,
    turn,
    warp,
)
from wamlab.motion.features import to_features
from wamlab.motion.segments import KINDS
from wamlab.motion.skeleton import CANONICAL_TREE, mirror_index
from wamlab.motion.synthetic import main, make
from wamlab.motion.windows import WindowError, Windows, bvh_files, process

RATE = 60.0
STRONG = AugmentConfig(bone=0.2, rotation=0.3, root=0.1, dropout=0.3, warp=0.3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    out = tmp_path_factory.mktemp("mocap")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["synthetic", str(out), "--clips", "2"])
        main()
    return out


@pytest.fixture(scope="module")
def window(folder, tmp_path_factory):
    windows = Windows(bvh_files(folder), 60, RATE, packed=tmp_path_factory.mktemp("packed"))
    return windows.batch(range(4))


def draws(ids=(0, 1, 2, 3), step=0):
    return Draws(7, step, torch.tensor(ids))


def bones(w: Window):
    place = w.motion().place
    parents = list(CANONICAL_TREE.parents[1:])
    return (place[:, :, 1:] - place[:, :, parents]).norm(dim=-1)


def test_nothing_changes_nothing(window):
    same, seen = augment(window, draws(), NOTHING)
    for name, a, b in zip(Window._fields, same, window):
        torch.testing.assert_close(a, b, atol=2e-6, rtol=0, msg=name)
    assert seen.all()


def test_rotations_stay_rotations_and_bones_keep_their_lengths(window):
    out, seen = augment(window, draws(), STRONG)
    eye = torch.eye(3).expand_as(out.rot)
    assert (out.rot @ out.rot.mT - eye).abs().max() < 1e-5
    assert torch.det(out.rot).min() > 0.999
    spread = bones(out).amax(1) - bones(out).amin(1)
    assert spread.max() < 1e-5
    assert (bones(out)[:, 0] - bones(window)[:, 0]).abs().max() > 0.01
    assert 0.5 < seen.float().mean() < 0.9


@pytest.mark.parametrize("field", [f.name for f in dataclasses.fields(AugmentConfig)])
def test_each_kind_does_something(window, field):
    one = dataclasses.replace(NOTHING, **{field: getattr(STRONG, field)})
    out, seen = augment(window, draws(), one)
    differs = [not torch.allclose(a, b, atol=1e-4) for a, b in zip(out, window)]
    assert any(differs) != (field == "dropout")
    assert seen.all() == (field != "dropout")


def test_mirror_twice_is_identity_and_once_is_a_mirror(window):
    for a, b in zip(mirror(mirror(window)), window):
        torch.testing.assert_close(a, b)
    place = window.motion().place
    wanted = (place * place.new_tensor([1, -1, 1]))[:, :, mirror_index()]
    torch.testing.assert_close(mirror(window).motion().place, wanted)


def test_heading_changes_no_feature_and_no_contact(window):
    turned = turn(window, torch.tensor([1.0, -2.0, 3.0, 0.5]))
    found, wanted = (to_features(w.motion(), RATE) for w in (turned, window))
    torch.testing.assert_close(found, wanted, atol=2e-3, rtol=1e-4)
    assert torch.equal(turned.contact, window.contact)


def test_warp_reads_between_frames(window):
    whole = torch.arange(60.0).expand(4, 60)
    for a, b in zip(warp(window, whole), window):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=0)
    half = (whole + 0.5).clamp(max=59)
    out = warp(window, half)
    torch.testing.assert_close(out.root[:, 3], (window.root[:, 3] + window.root[:, 4]) / 2)
    two = out.rot[:, 3] @ (window.rot[:, 3].mT @ out.rot[:, 3])
    torch.testing.assert_close(two, window.rot[:, 4], atol=1e-5, rtol=0)


def test_a_window_is_augmented_alike_alone_and_in_a_batch(window):
    together, seen = augment(window, draws(), STRONG)
    for i in range(4):
        one = Window(*(x[i : i + 1] for x in window))
        alone, seen_alone = augment(one, draws([i]), STRONG)
        assert torch.equal(seen_alone[0], seen[i])
        for a, b in zip(alone, together):
            torch.testing.assert_close(a[0], b[i], atol=1e-6, rtol=0)
    other, _ = augment(window, draws(step=1), STRONG)
    assert not torch.allclose(other.rot, together.rot, atol=1e-3)


def test_warp_moves_blocks_and_never_back(window):
    out, _ = augment(window, draws(), STRONG)
    assert (out.block.diff(dim=1) >= 0).all()
    assert out.block.max() < 60


def test_parsed_and_packed_windows_are_equal(folder, tmp_path):
    packed = Windows(bvh_files(folder), 60, RATE, packed=tmp_path)
    parsed = Windows(bvh_files(folder), 60, RATE, packed=tmp_path, parse=True)
    ids = [0, len(packed) - 1]
    for a, b in zip(packed.batch(ids), parsed.batch(ids)):
        assert torch.equal(a, b)
    assert packed.batch(ids).block[:, 0].tolist() == [0, 0]


def test_a_processed_file_is_the_made_motion(folder):
    made = make(0, rate=RATE)
    arrays = process(folder / "synthetic_000.bvh", RATE)
    w = Window(*(torch.from_numpy(arrays[n])[None] for n in Window._fields))
    place = w.motion().place[0].numpy()
    assert np.abs(place - made.clip.positions()[: len(place)]).max() < 1e-5
    assert set(np.unique(arrays["kind"])) >= {KINDS.index("flight"), KINDS.index("landing")}


def test_another_rate_and_scores(folder, tmp_path):
    at_30 = Windows(bvh_files(folder), 30, 30.0, packed=tmp_path)
    at_60 = Windows(bvh_files(folder), 60, RATE, packed=tmp_path)
    a, b = at_30.batch([0]).root[0], at_60.batch([0]).root[0, ::2]
    assert (a - b).abs().max() < 0.01
    assert at_60.scores.shape == (len(at_60),)
    flies = [
        (at_60.batch([i]).kind == KINDS.index("flight")).any().item() for i in range(len(at_60))
    ]
    assert at_60.scores[flies].mean() > 1.5 * at_60.scores[[not f for f in flies]].mean()


def test_what_is_refused(folder, tmp_path):
    with pytest.raises(WindowError, match=r"no \.bvh file in .*synthetic"):
        bvh_files(tmp_path)
    with pytest.raises(WindowError, match="no clip has 5000 frames at 60 Hz; the longest of 2 has"):
        Windows(bvh_files(folder), 5000, RATE, packed=tmp_path)


def test_the_default_turns_any_way():
    assert AugmentConfig().heading == math.pi
