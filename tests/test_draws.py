"""wamlab.draws: a sample's random numbers depend on seed, step and id alone."""

import math

import torch

from wamlab.draws import Draws

IDS = torch.tensor([5, 17, 123456789012, 3])


def test_a_sample_draws_the_same_in_any_batch_and_order():
    whole = Draws(1, 2, IDS).normal("noise", (3, 4))
    for row, sample_id in enumerate(IDS):
        torch.testing.assert_close(
            Draws(1, 2, sample_id[None]).normal("noise", (3, 4))[0], whole[row], rtol=0, atol=0
        )


def test_seed_step_id_and_name_each_change_the_draw():
    base = Draws(1, 2, IDS).uniform("a", (8,))
    for other in (Draws(2, 2, IDS), Draws(1, 3, IDS), Draws(1, 2, IDS + 1)):
        assert not torch.equal(base, other.uniform("a", (8,)))
    assert not torch.equal(base, Draws(1, 2, IDS).uniform("b", (8,)))


def test_a_step_tensor_equals_a_step_number():
    """A CUDA graph replays with the step in a tensor."""
    a = Draws(1, torch.tensor(7), IDS).integers("k", 1000, (6,))
    assert torch.equal(a, Draws(1, 7, IDS).integers("k", 1000, (6,)))


def test_distributions():
    draws = Draws(0, 0, torch.arange(64))
    normal = draws.normal("n", (4096,)).double()
    n = normal.numel()
    assert abs(normal.mean()) < 4 / math.sqrt(n)
    assert abs(normal.var() - 1) < 4 * math.sqrt(2 / n)
    assert abs((normal**4).mean() - 3) < 4 * math.sqrt(96 / n)
    assert torch.isfinite(normal).all()
    uniform = draws.uniform("u", (4096,)).double()
    assert uniform.min() >= 0
    assert uniform.max() < 1
    assert abs(uniform.mean() - 0.5) < 4 / math.sqrt(12 * n)
    counts = torch.bincount(draws.integers("k", 10, (4096,)).flatten(), minlength=10).double()
    chi2 = ((counts - n / 10) ** 2 / (n / 10)).sum()
    assert chi2 < 33.7  # 99.99 % quantile at 9 degrees of freedom


def test_neighbouring_steps_and_samples_are_uncorrelated():
    rows = torch.cat([Draws(0, s, torch.arange(32)).normal("n", (4096,)) for s in range(4)])
    correlation = torch.corrcoef(rows.double())
    off_diagonal = correlation - torch.eye(len(rows))
    assert off_diagonal.abs().max() < 6 / math.sqrt(4096)
