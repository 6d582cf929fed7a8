"""Experiments of notebook 04 that run on ranks: split the batch, shard, recompute, and get it
wrong.

Each function is a target of `launch` and takes and returns plain values. The model is the tiny row
with its encoders' outputs made from numbers, so that a step is the DiT's forward, backward and
update.
"""

import dataclasses
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils.checkpoint import checkpoint

from wamlab.dist import rank
from wamlab.draws import Draws
from wamlab.model.wam import WorldActionModel
from wamlab.trace import read_trace
from wamlab.train.communication import data_mesh, training_group
from wamlab.train.config import TrainConfig
from wamlab.train.optim import OptimConfig, local
from wamlab.train.trainer import Trainer

CPU = torch.device("cpu")
COLLECTIVES = {
    "c10d::_allgather_base_": "all_gather",
    "c10d::_reduce_scatter_base_": "reduce_scatter",
}


class Numbers:
    """A loader of samples that are functions of their id: latents and features, or raw video."""

    def __init__(self, data: Any, *, video: bool = False, **split: Any) -> None:
        self.split, self.video, self.wait_s = split, video, 0.0
        self.step = split["start_step"]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        batch, world, rank = (self.split[k] for k in ("global_batch", "world_size", "rank"))
        share = batch // world
        while True:
            ids = torch.arange(batch).add(self.step * batch)[rank * share :][:share]
            for part in ids.split(self.split["micro_batch"]):
                yield self.samples(part.to(self.split["device"]))
            self.step += 1

    def samples(self, ids: Tensor) -> dict[str, Any]:
        """Return one micro-batch with the given sample ids."""
        draws, count = Draws(7, 0, ids), len(ids)
        batch = {
            "state": draws.normal("state", (4, 64)),
            "action": draws.uniform("action", (96, 32)) * 2 - 1,
            "action_mask": torch.ones(count, 96, 32, dtype=torch.bool, device=ids.device),
            "has_real_action": torch.ones(count, dtype=torch.bool, device=ids.device),
            "sample_id": ids,
        }
        if self.video:
            frames = draws.integers("video", 256, (33, 64, 128, 3)).to(torch.uint8)
            return {**batch, "video": frames, "prompt": ["pick"] * count}
        return {
            **batch,
            "latents": draws.normal("latents", (48, 9, 4, 8)),
            "clip_feature": draws.normal("clip", (257, 64)),
            "prompt_embedding": draws.normal("prompt", (512, 64)).bfloat16(),
            "prompt_length": torch.full((count,), 12, device=ids.device),
        }

    def close(self) -> None:
        """Nothing is open."""


