"""Near misses are not taken for solutions of notebook 01's exercises."""

import pytest
import torch
from solutions.model import mask

from wamlab.jupyter.exercise import attempt
from wamlab.jupyter.exercises_model import describe
from wamlab.model.attention import Layout


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("rmsnorm", lambda x, w, eps: torch.nn.functional.layer_norm(x, x.shape[-1:], w, eps=eps)),
        ("rmsnorm", lambda x, w, eps: x / x.square().mean(-1, keepdim=True).sqrt() * w),
        ("mask", lambda kind, block: block[:, None] >= block[None, :]),
        ("mask", lambda kind, block: mask(kind, block) | torch.eye(len(kind)).bool()[:, :1]),
        ("velocity_target", lambda c, n, s: ((1 - s[..., None]) * c + s[..., None] * n, c - n)),
        ("velocity_target", lambda c, n, s: (s[..., None] * c + (1 - s[..., None]) * n, n - c)),
    ],
)
def test_a_near_miss_does_not(name, wrong):
    assert not attempt(name, wrong).solved


def test_every_token_is_described():
    layout = Layout(
        frames=5, frame_tokens=3, frames_per_block=2, actions_per_block=2, states_per_block=1
    )
    kinds, blocks = describe(layout)
    assert len(kinds) == len(blocks) == layout.tokens
    assert [int((kinds == k).sum()) for k in range(4)] == [15, 15, 4, 2]
    assert [int((blocks[kinds == 1] == b).sum()) for b in range(3)] == [3, 6, 6]
