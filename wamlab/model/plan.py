"""How the network computes: its options, and the constants of one sequence layout.

Nothing here changes a number (but for the named reproductions of public faults). A `Plan` holds
what depends on sizes alone: masks, rotary angles, which row of the time table a token reads. It is
made once a layout and handed to every block as it is, so that no wrapper casts or shards it.

Shapes: B batch, T tokens, Q queries, S video tokens of one stream, F frames, A actions, G distinct
times, D width, H heads, K head width, P = K/2 pairs, L text rows.
"""

import dataclasses
import importlib
import math
from collections.abc import Callable
from types import ModuleType
from typing import Any, Literal, Protocol

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from wamlab.config import ConfigError, check_name, lookup
from wamlab.model import attention, fused, reference
from wamlab.model.attention import Layout, build_attention

OPERATIONS: dict[str, ModuleType] = {"reference": reference, "fused": fused}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """How to compute, never what: operations, attention, exact shortcuts; then reproductions.

    `impl` is a key of OPERATIONS, or "triton" for the hand-written kernels of kernels_triton;
    `attention` is one of attention.IMPLEMENTATIONS or "auto".
    """

    impl: str = "fused"
    attention: str = "auto"

    distinct_times: bool = True  # embed each distinct time once; off: once a token
    joint_queries: bool = True  # video and action queries of a block in one call ("loops")
    state_is_value: bool = True  # a lone state token's attention is its value ("loops")
    trim_last_block: bool = True  # the last block reads the clean stream and does not update it
    text_padding: bool = True  # equal padding rows of the prompt as one, its score + log count
    longest_prompt: int | None = None  # of the run, in tokens; None: of the prompts seen so far

    time_dtype: Literal["fp32", "bf16"] = "fp32"  # bf16 leaves 294 of the 1000 times distinct
    clean_token_causal: bool = False  # without a window: token by token, not block by block
    zero_init_img_branch: bool = False  # a fresh image branch says nothing; publicly it is random

    def __post_init__(self) -> None:
        if self.impl == "triton":
            _load_triton()
            if not self.distinct_times:
                raise ConfigError(
                    "impl 'triton' sums over tokens that share a row of times: it needs "
                    "distinct_times, use 'fused' without it"
                )
        lookup(OPERATIONS, self.impl, "impl")
        implementations = ("auto", *attention.IMPLEMENTATIONS)
        check_name(self.attention, implementations, "attention implementation")
        check_name(self.time_dtype, ("fp32", "bf16"), "time_dtype")


def _load_triton() -> None:
    """Add the hand-written kernels to OPERATIONS; a CPU build of torch comes without triton."""
    try:
        OPERATIONS["triton"] = importlib.import_module("wamlab.model.kernels_triton")
    except ModuleNotFoundError as error:
        raise ConfigError(
            "impl 'triton' needs the package triton, which CUDA builds of torch bring along: use "
            "'fused' here"
        ) from error


SHORTCUTS = ("distinct_times", "joint_queries", "state_is_value", "trim_last_block", "text_padding")
# what the public training code does, at its cost
PUBLIC = ModelOptions(impl="reference", attention="loops", **dict.fromkeys(SHORTCUTS, False))


