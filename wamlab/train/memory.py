"""Bytes per GPU, predicted before anything is loaded, and the nearest settings that fit.

A training step has four moments that can be its peak; what each holds is added up, and the largest
counts:

    encode      weights, state, frozen encoders and what the encoders need while they run
    forward     weights, state, frozen encoders and every kept activation: the backward begins
    backward    the same without activations but with all gradients: the backward ends
    (between the last two, activations go as gradients come, so the larger end is the peak)

Activations are counted in values a token and block. The constants belong to the compiled block of
wamlab.model.dit and were fitted to peaks measured at 5B; eager blocks keep more, by EAGER.
"""

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterator

import torch

from wamlab.config import UserError, replace
from wamlab.model.attention import Layout
from wamlab.model.lora import LoRAConfig, inject
from wamlab.model.wam import WAMConfig, WorldActionModel
from wamlab.train.optimizations import Fsdp2, StepPlan, recompute_of

FRAMES = 33
# kept values a token and block, as (multiples of dim, multiples of ffn_dim)
KEPT = {"none": (22.0, 2.0), "selective": (12.0, 1.0), "full": (1.0, 0.0)}
EAGER = 1.9  # eager blocks also keep what a fused kernel never stores
HEADROOM = 0.94  # of the device: above it the allocator's cache starts to thrash
GIB = 2**30


class MemoryLimitError(UserError):
    """A run needs more memory than a device has; shows the table and what would fit."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelShape:
    """What the prediction must know of a model."""

    trained: int  # parameters
    base: int  # parameters of the trained network that are frozen, sharded with it
    block: int  # parameters of the largest block
    layers: int
    dim: int
    ffn_dim: int
    tokens: int  # of one sample
    frozen_bytes: int
    encode_bytes: int  # that the encoders need for one sample while they run
    encode_limit: int  # above which they split the batch


@dataclasses.dataclass(frozen=True, kw_only=True)
class Memory:
    """Predicted bytes of one GPU by part; `peak` is what a device must hold."""

    parameters: float
    optimizer: float
    gradients: float
    unsharded: float  # whole weights when the forward ends
    gathered: float  # whole weights and gradients while the backward ends
    frozen: float
    activations: float
    working: float  # of the block that is just computed
    encoding: float

    @property
    def moments(self) -> dict[str, float]:
        """The step's candidate peaks."""
        held = self.parameters + self.optimizer + self.frozen
        return {
            "encode": held + self.encoding,
            "forward": held + self.unsharded + self.activations + self.working,
            "backward": held + self.gathered + self.gradients + self.working,
        }

    @property
    def peak(self) -> float:
        """The largest of `moments`."""
        return max(self.moments.values())

    def table(self) -> str:
        """Return the parts and moments as lines of text, in GiB."""
        parts = dataclasses.asdict(self) | {f"peak in {k}": v for k, v in self.moments.items()}
        return "\n".join(f"  {name:<18}{value / GIB:9.2f} GiB" for name, value in parts.items())


