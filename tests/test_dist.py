"""wamlab.dist: one process needs no group; a missing device is refused."""

import pytest
import torch

from wamlab import dist
from wamlab.config import ConfigError


def test_one_process_is_rank_zero_of_one(monkeypatch, capsys):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
    assert (dist.rank(), dist.world_size(), dist.local_rank()) == (0, 1, 0)
    with dist.process_group(torch.device("cpu")):
        assert dist.gather({"a": 1}) == [{"a": 1}]
        dist.barrier()
    dist.print0("hello")
    assert capsys.readouterr().out == "hello\n"


def test_only_rank_zero_prints(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "1")
    dist.print0("hello")
    assert capsys.readouterr().out == ""


def test_a_rank_without_a_gpu_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert dist.device("auto") == torch.device("cpu")
    with pytest.raises(ConfigError, match="no CUDA GPU"):
        dist.device("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(ConfigError, match="local rank 2 has no GPU: this host has 2"):
        dist.device("cuda")
