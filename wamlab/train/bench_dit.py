"""The DiT's forward and backward alone, from embeddings to heads: scope "dit".

Inputs are random numbers of the true shapes; the loss is the outputs' dot product with fixed random
weights, so nothing but the network is timed. Parameters and gradients are in the compute dtype.
"""

import dataclasses
import tempfile
import time
from typing import Any, Literal

import torch
from torch import Tensor

from wamlab.config import ConfigError, check_least, check_name, lookup, replace
from wamlab.measure import (
    Record,
    device_name,
    measure_ms,
    mfu,
    peak_gib,
    reset_peak,
    stamp,
    synchronize,
)
from wamlab.model.attention import IMPLEMENTATIONS, Layout
from wamlab.model.dit import MODEL_SIZES, PUBLIC, DiTConfig, ModelOptions, WorldActionDiT
from wamlab.model.flops import flops
from wamlab.profiler import profile_steps
from wamlab.trace import kernel_table, read_trace, split_steps, summarise
from wamlab.train.float8 import convert
from wamlab.train.optimizations import StepPlan, recompute_of
from wamlab.train.wrap import wrap

LATENTS: dict[str, tuple[int, int]] = {
    "tiny": (4, 8),
    "small": (10, 20),
    "dreamzero-5b": (10, 20),
    "dreamzero-14b": (44, 80),
}
FRAMES = 9  # 33 video frames
PROMPT_ROWS = 100  # of the text length: a long prompt


@dataclasses.dataclass(frozen=True, kw_only=True)
class DiTCase:
    """One timed configuration of the DiT."""

    name: str
    size: str = "tiny"
    layers: int | None = None
    micro_batch: int = 1
    way: Literal["official", "eager", "compiled", "triton"] = "official"  # triton: and compiled
    attention: str = "auto"
    recompute: str = "none"
    float8: Literal["none", "tensorwise", "rowwise"] = "none"  # of the blocks' large linears
    cuda_graph: bool = False
    precision: Literal["fp32", "bf16"] = "fp32"
    device: Literal["cpu", "cuda"] = "cpu"
    warmup: int = 3
    repeats: int = 10
    trace: bool = False  # the record also says what one step runs

    def __post_init__(self) -> None:
        lookup(MODEL_SIZES, self.size, "model size")
        check_name(self.attention, ("auto", *IMPLEMENTATIONS), "attention implementation")
        recompute_of(self.recompute, 0)
        check_least(self, {"layers": 1, "micro_batch": 1, "warmup": 0, "repeats": 1})
        if self.cuda_graph and self.device != "cuda":
            raise ConfigError("cuda_graph needs device 'cuda'")


def measure_dit(case: DiTCase) -> Record:
    """Build the network, warm it up, and time forward and backward together.

    Returns:
        A record of scope "dit"; `first_step_s` is the first call, compilation included. With
        `trace` it holds `split` (see trace.summarise) and `kernels`, the 40 most expensive with
        how often and how many milliseconds.
    """
    torch._dynamo.reset()  # another case's graphs would count against the limit of recompiles
    dev, config = torch.device(case.device), _config(case)
    torch.manual_seed(0)
    with torch.device(dev):
        model = WorldActionDiT(config, _options(case))
    dtype = torch.bfloat16 if case.precision == "bf16" else torch.float32
    model = model.to(dtype)
    if case.float8 != "none":
        convert(model.blocks(), case.float8)
    with torch.no_grad():
        for p in model.parameters():  # a zero head would hide a wrong backward
            if not p.any():
                p.normal_(std=0.02)
    plan = _plan(case)
    wrap(model, plan, None, case.precision)
    inputs = random_inputs(config, case, dev=dev, dtype=dtype)
    weights = [torch.randn_like(out, dtype=torch.float32) for out in _outputs_like(inputs)]

    def step() -> Tensor:
        outputs = model(**inputs)
        loss = sum((out * w).float().sum() for out, w in zip(outputs, weights))
        loss.backward()
        return loss

    start = time.perf_counter()
    loss = step().item()
    first_step_s = time.perf_counter() - start
    run = _capture(model, step) if case.cuda_graph else _clearing(model, step)
    reset_peak(dev)
    timing = measure_ms(run, dev=dev, warmup=case.warmup, repeats=case.repeats)
    model_flops = flops(config, 1, latent_hw=LATENTS[case.size]) * case.micro_batch
    seconds = timing.median / 1e3
    return stamp(
        Record(
            name=case.name,
            scope="dit",
            dimension=None if case.way == "official" else "compute",
            model=case.size,
            layers=case.layers,
            device=device_name(dev),
            world_size=1,
            micro_batch=case.micro_batch,
            precision=case.precision if case.float8 == "none" else "float8",
            recompute=plan.recompute,
            optimizations=_names(case),
            step_ms=timing,
            samples_per_s=case.micro_batch / seconds,
            samples_per_s_per_gpu=case.micro_batch / seconds if case.device == "cuda" else None,
            mfu=mfu(model_flops, seconds, dev, case.precision),  # float8 too counts by bf16's peak
            peak_gib=peak_gib(dev),
            first_step_s=first_step_s,
            extra={
                "model_tflops_per_s": model_flops / seconds / 1e12,
                "attention": case.attention,
                "float8": case.float8,
                "output_sum": loss,
                **(_trace(run, dev) if case.trace else {}),
            },
        )
    )


