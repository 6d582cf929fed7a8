"""Measurements of the closed loop: what the order of samples does to gradient and loss.

Shapes: S batches, P parameters.
"""

from collections.abc import Mapping
from itertools import pairwise
from statistics import variance
from typing import Any

import torch
from torch import Tensor

from wamlab.data.corpus import Corpus, CorpusLoader
from wamlab.data.sampler import Strategy
from wamlab.draws import Draws
from wamlab.measure import Record
from wamlab.model.wam import WorldActionModel
from wamlab.train.communication import training_group
from wamlab.train.config import TrainConfig
from wamlab.train.trainer import Trainer


def loss_roughness(losses: tuple[float, ...]) -> float:
    """Return the variance of the differences of consecutive steps' losses."""
    return variance(b - a for a, b in pairwise(losses))


def train_by(
    corpus: Corpus, strategies: Mapping[str, Strategy], config: TrainConfig
) -> dict[str, Record]:
    """Train the same model on as many samples in each order.

    Args:
        corpus: the samples.
        strategies: name -> order.
        config: the run; `data` is not read.
    """
    found = {}
    for name, strategy in strategies.items():

        def load(data: None, *, device: Any, strategy: Strategy = strategy, **how: Any) -> Any:
            return CorpusLoader(corpus.to(device), strategy=strategy, **how)

        with training_group(torch.device(config.device)):
            found[name] = Trainer(config, loader=load).fit()
    return found


def gradient_noise(
    model: WorldActionModel,
    corpus: Corpus,
    strategies: Mapping[str, Strategy],
    *,
    batch: int = 8,
    batches: int = 24,
    seed: int = 0,
) -> dict[str, float]:
    """Return the relative variance of a batch's gradient in each order of samples.

    The weights stand still. Every batch gives a gradient g_b; g is the mean over all batches of all
    orders, and the noise E|g_b - g|² / |g|². A sample has the same noise and times wherever it
    stands, so that only the order differs.

    Args:
        model: with an `encode` for the corpus's samples.
        corpus: the samples, on the model's device.
        strategies: name -> order.
        batch: samples a batch.
        batches: S, of each order.
        seed: of the order and of the noise.
    """
    found: dict[str, Tensor] = {}
    for name, strategy in strategies.items():
        loader = CorpusLoader(
            corpus, global_batch=batch, micro_batch=batch, seed=seed, strategy=strategy
        )
        found[name] = torch.stack([_gradient(model, next(loader), seed) for _ in range(batches)])
    mean_P = torch.cat(list(found.values())).mean(0)
    scale = mean_P.square().sum()
    return {n: ((g_SP - mean_P).square().sum(1).mean() / scale).item() for n, g_SP in found.items()}


def _gradient(model: WorldActionModel, batch: dict[str, Any], seed: int) -> Tensor:
    model.zero_grad(set_to_none=True)
    model.loss(batch, Draws(seed, 0, batch["sample_id"]))["loss"].backward()
    gradients = [p.grad.flatten() for p in model.trainable.parameters() if p.grad is not None]
    return torch.cat(gradients).float()
