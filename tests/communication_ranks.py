"""What tests/test_communication.py starts under torchrun on two ranks: all its checks in one go.

usage: communication_ranks.py FOLDER; writes FOLDER/RANK.pt.
"""

import copy
import dataclasses
import sys
import time
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel
from toy_model import ToyLoader, ToyModel
from trainer_ranks import CONFIG, whole

from wamlab.config import ConfigError
from wamlab.draws import Draws
from wamlab.profiler import Marks, profile_steps
from wamlab.trace import read_trace, split_steps
from wamlab.train.communication import training_group
from wamlab.train.compression import Compression, replicate
from wamlab.train.optimizations import Ddp
from wamlab.train.trainer import Trainer
from wamlab.train.wait import balance, measure_wait

SMALL = {"name": "ddp", "bucket_mb": 0.002}  # nine buckets
RUNS = {
    "plain": (),
    "one bucket": ("ddp",),
    "buckets": (SMALL,),
    "fp16": ({**SMALL, "wire": "fp16", "start": 0.0},),
    "bf16": ({**SMALL, "wire": "bf16", "start": 0.0},),
    "low rank": ({**SMALL, "wire": "lowrank", "rank": 4},),
    "top": ({**SMALL, "wire": "topk", "keep": 0.2, "gate": "high"},),
    "fsdp2": ("fsdp2",),
    "float8 weights": ({"name": "fsdp2", "gather": "float8"},),
    "bf16 gradients": ({"name": "fsdp2", "scatter": "bf16"},),
    "float8 gradients": ({"name": "fsdp2", "scatter": "float8"},),
    "between": ({"name": "fsdp2", "replicate": 2, "between": "fp16"},),
    "by the links": ({"name": "fsdp2", "replicate": 0},),
    "no root": ({"name": "fsdp2", "root": False},),
}


def trainer(*optimizations, micro=None, loader=ToyLoader, model=None, **changes):
    entries = ({"name": "micro_batch", "size": micro}, *optimizations)
    config = dataclasses.replace(CONFIG, optimizations=entries, steps=8)
    return Trainer(dataclasses.replace(config, **changes), model or ToyModel(), loader)


def runs():
    found = {}
    for name, entries in RUNS.items():
        run = trainer(*entries)
        record = run.fit()
        parameters = {n: p.detach().clone() for n, p in run.stepper.parameters.items()}
        bytes_share = record.extra.get("wire_bytes_share")
        found[name] = {"losses": record.losses, "bytes": bytes_share}
        if run.plan.fsdp is None:
            found[name]["parameters"] = parameters
    return found


def accumulated():
    """Two micro-batches a step, exchanged once."""
    return trainer(SMALL, micro=2, steps=3).fit().losses, trainer(steps=3).fit().losses


