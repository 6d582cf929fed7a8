"""wamlab.jupyter.static_graph: a recording does what a CUDA graph does, right and wrong alike."""

import pytest
import torch

from wamlab.config import ConfigError
from wamlab.jupyter.static_graph import StaticGraph


@pytest.fixture
def setting():
    torch.manual_seed(0)
    layer, x = torch.nn.Linear(4, 1), torch.zeros(8, 4)
    return layer, x, list(torch.randn(4, 8, 4))


def micro_batch(layer, x):
    (layer(x).mean() / 4).backward()


def replay_all(graph, x, parts):
    for part in parts:
        x.copy_(part)
        graph.replay()


def test_captured_without_gradients_only_the_last_micro_batch_counts(setting):
    layer, x, parts = setting
    graph = StaticGraph(lambda: micro_batch(layer, x))
    replay_all(graph, x, parts)
    assert layer.bias.grad.item() == 0.25


def test_captured_with_gradients_they_add_up_as_eager(setting):
    layer, x, parts = setting
    for part in parts:
        micro_batch(layer, part)
    eager = [p.grad.clone() for p in layer.parameters()]
    graph = StaticGraph(lambda: micro_batch(layer, x))
    layer.zero_grad(set_to_none=False)
    replay_all(graph, x, parts)
    assert layer.bias.grad.item() == 1.0
    for p, expected in zip(layer.parameters(), eager):
        torch.testing.assert_close(p.grad, expected, rtol=1e-6, atol=1e-7)


def test_gradients_set_to_none_after_capture_never_come_back(setting):
    layer, x, parts = setting
    micro_batch(layer, x)
    graph = StaticGraph(lambda: micro_batch(layer, x))
    layer.zero_grad(set_to_none=True)
    replay_all(graph, x, parts)
    assert layer.bias.grad is None


def test_a_replay_reads_new_weights_and_new_inputs_at_the_old_place(setting):
    layer, x, _ = setting
    found = {}
    graph = StaticGraph(lambda: found.update(y=layer(x)))
    with torch.no_grad():
        layer.weight.fill_(2.0)
        layer.bias.fill_(1.0)
    x.fill_(3.0)
    graph.replay()
    assert torch.equal(found["y"].detach(), torch.full((8, 1), 25.0))


def test_the_host_cannot_wait_inside_a_recording():
    x = torch.ones(2)
    with pytest.raises(ConfigError, match=r"capture met \.item\(\)"):
        StaticGraph(lambda: x.sum().item())