def shape_of(config: WAMConfig, lora: LoRAConfig | None = None) -> ModelShape:
    """Return a world action model's shape, from a copy on the meta device that holds no memory."""
    plain = replace(config, vae_weights=None, text_weights=None, image_weights=None)
    with torch.device("meta"):
        model = WorldActionModel(plain)
    if lora:
        inject(model.dit, lora)
    height, width = config.encoders.target_hw or (352, 640)
    side, dit, vae = model.vae.config.spatial, model.dit.config, model.vae.config
    grid = (height // side // 2, width // side // 2)
    width_bytes = 2 if config.encoder_precision == "bf16" else 4
    first_maps = FRAMES * height * width // vae.patch**2 * vae.dim * width_bytes
    frozen = [p for module in model.frozen() for p in module.parameters()]
    return ModelShape(
        trained=sum(p.numel() for p in model.dit.parameters() if p.requires_grad),
        base=sum(p.numel() for p in model.dit.parameters() if not p.requires_grad),
        block=max(sum(p.numel() for p in b.parameters()) for b in model.blocks()),
        layers=len(model.blocks()),
        dim=dit.dim,
        ffn_dim=dit.ffn_dim,
        tokens=Layout.of(dit, 1 + (FRAMES - 1) // 4, grid).tokens,
        frozen_bytes=sum(p.numel() * p.element_size() for p in frozen),
        encode_bytes=4 * first_maps,  # input, output and two maps between of the widest level
        encode_limit=int(model.vae.memory_gib * GIB),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """What fixes a step's memory: the model, the plan, and how the batch is split."""

    shape: ModelShape
    plan: StepPlan
    precision: str
    world: int  # ranks
    micro_batch: int  # samples computed at once on a rank


def predict(setting: Setting) -> Memory:
    """Predict the memory of one training step."""
    shape, plan, fsdp = setting.shape, setting.plan, setting.plan.fsdp
    copies = max(1, fsdp.replicate) if fsdp else setting.world  # 0: not yet asked the links
    share = copies / setting.world
    own = shape.trained * share
    split = plan.optimizer == "split"
    weight = 2.0 if split else 4.0
    moments = 8.0 if not split else 6.0 + 2.0 * (plan.second_moment == "fp32")
    compute = 2.0 if setting.precision == "bf16" else 4.0
    tokens = shape.tokens * setting.micro_batch
    kept = [_kept(shape, recompute_of(plan.recompute, i), plan) for i in range(shape.layers)]
    unsharded, gathered = _whole(setting, compute)
    return Memory(
        parameters=own * weight + shape.base * share * 4.0,
        optimizer=own * moments,
        gradients=own * weight,
        unsharded=unsharded,
        gathered=gathered,
        frozen=float(shape.frozen_bytes),
        activations=tokens * sum(kept) * compute,
        working=tokens * _kept(shape, "none", plan) * compute,
        encoding=float(min(shape.encode_bytes * setting.micro_batch, shape.encode_limit)),
    )


def _kept(shape: ModelShape, mode: str, plan: StepPlan) -> float:
    dims, ffns = KEPT[mode]
    eager = 1.0 if plan.compile or mode == "full" else EAGER
    return eager * (dims * shape.dim + ffns * shape.ffn_dim)


def _whole(setting: Setting, compute: float) -> tuple[float, float]:
    """Return the bytes of whole weights (and gradients) when the forward and the backward end."""
    shape, fsdp = setting.shape, setting.plan.fsdp
    if fsdp is None:  # autocast keeps a bf16 copy of every weight until the forward ends
        copied = compute == 2.0 and setting.plan.optimizer != "split"
        return (shape.trained + shape.base) * 2.0 * copied, 0.0
    root = shape.trained + shape.base - shape.layers * shape.block
    kept = shape.layers if fsdp.keep_unsharded < 0 else min(fsdp.keep_unsharded, shape.layers)
    at_work = 1 + fsdp.prefetch
    gradients = shape.trained * 4.0 if fsdp.defer_sync else shape.block * compute
    forward = (max(kept, at_work) * shape.block + root) * compute
    return forward, (at_work * shape.block + root) * compute + gradients


def nearest(setting: Setting, capacity: float) -> list[str]:
    """Return up to three settings that fit into `capacity` bytes: fewest GPUs, then fewest
    changes."""
    plan, found = setting.plan, []
    for size, mode, optimizer, ranks in itertools.product(
        [setting.micro_batch >> k for k in range(setting.micro_batch.bit_length())],
        dict.fromkeys((plan.recompute, "selective", "full")),
        dict.fromkeys((plan.optimizer, "split")),
        [setting.world << k for k in range(4)],
    ):
        fsdp = plan.fsdp or (Fsdp2() if ranks > setting.world else None)
        new = replace(plan, recompute=mode, optimizer=optimizer, fsdp=fsdp)
        changes = [
            f"micro_batch {size}" * (size != setting.micro_batch),
            f"recompute {mode}" * (mode != plan.recompute),
            "split_adamw" * (optimizer != plan.optimizer),
            "fsdp2" * (fsdp != plan.fsdp),
            f"{ranks} GPUs" * (ranks != setting.world),
        ]
        changes = [c for c in changes if c]
        peak = predict(replace(setting, plan=new, world=ranks, micro_batch=size)).peak
        if changes and peak <= capacity:
            found.append((ranks, len(changes), f"{', '.join(changes)} ({peak / GIB:.1f} GiB)"))
    return [text for *_, text in sorted(found, key=lambda f: f[:2])[:3]]


def explain(setting: Setting, capacity: float) -> str:
    """Return the table of this setting and the nearest ones that fit, as text for an error."""
    memory = predict(setting)
    fits = nearest(setting, capacity) or ["nothing up to 8 times the GPUs"]
    return (
        f"predicted peak {memory.peak / GIB:.1f} GiB a GPU, usable {capacity / GIB:.1f} GiB\n"
        f"{memory.table()}\nwhat fits: {'; '.join(fits)}"
    )


def check(setting: Setting, capacity: float) -> None:
    """Refuse a run that cannot fit, before anything is loaded.

    Raises:
        MemoryLimitError: with the table and the nearest settings that fit.
    """
    if predict(setting).peak > capacity:
        raise MemoryLimitError(f"this run cannot fit: {explain(setting, capacity)}")


@contextlib.contextmanager
def explained(setting: Setting, capacity: float, last: Callable[[], object]) -> Iterator[None]:
    """Turn an out-of-memory error of the body into the table, what fits, and the last checkpoint.

    Args:
        setting: what runs.
        capacity: usable bytes.
        last: returns the last complete checkpoint or None.

    Raises:
        MemoryLimitError: the device ran out of memory.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise MemoryLimitError(
            f"out of memory: {str(error).splitlines()[0]}\n{explain(setting, capacity)}\n"
            f"last checkpoint: {last() or 'none'}"
        ) from error


def usable_bytes(device: torch.device) -> float:
    """Return what a run may use of a GPU: HEADROOM of its memory."""
    return HEADROOM * torch.cuda.mem_get_info(device)[1]
