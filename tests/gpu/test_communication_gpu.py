"""Exchange over NCCL on two GPUs: the same numbers, whatever travels and on which stream."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from wamlab.train.topology import local_links, plan_groups

pytestmark = pytest.mark.gpu
HERE = Path(__file__).parent
CLOSE = {"buckets": 1e-5, "fsdp2": 1e-5, "no root": 1e-5, "by the links": 1e-5}
CLOSE |= {"fp16": 1e-3, "bf16": 1e-2, "between": 1e-3}
CLOSE |= {"float8 gradients": 2e-2, "float8 weights": 2e-2}


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    folder = tmp_path_factory.mktemp("gpu")
    path = os.pathsep.join([str(HERE.parent.parent), str(HERE.parent)])
    env = {**os.environ, "PYTHONWARNINGS": "ignore", "PYTHONPATH": path}
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [sys.executable, *torchrun, str(HERE / "communication_gpu_ranks.py"), str(folder)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return torch.load(folder / "found.pt", weights_only=False)


@pytest.mark.parametrize("name", list(CLOSE))
def test_losses_stay_close_to_one_all_reduce(found, name):
    got, want = torch.tensor(found[name]["losses"]), torch.tensor(found["plain"]["losses"])
    torch.testing.assert_close(got, want, rtol=CLOSE[name], atol=0)


@pytest.mark.parametrize("name", ["low rank", "gated"])
def test_low_rank_learns(found, name):
    losses = found[name]["losses"]
    assert losses[-1] < losses[0]
    assert found[name]["wire_bytes_share"] < 1.0


def test_every_record_has_its_wait_in_both_ways(found):
    for name in (*CLOSE, "low rank", "gated"):
        assert len(found[name]["wait_share_ablation"]) == 2
        assert all(share is not None for share in found[name]["wait_share_trace"]), name


def test_two_gpus_are_one_group(found):
    assert len(found["mesh"]["groups"]) == 1


def test_this_hosts_links_make_a_plan():
    count = torch.cuda.device_count()
    links, numa = local_links(count)
    plan = plan_groups(links, ["here"] * count, numa)
    assert sorted(rank for group in plan.groups for rank in group) == list(range(count))
