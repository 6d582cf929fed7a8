"""Optimizers: equal to torch's AdamW, skipping on the device, schedule and decay rules."""

import math

import pytest
import torch
from torch import nn

from wamlab.config import ConfigError
from wamlab.train.optim import (
    AdamW,
    OptimConfig,
    SplitAdamW,
    decays,
    lr_at,
    reduce_step,
    split_master,
)

GOOD = torch.tensor(False)


def parameters(dtype=torch.float32):
    torch.manual_seed(0)
    shapes = {"w.weight": (16, 8), "w.bias": (16,), "modulation": (1, 6, 8), "gain": ()}
    return {n: nn.Parameter(torch.randn(s).bfloat16().to(dtype)) for n, s in shapes.items()}


def set_grads(params, step, scale=0.1):
    torch.manual_seed(100 + step)
    for p in params.values():
        p.grad = (torch.randn(p.shape) * scale).bfloat16().to(p.dtype)
    return torch.stack([p.grad.float().square().sum() for p in params.values()]).sum().sqrt()


def reference(config, steps=5, scale=0.1):
    params = parameters()
    groups = [
        {"params": [p for n, p in params.items() if decays(n, p)]},
        {"params": [p for n, p in params.items() if not decays(n, p)], "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(
        groups, lr=config.lr, betas=config.betas, eps=config.eps, weight_decay=config.weight_decay
    )
    for step in range(steps):
        set_grads(params, step, scale)
        nn.utils.clip_grad_norm_(params.values(), config.clip_norm)
        adamw.step()
    return params


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("scale", [0.01, 1.0], ids=["below", "above the clip"])
def test_adamw_equals_torch(fused, scale):
    config = OptimConfig(lr=1e-2, weight_decay=0.1)
    params = parameters()
    optimizer = AdamW(params, config, fused=fused)
    for step in range(5):
        optimizer.step(set_grads(params, step, scale), GOOD)
    for name, p in reference(config, scale=scale).items():
        torch.testing.assert_close(params[name], p, rtol=1e-6, atol=1e-7)


def test_split_adamw_with_float32_moments_equals_torch():
    config = OptimConfig(lr=1e-2, weight_decay=0.1)
    params = parameters(torch.bfloat16)
    optimizer = SplitAdamW(params, config, first=torch.float32, second=torch.float32)
    for step in range(5):
        optimizer.step(set_grads(params, step), GOOD)
    for name, p in reference(config).items():
        master = optimizer.master(name).view(p.shape)
        torch.testing.assert_close(master, p.detach(), rtol=1e-6, atol=1e-6)
        assert (params[name] - p).abs().max() <= p.abs().max() * 2**-8


def test_split_adamw_in_ten_bytes_stays_near_torch():
    config = OptimConfig(lr=1e-3)
    params, start = parameters(torch.bfloat16), parameters()
    optimizer = SplitAdamW(params, config)
    for step in range(5):
        optimizer.step(set_grads(params, step), GOOD)
    for name, p in reference(config).items():
        moved = (p - start[name]).abs().mean()
        error = (optimizer.master(name).view(p.shape) - p).abs().max()
        assert error < 0.03 * moved


def test_a_master_survives_its_two_halves():
    master = torch.randn(4096) * torch.logspace(-30, 30, 4096)
    ties = torch.tensor([0x3F808000, 0x3F807FFF, 0x3F818000], dtype=torch.int32)
    master[:3] = ties.view(torch.float32)
    parameter = nn.Parameter(master.clone())
    low = split_master(parameter)
    assert parameter.dtype == torch.bfloat16
    optimizer = SplitAdamW({"w": parameter}, OptimConfig(), low={"w": low})
    assert torch.equal(optimizer.master("w"), master)
    assert (parameter.float() - master).abs().div(master.abs()).max() <= 2**-8


def test_stochastic_rounding_lets_a_bf16_second_moment_move():
    params = {"w": nn.Parameter(torch.zeros(4096, dtype=torch.bfloat16))}
    optimizer = SplitAdamW(params, OptimConfig(lr=0.0))
    optimizer.exp_avg_sq["w"].fill_(1.0)
    for _ in range(100):
        params["w"].grad = torch.zeros(4096, dtype=torch.bfloat16)
        optimizer.step(torch.tensor(0.0), GOOD)
    mean = optimizer.exp_avg_sq["w"].float().mean().item()
    assert mean == pytest.approx(0.999**100, rel=2e-3)


@pytest.mark.parametrize("kind", ["unfused", "fused", "split"])
def test_a_bad_step_changes_nothing(kind):
    dtype = torch.bfloat16 if kind == "split" else torch.float32
    params = parameters(dtype)
    config = OptimConfig(lr=1e-2)
    if kind == "split":
        optimizer = SplitAdamW(params, config)
    else:
        optimizer = AdamW(params, config, fused=kind == "fused")
    optimizer.step(set_grads(params, 0), GOOD)
    before = {n: p.detach().clone() for n, p in params.items()}
    state = {n: t.clone() for n, t in optimizer.state().items()}
    set_grads(params, 1)
    params["w.weight"].grad[0, 0] = math.nan
    optimizer.step(torch.tensor(math.nan), torch.tensor(True))
    assert all(torch.equal(before[n], p) for n, p in params.items())
    assert all(torch.equal(state[n], t) for n, t in optimizer.state().items())


def test_reduce_step_counts_frozen_and_missing_gradients_as_nothing():
    params = parameters()
    norm = set_grads(params, 0)
    params["frozen"] = nn.Parameter(torch.ones(3), requires_grad=False)
    got, losses = reduce_step(params, torch.tensor([1.5, 0.5], dtype=torch.float64))
    torch.testing.assert_close(got, norm)
    assert losses.tolist() == [1.5, 0.5]


def test_schedule():
    config = OptimConfig(lr=2.0, lr_warmup=0.1)
    rates = [lr_at(config, s, 100) for s in range(100)]
    assert rates[0] == pytest.approx(0.2)
    assert rates[9] == pytest.approx(2.0)
    assert rates == sorted(rates[:10]) + sorted(rates[10:], reverse=True)
    assert rates[55] == pytest.approx(1.0)
    assert lr_at(OptimConfig(lr=2.0, schedule="constant", lr_warmup=0.0), 99, 100) == 2.0


def test_no_decay_on_norms_biases_and_modulation():
    params = parameters() | {
        "action_encoder.W1.b": torch.zeros(1, 8),
        "head.modulation": torch.zeros(1, 2, 8),
    }
    assert [n for n, p in params.items() if decays(n, p)] == ["w.weight"]


def test_refusals():
    with pytest.raises(ConfigError, match=r"lr_warmup is a share of the steps in \[0, 1\), got 5"):
        OptimConfig(lr_warmup=5)
    with pytest.raises(ConfigError, match=r"needs bf16 parameters, but w.weight is torch.float32"):
        SplitAdamW(parameters(), OptimConfig())