class Moving(ToyModel):
    """Says how much its batch moves: calm and wild steps in turn."""

    steps = 0

    def loss(self, batch, draws):
        self.steps += 1
        moved = torch.tensor(float(self.steps // 2 % 2 + dist.get_rank()))
        return {**super().loss(batch, draws), "activity": moved}


def by_activity():
    """The trainer's gate by what moves, and its refusal of a model that does not say."""
    entry = {**SMALL, "wire": "topk", "gate": "activity", "start": 0.0}
    run = trainer(entry, steps=11, model=Moving())
    record = run.fit()
    known = run.stepper.compression._activity.get(0)
    try:
        trainer(entry).step()
    except ConfigError as error:
        return known, record.losses, record.extra["wire_bytes_share"], str(error)


def resumed(folder):
    """Eight steps at once, and four and four: compression's memory goes through the checkpoint."""
    entry = {**SMALL, "wire": "lowrank", "rank": 2, "start": 0.2}
    alone = trainer(entry, steps=8)
    alone.fit()
    where = {"out": str(folder), "save_every": 4}
    first = trainer(entry, steps=8, **where)
    for _ in range(4):
        first.step()
    first.checkpoints.save(first.stepper.state(), 4, first._marker())
    first.checkpoints.close()
    second = trainer(entry, steps=8, **where)
    begun = second.step_count
    second.fit()
    ends = whole(alone.stepper.state()), whole(second.stepper.state())
    return begun, {n: torch.equal(ends[0][n], ends[1][n]) for n in ends[0]}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.Sequential(nn.Linear(24, 40), nn.Tanh(), nn.Linear(40, 24))

    def loss(self, batch, draws):
        return {"loss": (self.layers(batch) - batch.flip(1)).square().mean()}


def batches(count):
    generator = torch.Generator().manual_seed(dist.get_rank())
    return [torch.randn(8, 24, generator=generator) for _ in range(count)]


def against_torch():
    """Gradients of torch's own PowerSGD hook and of ours, from the same first factors."""
    ours, theirs = Net(), Net()
    config = Ddp(wire="lowrank", rank=2, start=0.5)
    hook = Compression(config, dict(ours.named_parameters()), total_steps=6, seed=0)
    loss_of = replicate(ours, config, hook)
    module = DistributedDataParallel(theirs.layers, init_sync=False)
    state = PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=3)
    module.register_comm_hook(state, powerSGD_hook)
    apart = []
    for step, batch in enumerate(batches(6)):
        if step == 3:  # torch draws its factors now, in the order of the bucket: last layer first
            torch.manual_seed(np.random.RandomState(0).randint(1_000_000_000))
            for name in ("layers.2.weight", "layers.0.weight"):
                factor = hook.factors[name]
                factor.copy_(torch.randn(factor.shape))
        hook.step = step
        loss_of(batch, None)["loss"].backward()
        (module(batch) - batch.flip(1)).square().mean().backward()
        pairs = zip(ours.parameters(), theirs.parameters())
        apart.append(max((a.grad - b.grad).abs().max().item() for a, b in pairs))
        ours.zero_grad(), theirs.zero_grad()
    return apart


def nothing_is_lost():
    """The sum of what arrives equals the sum of the true means once no error is held back."""
    net = Net()
    config = Ddp(wire="topk", keep=0.05, gate="random", share=0.7, start=0.0, bucket_mb=0.002)
    hook = Compression(config, dict(net.named_parameters()), total_steps=40, seed=1)
    loss_of, true = replicate(net, config, hook), copy.deepcopy(net)
    arrived = [torch.zeros_like(p) for p in net.parameters()]
    wanted = [torch.zeros_like(p) for p in net.parameters()]
    for step, batch in enumerate(batches(40)):
        hook.step = step
        if step == 39:
            hook.config = dataclasses.replace(config, start=0.9)
            hook.first = 100  # the gate closes: everything held back goes out
        loss_of(batch, None)["loss"].backward()
        true.loss(batch, None)["loss"].backward()
        for total, p in zip(arrived, net.parameters()):
            total += p.grad
        for total, p in zip(wanted, true.parameters()):
            dist.all_reduce(p.grad)
            total += p.grad / 2
        net.zero_grad(), true.zero_grad()
    apart = max((a - b).abs().max().item() for a, b in zip(arrived, wanted))
    size = max(b.abs().max().item() for b in wanted)
    return apart / size, hook.sent_bytes / hook.dense_bytes


def waits():
    """The wait of the whole step when rank 1 computes 500 ms longer, measured in both ways."""
    run = trainer(steps=3)
    run.fit()
    if dist.get_rank() == 1:
        run.model.layers[0].register_forward_pre_hook(lambda *_: time.sleep(0.5))
    rehearse = run.stepper.rehearsal(run._batches, 1, 3)
    before = {n: p.detach().clone() for n, p in run.stepper.parameters.items()}
    found = measure_wait(rehearse, device=torch.device("cpu"), repeats=2, step_ms=1.0)
    after = run.stepper.parameters
    return found, all(torch.equal(before[n], after[n]) for n in before)


def every_way_can_be_rehearsed():
    found = {}
    for name in ("buckets", "float8 weights", "between"):
        run = trainer(*RUNS[name], steps=3, wait_steps=2)
        record = run.fit()
        found[name] = (record.exposed_comm_share, record.extra["wait_share_ablation"])
    return found


class Costly(ToyLoader):
    """A loader whose samples cost 60 or 4 ms to read, by their place in the global batch."""

    def __init__(self, data, *, balanced, **split):
        super().__init__(data, **split)
        self.balanced = balanced

    def __iter__(self):
        costs = [0.06] * 4 + [0.004] * 4  # in turn, the first rank gets all the dear ones
        order = balance(costs, self.world) if self.balanced else list(range(8))
        mine = order[self.rank * 4 :][:4]
        while True:
            time.sleep(sum(costs[place] for place in mine))
            ids = self.ids_of_step(self.step)[mine]
            yield {"x": Draws(7, 0, ids).normal("x", (5, 13)), "sample_id": ids}
            self.step += 1


def skewed(balanced):
    """Whole steps of two ranks whose samples cost unequally, read from their traces."""
    run = trainer(steps=2, loader=partial(Costly, balanced=balanced))
    run.step()
    run.stepper.clock = Marks()
    folder = Path(sys.argv[1]) / f"trace{balanced}"
    path = profile_steps(run.step, folder, dev=torch.device("cpu"), warmup=1, active=2)
    splits = split_steps(read_trace(path))
    losses = [r.loss for r in run.log.flush()]
    return [(s.parts_ms["data_wait"], s.exposed_comm_ms, s.step_ms) for s in splits], losses


def main(folder):
    torch.set_num_threads(1)
    with training_group(torch.device("cpu"), timeout_s=60):
        found = {
            "runs": runs(),
            "accumulated": accumulated(),
            "by_activity": by_activity(),
            "resumed": resumed(folder / "resumed"),
            "against_torch": against_torch(),
            "nothing_is_lost": nothing_is_lost(),
            "waits": waits(),
            "rehearsed": every_way_can_be_rehearsed(),
            "skewed": {on: skewed(on) for on in (False, True)},
        }
        torch.save(found, folder / f"{dist.get_rank()}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
