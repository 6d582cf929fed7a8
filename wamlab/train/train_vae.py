"""Train the tiny VAE on a data set's videos, within a given number of minutes.

All episodes are decoded first and stay on the device as uint8 grids. Each step takes random clips
at one of the shapes that the small models use, reconstructs them and follows an exponential mean of
the weights, which is what is measured and saved. The encoder's latents get a little fixed noise and
a small penalty on their size, so that near latents decode to near images, as a generator needs.

Shapes: B clips, T frames, H W pixels.
"""

import copy
import dataclasses
import math
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor

from wamlab import dist
from wamlab.config import ConfigError, lookup
from wamlab.data.augment import Augment
from wamlab.data.embodiment import EMBODIMENTS
from wamlab.data.lerobot import LeRobotDataset
from wamlab.data.video import DECODERS
from wamlab.draws import Draws
from wamlab.measure import append_jsonl
from wamlab.model.vae import VAE, load_vae
from wamlab.model.wam import preprocess

SHOWN = (0, 8, 16, 24, 32)  # frames of a clip on the sample sheet


@dataclasses.dataclass(frozen=True, kw_only=True)
class VAETrainConfig:
    """What to train on, for how long, and where the result goes."""

    datasets: tuple[str, ...]
    embodiment: str = "toy"
    decoder: str = "torchcodec"
    out: str = "data_samples/vae_tiny.safetensors"
    weights: str | None = None  # an earlier result to start from
    log: str = "runs/train-vae"  # folder of evaluations and sample sheets
    minutes: float = 7.0  # of training; the schedule follows the clock
    steps: int | None = None  # instead of the clock
    target_hw: tuple[int, int] = (160, 320)
    small_hw: tuple[int, int] = (64, 128)
    clips: int = 10  # of 9 frames at target_hw a step; other shapes get as many pixels
    variants: int = 2  # augmented copies of each training episode, beside the plain one
    episodes: int | None = None  # of each data set; null: all
    held_out: float = 0.1  # share of the episodes
    evaluations: int = 6
    evaluation_clips: int = 8
    statistics_clips: int = 32  # a size, for the latents' mean and standard deviation
    lr: float = 2e-3
    latent_noise: float = 0.03
    latent_penalty: float = 1e-4
    seed: int = 0
    device: str = "auto"


@dataclasses.dataclass(frozen=True)
class Shape:
    """One clip shape and the share of the steps that use it."""

    frames: int
    hw: tuple[int, int]
    share: float


def shapes(config: VAETrainConfig) -> list[Shape]:
    """Return the clip shapes of training: mostly short clips, some whole ones."""
    return [
        Shape(9, config.target_hw, 0.45),
        Shape(9, config.small_hw, 0.3),
        Shape(17, config.target_hw, 0.15),
        Shape(33, config.target_hw, 0.1),
    ]


class Episodes:
    """Grids of whole episodes on one device, and random clips of them."""

    def __init__(self, grids: list[Tensor]) -> None:
        self.grids = [g for g in grids if len(g) >= 33]
        if not self.grids:
            longest = max((len(g) for g in grids), default=0)
            raise ConfigError(f"a clip has 33 frames, the longest episode {longest}")
        lengths = np.array([len(g) for g in self.grids])
        self.frames, self.lengths = torch.cat(self.grids), lengths
        self.offsets = np.cumsum(lengths) - lengths
        self.grids = list(self.frames.split(lengths.tolist()))

    def clips(self, count: int, frames: int, rng: np.random.Generator) -> Tensor:
        """Return uint8 [B, T, H, W, 3] at random places."""
        which = rng.integers(len(self.lengths), size=count)
        starts = self.offsets[which] + rng.integers(self.lengths[which] - frames + 1)
        index = torch.from_numpy(starts[:, None] + np.arange(frames))
        return self.frames[index.to(self.frames.device)]


def load_episodes(config: VAETrainConfig, device: torch.device) -> tuple[Episodes, Episodes]:
    """Decode every episode and return the training and the held-out ones (the last of each set)."""
    robot = lookup(EMBODIMENTS, config.embodiment, "embodiment")
    decoder = lookup(DECODERS, config.decoder, "decoder")
    grid_of = Augment(robot, impl="batched" if device.type == "cuda" else "pieces")
    train, held = [], []
    for root in config.datasets:
        data = LeRobotDataset(root, robot, progress=False)
        count = len(data.episodes.lengths[: config.episodes])
        first_held = count - max(1, round(count * config.held_out))
        for episode in range(count):
            steps = np.arange(int(data.episodes.lengths[episode]))

            def open_video(span):
                return decoder(span.path, start_s=span.start_s, end_s=span.end_s)

            frames = [data.frames(episode, name, steps, open_video) for name in robot.views]
            views = torch.stack([f.contiguous() for f in frames])[None].to(device)
            if episode >= first_held:
                held.append(grid_of(views, _draws(episode, config, 0, device), train=False)[0])
                continue
            for variant in range(1 + config.variants):
                draws = _draws(episode, config, variant, device)
                train.append(grid_of(views, draws, train=variant > 0)[0])
    return Episodes(train), Episodes(held)


