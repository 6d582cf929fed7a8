"""The layout, its mask, and every implementation of its attention."""

import pytest
import torch

from wamlab.config import ConfigError
from wamlab.model import attention
from wamlab.model.attention import IMPLEMENTATIONS, Layout, build_attention, choose, full

LAYOUTS = {
    "shipped": Layout(
        frames=9, frame_tokens=2, frames_per_block=2, actions_per_block=3, states_per_block=1,
        window=9,
    ),
    "window": Layout(
        frames=7, frame_tokens=2, frames_per_block=2, actions_per_block=2, states_per_block=1,
        window=3,
    ),
    "no-window": Layout(
        frames=5, frame_tokens=3, frames_per_block=1, actions_per_block=2, states_per_block=1
    ),
    "two-states": Layout(
        frames=5, frame_tokens=2, frames_per_block=2, actions_per_block=4, states_per_block=2
    ),
    "no-actions": Layout(frames=5, frame_tokens=3, frames_per_block=2, window=9),
    "token-causal": Layout(
        frames=5, frame_tokens=2, frames_per_block=2, actions_per_block=3, states_per_block=1,
        clean_token_causal=True,
    ),
}  # fmt: skip
PUBLIC_CALLS = {"joint_queries": False, "state_is_value": False}
BACKWARD_ON_CPU = [name for name in IMPLEMENTATIONS if name != "flex"]


@pytest.fixture(params=LAYOUTS)
def layout(request) -> Layout:
    return LAYOUTS[request.param]


