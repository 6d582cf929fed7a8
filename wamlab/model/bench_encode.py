"""The frozen encoders alone: scope "encode". One run, one machine: the public way and ours.

Every row is checked against the public way in fp32 on the same random clip, and says how far its
latents are from it. Beside the rows stands the rate of one large matrix product, so that a row can
be held against its floor.
"""

import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from wamlab.config import ConfigError, check_least, lookup, replace
from wamlab.measure import (
    Record,
    device_name,
    exact_fp32,
    measure_ms,
    peak_gib,
    reset_peak,
    stamp,
    synchronize,
)
from wamlab.model.image import ImageEncoder
from wamlab.model.text import TextEncoder
from wamlab.model.vae import VAE, VAE_SIZES, load_vae
from wamlab.model.vae_blocks import RMSNorm
from wamlab.model.vae_still import StillEncoder
from wamlab.model.wam import first_frame_alone

COMPILE: dict[str, dict[str, Any]] = {
    "default": {},
    "tuned": {"options": {"coordinate_descent_tuning": True}},
    "autotuned": {"mode": "max-autotune-no-cudagraphs"},
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class EncodeCase:
    """One timed way to encode a batch of clips; the defaults are the public way."""

    name: str = "official"
    vae: str = "tiny"
    batch: int = 2
    frames: int = 33
    hw: tuple[int, int] = (64, 128)
    one_by_one: bool = True
    chunk: int | None = 4
    conditioning: Literal["none", "own_pass", "same_pass", "still"] = "none"
    channels_last: bool = False
    cudnn_benchmark: bool = False
    bf16_norms: bool = False
    compile: str | None = None  # a key of COMPILE
    cuda_graph: bool = False
    precision: Literal["fp32", "bf16"] = "fp32"
    device: str = "cpu"
    warmup: int = 3
    repeats: int = 10

    def __post_init__(self) -> None:
        cell = lookup(VAE_SIZES, self.vae, "VAE size").spatial
        if any(side < cell or side % cell for side in self.hw):
            raise ConfigError(f"hw {self.hw}: {self.vae} takes multiples of {cell} pixels")
        if self.compile is not None:
            lookup(COMPILE, self.compile, "way to compile")
        check_least(self, {"batch": 1, "frames": 1, "repeats": 1})
        if self.cuda_graph and self.device != "cuda":
            raise ConfigError("cuda_graph needs device 'cuda'")


def ladder(
    base: EncodeCase, *, conditioning: bool = False, autotune: bool = False
) -> list[EncodeCase]:
    """Return the ways to compare, each one step further than a former one.

    Args:
        base: sizes and device.
        conditioning: add rows with `y`, the public way and three of ours.
        autotune: add rows that take minutes to compile.
    """

    def way(name: str, **changes: Any) -> EncodeCase:
        return replace(base, changes | {"name": name})

    whole = {"one_by_one": False, "chunk": None}
    rows = [
        way("official", chunk=4, one_by_one=True),
        way("batched chunks", one_by_one=False),
        way("whole clip, one by one", chunk=None),
        way("whole clip", **whole),
    ]
    best = rows[-1]
    if base.device == "cuda":
        whole |= {"cudnn_benchmark": True}
        last = whole | {"channels_last": True}
        fused = last | {"compile": "default"}
        best = way("channels_last, compile", **fused)
        rows += [
            way("cudnn benchmark", **whole),
            way("channels_last", **last),
            way("channels_last, bf16 norms", **last, bf16_norms=True),
            way("compile", **whole, compile="default"),
            best,
            way("channels_last, compile, bf16 norms", **fused, bf16_norms=True),
            way("channels_last, compile, cuda graph", **fused, cuda_graph=True),
            way("channels_last, compile, one by one", **fused | {"one_by_one": True}),
            way("chunks of 16, channels_last, cuda graph", **last | {"chunk": 16}, cuda_graph=True),
            way("official, cuda graph", cuda_graph=True),
        ]
        for how in ("tuned", "autotuned") if autotune else ():
            rows.append(way(f"channels_last, compile {how}", **last, compile=how))
    pairs = [(rows[0], "own_pass"), *((best, way) for way in ("own_pass", "same_pass", "still"))]
    for row, kind in pairs if conditioning else ():
        name = f"{row.name}, y: {kind.replace('_', ' ')}"
        rows.append(replace(row, name=name, conditioning=kind))
    return rows


def measure_encode(case: EncodeCase) -> Record:
    """Time one way to encode; a way that cannot run is a record with its reason."""
    dev = torch.device(case.device)
    torch._dynamo.reset()
    old = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = case.cudnn_benchmark
    try:
        return _measure(case, dev)
    except torch.OutOfMemoryError as error:
        return stamp(Record(name=case.name, scope="encode", reason=str(error).split(". ")[0]))
    finally:
        torch.backends.cudnn.benchmark = old


def _measure(case: EncodeCase, dev: torch.device) -> Record:
    vae, clip = _build(case, dev), random_clip(case, dev)
    dtype = torch.bfloat16 if case.precision == "bf16" else torch.float32
    encode = _way(case, vae)
    clip = clip.to(dtype)
    if case.channels_last:
        clip = clip.contiguous(memory_format=torch.channels_last_3d)
    start = time.perf_counter()
    got = encode(clip)
    synchronize(dev)
    first_step_s = time.perf_counter() - start
    off = _distance(got[: len(clip)], case, dev)
    if case.cuda_graph:
        encode = _replay(encode, clip)
    reset_peak(dev)
    timing = measure_ms(lambda: encode(clip), dev=dev, warmup=case.warmup, repeats=case.repeats)
    passes = 1 if case.conditioning == "none" else 2
    flops = passes * case.batch * encode_flops(case.vae, case.frames, case.hw)
    seconds = timing.median / 1e3
    changed = dataclasses.asdict(case).items() - dataclasses.asdict(EncodeCase()).items()
    return stamp(
        Record(
            name=case.name,
            scope="encode",
            dimension="parallel",
            model=case.vae,
            device=device_name(dev),
            world_size=1,
            micro_batch=case.batch,
            precision=case.precision,
            encoders="online",
            optimizations=tuple(sorted(k for k, _ in changed if k in _OPTIONS)),
            step_ms=timing,
            samples_per_s=case.batch / seconds,
            samples_per_s_per_gpu=case.batch / seconds if dev.type == "cuda" else None,
            peak_gib=peak_gib(dev),
            first_step_s=first_step_s,
            extra={
                "sample_ms": timing.median / case.batch,
                "frames": case.frames,
                "height": case.hw[0],
                "width": case.hw[1],
                "chunk": case.chunk,
                "conditioning": case.conditioning,
                "tflops_per_s": flops / seconds / 1e12,
                "latents_rel_diff": off,
            },
        )
    )


_OPTIONS = ("channels_last", "cudnn_benchmark", "bf16_norms", "compile", "cuda_graph")


def _build(case: EncodeCase, dev: torch.device) -> VAE:
    dtype = torch.bfloat16 if case.precision == "bf16" else torch.float32
    vae = load_vae(case.vae, encoder_only=True, device=dev, dtype=dtype)
    vae.memory_gib = 64.0
    if case.channels_last:
        vae.channels_last()
    for module in vae.modules():
        if isinstance(module, RMSNorm):
            module.low_precision = case.bf16_norms
    if case.compile:
        vae.compile_encoder(**COMPILE[case.compile])
    return vae


def random_clip(case: EncodeCase, dev: torch.device) -> Tensor:
    """Return fp32 clips [B, 3, T, H, W] in [-1, 1], the same for every way."""
    size = (3, case.frames, *case.hw)
    seeds = [torch.Generator(dev).manual_seed(i) for i in range(case.batch)]
    return torch.stack([torch.rand(size, device=dev, generator=g) for g in seeds]) * 2 - 1


def _way(case: EncodeCase, vae: VAE) -> Callable[[Tensor], Tensor]:
    still = StillEncoder(vae, compile=case.compile is not None)

    @torch.no_grad()
    def encode(clip: Tensor) -> Tensor:
        if case.conditioning == "none":
            return vae.encode(clip, case.chunk)
        if case.conditioning == "same_pass":
            return vae.encode(torch.cat([clip, first_frame_alone(clip)]), case.chunk)
        if case.conditioning == "own_pass":
            passes = (clip, first_frame_alone(clip))
            return torch.cat([vae.encode(c, case.chunk) for c in passes])
        return torch.cat([vae.encode(clip, case.chunk), still.encode(clip[:, :, :1], case.frames)])

    def one_by_one(clip: Tensor) -> Tensor:
        parts = [encode(one) for one in clip.split(1)]
        return torch.cat([p[:1] for p in parts] + [p[1:] for p in parts])

    return one_by_one if case.one_by_one else encode


def _replay(encode: Callable[[Tensor], Tensor], clip: Tensor) -> Callable[[Tensor], Tensor]:
    """Capture the whole call once; a replay reads the clip where it lies."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            encode(clip)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = encode(clip)

    def run(_: Tensor) -> Tensor:
        graph.replay()
        return out

    return run


@functools.cache
def _reference(vae: str, frames: int, hw: tuple[int, int], device: str) -> Tensor:
    """Return the public way's latents of the first random clip, fp32 throughout."""
    case = EncodeCase(vae=vae, frames=frames, hw=hw, device=device, batch=1)
    dev = torch.device(device)
    with exact_fp32(), torch.no_grad():
        return _build(case, dev).encode(random_clip(case, dev), 4).cpu()


def _distance(latents: Tensor, case: EncodeCase, dev: torch.device) -> float:
    """Return the relative L2 distance of the first clip's latents from the public fp32 ones."""
    want = _reference(case.vae, case.frames, case.hw, case.device)
    return float((latents[:1].cpu() - want).norm() / want.norm())


@functools.cache
def encode_flops(vae: str, frames: int, hw: tuple[int, int]) -> int:
    """Return the FLOPs of encoding one clip, counted on the meta device."""
    with torch.device("meta"):
        model, clip = VAE(vae, encoder_only=True), torch.empty(1, 3, frames, *hw)
    with FlopCounterMode(display=False) as counter:
        model.normalise(model.encoder(clip))
    return counter.get_total_flops()


def measure_matmul(dev: torch.device, precision: str, size: int = 8192) -> float:
    """Return the FLOP/s of one square matrix product of random numbers."""
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    a, b = (torch.randn(size, size, device=dev, dtype=dtype) for _ in range(2))
    timing = measure_ms(lambda: a @ b, dev=dev, warmup=3, repeats=10)
    return 2 * size**3 / (timing.median / 1e3)


def measure_text(size: str, batch: int, positions: int, *, device: str) -> Record:
    """Time the text encoder on prompts that fill `positions` of the text length."""
    dev = torch.device(device)
    dtype = torch.bfloat16 if dev.type == "cuda" else torch.float32
    encoder = TextEncoder(size, device=dev, dtype=dtype)
    ids = torch.randint(3, 250, (batch, positions), device=dev)
    mask = torch.ones_like(ids)
    return _frozen_row(f"text, {positions} positions", size, batch, lambda: encoder(ids, mask), dev)


def measure_image(size: str, batch: int, *, device: str) -> Record:
    """Time the image encoder on frames of 160x320 pixels."""
    dev = torch.device(device)
    dtype = torch.bfloat16 if dev.type == "cuda" else torch.float32
    encoder = ImageEncoder(size, device=dev, dtype=dtype)
    image = torch.rand(batch, 3, 160, 320, device=dev) * 2 - 1
    return _frozen_row("image", size, batch, lambda: encoder(image), dev)


def _frozen_row(
    name: str, size: str, batch: int, run: Callable[[], Any], dev: torch.device
) -> Record:
    with torch.no_grad():
        timing = measure_ms(run, dev=dev)
    return stamp(
        Record(
            name=f"{name}, batch {batch}",
            scope="encode",
            model=size,
            device=device_name(dev),
            micro_batch=batch,
            precision="bf16" if dev.type == "cuda" else "fp32",
            step_ms=timing,
            samples_per_s=1e3 * batch / timing.median,
            extra={"sample_ms": timing.median / batch},
        )
    )
