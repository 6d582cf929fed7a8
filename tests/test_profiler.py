"""wamlab.profiler: a real trace of real steps, on the CPU."""

import pytest
import torch

from wamlab.config import ConfigError
from wamlab.profiler import memory_snapshot, part, profile_steps
from wamlab.trace import read_trace, split_steps, summarise

CPU = torch.device("cpu")


def test_a_profiled_step_is_split_into_its_parts(tmp_path, capsys):
    weight = torch.randn(256, 256, requires_grad=True)

    def step():
        with part("forward"):
            loss = (weight @ weight).square().mean()
        with part("backward"):
            loss.backward()
        loss.item()

    path = profile_steps(step, tmp_path, dev=CPU, warmup=1, active=2)
    splits = split_steps(read_trace(path))
    assert len(splits) == 2
    summary = summarise(splits)
    assert 0 < summary["parts_ms"]["forward"] < summary["step_ms"]
    assert summary["counts"]["item_calls"] == 1
    assert "ui.perfetto.dev" in capsys.readouterr().out


def test_no_object_is_made_of_an_event_that_only_the_trace_needs(tmp_path, monkeypatch):
    def refuse(*args, **options):
        raise AssertionError("for 100,000 events it takes seconds")

    monkeypatch.setattr(torch.autograd.profiler.profile, "_parse_kineto_results", refuse)
    path = profile_steps(lambda: torch.ones(8).sum(), tmp_path, dev=CPU, warmup=1, active=2)
    assert len(split_steps(read_trace(path))) == 2


def test_bounds_and_names_are_checked(tmp_path):
    with pytest.raises(ConfigError, match="record 1 to 3 steps"):
        profile_steps(lambda: None, tmp_path, dev=CPU, active=10)
    with pytest.raises(ConfigError, match="unknown part 'fwd'"), part("fwd"):
        pass


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU keeps a history")
def test_a_memory_snapshot_needs_a_gpu(tmp_path):
    with pytest.raises(ConfigError, match="needs a CUDA GPU"), memory_snapshot(tmp_path / "s"):
        pass
