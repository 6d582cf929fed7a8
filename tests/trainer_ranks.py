"""What tests/test_trainer_ranks.py starts under torchrun: all checks of one world size in one go.

usage: trainer_ranks.py FOLDER; writes FOLDER/WORLD.pt on rank 0.
"""

import dataclasses
import os
import signal
import sys
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile
from toy_model import ToyLoader, ToyModel

from wamlab.train.communication import training_group
from wamlab.train.config import TrainConfig
from wamlab.train.optim import OptimConfig
from wamlab.train.trainer import Trainer

CONFIG = TrainConfig(
    model=None,
    data=None,
    device="cpu",
    steps=20,
    warmup_steps=1,
    wait_steps=0,
    global_batch=8,
    optim=OptimConfig(lr=1e-2, schedule="constant", lr_warmup=0.0),
)
MICRO = {"name": "micro_batch", "size": 1}
EVERY = [1, 2, 4]
DEFER = {"name": "fsdp2", "defer_sync": True}
HSDP = {"name": "fsdp2", "replicate": 2}
RUNS = {  # name -> optimizations, world sizes, steps
    "replicated": ((), EVERY, 20),
    "batched": (("micro_batch", "fused_adamw"), [1, 2], 20),
    "fsdp2": (("micro_batch", "fsdp2"), EVERY, 20),
    "accumulated": ((MICRO, "fsdp2"), [2], 5),
    "deferred": ((MICRO, DEFER), [2], 5),
    "hsdp": (("micro_batch", HSDP), [4], 5),
}


def trainer(*optimizations, loader=ToyLoader, **changes) -> Trainer:
    config = dataclasses.replace(CONFIG, optimizations=optimizations, **changes)
    return Trainer(config, ToyModel(), loader)


def whole(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Gather a state; gloo knows no int16."""
    gathered = {}
    for name, tensor in state.items():
        tensor = tensor.int() if tensor.dtype == torch.int16 else tensor
        full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        gathered[name] = full.detach().clone()
    return gathered


def losses_and_norms(world: int) -> dict[str, dict[str, list[float]]]:
    found = {}
    for name, (optimizations, worlds, steps) in RUNS.items():
        if world in worlds:
            run = trainer(*optimizations, steps=steps)
            run.fit()
            rows = run.log.records
            found[name] = {"losses": [r.loss for r in rows], "norms": [r.grad_norm for r in rows]}
    return found


def reduce_scatters() -> dict[str, int]:
    """Count a step's reduce-scatters with accumulation of 4, gradient by gradient sync and
    deferred."""
    counts = {}
    for name, fsdp in (("every", "fsdp2"), ("deferred", DEFER)):
        run = trainer(MICRO, fsdp, global_batch=4 * dist.get_world_size())
        with profile(activities=[ProfilerActivity.CPU]) as seen:
            run.step()
        names = [event.key for event in seen.key_averages() for _ in range(event.count)]
        counts[name] = names.count("c10d::_reduce_scatter_base_")
    return counts


def interrupted_and_resumed(folder: Path) -> dict[str, object]:
    """Stop by a signal that one rank alone gets, resume, and compare with a run left alone."""

    class Interrupted(ToyLoader):
        def __iter__(self):
            for number, batch in enumerate(super().__iter__()):
                if number == 5 and self.rank == self.world - 1:
                    os.kill(os.getpid(), signal.SIGTERM)
                yield batch

    entries, where = ("micro_batch", "fsdp2"), {"out": str(folder), "save_every": 100, "steps": 10}
    stopped = trainer(*entries, loader=Interrupted, **where)
    record = stopped.fit()
    resumed = trainer(*entries, **where)
    start = resumed.step_count
    resumed.fit()
    alone = trainer(*entries, steps=10)
    alone.fit()
    ends = whole(resumed.stepper.state()), whole(alone.stepper.state())
    return {
        "reason": record.reason,
        "stopped_at": [start, len(record.losses)],
        "same": all(torch.equal(ends[0][n], ends[1][n]) for n in ends[0]),
    }


def poisoned() -> dict[str, object]:
    run = trainer("micro_batch", "fsdp2", loader=partial(ToyLoader, poison=[2]), steps=4)
    run.fit()
    rows = run.log.records
    parameters = [t.isfinite().all().item() for t in whole(run.stepper.state()).values()]
    ids = run.loader.ids_of_step(2)[-run.share :].tolist()
    return {
        "skipped": [r.skipped for r in rows],
        "bad": rows[2].bad,
        "ids": ids,
        "finite": all(parameters),
    }


def resharded(folder: Path, world: int) -> dict[str, dict[str, Tensor]]:
    """Save on 2 ranks (which run first), load on the others; return the whole state."""
    found = {}
    for name, entries in (("adamw", ("fsdp2",)), ("split", ("fsdp2", "split_adamw"))):
        where = {"out": str(folder / name), "save_every": 3, "steps": 3 if world == 2 else 5}
        run = trainer(*entries, **where, global_batch=8)
        if world == 2:
            run.fit()
        found[name] = whole(run.stepper.state())
    return found


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    with training_group(torch.device("cpu"), timeout_s=60):
        world = dist.get_world_size()
        found = {
            "runs": losses_and_norms(world),
            "resharded": resharded(folder / "reshard", world),
        }
        if world == 2:
            found["reduce_scatters"] = reduce_scatters()
            found["interrupted"] = interrupted_and_resumed(folder / "stop")
        if world > 1:
            found["poisoned"] = poisoned()
        if dist.get_rank() == 0:
            torch.save(found, folder / f"{world}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
