"""The batched augmentation equals the public per-sample one, and both do what their parts say."""

import colorsys
import itertools

import pytest
import torch

from wamlab.config import ConfigError, replace
from wamlab.data import augment, jitter
from wamlab.data.augment import Augment, augment_cpu, draw_augmentation
from wamlab.data.embodiment import EMBODIMENTS
from wamlab.draws import Draws

TOY = replace(EMBODIMENTS["toy"], view_hw=(22, 40))


def views(embodiment, batch=3, frames=3, size=(45, 80), seed=0):
    generator = torch.Generator().manual_seed(seed)
    shape = (batch, len(embodiment.views), frames, 3, *size)
    x = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
    x[0, 0, 0] = 128  # grey: no hue
    x[0, 0, -1] = 0
    return x


def draws(ids, step=5):
    return Draws(11, step, torch.as_tensor(ids))


def one_by_one(x, ids, embodiment, train=True):
    return torch.stack([augment_cpu(v, draws([i]), embodiment, train) for v, i in zip(x, ids)])


@pytest.mark.parametrize("name", EMBODIMENTS)
@pytest.mark.parametrize("impl", ["pieces", "batched"])
@pytest.mark.parametrize("train", [True, False])
def test_a_batch_equals_its_samples(name, impl, train):
    h, w = EMBODIMENTS[name].view_hw
    embodiment = replace(EMBODIMENTS[name], view_hw=(h // 8, w // 8))
    x, ids = views(embodiment), [4, 900, 31]
    got = Augment(embodiment, impl=impl)(x, draws(ids), train)
    want = one_by_one(x, ids, embodiment, train)
    assert got.dtype == torch.uint8
    rows, (h, w) = augment.LAYOUTS[embodiment.layout], embodiment.view_hw
    assert got.shape == (3, 3, len(rows) * h, max(map(len, rows)) * w, 3)
    assert (got.int() - want.int()).abs().max() <= 1


def test_every_order_of_the_jitter_is_reached_and_equal():
    x = torch.rand(24, 3, 2, 6, 8, generator=torch.Generator().manual_seed(1))
    order = torch.tensor(list(itertools.permutations(range(4))))
    factors = torch.tensor([[1.25, 0.65, 1.45, -0.07]]).expand(24, 4)
    planes = jitter.Jitter.of(factors, order).apply(tuple(x.unbind(1)))
    for i, ks in enumerate(order.tolist()):
        want = x[i].transpose(0, 1)
        for k in ks:
            want = jitter.ADJUSTMENTS[k](want, float(factors[i, k]))
        got = torch.stack([p[i] for p in planes], 1)
        torch.testing.assert_close(got, want, atol=2e-6, rtol=0)


@pytest.mark.slow
def test_the_compiled_batch_equals_the_eager_one():
    x, ids = views(TOY, batch=2, frames=2), [7, 8]
    got = Augment(TOY, impl="compiled")(x, draws(ids))
    assert (got.int() - one_by_one(x, ids, TOY).int()).abs().max() <= 1


@pytest.mark.parametrize("shift", [-0.08, 0.0, 0.05, 0.5])
def test_hue_turns_in_hsv(shift):
    x = torch.rand(1, 3, 4, 5, generator=torch.Generator().manual_seed(2))
    got = jitter.adjust_hue(x, shift)[0].flatten(1).T
    for before, after in zip(x[0].flatten(1).T.tolist(), got.tolist()):
        h, s, v = colorsys.rgb_to_hsv(*before)
        assert after == pytest.approx(colorsys.hsv_to_rgb((h + shift) % 1, s, v), abs=1e-5)


def test_contrast_blends_with_the_mean_grey_of_each_frame():
    x = torch.stack([torch.full((3, 4, 4), 0.2), torch.full((3, 4, 4), 0.6)])
    x[:, :, :2] += 0.2  # frame means 0.3 and 0.7
    got = jitter.adjust_contrast(x, 0.5)
    want = torch.tensor([0.35, 0.75])[:, None, None, None].expand(2, 3, 2, 4)
    torch.testing.assert_close(got[:, :, :2], want, atol=1e-4, rtol=0)


def test_the_draws_belong_to_the_sample_not_to_its_place_in_the_batch():
    x = views(TOY)
    whole = Augment(TOY)(x, draws([4, 900, 31]))
    turned = Augment(TOY)(x.flip(0), draws([31, 900, 4]))
    assert torch.equal(whole, turned.flip(0))
    assert not torch.equal(whole, Augment(TOY)(x, draws([4, 900, 31], step=6)))


def test_all_views_of_a_sample_share_one_draw():
    x = views(TOY)
    x[:, 1] = x[:, 0]
    grid = Augment(TOY)(x, draws([1, 2, 3]))
    assert torch.equal(grid[:, :, 22:, :40], grid[:, :, 22:, 40:])


def test_the_draws_cover_their_ranges():
    params = draw_augmentation(draws(range(4000)), 180, 320)
    assert (params.top.min(), params.top.max()) == (0, 9)
    assert (params.left.min(), params.left.max()) == (0, 16)
    low, high = params.factors.min(0).values, params.factors.max(0).values
    torch.testing.assert_close(low, torch.tensor([0.7, 0.6, 0.5, -0.08]), atol=0.01, rtol=0)
    torch.testing.assert_close(high, torch.tensor([1.3, 1.4, 1.5, 0.08]), atol=0.01, rtol=0)
    assert len(params.order.unique(dim=0)) == 24


def test_evaluation_takes_the_centre_and_no_jitter():
    params = draw_augmentation(draws([1, 2]), 180, 320, train=False)
    assert params.top.tolist() == [4, 4]  # halves round to even, as the public centre crop does
    assert params.left.tolist() == [8, 8]
    x = torch.full((1, 3, 1, 3, 45, 80), 77, dtype=torch.uint8)
    assert Augment(TOY)(x, draws([3]), train=False).unique().tolist() in ([77], [76, 77])


def test_grids_place_every_view():
    def panel(value):
        return torch.full((1, 2, 2, 3), value, dtype=torch.uint8)

    x = torch.stack([panel(1), panel(2), panel(3)])
    x[2, ..., 1, :] = 9  # the wrist's right column
    wrist = augment._build_grid(x, "droid")[0, ..., 0].tolist()
    assert wrist == [[3, 3, 9, 9], [3, 3, 9, 9], [1, 1, 2, 2], [1, 1, 2, 2]]
    hands = augment._build_grid(x, "three_view")[0, ..., 0].tolist()
    assert hands == [[1, 1, 3, 9], [1, 1, 3, 9], [2, 2, 0, 0], [2, 2, 0, 0]]
    pair = augment._build_grid(x[:2], "side_by_side")[0, ..., 0].tolist()
    assert pair == [[1, 1, 2, 2], [1, 1, 2, 2]]


def test_the_layouts_fits_the_embodiments():
    for embodiment in EMBODIMENTS.values():
        rows = augment.LAYOUTS[embodiment.layout]
        shown = {v for row in rows for v in row if v is not None}
        assert shown == set(range(len(embodiment.views)))


@pytest.mark.parametrize(("size", "out"), [(171, 88), (304, 160), (171, 176), (20, 3), (5, 5)])
def test_the_taps_are_the_antialiased_resize(size, out):
    first, weights = augment._taps(size, out, torch.device("cpu"))
    x = torch.rand(1, 3, size, 4)
    want = torch.nn.functional.interpolate(x, (out, 4), mode="bilinear", antialias=True)
    got = sum(w * x[0, 1, first + k, 2] for k, w in enumerate(weights))
    torch.testing.assert_close(got, want[0, 1, :, 2], atol=1e-6, rtol=0)


def test_wrong_views_and_names_are_refused():
    x = views(TOY)
    with pytest.raises(ConfigError, match=r"\[B, V, T, 3, H, W\] with V = 3 .*got torch.uint8"):
        Augment(TOY)(x[:, :2], draws([1, 2, 3]))
    with pytest.raises(ConfigError, match=r"got torch.float32 \[3, 3, 3, 45, 80\]"):
        augment_cpu(x[0].float(), draws([1]), TOY)
    with pytest.raises(ConfigError, match=r"unknown augmentation impl 'compile'.*did you mean"):
        Augment(TOY, impl="compile")
