"""The trainer on 1, 2 and 4 gloo ranks: the same numbers, whatever the split."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import trainer_ranks

HERE = Path(__file__).parent
RUNS = ["replicated", "batched", "fsdp2", "accumulated", "deferred", "hsdp"]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    env["PYTHONPATH"] = os.pathsep.join([str(HERE.parent), str(HERE), env.get("PYTHONPATH", "")])
    results = {}
    for world in (2, 4):
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world)]
        command = [sys.executable, *torchrun, str(HERE / "trainer_ranks.py"), str(folder)]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stdout + done.stderr
        results[world] = torch.load(folder / f"{world}.pt")
    threads = torch.get_num_threads()
    trainer_ranks.main(folder)  # one rank needs no process of its own
    torch.set_num_threads(threads)
    return results | {1: torch.load(folder / "1.pt")}


@pytest.mark.parametrize("name", RUNS)
def test_losses_agree(found, name):
    """Over 20 steps (5 for the last three), to 1e-5 relative, on 1, 2 and 4 ranks."""
    compare(found, name, "losses")


@pytest.mark.parametrize("name", RUNS)
def test_gradient_norm_is_global(found, name):
    """D18: with a frozen encoder and a scalar that is not sharded, the norm is that of one rank."""
    compare(found, name, "norms")


def compare(found, name, key):
    want = torch.tensor(found[1]["runs"]["replicated"][key])
    runs = [found[world]["runs"][name] for world in (1, 2, 4) if name in found[world]["runs"]]
    assert runs
    for run in runs:
        got = torch.tensor(run[key])
        torch.testing.assert_close(got, want[: len(got)], rtol=1e-5, atol=0)


def test_deferred_sync_reduces_once_a_step(found):
    """D17: three blocks and the root; one reduce-scatter a group and step, or one a micro-batch."""
    assert found[2]["reduce_scatters"] == {"every": 4 * 4, "deferred": 4}


def test_a_signal_to_one_rank_stops_all_at_the_same_step(found):
    got = found[2]["interrupted"]
    assert "stopped by" in got["reason"]
    assert got["stopped_at"][0] == got["stopped_at"][1]
    assert 5 <= got["stopped_at"][0] <= 8
    assert got["same"]


@pytest.mark.parametrize("world", [2, 4])
def test_a_nan_on_one_rank_skips_the_step_on_all(found, world):
    got = found[world]["poisoned"]
    assert got["skipped"] == [False, False, True, False]
    assert got["finite"]
    assert [b["rank"] for b in got["bad"]] == [world - 1]


@pytest.mark.parametrize("kind", ["adamw", "split"])
@pytest.mark.parametrize("world", [1, 4])
def test_a_checkpoint_of_two_ranks_loads_on_others(found, world, kind):
    """D19: 13 rows, which neither 2 nor 4 divides; parameters and moments bit-equal."""
    saved, loaded = found[2]["resharded"][kind], found[world]["resharded"][kind]
    assert set(saved) == set(loaded)
    for name, tensor in saved.items():
        assert torch.equal(tensor, loaded[name]), name
    assert any(t.any() for n, t in saved.items() if "exp_avg_sq" in n)
