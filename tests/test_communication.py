"""Exchange of gradients and weights on two gloo ranks: what travels, what is lost, what waits."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from communication_ranks import RUNS

from wamlab.config import ConfigError
from wamlab.train.communication import training_group
from wamlab.train.compression import Gate, as_matrix, orthonormalise, pays_off
from wamlab.train.optimizations import build_optimizations, build_plan
from wamlab.train.wait import balance
from wamlab.train.wire import CHUNK, Float8Gather, from_float8, pack, to_float8, unpack

HERE = Path(__file__).parent
EXACT = ["one bucket", "buckets", "fsdp2", "by the links", "no root"]
CLOSE = {"fp16": 1e-4, "bf16": 1e-3, "bf16 gradients": 1e-3, "float8 gradients": 1e-2}
CLOSE |= {"between": 1e-4, "float8 weights": 1e-2}


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("communication")
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    env["PYTHONPATH"] = os.pathsep.join([str(HERE.parent), str(HERE), env.get("PYTHONPATH", "")])
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [sys.executable, *torchrun, str(HERE / "communication_ranks.py"), str(folder)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(2)]


@pytest.mark.parametrize("name", EXACT)
def test_the_way_of_exchange_changes_no_number(found, name):
    runs = found[0]["runs"]
    got, want = torch.tensor(runs[name]["losses"]), torch.tensor(runs["plain"]["losses"])
    torch.testing.assert_close(got, want, rtol=1e-5, atol=0)


@pytest.mark.parametrize("name", list(CLOSE))
def test_fewer_bytes_stay_close(found, name):
    runs = found[0]["runs"]
    got, want = torch.tensor(runs[name]["losses"]), torch.tensor(runs["plain"]["losses"])
    torch.testing.assert_close(got, want, rtol=CLOSE[name], atol=0)


@pytest.mark.parametrize("name", [n for n in RUNS if n not in CLOSE and n not in EXACT])
def test_replicas_stay_bit_equal(found, name):
    ranks = [rank["runs"][name]["parameters"] for rank in found]
    assert all(torch.equal(ranks[0][n], ranks[1][n]) for n in ranks[0])


def test_bytes_are_counted(found):
    runs = found[0]["runs"]
    assert runs["buckets"]["bytes"] == 1.0
    assert runs["fp16"]["bytes"] == runs["bf16"]["bytes"] == 0.5
    assert runs["low rank"]["bytes"] < 1.0
    assert 0.4 < runs["top"]["bytes"] < 1.0


def test_micro_batches_travel_together(found):
    got, want = found[0]["accumulated"]
    torch.testing.assert_close(torch.tensor(got), torch.tensor(want), rtol=1e-5, atol=0)


def test_a_gate_by_what_moves_hears_of_all_ranks(found):
    """Ranks of activity 1 and 2 in a wild step: the mean over both decides, alike on both."""
    known, losses, share, refusal = found[0]["by_activity"]
    assert known == 1.5
    assert found[1]["by_activity"][:3] == (known, losses, share)
    assert 0.1 < share < 1.0
    assert "needs a model whose loss also returns `activity`" in refusal


def test_a_checkpoint_holds_what_compression_remembers(found):
    begun, equal = found[0]["resumed"]
    assert begun == 4
    assert any(name.endswith(".error") for name in equal)
    assert any(name.endswith(".factor") for name in equal)
    assert all(equal.values()), [name for name, same in equal.items() if not same]


def test_low_rank_is_torchs_powersgd(found):
    """The first steps whole, then three compressed with error feedback and a warm start."""
    assert max(found[0]["against_torch"]) < 1e-5


def test_error_feedback_loses_nothing(found):
    apart, share = found[0]["nothing_is_lost"]
    assert apart < 1e-5
    assert 0.3 < share < 0.7


def test_the_wait_is_the_same_in_both_ways(found):
    """Rank 0 waits for rank 1's 500 ms; the two measurements agree within 3 points."""
    waits, unchanged = found[0]["waits"]
    assert unchanged
    ablation, trace = waits["wait_share_ablation"], waits["wait_share_trace"]
    assert ablation[0] > 0.6
    for a, t in zip(ablation, trace):
        assert abs(a - t) < 0.03, waits
    assert waits["rank_skew"] > 2.0
    assert waits == found[1]["waits"][0]


def test_every_training_record_has_its_wait(found):
    for name, (share, ablation) in found[0]["rehearsed"].items():
        assert 0.0 <= share <= 1.0, name
        assert len(ablation) == 2, name


def test_a_skew_is_seen_and_balanced_shares_take_it_away(found):
    """One rank's four dear samples cost 240 ms, the other's 16; shared out, both pay 128."""
    (before, losses), (after, same) = (found[0]["skewed"][on] for on in (False, True))
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(same), rtol=1e-5, atol=0)
    data = [[wait for wait, _, _ in rank["skewed"][False][0]] for rank in found]
    assert min(data[0]) > 2 * max(data[1])
    exposed = [[comm for _, comm, _ in rank["skewed"][False][0]] for rank in found]
    assert min(exposed[1]) > 150 > max(exposed[0])  # who has little to do waits
    assert max(step for *_, step in after) < min(step for *_, step in before) - 60


