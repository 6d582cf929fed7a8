"""What test_communication_gpu.py starts under torchrun, one rank a GPU.

usage: communication_gpu_ranks.py FOLDER; writes FOLDER/found.pt on rank 0.
"""

import dataclasses
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from toy_model import ToyLoader, ToyModel
from trainer_ranks import CONFIG

from wamlab.dist import device
from wamlab.train.communication import planned_mesh, training_group
from wamlab.train.trainer import Trainer

SMALL = {"name": "ddp", "bucket_mb": 0.002}
RUNS = {
    "plain": (),
    "buckets": (SMALL,),
    "fp16": ({**SMALL, "wire": "fp16", "start": 0.0},),
    "bf16": ({**SMALL, "wire": "bf16", "start": 0.0},),
    "low rank": ({**SMALL, "wire": "lowrank", "rank": 4},),
    "gated": ({**SMALL, "wire": "lowrank", "rank": 4, "gate": "high"},),
    "fsdp2": ("fsdp2",),
    "no root": ({"name": "fsdp2", "root": False},),
    "float8 weights": ({"name": "fsdp2", "gather": "float8"},),
    "float8 gradients": ({"name": "fsdp2", "scatter": "float8"},),
    "between": ({"name": "fsdp2", "replicate": 2, "between": "fp16"},),
    "by the links": ({"name": "fsdp2", "replicate": 0},),
}


def main(folder):
    found = {}
    with training_group(device("cuda")):
        found["mesh"] = dataclasses.asdict(planned_mesh())
        for name, entries in RUNS.items():
            config = dataclasses.replace(
                CONFIG, device="cuda", optimizations=("micro_batch", *entries), wait_steps=5
            )
            run = Trainer(config, ToyModel(), ToyLoader)
            record = run.fit()
            found[name] = {"losses": record.losses, **record.extra}
        if dist.get_rank() == 0:
            torch.save(found, folder / "found.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
