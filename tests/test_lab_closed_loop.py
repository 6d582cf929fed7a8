"""What the order of samples does to the gradient, on samples whose gradients are known."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from wamlab.data.corpus import Corpus
from wamlab.data.sampler import Shards, Steps, Unions
from wamlab.jupyter.lab_closed_loop import gradient_noise

EPISODES, EACH = 20, 10


class Point(nn.Module):
    """Learns the mean of the samples: the gradient of one is the distance to it."""

    def __init__(self) -> None:
        super().__init__()
        self.at = nn.Parameter(torch.tensor([5.0]))

    @property
    def trainable(self) -> nn.Module:
        return self

    def loss(self, batch: dict, draws: object) -> dict[str, Tensor]:
        return {"loss": (self.at - batch["latents"]).square().mean() / 2}


@pytest.fixture
def corpus() -> Corpus:
    """Twenty episodes of ten samples; those of an episode are all alike."""
    count = EPISODES * EACH
    episode = torch.arange(EPISODES).repeat_interleave(EACH)
    values = torch.from_numpy(np.random.default_rng(0).normal(size=EPISODES)).float()
    tensors = {
        "latents": values[episode][:, None],
        "clip_feature": torch.zeros(count, 1),
        "state": torch.zeros(count, 1, 64),
        "action": torch.zeros(count, 24, 32),
        "episode": episode,
        "prompt": torch.zeros(count, dtype=torch.int64),
    }
    words = {"prompt_embedding": torch.zeros(1, 2, 4), "prompt_length": torch.tensor([2])}
    codec = SimpleNamespace(masks=lambda: (np.ones(64, bool), np.ones(32, bool)))
    return Corpus(tensors, ("wave",), words, codec, {})


def test_samples_of_one_episode_are_worth_one_sample(corpus):
    orders = {"step": Steps(), "union": Unions(starts=4), "shard": Shards(shard=20, share=0.8)}
    noise = gradient_noise(Point(), corpus, orders, batch=8, batches=400)
    assert noise["union"] / noise["step"] == pytest.approx(4, rel=0.25)  # 2 draws, not 8
    assert noise["shard"] > 2 * noise["step"]  # 2 episodes at a time


def test_the_noise_falls_as_the_batch_grows(corpus):
    small, large = (
        gradient_noise(Point(), corpus, {"step": Steps()}, batch=b, batches=200)["step"]
        for b in (2, 8)
    )
    assert small / large == pytest.approx(4, rel=0.3)
