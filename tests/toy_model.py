"""A model of thirty lines with the trainer's protocol, and a loader for it."""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from wamlab.draws import Draws


def keep_products():
    return create_selective_checkpoint_contexts([torch.ops.aten.addmm.default])


class ToyBlock(nn.Module):
    """A residual MLP; fp32 times come in beside activations of the compute dtype."""

    def __init__(self, dim):
        super().__init__()
        self.recompute, self.calls = "none", 0
        self.up, self.down = nn.Linear(dim, 3 * dim), nn.Linear(3 * dim, dim)
        self.modulation = nn.Parameter(torch.ones(1, dim))

    def forward(self, x_BTD, time_BT):
        if self.recompute == "none":
            return self.compute(x_BTD, time_BT)
        keep = {"context_fn": keep_products} if self.recompute == "selective" else {}
        return checkpoint(self.compute, x_BTD, time_BT, use_reentrant=False, **keep)

    def compute(self, x_BTD, time_BT):
        assert time_BT.dtype == torch.float32
        scale_BTD = (self.modulation * torch.cos(time_BT)[..., None]).to(x_BTD.dtype)
        return x_BTD + self.down(torch.tanh(self.up(x_BTD * scale_BTD)))


class ToyModel(nn.Module):
    """Predicts noise from a noised input; a frozen encoder in front, a scalar parameter behind.

    13 features: a dimension that neither 2 nor 4 ranks divide.
    """

    def __init__(self, dim=13, layers=3, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.encoder = nn.Linear(dim, dim)
        self.layers = nn.ModuleList(ToyBlock(dim) for _ in range(layers))
        self.head = nn.Linear(dim, dim)
        self.gain = nn.Parameter(torch.tensor(1.0))

    def blocks(self):
        return list(self.layers)

    def frozen(self):
        return [self.encoder]

    def loss(self, batch, draws):
        x_BTD = batch["x"]
        noise_BTD = draws.normal("noise", x_BTD.shape[1:])
        time_BT = draws.uniform("time", x_BTD.shape[1:2]) * 1000
        with torch.no_grad():
            hidden_BTD = self.encoder(x_BTD)
        hidden_BTD = (hidden_BTD + noise_BTD).to(self.head.weight.dtype)
        for block in self.layers:
            hidden_BTD = block(hidden_BTD, time_BT)
        error_BTD = self.gain.float() * self.head(hidden_BTD).float() - noise_BTD
        return {"loss": error_BTD.square().mean()}


class ToyLoader:
    """Samples that are a function of their id; ids that are a function of (seed, step).

    In the steps of `poison` the last rank's samples are NaN.
    """

    def __init__(
        self,
        data,
        *,
        global_batch,
        micro_batch,
        seed,
        rank,
        world_size,
        device,
        start_step=0,
        poison=(),
    ):
        self.batch, self.micro, self.seed = global_batch, micro_batch, seed
        self.rank, self.world, self.device = rank, world_size, device
        self.step, self.wait_s, self.poison = start_step, 0.0, set(poison)

    def ids_of_step(self, step):
        first = torch.full((1,), step, dtype=torch.int64)
        return Draws(self.seed, 0, first).integers("ids", 1 << 20, (self.batch,))[0]

    def __iter__(self):
        share = self.batch // self.world
        while True:
            ids = self.ids_of_step(self.step)[self.rank * share :][:share].to(self.device)
            for part in ids.split(self.micro):
                x = Draws(7, 0, part).normal("x", (5, 13))
                if self.step in self.poison and self.rank == self.world - 1:
                    x = x * torch.nan
                yield {"x": x, "sample_id": part}
            self.step += 1

    def close(self):
        pass
