"""reference and fused: the same names, the same numbers forward and backward."""

import inspect

import pytest
import torch

from wamlab.model import fused, reference

B, T, D, H, G, EPS = 2, 12, 24, 2, 5, 1e-6
SEGMENT = torch.tensor([0, 0, 0, 1, 1, 2, 2, 2, 3, 4, 4, 4])


def tensor(*shape: int, seed: int, dtype=torch.float64) -> torch.Tensor:
    made = torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return made.to(dtype).requires_grad_()


def angles() -> torch.Tensor:
    return torch.rand(T, D // H // 2, dtype=torch.float64) * 300


def cases(dtype) -> dict:
    """name -> (arguments with gradient, call(ops, *arguments))."""
    x, other, weight = (
        tensor(B, T, D, seed=1, dtype=dtype),
        tensor(B, T, D, seed=2, dtype=dtype),
        tensor(D, seed=3, dtype=dtype),
    )
    rows, more = tensor(B, G, D, seed=4, dtype=dtype), tensor(B, G, D, seed=5, dtype=dtype)
    full, again = tensor(B, T, D, seed=6, dtype=dtype), tensor(B, T, D, seed=7, dtype=dtype)
    latents = tensor(B, 3, 2, 5, 6, seed=8, dtype=dtype)
    kernel, bias = tensor(D, 3, 1, 2, 2, seed=9, dtype=dtype), tensor(D, seed=10, dtype=dtype)
    turns = angles()
    return {
        "rms_norm": ((x, weight), lambda ops, x, w: ops.rms_norm(x, w, EPS)),
        "norm_rope": (
            (x, weight),
            lambda ops, x, w: ops.norm_rope(x, w, ops.rotation(turns), H, eps=EPS),
        ),
        "norm_modulate": (
            (x, rows, more),
            lambda ops, x, a, b: ops.norm_modulate(x, a, b, SEGMENT, eps=EPS),
        ),
        "norm_modulate_per_token": (
            (x, full, again),
            lambda ops, x, a, b: ops.norm_modulate(x, a, b, None, eps=EPS),
        ),
        "gated_residual": (
            (x, other, rows),
            lambda ops, x, u, g: ops.gated_residual(x, u, g, SEGMENT),
        ),
        "gelu_tanh": ((x,), lambda ops, x: ops.gelu_tanh(x)),
        "patchify": ((latents, kernel, bias), lambda ops, *a: ops.patchify(*a)),
    }


NAMES = list(cases(torch.float32))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_fused_equals_reference(name, dtype):
    arguments, call = cases(dtype)[name]
    tolerance = 2e-6 if dtype == torch.float32 else 2e-2
    results = []
    for ops in (reference, fused):
        out = call(ops, *arguments)
        assert out.dtype == dtype
        weight = torch.linspace(-1, 1, out.numel()).view(out.shape)
        results.append([out, *torch.autograd.grad((out.float() * weight).sum(), arguments)])
    for ours, want in zip(results[1], results[0], strict=True):
        error = (ours.double() - want.double()).norm() / want.double().norm()
        assert error < tolerance, f"{name}: {error:.1e}"


def test_the_two_modules_have_the_same_names():
    def public(module):
        return {n for n, f in vars(module).items() if inspect.isfunction(f) and n[0] != "_"}

    assert public(reference) == public(fused)
    for name in public(fused):
        ours, theirs = (
            list(inspect.signature(getattr(m, name)).parameters) for m in (fused, reference)
        )
        assert len(ours) == len(theirs), name


def test_rms_norm_is_over_the_full_width():
    x = torch.randn(1, 1, D)
    x[..., : D // H] *= 100  # one loud head
    for ops in (reference, fused):
        out = ops.rms_norm(x, torch.ones(D), EPS)
        assert out.square().mean() == pytest.approx(1.0, rel=1e-5)
        assert out[..., D // H :].abs().max() < 0.1, "heads share one scale (K1)"


@pytest.mark.parametrize("ops", [reference, fused])
def test_epsilon_of_every_norm_shows_at_small_scale(ops):
    x = torch.randn(1, T, D) * 1e-3
    tiny, none = (
        ops.rms_norm(x, torch.ones(D), EPS),
        ops.norm_modulate(x, torch.zeros(1, 1, D), torch.zeros(1, 1, D), None, eps=EPS),
    )
    assert tiny.square().mean() == pytest.approx(float(x.square().mean()) / 2e-6, rel=0.35)
    wanted = (x - x.mean(-1, keepdim=True)) / (x.var(-1, unbiased=False, keepdim=True) + EPS).sqrt()
    torch.testing.assert_close(none, wanted)


@pytest.mark.parametrize("ops", [reference, fused])
def test_rms_norm_rounds_before_the_weight(ops):
    x = torch.randn(1, 64, D).bfloat16()
    weight = torch.full((D,), 1 + 2.0**-7).bfloat16()
    unit = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + EPS)
    assert torch.equal(ops.rms_norm(x, weight, EPS), unit.bfloat16() * weight), "K13"


@pytest.mark.parametrize("ops", [reference, fused])
def test_rope_sees_distances_only(ops):
    q, k = torch.randn(2, 1, 1, 1, 12).unbind(0)
    frequency = torch.rand(6, dtype=torch.float64)

    def score(at_q: float, at_k: float) -> float:
        turned = [
            ops.rope(x, ops.rotation(frequency[None] * at)) for x, at in ((q, at_q), (k, at_k))
        ]
        return float((turned[0] * turned[1]).sum())

    assert score(5, 2) == pytest.approx(score(105, 102), abs=1e-5)
    assert score(5, 2) != pytest.approx(score(5, 3), abs=1e-3)
    interleaved = ops.rope(
        torch.tensor([1.0, 0, 0, 0]).view(1, 1, 1, 4),
        ops.rotation(torch.tensor([[0.5, 0.25]], dtype=torch.float64)),
    )
    want = torch.tensor([0.5, 0.5]).cos()[0], torch.tensor(0.5).sin()
    torch.testing.assert_close(interleaved.flatten()[:2], torch.stack(want))


def test_sinusoids_differ_in_order():
    time = torch.tensor([[0.0, 137.0]])
    of_time, of_action = reference.time_sinusoid(time, 8), reference.action_sinusoid(time, 8)
    assert of_time[0, 0].tolist() == [1.0] * 4 + [0.0] * 4, "cosines first (K2)"
    assert of_action[0, 0].tolist() == [0.0] * 4 + [1.0] * 4, "sines first (K2)"
    assert (of_time.dtype, of_action.dtype) == (torch.float64, torch.float32)
    torch.testing.assert_close(of_time[0, 1].roll(4).float(), of_action[0, 1])
