"""Serial and parallel training of blocks are one and the same training."""

import copy

import pytest
import torch

from wamlab.config import ConfigError
from wamlab.motion.model import (
    MODES,
    DenoiserConfig,
    MotionDenoiser,
    allowed,
    block_levels,
    dense_mask,
    fixed_blocks,
    generate,
)

SMALL = DenoiserConfig(features=20, dim=32, heads=4, layers=2, frequencies=8)
CUTS = [0, 5, 6, 13, 20, 24]


def model(dtype=torch.float64, mode="parallel", seed=0):
    torch.manual_seed(seed)
    net = MotionDenoiser(SMALL, mode)
    with torch.no_grad():
        for p in net.parameters():  # zero gates and a zero head would hide everything
            p.normal_(std=0.2)
    return net.to(dtype)


def inputs(dtype=torch.float64, ragged=True):
    draw = torch.Generator().manual_seed(1)
    clean, noisy = torch.randn(2, 3, 24, 20, generator=draw, dtype=torch.float64).to(dtype)
    block = torch.zeros(3, 24, dtype=torch.int64)
    for row in range(3):
        for at in CUTS[1:-1] if row < 2 or not ragged else [9, 10]:
            block[row, at:] += 1
    level = torch.rand(3, 24, generator=draw, dtype=torch.float64).to(dtype)
    return clean, noisy, block_levels(level, block), block


def run(mode, dtype, ragged=True):
    net = model(dtype, mode)
    out = net(*inputs(dtype, ragged), 60.0)
    out.square().sum().backward()
    return out.detach(), torch.cat([p.grad.flatten() for p in net.parameters()])


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize(("dtype", "allowed_diff"), [(torch.float64, 1e-13), (torch.float32, 1e-5)])
def test_serial_and_parallel_are_identical(dtype, allowed_diff, ragged):
    out, grad = run("parallel", dtype, ragged)
    out_s, grad_s = run("serial", dtype, ragged)
    assert (out - out_s).abs().max() / out.abs().max() < allowed_diff
    assert (grad - grad_s).norm() / grad.norm() < allowed_diff


def test_a_detached_cache_is_another_training():
    out, grad = run("serial", torch.float64)
    out_d, grad_d = run("serial-detached", torch.float64)
    torch.testing.assert_close(out, out_d)
    assert (grad - grad_d).norm() / grad.norm() > 1e-3


@pytest.mark.parametrize("mode", MODES)
def test_a_noisy_block_knows_the_clean_past_and_itself(mode):
    """Block 2 is frames 6 to 12: what may change its velocity, and what may not."""
    net, (clean, noisy, level, block) = model(mode=mode), inputs(ragged=False)
    want = slice(6, 13)
    base = net(clean, noisy, level, block, 60.0)[:, want]

    def changed(stream, at):
        c, n = clean.clone(), noisy.clone()
        (c if stream == "clean" else n)[:, at] += 1
        return (net(c, n, level, block, 60.0)[:, want] - base).abs().max().item()

    assert changed("clean", 5) > 1e-6
    assert changed("noisy", 12) > 1e-6
    for stream, at in (("clean", 6), ("clean", 12), ("clean", 20), ("noisy", 5), ("noisy", 13)):
        assert changed(stream, at) == 0, (stream, at)


def test_the_mask_written_out():
    block = torch.tensor([[0, 0, 1]])
    wanted = """
        xx....
        xx....
        xxx...
        ...xx.
        ...xx.
        xx...x"""
    rows = ["".join("x" if v else "." for v in row) for row in dense_mask(block)[0, 0].tolist()]
    assert rows == wanted.split()
    seen = allowed(block)
    assert seen(*(torch.tensor(i) for i in (0, 0, 5, 1)))


def test_noise_levels_are_one_a_block():
    block = torch.tensor([[0, 0, 1, 1, 1, 2]])
    level = torch.tensor([[0.1, 0.2, 0.3, 0.4, 0.5, 0.6]])
    wanted = [0.1, 0.1, 0.3, 0.3, 0.3, 0.6]
    assert block_levels(level, block)[0].tolist() == pytest.approx(wanted)
    assert fixed_blocks(2, 5, 2, "cpu").tolist() == [[0, 0, 1, 1, 2]] * 2
    with pytest.raises(ConfigError, match="at least one frame, got 0"):
        fixed_blocks(1, 4, 0, "cpu")


def test_fresh_blocks_are_the_identity_and_an_unknown_mode_is_refused():
    net = MotionDenoiser(SMALL)
    assert (net(*inputs(torch.float32), 60.0) == 0).all()
    with pytest.raises(ConfigError, match=r"unknown training mode 'paralel'.*did you mean"):
        MotionDenoiser(SMALL, "paralel")


def test_generation_continues_the_clean_past():
    """With a perfect velocity, Euler's steps end at the clean motion; block 0 is given."""
    clean, noise, _, block = inputs()

    class Perfect(MotionDenoiser):
        def forward(self, clean_BTD, noisy_BTD, level_BT, block_BT, rate):
            return (noisy_BTD - clean_BTD) / level_BT[..., None]

    out = generate(Perfect(SMALL), clean, noise, block, rate=60.0, steps=7)
    torch.testing.assert_close(out, clean)
    plain = generate(model(), clean, noise, block, rate=60.0, steps=2)
    assert torch.equal(plain[block == 0], clean[block == 0])
    assert not torch.equal(plain, clean)


def test_the_modes_share_their_weights():
    net = model()
    other = copy.deepcopy(net)
    other.mode = "serial"
    torch.testing.assert_close(net(*inputs(), 60.0), other(*inputs(), 60.0))