def _draws(episode: int, config: VAETrainConfig, variant: int, device: torch.device) -> Draws:
    return Draws(config.seed, variant, torch.tensor([episode], device=device))


def reconstruct(vae: VAE, clip: Tensor, noise: float = 0.0) -> tuple[Tensor, Tensor]:
    """Return a clip's reconstruction [B, 3, T, H, W], not clamped, and its latents."""
    latents = vae.encode(clip)
    return vae.decode(latents + noise * torch.randn_like(latents), clamp=False), latents


def psnr(got: Tensor, want: Tensor) -> float:
    """Return the mean over frames of the peak signal-to-noise ratio in dB, for [-1, 1] videos."""
    error = (got.float().clamp(-1, 1) - want).square().mean((1, 3, 4)) / 4
    return float((-10 * error.clamp_min(1e-10).log10()).mean())


@torch.no_grad()
def evaluate(vae: VAE, clips: Tensor, hw: tuple[int, int]) -> float:
    """Return the PSNR of held-out clips uint8 [B, T, H, W, 3] at one size."""
    parts = [preprocess(one, hw) for one in clips.split(1)]
    return float(np.mean([psnr(reconstruct(vae, part)[0], part) for part in parts]))


@torch.no_grad()
def measure_statistics(vae: VAE, episodes: Episodes, config: VAETrainConfig) -> None:
    """Set the latents' mean and standard deviation from training clips at both sizes."""
    rng = np.random.default_rng(config.seed)
    latents = []
    for hw in (config.target_hw, config.small_hw):
        clips = episodes.clips(config.statistics_clips, 33, rng)
        latents += [vae.encode(preprocess(c, hw)).movedim(1, 0).flatten(1) for c in clips.split(4)]
    values = torch.cat(latents, 1).double()
    vae.set_statistics(tuple(values.mean(1).tolist()), tuple(values.std(1).tolist()))


def save_vae(vae: VAE, path: Path, note: dict[str, str]) -> None:
    """Write the weights in fp16 (half the bytes, error 0.05 %) and the statistics beside them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    tensors = {name: value.half().contiguous().cpu() for name, value in vae.state_dict().items()}
    mean, std = (torch.tensor(values) for values in vae._values)
    save_file(tensors | {"mean": mean, "std": std}, path, metadata=note)


@torch.no_grad()
def save_sheet(vae: VAE, clips: Tensor, hw: tuple[int, int], path: Path) -> None:
    """Write a picture: some frames of each clip, and under them their reconstructions."""
    rows = []
    for clip in clips.split(1):
        want = preprocess(clip, hw)
        for video in (want, reconstruct(vae, want)[0]):
            rows.append(torch.cat([video[0, :, t] for t in SHOWN], 2))
    pixels = torch.cat(rows, 1).float().clamp(-1, 1).add(1).mul(127.5).round().to(torch.uint8)
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels.movedim(0, -1).cpu().numpy()).save(path)


class Clock:
    """How far training has come, 0 to 1: by steps where they are given, else by minutes."""

    def __init__(self, config: VAETrainConfig) -> None:
        self.config, self.step, self.start = config, 0, time.monotonic()

    @property
    def done(self) -> float:
        """Return the share of the training that is over."""
        if self.config.steps is not None:
            return min(1.0, self.step / self.config.steps)
        return min(1.0, (time.monotonic() - self.start) / (60 * self.config.minutes))

    def lr(self) -> float:
        """Return the learning rate: 100 steps of warm-up, then half a cosine."""
        warm = min(1.0, (self.step + 1) / 100)
        return self.config.lr * warm * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * self.done)))


def train_vae(config: VAETrainConfig) -> float:
    """Train, save and return the held-out PSNR at `target_hw`, in dB, of the saved file.

    Raises:
        ConfigError: no episode is as long as one clip.
    """
    device = dist.device(config.device)
    start = time.monotonic()
    train, held = load_episodes(config, device)
    frames = sum(map(len, train.grids))
    dist.print0(f"decoded {frames} training frames in {time.monotonic() - start:.0f} s")
    clips = held.clips(config.evaluation_clips, 33, np.random.default_rng(1))
    vae = load_vae("tiny", config.weights, seed=config.seed, device=device)
    vae.set_statistics(vae.config.mean, vae.config.std)  # none, until they are measured
    vae.requires_grad_(True).train()
    if device.type == "cuda":
        vae.channels_last()
    mean = copy.deepcopy(vae).requires_grad_(False)
    if device.type == "cuda":
        torch._dynamo.config.recompile_limit = 64  # one graph for each width of a norm
        vae.compile_norms()
    _fit(vae, mean, train, clips, config)
    measure_statistics(mean, train, config)
    score = evaluate(mean, clips, config.target_hw)
    save_vae(mean, Path(config.out), {"psnr_db": f"{score:.2f}", "format": "wamlab-vae-1"})
    saved = load_vae("tiny", config.out, device=device)
    score, small = (evaluate(saved, clips, hw) for hw in (config.target_hw, config.small_hw))
    save_sheet(saved, clips[:2], config.target_hw, Path(config.log) / "reconstructions.png")
    save_sheet(saved, clips[:2], config.small_hw, Path(config.log) / "reconstructions_small.png")
    size = Path(config.out).stat().st_size / 1e6
    dist.print0(
        f"{config.out}: {size:.2f} MB, held-out PSNR {score:.2f} dB at {config.target_hw}, "
        f"{small:.2f} dB at {config.small_hw}, {time.monotonic() - start:.0f} s in all"
    )
    return score


class Learner:
    """One training step at a time: loss, gradient, update.

    On a GPU each clip shape's step is captured once as a CUDA graph: a step has some 3,000 small
    kernels, and launching them one by one takes 100 ms whatever the batch.
    """

    def __init__(self, vae: VAE, config: VAETrainConfig, device: torch.device) -> None:
        self.vae, self.config, self.on_gpu = vae, config, device.type == "cuda"
        self.lr = torch.tensor(config.lr, device=device)
        self.optimizer = torch.optim.AdamW(
            vae.parameters(),
            self.lr,
            weight_decay=0.0,
            capturable=self.on_gpu,
            fused=self.on_gpu,
        )
        self._replays: dict[Shape, Callable[[Tensor], Tensor]] = {}

    def step(self, clips: Tensor, shape: Shape, lr: float) -> Tensor:
        """Learn from uint8 clips [B, T, H, W, 3] and return the loss, a scalar on the device."""
        self.lr.fill_(lr)
        if not self.on_gpu:
            return self._compute(clips, shape)
        if shape not in self._replays:
            self._replays[shape] = self._capture(clips, shape)
        return self._replays[shape](clips)

    def _compute(self, clips: Tensor, shape: Shape) -> Tensor:
        clip, config = preprocess(clips, shape.hw), self.config
        kind = clips.device.type
        with torch.autocast(kind, torch.bfloat16, enabled=self.on_gpu, cache_enabled=False):
            got, latents = reconstruct(self.vae, clip, config.latent_noise)
        error = got.float() - clip
        loss = 0.1 * error.abs().mean() + error.square().mean()  # the second is what PSNR counts
        loss = loss + config.latent_penalty * latents.square().mean()
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.vae.parameters(), 1.0)
        self.optimizer.step()
        return loss.detach()

    def _capture(self, clips: Tensor, shape: Shape) -> Callable[[Tensor], Tensor]:
        clips = clips.clone()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):  # compiles the norms and lets cuDNN and the optimizer settle
                self._compute(clips, shape)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            loss = self._compute(clips, shape)

        def replay(new: Tensor) -> Tensor:
            clips.copy_(new)
            graph.replay()
            return loss

        return replay


def _fit(vae: VAE, mean: VAE, train: Episodes, clips: Tensor, config: VAETrainConfig) -> None:
    """Train `vae` until the clock is over; `mean` follows it and is looked at now and then."""
    learner, clock, looks = Learner(vae, config, clips.device), Clock(config), 0
    rng, kinds = np.random.default_rng(config.seed), shapes(config)
    budget = config.clips * 9 * math.prod(config.target_hw)
    followed = list(mean.parameters()), list(vae.parameters())
    while clock.done < 1:
        kind = kinds[rng.choice(len(kinds), p=[k.share for k in kinds])]
        count = max(1, budget // (kind.frames * math.prod(kind.hw)))
        loss = learner.step(train.clips(count, kind.frames, rng), kind, clock.lr())
        clock.step += 1
        share = 1 - min(0.999, clock.step / (clock.step + 9))  # an early mean forgets its start
        with torch.no_grad():
            torch._foreach_lerp_(*followed, share)
        if clock.done * config.evaluations >= looks + 1:
            looks += 1
            _look(mean, clips, config, clock=clock, loss=loss.item())


def _look(mean: VAE, clips: Tensor, config: VAETrainConfig, *, clock: Clock, loss: float) -> None:
    score = evaluate(mean, clips, config.target_hw)
    row = {"step": clock.step, "loss": loss, "psnr_db": score}
    append_jsonl(Path(config.log) / "evaluations.jsonl", [row])
    seconds = time.monotonic() - clock.start
    dist.print0(f"step {clock.step}  {seconds:.0f} s  loss {loss:.4f}  {score:.2f} dB")
