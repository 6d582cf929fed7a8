"""Who sees whom, and four ways to compute it: the block-causal layout and its attention.

One training sequence holds clean and noisy video, actions and states, in this order:

    [ C0 C1 .. Cn | N0 | N1 A1 S1 | N2 A2 S2 | .. ]

C: clean latent frames, N: noisy ones, A: action tokens, S: state tokens. Frame 0 stands alone;
block i holds `frames_per_block` frames and the actions and states that belong to them.

    C0 sees C0.  Ci sees C0..Ci (inside the window).     N0 sees N0.
    Ni and Ai see C0..C(i-1), Ni, Ai, Si.                Si sees Si.

So all blocks learn at once: each is denoised given the clean past, as if it came alone. In this
order every query sees two ranges of keys, [0, prefix) and [start, stop): the whole mask is three
integers a token, whatever the implementation.

Shapes: B batch, T tokens, Q queries (the last Q of the T tokens), H heads, K head width.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from wamlab.config import ConfigError, lookup


class Group(NamedTuple):
    """Tokens [first, last) that see the same keys: [0, prefix) and [start, stop)."""

    name: str
    first: int
    last: int
    prefix: int
    start: int
    stop: int
    causal: bool = False  # token by token: query q sees [0, q] alone

    @property
    def keys(self) -> tuple[tuple[int, int], ...]:
        """The non-empty key ranges."""
        return tuple((a, b) for a, b in ((0, self.prefix), (self.start, self.stop)) if b > a)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """The sizes that fix one sequence; equal sizes, equal mask.

    Without actions, `actions_per_block` and `states_per_block` are 0 and the table above holds with
    A and S empty. `window` counts the latent frames that a clean block sees (-1: all before it;
    frame 0 is always seen). `clean_token_causal` makes clean frames after the first causal token by
    token, as the public code does without a window.
    """

    frames: int
    frame_tokens: int
    frames_per_block: int
    actions_per_block: int = 0
    states_per_block: int = 0
    window: int = -1
    clean_token_causal: bool = False

    def __post_init__(self) -> None:
        blocks, rest = divmod(self.frames - 1, self.frames_per_block)
        if blocks < 1 or rest:
            raise ConfigError(
                f"{self.frames} latent frames do not divide into frame 0 and blocks of "
                f"{self.frames_per_block}: use 1 + {self.frames_per_block} n frames, n >= 1"
            )

    @classmethod
    def of(
        cls, sizes: Any, frames: int, grid: tuple[int, int], *, actions: bool = True
    ) -> "Layout":
        """Return the layout of one training sequence of a network.

        Args:
            sizes: a DiTConfig.
            frames: latent frames.
            grid: rows and columns of a frame's tokens.
            actions: whether the clip has actions and states.
        """
        return cls(
            frames=frames,
            frame_tokens=grid[0] * grid[1],
            frames_per_block=sizes.num_frame_per_block,
            actions_per_block=sizes.num_action_per_block if actions else 0,
            states_per_block=sizes.num_state_per_block if actions else 0,
            window=sizes.window,
        )

    @property
    def blocks(self) -> int:
        """Number of blocks after frame 0."""
        return (self.frames - 1) // self.frames_per_block

    @property
    def stream_tokens(self) -> int:
        """Video tokens of one stream; the clean stream is the first this many tokens."""
        return self.frames * self.frame_tokens

    @property
    def tokens(self) -> int:
        """Length of the whole sequence."""
        registers = self.actions_per_block + self.states_per_block
        return 2 * self.stream_tokens + self.blocks * registers

    def check_registers(self, actions: int, states: int) -> None:
        """Refuse numbers of action and state tokens that do not fit the blocks."""
        per_block = (self.actions_per_block, self.states_per_block)
        if (actions, states) != (self.blocks * per_block[0], self.blocks * per_block[1]):
            raise ConfigError(
                f"{actions} action and {states} state tokens for {self.blocks} blocks of "
                f"{per_block[0]} and {per_block[1]}: each block of {self.frames_per_block} latent "
                "frames brings its own (num_action_per_block, num_state_per_block)"
            )

    def braid(self, clean: Tensor, noisy: Tensor, action: Tensor, state: Tensor) -> Tensor:
        """Put four streams [B, tokens, ...] into the order of the sequence."""
        frame = self.frame_tokens
        streams = (noisy[:, frame:], action, state)
        blocks = [s.unflatten(1, (self.blocks, s.shape[1] // self.blocks)) for s in streams]
        return torch.cat([clean, noisy[:, :frame], torch.cat(blocks, dim=2).flatten(1, 2)], dim=1)

    def unbraid(self, tail: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Split all but the clean tokens [B, tokens, ...] into noisy video, action and state."""
        frame = self.frame_tokens
        sizes = [frame * self.frames_per_block, self.actions_per_block, self.states_per_block]
        blocks = tail[:, frame:].unflatten(1, (self.blocks, sum(sizes))).split(sizes, dim=2)
        video, action, state = (part.flatten(1, 2) for part in blocks)
        return torch.cat([tail[:, :frame], video], dim=1), action, state

    def groups(self) -> list[Group]:
        """Return every group of tokens with its keys, in the order of the sequence."""
        frame, video = self.frame_tokens, self.frame_tokens * self.frames_per_block
        groups, clean = self._clean_groups(frame, video), self.stream_tokens
        groups.append(Group("N0", clean, clean + frame, 0, clean, clean + frame))
        first, past = clean + frame, frame
        for i in range(1, self.blocks + 1):
            action = first + video
            state = action + self.actions_per_block
            stop = state + self.states_per_block
            groups.append(Group(f"N{i}", first, action, past, first, stop))
            groups.append(Group(f"A{i}", action, state, past, first, stop))
            groups.append(Group(f"S{i}", state, stop, 0, state, stop))
            first, past = stop, past + video
        return [g for g in groups if g.last > g.first]

    def _clean_groups(self, frame: int, video: int) -> list[Group]:
        groups = [Group("C0", 0, frame, frame, 0, 0)]
        if self.clean_token_causal:
            end = self.stream_tokens
            return [*groups, Group("C+", frame, end, end, 0, 0, causal=True)]
        for i in range(1, self.blocks + 1):
            last = frame + i * video
            oldest = (i * self.frames_per_block + 1 - self.window) if self.window > 0 else 1
            if oldest <= 1:
                groups.append(Group(f"C{i}", last - video, last, last, 0, 0))
            else:
                groups.append(Group(f"C{i}", last - video, last, frame, oldest * frame, last))
        return groups

    def ranges(self) -> Tensor:
        """Return prefix, start and stop of every query: int32 [3, T]."""
        groups = self.groups()
        counts = torch.tensor([g.last - g.first for g in groups])
        rows = torch.tensor([[g.prefix, g.start, g.stop] for g in groups], dtype=torch.int32)
        ranges = rows.repeat_interleave(counts, dim=0).T.contiguous()
        for g in groups:
            if g.causal:
                ranges[0, g.first : g.last] = torch.arange(g.first, g.last) + 1
        return ranges

    def mask(self) -> Tensor:
        """Return the mask: bool [T, T], rows are queries, True is seen."""
        prefix, start, stop = self.ranges()[:, :, None]
        key = torch.arange(self.tokens)
        return (key < prefix) | ((key >= start) & (key < stop))

    def time_rows(self, coupled: bool) -> Tensor:
        """Return the row of every token in the table of distinct times: int64 [T].

        Rows: 0 clean; then one a noisy frame and one an action token. Where the frames and actions
        of a block share one time (`coupled`): 0 clean, 1 frame 0, 1 + i block i. A state token has
        the time of the first action of its share of the block.
        """
        frame = torch.arange(self.frames).repeat_interleave(self.frame_tokens)
        action = torch.arange(self.blocks * self.actions_per_block)
        state = torch.arange(self.blocks * self.states_per_block)
        if coupled:
            noisy = 1 + (frame + self.frames_per_block - 1).div(self.frames_per_block).long()
            action = 2 + action // max(self.actions_per_block, 1)
            state = 2 + state // max(self.states_per_block, 1)
        else:
            noisy, first = 1 + frame, 1 + self.frames
            state = first + state * (self.actions_per_block // max(self.states_per_block, 1))
            action = first + action
        clean = torch.zeros_like(noisy)
        return self.braid(*(rows[None] for rows in (clean, noisy, action, state)))[0]

    def public_order(self) -> Tensor:
        """Return the place here of every token of the public order [C | N | A | S]: int64 [T]."""
        place = torch.arange(self.tokens)[None]
        clean = self.stream_tokens
        return torch.cat([place[:, :clean], *self.unbraid(place[:, clean:])], dim=1)[0]


@dataclasses.dataclass(frozen=True, eq=False)
class Attention:
    """One layout's attention, ready to be called; build it with `build_attention` and keep it."""

    impl: str
    calls: tuple[Group, ...] = ()
    mask: Tensor | None = None
    block_mask: BlockMask | None = None
    tail_mask: BlockMask | None = None  # the same for queries after the clean stream

    def __call__(self, q_BQHK: Tensor, k_BTHK: Tensor, v_BTHK: Tensor) -> Tensor:
        """Attend: the Q queries are the last Q tokens of the sequence. Returns [B, Q, H, K]."""
        q, k, v = (x.transpose(1, 2) for x in (q_BQHK, k_BTHK, v_BTHK))
        return IMPLEMENTATIONS[self.impl](self, q, k, v).transpose(1, 2)


def build_attention(
    layout: Layout,
    impl: str,
    device: torch.device | str = "cpu",
    *,
    joint_queries: bool = True,
    state_is_value: bool = True,
    tail: bool = False,
) -> Attention:
    """Make the tables that one implementation needs for one layout.

    Args:
        layout: the sequence.
        impl: "dense" (one call with a mask), "loops" (one small call a group, 18 with four blocks),
            "prefix" (the fewest calls without a mask), "flex" (one FlexAttention call), or "auto".
        device: where it will run.
        joint_queries: for "loops": Ni and Ai, which see the same keys, in one call.
        state_is_value: for "loops": a lone state token sees itself alone, its result is its value.
        tail: also prepare calls whose queries leave out the clean stream.

    Raises:
        ConfigError: unknown `impl`.
    """
    device = torch.device(device)
    impl = choose(layout, device) if impl == "auto" else impl
    lookup(IMPLEMENTATIONS, impl, "attention implementation")
    if impl == "dense":
        return Attention(impl, mask=layout.mask().to(device))
    if impl == "flex":
        queries = [0, layout.stream_tokens] if tail else [0]
        masks = [_block_mask(layout, device, first) for first in queries]
        return Attention(impl, block_mask=masks[0], tail_mask=masks[-1])
    merge = impl == "prefix"
    calls = _calls(layout, joint_queries or merge, state_is_value or merge)
    return Attention(impl, calls=calls)


def choose(layout: Layout, device: torch.device) -> str:
    """Return the implementation that "auto" stands for: the fastest measured of its kind."""
    for kind, most_frame_tokens, impl in FASTEST:
        if device.type == kind and layout.frame_tokens <= most_frame_tokens:
            return impl
    return "dense"


def full(q_BQHK: Tensor, k_BTHK: Tensor, v_BTHK: Tensor, bias: Tensor | None = None) -> Tensor:
    """Attend to every key; `bias` is added to the scores, broadcast to [B, H, Q, T]."""
    q, k, v = (x.transpose(1, 2) for x in (q_BQHK, k_BTHK, v_BTHK))
    return sdpa(q, k, v, bias).transpose(1, 2)


def sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """Scaled dot-product attention [B, H, T, K].

    Compiled for a GPU it is cuDNN's where that can: on Hopper 1.6 times as fast as flash. Eagerly
    the choice is torch's own, as in the public code.
    """
    if q.is_cuda and torch.compiler.is_compiling():
        with sdpa_kernel(_GPU_ORDER, set_priority=True):
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def _dense(plan: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return sdpa(q, k, v, plan.mask[k.shape[2] - q.shape[2] :])


def _slices(plan: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    offset = k.shape[2] - q.shape[2]
    outputs = []
    for call in plan.calls:
        if call.first < offset:
            continue
        if not call.keys:
            outputs.append(v[:, :, call.first : call.last])
            continue
        k_seen, v_seen = (_ranges_of(x, call.keys) for x in (k, v))
        q_call = q[:, :, call.first - offset : call.last - offset]
        outputs.append(sdpa(q_call, k_seen, v_seen, _causal_mask(call, q.device)))
    return torch.cat(outputs, dim=2)


def _flex(plan: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    if q.device.type == "cpu" and torch.is_grad_enabled() and q.requires_grad:
        raise ConfigError(
            "attention 'flex' has no backward on a CPU: use 'dense' or 'prefix' there, or 'auto'"
        )
    mask = plan.block_mask if q.shape[2] == k.shape[2] else plan.tail_mask
    if torch.compiler.is_compiling():
        return flex_attention(q, k, v, block_mask=mask)
    return _compiled_flex()(q, k, v, block_mask=mask)


IMPLEMENTATIONS: dict[str, Callable[[Attention, Tensor, Tensor, Tensor], Tensor]] = {
    "dense": _dense,
    "loops": _slices,
    "prefix": _slices,
    "flex": _flex,
}

# device, up to how many tokens a frame, the fastest implementation there
FASTEST: tuple[tuple[str, float, str], ...] = (
    ("cpu", 16, "dense"),
    ("cpu", float("inf"), "prefix"),
    ("cuda", 200, "flex"),
    ("cuda", float("inf"), "prefix"),
)

_GPU_ORDER = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]


def _calls(layout: Layout, joint_queries: bool, state_is_value: bool) -> tuple[Group, ...]:
    calls: list[Group] = []
    for group in layout.groups():
        if state_is_value and group.name[0] == "S" and layout.states_per_block == 1:
            group = group._replace(stop=group.start)  # no keys to weigh: the value itself
        if joint_queries and group.name[0] == "A":
            group = group._replace(name=calls[-1].name + group.name, first=calls.pop().first)
        calls.append(group)
    return tuple(calls)


def _ranges_of(x: Tensor, keys: tuple[tuple[int, int], ...]) -> Tensor:
    parts = [x[:, :, a:b] for a, b in keys]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)


def _causal_mask(call: Group, device: torch.device) -> Tensor | None:
    if not call.causal:
        return None
    query = torch.arange(call.first, call.last, device=device)
    return torch.arange(call.prefix, device=device) <= query[:, None]


def _block_mask(layout: Layout, device: torch.device, first: int) -> BlockMask:
    prefix, start, stop = layout.ranges()[:, first:].to(device)

    def seen(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key < prefix[query]) | ((key >= start[query]) & (key < stop[query]))

    return create_block_mask(
        seen, None, None, layout.tokens - first, layout.tokens, device=str(device)
    )


@functools.cache
def _compiled_flex() -> Callable[..., Tensor]:
    return torch.compile(flex_attention, dynamic=False)