def test_float8_rounds_to_a_sixteenth_and_packs_to_a_byte():
    torch.manual_seed(0)
    values = torch.randn(2, 1000) * torch.logspace(-6, 3, 1000)
    back = from_float8(*to_float8(values), 1000)
    chunks = values.split(CHUNK, -1)
    for chunk, got in zip(chunks, back.split(CHUNK, -1)):
        coarse = chunk.abs().amax(-1, keepdim=True) / 448 * 2**-7  # half a subnormal
        assert ((chunk - got).abs() <= (chunk.abs() / 16).maximum(coarse)).all()
    packed = pack(values, "float8")
    assert packed.shape == (2, 4 * CHUNK + 4 * 4)
    assert torch.equal(unpack(packed, "float8", 1000), back)
    assert torch.equal(unpack(pack(values, "bf16"), "bf16", 1000), values.bfloat16().float())
    assert not from_float8(*to_float8(torch.zeros(3)), 3).any()


def test_float8_weights_are_the_true_ones_on_average():
    """One step's gathers agree; over 64 steps the rounding errors cancel."""
    torch.manual_seed(0)
    weights = torch.randn(1000)
    with training_group(torch.device("cpu")):
        gather, total, out = Float8Gather(), torch.zeros(1000), torch.empty(1000)
        for _ in range(64):
            gather(out, weights, torch.distributed.group.WORLD)
            first = out.clone()
            gather(out, weights, torch.distributed.group.WORLD)
            assert torch.equal(first, out)
            gather.advance()
            total += out / 64
    assert (first - weights).abs().max() > 0.01
    assert (total - weights).abs().max() < 0.004


@pytest.mark.parametrize(
    ("shape", "rows", "pays"),
    [((1, 256, 128), 256, True), ((128, 48, 1, 2, 2), 128, True), ((7,), None, False)],
)
def test_any_tensor_is_a_matrix_for_low_rank(shape, rows, pays):
    tensor = torch.zeros(shape)
    assert pays_off(tensor, 2) == pays
    assert rows is None or as_matrix(tensor).shape[0] == rows


def test_orthonormal_columns_even_of_a_singular_matrix():
    columns = torch.randn(20, 3)
    columns[:, 1] = 0
    orthonormalise(columns)
    want = torch.diag(torch.tensor([1.0, 0.0, 1.0]))
    torch.testing.assert_close(columns.T @ columns, want, atol=1e-6, rtol=0)


@pytest.mark.parametrize("kind", ["high", "low", "activity", "random", "always"])
@pytest.mark.parametrize("share", [0.25, 0.5])
def test_every_gate_lets_the_same_share_pass(kind, share):
    signals = torch.randn(4, 400, generator=torch.Generator().manual_seed(0)).exp().tolist()
    gate = Gate(kind, share)
    open_ = [gate.decide(b, s, x) for b, row in enumerate(signals) for s, x in enumerate(row)]
    assert abs(sum(open_) / len(open_) - (1.0 if kind == "always" else share)) < 0.06


def test_a_gate_opens_for_what_it_is_named_after():
    signals = [1.0, 5.0] * 50
    high, low = Gate("high", 0.5), Gate("low", 0.5)
    seen = [(high.decide(0, s, x), low.decide(0, s, x)) for s, x in enumerate(signals)][50:]
    assert seen == [(False, True), (True, False)] * 25
    assert not Gate("high", 0.5).decide(0, 0, None)  # nothing is known of the first step


def test_shares_are_balanced_and_stay_whole():
    costs = [6, 1, 1, 4, 5, 3, 2, 2]
    order = balance(costs, 2)
    assert sorted(order) == list(range(8))
    sums = [sum(costs[i] for i in part) for part in (order[:4], order[4:])]
    assert sums == [12, 12]
    assert sorted(balance([1.0] * 6, 3)) == list(range(6))


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        (("ddp", "fsdp2"), "ddp and fsdp2 both exchange gradients: list one"),
        (({"name": "ddp", "share": 0.0},), r"ddp\.share is a share in \(0, 1\], got 0\.0"),
        (({"name": "ddp", "start": 1.0},), r"ddp\.start is a share of the steps in \[0, 1\)"),
        (({"name": "ddp", "rank": 0},), "ddp needs rank >= 1 and bucket_mb > 0, got 0"),
        (({"name": "ddp", "wire": "fp15"},), "did you mean 'fp16'"),
    ],
)
def test_what_makes_no_sense_is_refused(entries, message):
    with pytest.raises(ConfigError, match=message):
        build_plan(build_optimizations(entries))
