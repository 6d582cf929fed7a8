"""What tests/test_hosts.py starts under torchrun, one rank a made-up host.

usage: host_ranks.py FOLDER STEPS; trains the toy model slowly and writes FOLDER/losses.json.
"""

import dataclasses
import json
import sys
import time
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from toy_model import ToyLoader, ToyModel
from trainer_ranks import CONFIG

from wamlab.train.communication import training_group
from wamlab.train.trainer import Trainer


class Slowly(ToyLoader):
    """Gives a test time to end a host."""

    def __iter__(self):
        for batch in super().__iter__():
            time.sleep(0.1)
            yield batch


def main(folder, steps):
    torch.set_num_threads(1)
    entries = ("micro_batch", "fsdp2")
    where = {"out": str(folder / "run"), "save_every": 5, "log_every": 1, "steps": steps}
    where["silence_s"] = 6.0
    with training_group(torch.device("cpu"), timeout_s=60):
        config = dataclasses.replace(CONFIG, optimizations=entries, **where)
        Trainer(config, ToyModel(), partial(Slowly)).fit()
        if dist.get_rank() == 0:
            rows = (folder / "run" / "steps.jsonl").read_text().splitlines()
            losses = [json.loads(row)["loss"] for row in rows]
            (folder / "losses.json").write_text(json.dumps([dist.get_world_size(), losses]))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
