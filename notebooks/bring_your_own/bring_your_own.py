"""A model that is not wamlab's, through profile, three dimensions and report, in thirty lines.

python notebooks/bring_your_own/bring_your_own.py
"""

from pathlib import Path

import torch
from cloner import Cloner
from torch.nn.functional import mse_loss

from wamlab.data.loader import DataConfig
from wamlab.dist import device
from wamlab.jupyter.ladder import Row, ladder
from wamlab.jupyter.report import write_report
from wamlab.jupyter.table import print_ladder
from wamlab.train.communication import training_group
from wamlab.train.config import TrainConfig
from wamlab.train.profile import profile_trainer
from wamlab.train.trainer import Trainer

SAMPLES = Path(__file__).resolve().parents[2] / "data_samples" / "droid_mini"


class Guest(Cloner):
    """The stranger's model with the three methods by which the trainer knows a model."""

    def loss(self, batch, draws):
        """Return the mean squared error of the actions of every block, seen from its start."""
        pictures = batch["video"][:, :-1:8].flatten(0, 1).movedim(-1, 1) / 255.0
        # forward, not self(...): when the model is sharded, the call that gathers it is `loss`
        actions = self.forward(pictures, batch["state"].flatten(0, 1))
        actions = actions.reshape(batch["action"].shape)
        return {"loss": mse_loss(actions * batch["action_mask"], batch["action"])}

    def blocks(self):
        """Return the layers, each compiled, recomputed and sharded by itself."""
        return list(self.layers)

    def frozen(self):
        """Return nothing: all of it is trained."""
        return []


def train(config):
    """Train on this rank: what a row of the ladder runs."""
    with training_group(device(config.device), config.timeout_s):
        torch.manual_seed(config.seed)  # every row and every rank starts from the same weights
        return Trainer(config, Guest()).fit()


def profile(config):
    """Profile on this rank: where a step's time goes."""
    with training_group(device(config.train.device), config.train.timeout_s):
        return profile_trainer(config, Guest())


BASE = TrainConfig(
    name="guest",
    model=None,
    data=DataConfig(root=str(SAMPLES), embodiment="toy"),
    global_batch=2,
    steps=4,
    warmup_steps=1,
    parts_steps=1,
    wait_steps=1,
    log_every=1,
)
YOURS = ({"name": "recompute", "mode": "none"}, "micro_batch")  # a plain loop over whole batches
COMPUTE, PARALLEL = ("compile", "fused_adamw"), ("fsdp2",)
DATA = ("torchcodec", "device_augment", "prefetch")
TWO = {"nproc": 2, "threads": 1}
ROWS = (
    Row(name="yours", optimizations=YOURS),
    Row(name="compute", dimension="compute", optimizations=YOURS + COMPUTE),
    Row(name="parallel", dimension="parallel", optimizations=YOURS + PARALLEL, **TWO),
    Row(name="data", dimension="data", optimizations=YOURS + DATA, tolerance=2e-2),
    Row(
        name="all three",
        dimension="data",
        optimizations=YOURS + COMPUTE + PARALLEL + DATA,
        tolerance=2e-2,
        **TWO,
    ),
)


def main() -> None:
    """Measure every row and write the report."""
    records = ladder(BASE, ROWS, "runs/bring_your_own", target="bring_your_own:train")
    print_ladder(records)
    print(write_report(records, "runs/bring_your_own", title="A guest on the ladder"))


if __name__ == "__main__":
    main()