# called with the keys and values [B, T, H, K] of new tokens, returns those of old and new ones
Cache = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Plan:
    """The constants of one layout, as the blocks read them.

    `impl` is a key of OPERATIONS, and made `rotation`; `attention` maps queries [B, Q, H, K] and
    keys and values [B, T, H, K] to [B, Q, H, K]; `segment` [T] names each token's row in the time
    table (None: a row a token); `text_bias` [L] is added to the scores of the text keys; tokens
    before `first` give keys and values only.
    """

    impl: str
    attention: Callable[[Tensor, Tensor, Tensor], Tensor]
    rotation: Tensor
    segment: Tensor | None = None
    text_bias: Tensor | None = None
    first: int = 0

    @property
    def ops(self) -> ModuleType:
        """The operations of `impl`."""
        return OPERATIONS[self.impl]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class TrainingPlan(Plan):
    """The plan of a training sequence, and what stands around its blocks.

    `time_rows` and `video_rows` name the row of distinct times of every token [T] and of every
    noisy video token [S]; `coupled`: the frames and actions of a block share one time; `text_rows`
    is how many the blocks see; `trim`: the last block leaves out the clean stream's queries.
    """

    layout: Layout
    time_rows: Tensor
    video_rows: Tensor
    coupled: bool
    text_rows: int
    trim: bool

    @property
    def tail(self) -> int:
        """Tokens after the clean stream."""
        return self.layout.tokens - self.layout.stream_tokens

    def of_blocks(self, count: int) -> list[Plan]:
        """Return the plan of each block; the last one may leave out the clean stream."""
        last = dataclasses.replace(self, first=self.layout.stream_tokens) if self.trim else self
        return [*[self] * (count - 1), last]

    def times(self, timestep_BF: Tensor, timestep_action_BA: Tensor) -> Tensor:
        """Return the times to embed: distinct ones [B, G], or one a token [B, T]."""
        clean = torch.zeros_like(timestep_BF[:, :1])
        if self.coupled:
            step = self.layout.frames_per_block
            times = torch.cat([clean, timestep_BF[:, :1], timestep_BF[:, 1::step]], dim=1)
        else:
            times = torch.cat([clean, timestep_BF, timestep_action_BA], dim=1)
        return times if self.segment is not None else times[:, self.time_rows]

    def of_video(self, time_BGD: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the noisy video's time rows, and which of them each token reads."""
        if self.segment is not None:
            return time_BGD, self.video_rows
        return self.layout.unbraid(time_BGD[:, -self.tail :])[0], None


class Sizes(Protocol):
    """What a plan needs to know of a network's configuration."""

    dim: int
    num_heads: int
    num_frame_per_block: int
    num_action_per_block: int
    num_state_per_block: int
    window: int
    text_len: int


class Plans:
    """The plans of one network, each made once."""

    def __init__(self, sizes: Sizes, options: ModelOptions) -> None:
        self.sizes, self.options = sizes, options
        self._made: dict[tuple, TrainingPlan] = {}
        self._text_rows = 0

    def get(
        self, x: Tensor, action: Tensor, state: Tensor, *, lengths: Tensor | None, coupled: bool
    ) -> TrainingPlan:
        """Return the plan of a batch by the shapes of its latents, actions and states.

        Args:
            x: latents [B, C, F, Y, X].
            action: [B, A, action_dim], A may be 0.
            state: [B, Z, max_state_dim].
            lengths: int64 [B], rows of each prompt, or None.
            coupled: the frames and actions of a block share one time.

        Raises:
            ConfigError: the numbers of frames, actions and states do not fit each other.
        """
        sizes, options, acts = self.sizes, self.options, action.shape[1] > 0
        grid = (x.shape[3] // 2, x.shape[4] // 2)
        layout = Layout.of(sizes, x.shape[2], grid, actions=acts)
        if options.clean_token_causal and sizes.window < 0:
            layout = dataclasses.replace(layout, clean_token_causal=True)
        layout.check_registers(action.shape[1], state.shape[1])
        rows = count_text_rows(options, lengths, sizes.text_len, self._text_rows)
        self._text_rows = self._text_rows if lengths is None else rows
        key = (layout, grid, rows, coupled, x.device)
        if key not in self._made:
            self._made[key] = self._make(layout, grid, rows, coupled=coupled, device=x.device)
        return self._made[key]

    @torch.inference_mode(False)  # a plan serves training too, whoever asks first
    def _make(
        self, layout: Layout, grid: tuple[int, int], text_rows: int, *, coupled: bool, device: Any
    ) -> TrainingPlan:
        options, sizes = self.options, self.sizes
        rows = layout.time_rows(coupled)
        bias = text_count_bias(text_rows, sizes.text_len)
        angles = training_angles(layout, *grid, sizes.dim // sizes.num_heads)
        return TrainingPlan(
            impl=options.impl,
            attention=build_attention(
                layout,
                options.attention,
                device,
                joint_queries=options.joint_queries,
                state_is_value=options.state_is_value,
                tail=options.trim_last_block,
            ),
            rotation=OPERATIONS[options.impl].rotation(angles).to(device),
            segment=rows.to(device) if options.distinct_times else None,
            text_bias=None if bias is None else bias.to(device),
            layout=layout,
            time_rows=rows.to(device),
            video_rows=layout.unbraid(rows[None, layout.stream_tokens :])[0][0].to(device),
            coupled=coupled,
            text_rows=text_rows,
            trim=options.trim_last_block,
        )


def training_angles(layout: Layout, rows: int, cols: int, head_width: int) -> Tensor:
    """Return the rotary angles of a training sequence: fp64 [T, P].

    Clean and noisy video stand at the same places; actions and states count their own steps from 0.
    """
    video = video_angles(layout.frames, rows, cols, head_width)
    action = line_angles(layout.blocks * layout.actions_per_block, head_width)
    state = line_angles(layout.blocks * layout.states_per_block, head_width)
    return layout.braid(*(angles[None] for angles in (video, video, action, state)))[0]


def video_angles(frames: int, rows: int, cols: int, head_width: int, *, start: int = 0) -> Tensor:
    """Return the angles of video tokens in (frame, row, column) order: fp64 [frames*rows*cols, P].

    A head's pairs are shared out to time, row and column; each axis has frequencies of its own.
    `start` is the index of the first frame.
    """
    side = 2 * (head_width // 6)
    time = line_angles(frames, head_width - 2 * side, start=start)[:, None, None]
    row = line_angles(rows, side)[None, :, None]
    col = line_angles(cols, side)[None, None, :]
    size = (frames, rows, cols, -1)
    return torch.cat([time.expand(size), row.expand(size), col.expand(size)], dim=-1).flatten(0, 2)


def line_angles(count: int, width: int, *, start: int = 0) -> Tensor:
    """Return the angles of positions start .. start+count-1 over `width` channels: [count, P]."""
    position = torch.arange(start, start + count, dtype=torch.float64)
    frequency = 10000.0 ** -(torch.arange(0, width, 2, dtype=torch.float64) / width)
    return position[:, None] * frequency


def text_count_bias(kept: int, text_len: int) -> Tensor | None:
    """Return what lets `kept` text rows stand for all `text_len`, where the last two are padding.

    Those two weigh as much as the text_len - kept + 2 equal rows that they stand for. One bias,
    log(count), would be rounded to bf16 in the attention and miss the count by up to 1.6 %; a bias
    that bf16 holds exactly and a second one for the rest miss it by 0.03 %.

    Returns:
        fp32 [kept], zero but for the last two; None if nothing was left out.
    """
    if kept >= text_len:
        return None
    count = text_len - kept + 2
    coarse = math.floor(math.log(count) * 32) / 32
    bias_L = torch.zeros(kept)
    bias_L[-2:] = torch.tensor([coarse, math.log(count - math.exp(coarse))])
    return bias_L


def exact_times(options: ModelOptions, *times: Tensor) -> list[Tensor]:
    """Return the times untouched, or rounded to bf16 where options.time_dtype says so.

    Raises:
        ConfigError: they arrive in half precision, in which most of the 1000 times merge.
    """
    if options.time_dtype == "bf16":
        return [time.bfloat16() for time in times]
    for time in times:
        if time.dtype in (torch.bfloat16, torch.float16):
            raise ConfigError(
                f"times arrived as {time.dtype}, which merges most of the 1000 of them: keep them "
                "fp32 (under FSDP2, MixedPrecisionPolicy(cast_forward_inputs=False) for the root), "
                "or set time_dtype='bf16' to reproduce the public fault"
            )
    return list(times)


def count_text_rows(
    options: ModelOptions, lengths_B: Tensor | None, text_len: int, seen: int = 0
) -> int:
    """Return how many text rows to keep: the longest prompt rounded up to 16, and two that count.

    Args:
        options: `text_padding`, and `longest_prompt` of the run where it is known.
        lengths_B: int64 [B], rows of each prompt; None keeps all rows.
        text_len: all rows.
        seen: rows kept before; the number only grows, so that shapes soon stop changing.

    Raises:
        ConfigError: a prompt is longer than options.longest_prompt.
    """
    if not options.text_padding or lengths_B is None:
        return text_len
    longest = options.longest_prompt
    if longest is None:
        longest = int(lengths_B.max())
    elif lengths_B.device.type == "cpu" and int(lengths_B.max()) > longest:
        raise ConfigError(
            f"a prompt has {int(lengths_B.max())} tokens, but longest_prompt is {longest}: "
            "raise it, or leave it out"
        )
    return max(seen, min(-(-longest // 16) * 16 + 2, text_len))


_aten = torch.ops.aten
_MATMULS = {op.default for op in (_aten.mm, _aten.addmm, _aten.bmm, _aten._scaled_mm)}


def save_matmuls() -> tuple:
    """Selective recompute: keep what a matrix product or an attention made, redo what is cheap."""

    def policy(context: object, op: object, *args: object, **kwargs: object) -> CheckpointPolicy:
        keep = op in _MATMULS or "attention" in str(op)
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)