def _config(case: DiTCase) -> DiTConfig:
    config = MODEL_SIZES[case.size]
    return config if case.layers is None else replace(config, num_layers=case.layers)


def _options(case: DiTCase) -> ModelOptions:
    if case.way == "official":
        return PUBLIC
    impl = {"eager": "reference", "compiled": "fused"}.get(case.way, case.way)
    return ModelOptions(impl=impl, attention=case.attention)


def layout_of(size: str) -> Layout:
    """Return the layout of one training sequence of a model size."""
    rows, cols = LATENTS[size]
    return Layout.of(MODEL_SIZES[size], FRAMES, (rows // 2, cols // 2))


def _plan(case: DiTCase) -> StepPlan:
    mode = "full" if case.way == "official" else case.recompute
    return StepPlan(recompute=mode, compile=case.way in ("compiled", "triton"))


def _names(case: DiTCase) -> tuple[str, ...]:
    names = {"official": (), "eager": ("shortcuts",), "compiled": ("shortcuts", "compile")}
    names["triton"] = (*names["compiled"], "triton")
    extra = {"float8": case.float8 != "none", "cuda_graph": case.cuda_graph}
    return names[case.way] + tuple(name for name, used in extra.items() if used)


def random_inputs(
    config: DiTConfig, case: DiTCase, *, dev: torch.device, dtype: torch.dtype
) -> dict[str, Any]:
    """Return one training call's arguments, random; the times of a block are shared."""
    batch, (height, width) = case.micro_batch, LATENTS[case.size]
    blocks = (FRAMES - 1) // config.num_frame_per_block
    per_action = config.num_action_per_block

    def randn(*shape: int) -> Tensor:
        return torch.randn(batch, *shape, device=dev, dtype=dtype)

    time_BK = torch.rand(batch, blocks, device=dev) * 999
    first_B1 = torch.rand(batch, 1, device=dev) * 999
    rows = min(PROMPT_ROWS, config.text_len)
    context = randn(config.text_len, config.text_dim)
    context[:, rows:] = 0
    inputs = {
        "x": randn(config.out_dim, FRAMES, height, width),
        "clean_x": randn(config.out_dim, FRAMES, height, width),
        "timestep": torch.cat(
            [first_B1, time_BK.repeat_interleave(config.num_frame_per_block, 1)], 1
        ),
        "action": randn(blocks * per_action, config.action_dim),
        "timestep_action": time_BK.repeat_interleave(per_action, 1),
        "state": randn(blocks * config.num_state_per_block, config.max_state_dim),
        "context": context,
        "clip_feature": randn(257, config.clip_dim),
        "context_length": torch.full((batch,), rows),
        "coupled_times": True,
    }
    if config.concat_first_frame_latent:
        inputs["y"] = randn(4 + config.out_dim, FRAMES, height, width)
    return inputs


def _outputs_like(inputs: dict[str, Any]) -> tuple[Tensor, Tensor]:
    height, width = (2 * (n // 2) for n in inputs["x"].shape[-2:])
    return inputs["x"][..., :height, :width], inputs["action"]


def _trace(run: Any, dev: torch.device) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        events = read_trace(profile_steps(run, folder, dev=dev, warmup=1, active=1))
    kernels = dict(list(kernel_table(events).items())[:40])
    return {"split": summarise(split_steps(events)), "kernels": kernels}


def _clearing(model: WorldActionDiT, step: Any) -> Any:
    def run() -> None:
        model.zero_grad(set_to_none=True)
        step()

    return run


def _capture(model: WorldActionDiT, step: Any) -> Any:
    """Return the replay of one CUDA graph that holds forward and backward.

    Gradients must not exist at capture: then the graph writes them afresh in every replay, instead
    of adding to what lies there.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            model.zero_grad(set_to_none=True)
            step()
    torch.cuda.current_stream().wait_stream(stream)
    model.zero_grad(set_to_none=True)
    synchronize("cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay
