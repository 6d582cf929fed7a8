"""A corpus of the toy world: the expert plays, frames are drawn and encoded, nothing is decoded."""

import multiprocessing
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from wamlab.config import to_dict
from wamlab.data.augment import Augment
from wamlab.data.codec import Codec
from wamlab.data.corpus import Corpus
from wamlab.data.embodiment import FRAMES_PER_BLOCK, Embodiment
from wamlab.data.normalize import Statistics, relative_rows
from wamlab.data.toy_play import Play, ToyPlayConfig, play
from wamlab.draws import Draws
from wamlab.model.wam import WorldActionModel, latent_meta


def make_corpus(
    model: WorldActionModel,
    config: ToyPlayConfig,
    *,
    workers: int = 1,
    batch: int = 16,
) -> Corpus:
    """Play, draw and encode.

    Args:
        model: whose encoders are used.
        config: what to play.
        workers: processes that play and draw.
        batch: samples encoded at once.
    """
    robot = config.robot
    parts, plays = [], []
    grid, device = Augment(robot, impl="pieces"), next(model.vae.parameters()).device
    for played in tqdm(_plays(config, workers), total=config.episodes, desc="toy", disable=None):
        frames = _grid(grid, torch.from_numpy(played.views).to(device))
        starts = _starts(played, robot, config.every)
        parts.append(_encode(model, frames, starts, (robot, batch)))
        plays.append((replace(played, views=np.empty(0)), starts))
    codec = _codec(robot, [p for p, _ in plays])
    prompts = tuple(dict.fromkeys(robot.prompt_text(p.task) for p, _ in plays))
    tensors = {n: torch.cat([part[n] for part in parts]) for n in parts[0]}
    tensors |= _numbers(codec, plays, prompts)
    some = {"latents": tensors["latents"][:1].to(device), "prompt": list(prompts)}
    words = {n: t.cpu() for n, t in model.encode(some).items() if n != "latents"}
    meta = {"made_by": to_dict(config), "encoders": latent_meta(model.config)}
    return Corpus(tensors, prompts, words, codec, meta)


def _plays(config: ToyPlayConfig, workers: int) -> Iterator[Play]:
    seeds: Iterable[int] = range(config.seed, config.seed + config.episodes)
    one = partial(play, config=config)
    context = multiprocessing.get_context("spawn")
    with context.Pool(workers) if workers > 1 else nullcontext() as pool:
        yield from pool.imap(one, seeds, chunksize=2) if pool else map(one, seeds)


def _grid(augment: Augment, views_VTHW3: Tensor) -> Tensor:
    """Return an episode's frames as the model's grid, uint8 [T, H, W, 3]."""
    ids = torch.zeros(1, dtype=torch.int64, device=views_VTHW3.device)
    return augment(views_VTHW3.movedim(-1, 2)[None], Draws(0, 0, ids), train=False)[0]


def _starts(played: Play, robot: Embodiment, every: int) -> np.ndarray:
    return np.arange(0, len(played.states) - robot.blocks * robot.horizon, every)


@torch.no_grad()
def _encode(
    model: WorldActionModel, frames: Tensor, starts: np.ndarray, how: tuple[Embodiment, int]
) -> dict[str, Tensor]:
    robot, batch = how
    step = robot.horizon // FRAMES_PER_BLOCK
    where = torch.from_numpy(starts // step)[:, None] + torch.arange(robot.frames)
    found = [model.encode_video(frames[rows]) for rows in where.to(frames.device).split(batch)]
    half = {"latents": torch.float16, "clip_feature": torch.bfloat16}
    return {n: torch.cat([f[n].to("cpu", half.get(n)) for f in found]) for n in found[0]}


def _numbers(
    codec: Codec, plays: list[tuple[Play, np.ndarray]], prompts: tuple[str, ...]
) -> dict[str, Tensor]:
    robot = codec.embodiment
    states, actions, episode, prompt = [], [], [], []
    blocks, steps = np.arange(robot.blocks) * robot.horizon, np.arange(robot.horizon)
    for number, (played, starts) in enumerate(plays):
        for start in starts:
            anchors = start + blocks
            states.append(codec.encode_state(played.states[anchors]))
            blocks_KHA = played.actions[anchors[:, None] + steps]
            actions.append(codec.encode_action(blocks_KHA, played.states[anchors]))
        episode += [number] * len(starts)
        prompt += [prompts.index(robot.prompt_text(played.task))] * len(starts)
    return {
        "state": torch.from_numpy(np.stack(states)),
        "action": torch.from_numpy(np.stack(actions)),
        "episode": torch.tensor(episode),
        "prompt": torch.tensor(prompt),
    }


def _codec(robot: Embodiment, plays: list[Play]) -> Codec:
    states = np.concatenate([p.states for p in plays])
    actions = np.concatenate([p.actions for p in plays])
    relative = [relative_rows(p.actions[:, :7], p.states[:, :7], robot.horizon) for p in plays]
    return Codec(
        robot,
        (Statistics.of(states[:, :7]), Statistics.of(states[:, 7:])),
        (Statistics.of(np.concatenate(relative)), Statistics.of(actions[:, 7:])),
    )
