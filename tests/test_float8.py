"""float8 through torchao, emulated on a CPU: which linears, and how far the loss moves."""

import importlib.util

import pytest
import torch

from wamlab.config import ConfigError
from wamlab.draws import Draws
from wamlab.model.wam import WAMConfig, WorldActionModel
from wamlab.train.float8 import LARGE, check_widths, convert
from wamlab.train.optimizations import MissingNeedError, build_optimizations, check_needs

HAS_TORCHAO = importlib.util.find_spec("torchao") is not None


def test_it_says_what_it_needs():
    missing = "a CUDA GPU with float8" if HAS_TORCHAO else "torchao"
    with pytest.raises(MissingNeedError, match=f"float8 needs {missing}"):
        check_needs(build_optimizations(["float8"]), torch.device("cpu"))


def test_what_would_stay_in_bf16_is_refused():
    block = WorldActionModel(WAMConfig(layers=1, target_hw=(32, 64))).blocks()[0]
    check_widths(block)
    block.ffn[0] = torch.nn.Linear(128, 500)
    with pytest.raises(ConfigError, match=r"multiples of 16, ffn\.0 maps 128 to 500"):
        check_widths(block)
    with pytest.raises(ConfigError, match=r"Linear has no self_attn\.q"):
        check_widths(torch.nn.Linear(16, 16))


@pytest.mark.skipif(not HAS_TORCHAO, reason="torchao is not installed")
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_only_the_large_linears_change_and_the_loss_stays_near(recipe):
    torch.set_num_threads(1)
    draws = Draws(5, 0, torch.arange(2))
    model = WorldActionModel(WAMConfig(layers=2, target_hw=(32, 64)))
    batch = model.encode(
        {
            "video": draws.integers("video", 256, (33, 32, 64, 3)).to(torch.uint8),
            "state": draws.normal("state", (4, 64)),
            "action": draws.uniform("action", (96, 32)) * 2 - 1,
            "action_mask": torch.ones(2, 96, 32, dtype=torch.bool),
            "has_real_action": torch.ones(2, dtype=torch.bool),
            "prompt": ["pick", "open"],
            "sample_id": torch.arange(2),
        }
    )
    names = [name for name, _ in model.named_parameters()]
    before = model.loss(batch, draws)["loss"]
    convert(model.blocks(), recipe, emulate=True)
    for block in model.blocks():
        found = {n for n, m in block.named_modules() if type(m).__name__ == "Float8Linear"}
        assert found == set(LARGE)
    assert [name for name, _ in model.named_parameters()] == names
    after = model.loss(batch, draws)["loss"]
    after.backward()
    assert 0 < abs(after - before) / before < 5e-2
    assert all(p.grad.isfinite().all() for p in model.blocks()[0].parameters())


@pytest.mark.slow
@pytest.mark.skipif(not HAS_TORCHAO, reason="torchao is not installed")
def test_500_steps_learn_as_in_float32():
    """The loss parity that any speed of float8 stands on, on a small network, emulated."""
    exact, rounded = _losses(None), _losses("tensorwise")
    assert exact[-50:].mean() < 0.6 * exact[:50].mean()  # something was learned
    for part in range(0, 500, 50):
        a, b = exact[part : part + 50].mean(), rounded[part : part + 50].mean()
        assert abs(a - b) < 0.05 * a, (part, a, b)


def _losses(recipe, steps=500):
    from tiny_dit import batch, build

    from wamlab.model.dit import ModelOptions

    torch.set_num_threads(1)
    dit = build(ModelOptions(impl="reference", attention="dense"))
    if recipe:
        convert(dit.blocks(), recipe, emulate=True)
    optimizer = torch.optim.AdamW(dit.parameters(), lr=1e-3)
    given, losses = batch(), []
    for step in range(steps):
        draws = Draws(3, step, torch.arange(2))
        shape, actions = given["x"].shape[1:], given["action"].shape[1:]
        noise, tremor = draws.normal("noise", shape), draws.normal("tremor", actions)
        level = draws.uniform("level", ())
        time = (1000 * level)[:, None].expand(2, given["timestep"].shape[1])
        video, action = dit(**given | {
            "x": torch.lerp(given["x"], noise, level[:, None, None, None, None]),
            "action": torch.lerp(given["action"], tremor, level[:, None, None]),
            "timestep": time,
            "timestep_action": time[:, :1].expand_as(given["timestep_action"]),
        })  # fmt: skip
        loss = (video - (noise - given["x"])).square().mean()
        loss = loss + (action - (tremor - given["action"])).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses)