def train_runs(config: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Train several short runs one after the other on these ranks.

    Args:
        config: `runs`: name -> {"optimizations": [...], and fields of TrainConfig}; `encoders`:
            "outside" (frozen encoders whole on each rank) or "inside" (sharded, as a trap).

    Returns:
        Name -> losses, norms, step_ms, samples_per_s, held_mib (parameters, gradients and moments
        of a rank) and computed (how often blocks ran in one step); on one rank also kept_mib (what
        the forward of one micro-batch leaves in memory for the backward), on the first of several
        that step's collectives and backward_cpu_ms.
    """
    torch.set_num_threads(1)
    with training_group(CPU):
        return {name: _train(dict(run)) for name, run in config["runs"].items()}


def _train(run: dict[str, Any]) -> dict[str, Any]:
    inside = run.pop("encoders", "outside") == "inside"
    video = run.pop("video", False)
    settings = TrainConfig(
        data=None, device="cpu", optim=OptimConfig(lr=1e-3), warmup_steps=1, wait_steps=0
    )
    entries = tuple(run.pop("optimizations", ()))
    settings = dataclasses.replace(settings, optimizations=entries, **run)
    model = WorldActionModel(settings.model)
    for option in ("batched_encoders", "skip_unused_y"):
        model.set_option(option, True)
    if inside:
        fully_shard(model.vae, mesh=data_mesh(CPU))
        register_fsdp_forward_method(model.vae, "encode")
        model = _WithEncoders(model)
    trainer = Trainer(settings, model, lambda data, **split: Numbers(data, video=video, **split))
    record = trainer.fit()
    return {
        "losses": list(record.losses),
        "norms": [r.grad_norm for r in trainer.log.records],
        "step_ms": record.step_ms.median,
        "samples_per_s": record.samples_per_s,
        **_observe(trainer),
    }


def _observe(trainer: Trainer) -> dict[str, Any]:
    """Look into one further step, and at what one micro-batch's forward leaves in memory."""
    computed: list[int] = []
    for block in trainer.model.blocks():  # a hook inside the block also sees it recomputed
        block.self_attn.register_forward_pre_hook(lambda *_: computed.append(1))
    found = _trace(trainer) if trainer.world > 1 else trainer.step() or {}
    found["computed"] = len(computed)  # before anything else runs the blocks
    if trainer.world == 1:
        found["kept_mib"] = _kept_mib(trainer)
    stepper = trainer.stepper
    held = [*stepper.state().values(), *stepper.parameters.values()]  # gradients: like parameters
    return {**found, "held_mib": sum(local(t).numel() * t.element_size() for t in held) / 2**20}


def _trace(trainer: Trainer) -> dict[str, Any]:
    """Run a step that the first rank records; `key_averages` would take several steps' time."""
    if rank() != 0:
        trainer.step()
        return {}
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        trainer.step()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        seen.export_chrome_trace(str(path))
        events = read_trace(path)
    backward = sum(e.duration for e in events if e.name.startswith("autograd::engine::eval"))
    counts = {name: sum(e.name == key for e in events) for key, name in COLLECTIVES.items()}
    return {"collectives": counts, "backward_cpu_ms": backward / 1e3}


def _kept_mib(trainer: Trainer) -> float:
    batch = next(iter(trainer.loader))
    draws = Draws(0, 0, batch["sample_id"])
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        losses = trainer.model.loss(batch, draws)
    kept = sum(event.self_cpu_memory_usage for event in seen.key_averages()) / 2**20
    losses["loss"].backward()
    trainer.model.zero_grad()
    return kept


class _WithEncoders(nn.Module):
    """A model whose encoders run inside `loss`, under FSDP2's root, as sharded ones must."""

    def __init__(self, model: WorldActionModel) -> None:
        super().__init__()
        self.model = model
        self.loss, self.blocks, self.frozen = model.loss, model.blocks, model.frozen


class _Block(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.number, self.inside = number, False
        self.scale, self.linear = nn.Parameter(torch.ones(64)), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        if self.inside:
            return checkpoint(self.compute, x, use_reentrant=False)
        return self.compute(x)

    def compute(self, x: Tensor) -> Tensor:
        with record_function(f"compute {self.number}"):
            return x + torch.tanh(self.linear((x * self.scale).to(self.linear.weight.dtype)))


class _Net(nn.Module):
    def __init__(self, *, outside: bool) -> None:
        super().__init__()
        self.blocks, self.outside = nn.ModuleList(_Block(i) for i in range(4)), outside

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.outside else block(x)
        return x.float().square().mean()


def wrapper_orders(config: Mapping[str, Any]) -> dict[str, Any]:
    """Wrap one small network in four ways, on these ranks, in bf16.

    Returns:
        `orders`: "no root", "root last", "root last, prefetch", "recompute outside" -> `error`
        (first line, or None), `loss`, and what `forward` and `backward` started, in order. `times`:
        how many of the 1,000 times of the noise schedule a block tells apart, with FSDP2's cast of
        inputs ("cast") and without ("kept").
    """
    torch.set_num_threads(1)
    with training_group(CPU):
        orders = {
            "no root": _attempt(root=False),
            "root last": _attempt(),
            "root last, prefetch": _attempt(prefetch=1),
            "recompute outside": _attempt(outside=True),
        }
        times = {"cast": _times_seen(True), "kept": _times_seen(False)}
        return {"orders": orders, "times": times}


def _attempt(*, outside: bool = False, root: bool = True, prefetch: int = 0) -> dict[str, Any]:
    torch.manual_seed(0)
    net, mesh = _Net(outside=outside), data_mesh(CPU)
    how = {"mesh": mesh, "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)}
    for block in net.blocks:
        block.inside = not outside
        fully_shard(block, **how, reshard_after_forward=True)
    if root:
        fully_shard(net, **how)
    for number, block in enumerate(net.blocks):
        if prefetch:
            ahead = net.blocks[number + 1 : number + 1 + prefetch]
            block.set_modules_to_forward_prefetch(list(ahead))
    found: dict[str, Any] = {"error": None}
    with profile(activities=[ProfilerActivity.CPU]) as forward:
        loss = net(torch.ones(8, 64))
    with profile(activities=[ProfilerActivity.CPU]) as backward:
        try:
            loss.backward()
        except (RuntimeError, AssertionError) as fault:
            found["error"] = f"{type(fault).__name__}: {str(fault).strip().splitlines()[0]}"
    dist.barrier()
    return {
        **found,
        "loss": loss.item(),
        "forward": _started(forward),
        "backward": _started(backward),
    }


def _started(seen: profile) -> list[str]:
    ordered = sorted(seen.events(), key=lambda e: e.time_range.start)
    names = [COLLECTIVES.get(e.name, e.name) for e in ordered]
    return [n for n in names if n in COLLECTIVES.values() or n.startswith("compute ")]


class _Times(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.seen = nn.Linear(2, 2), 0

    def forward(self, time: Tensor) -> Tensor:
        self.seen = time.unique().numel()
        return self.linear(time[:2].to(self.linear.weight.dtype))


def _times_seen(cast: bool) -> int:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, cast_forward_inputs=cast)
    net = fully_shard(_Times(), mesh=data_mesh(CPU), mp_policy=policy)
    sigma = 1 - torch.arange(1000) / 1000
    net(1000 * 5 * sigma / (1 + 4 * sigma))  # the schedule's times, shift 5
    return net.seen