def written_mask(layout: Layout) -> torch.Tensor:
    """The table of who sees whom, token by token, from (stream, frame or block) alone."""
    per_block, frame = layout.frames_per_block, layout.frame_tokens
    block_of_frame = [0, *(1 + (f - 1) // per_block for f in range(1, layout.frames))]
    clean = [("C", f) for f in range(layout.frames) for _ in range(frame)]
    tokens = clean + [("N", 0)] * frame
    for b in range(1, layout.blocks + 1):
        tokens += [("N", b)] * (frame * per_block)
        tokens += [("A", b)] * layout.actions_per_block + [("S", b)] * layout.states_per_block

    def sees(query: int, key: int) -> bool:
        (stream, q), (other, k) = tokens[query], tokens[key]
        if stream == "S":
            return other == "S" and k == q
        if stream in "NA":
            if other == "C":
                return q > 0 and block_of_frame[k] < q
            return k == q
        if other != "C":
            return False
        if layout.clean_token_causal:
            return k == 0 if q == 0 else key <= query
        in_window = (
            layout.window < 0 or k == 0 or k >= block_of_frame[q] * per_block + 1 - layout.window
        )
        return block_of_frame[k] <= block_of_frame[q] and in_window

    return torch.tensor([[sees(q, k) for k in range(len(tokens))] for q in range(len(tokens))])


def test_ranges_say_what_the_table_says(layout):
    assert torch.equal(layout.mask(), written_mask(layout))
    covered = [t for group in layout.groups() for t in range(group.first, group.last)]
    assert covered == list(range(layout.tokens)), "every token is in one group, in order"


def qkv(layout: Layout, *, queries: int | None = None) -> list[torch.Tensor]:
    torch.manual_seed(0)
    shape = (2, layout.tokens, 2, 8)
    q, k, v = (torch.randn(shape, dtype=torch.float64) for _ in range(3))
    return [x.requires_grad_() for x in (q[:, -(queries or layout.tokens) :].detach(), k, v)]


@pytest.mark.parametrize(
    "options", [{}, {"joint_queries": False, "state_is_value": False}], ids=str
)
@pytest.mark.parametrize("impl", BACKWARD_ON_CPU)
@pytest.mark.parametrize("tail", [False, True], ids=["all", "tail"])
def test_implementations_are_equal_forward_and_backward(layout, impl, options, tail):
    queries = layout.tokens - layout.stream_tokens if tail else layout.tokens
    given = qkv(layout, queries=queries)
    want = full(*given, layout.mask()[-queries:])
    got = build_attention(layout, impl, tail=tail, **options)(*given)
    weight = torch.randn_like(want)
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)
    for ours, theirs in zip(
        torch.autograd.grad(got, given, weight), torch.autograd.grad(want, given, weight)
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("tail", [False, True], ids=["all", "tail"])
def test_flex_sees_the_same_without_its_compiler(layout, tail, monkeypatch):
    monkeypatch.setattr(attention, "_compiled_flex", lambda: attention.flex_attention)
    queries = layout.tokens - layout.stream_tokens if tail else layout.tokens
    given = [x.detach().float() for x in qkv(layout, queries=queries)]
    got = build_attention(layout, "flex", tail=tail)(*given)
    torch.testing.assert_close(got, full(*given, layout.mask()[-queries:]), rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["shipped", "window"])
def test_flex_compiled_forward(name):
    layout = LAYOUTS[name]
    given = [torch.randn(1, layout.tokens, 2, 16) for _ in range(3)]
    want = full(*given, layout.mask())
    torch.testing.assert_close(build_attention(layout, "flex")(*given), want, rtol=1e-5, atol=1e-5)


def test_flex_refuses_a_backward_on_the_cpu():
    layout = LAYOUTS["shipped"]
    with pytest.raises(ConfigError, match="no backward on a CPU: use 'dense' or 'prefix'"):
        build_attention(layout, "flex")(*qkv(layout))


def test_public_calls_and_ours():
    """With four blocks the public code makes 18 calls a layer; merged they are 10."""
    layout = LAYOUTS["shipped"]
    public = build_attention(layout, "loops", **PUBLIC_CALLS).calls
    assert len(public) == 18
    joined = build_attention(layout, "prefix").calls
    assert sum(bool(call.keys) for call in joined) == 10
    assert build_attention(layout, "loops").calls == joined


def test_braid_and_unbraid_are_inverse(layout):
    video = torch.arange(layout.stream_tokens)[None, :, None] * 1.0
    action = 1000 + torch.arange(layout.blocks * layout.actions_per_block)[None, :, None] * 1.0
    state = 2000 + torch.arange(layout.blocks * layout.states_per_block)[None, :, None] * 1.0
    tokens = layout.braid(-video, video, action, state)
    assert tokens.shape == (1, layout.tokens, 1)
    assert torch.equal(tokens[:, : layout.stream_tokens], -video)
    for got, want in zip(layout.unbraid(tokens[:, layout.stream_tokens :]), (video, action, state)):
        assert torch.equal(got, want)
    public = tokens[:, layout.public_order()]
    assert torch.equal(public, torch.cat([-video, video, action, state], dim=1))


def test_time_rows():
    layout = LAYOUTS["two-states"]
    public = layout.time_rows(False)[layout.public_order()].tolist()
    video = [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    assert public[:10] == [0] * 10
    assert public[10:20] == [1 + f for f in video]
    assert public[20:28] == list(range(6, 14))
    # a state has the time of the first action of its share of the block
    assert public[28:] == [6, 8, 10, 12]
    coupled = layout.time_rows(True)[layout.public_order()].tolist()
    assert coupled[10:] == [1, 1, *[2] * 4, *[3] * 4, *[2] * 4, *[3] * 4, 2, 2, 3, 3]


def test_without_actions_nothing_leaks():
    """F4: publicly, noisy frames without actions see all clean frames, their own targets too."""
    layout = LAYOUTS["no-actions"]
    q, k, v = (x.detach() for x in qkv(layout))
    clean, changed = layout.stream_tokens, v.clone()
    changed[:, clean - 3 : clean] += 1  # the last clean frame, the target of the last block

    def differs(mask: torch.Tensor) -> torch.Tensor:
        moved = (full(q, k, v, mask) - full(q, k, changed, mask)).abs().amax(dim=(0, 2, 3))
        return moved[clean:] > 0

    public = layout.mask()
    public[clean:, :clean] = True
    assert differs(public).all(), "the public fault"
    assert not differs(layout.mask()).any()
    assert layout.mask()[:3, :3].all(), (
        "clean frame 0 is computed, not left as uninitialised memory"
    )


def test_without_a_window_clean_blocks_are_bidirectional_unless_asked():
    """F7: the public code without a window is causal by token; ours by block, or as asked."""
    sizes = {"frames": 5, "frame_tokens": 2, "frames_per_block": 2}
    ours, public = Layout(**sizes).mask(), Layout(**sizes, clean_token_causal=True).mask()
    assert ours[2, 5]
    assert not public[2, 5]
    assert public[2:10, :10].equal(torch.ones(8, 10).tril(diagonal=2).bool()), "aligned at its end"


def test_auto_is_measured_by_device_and_frame():
    small, large = (
        Layout(frames=9, frame_tokens=n, frames_per_block=2, actions_per_block=24)
        for n in (50, 880)
    )
    assert choose(small, torch.device("cuda")) == "flex"
    assert choose(large, torch.device("cuda")) == "prefix"
    assert choose(small, torch.device("cpu")) in BACKWARD_ON_CPU
    assert build_attention(small, "auto").impl == choose(small, torch.device("cpu"))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: Layout(frames=8, frame_tokens=2, frames_per_block=2),
            "8 latent frames do not divide into frame 0 and blocks of 2: use 1 \\+ 2 n",
        ),
        (lambda: Layout(frames=1, frame_tokens=2, frames_per_block=2), "n >= 1"),
        (
            lambda: LAYOUTS["shipped"].check_registers(96, 4),
            "96 action and 4 state tokens for 4 blocks of 3 and 1",
        ),
        (lambda: build_attention(LAYOUTS["shipped"], "flexx"), "did you mean 'flex'"),
    ],
)
def test_refusals(make, message):
    with pytest.raises(ConfigError, match=message):
        make()
