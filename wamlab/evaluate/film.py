"""Films of episodes: what was seen above, what the model had imagined would be seen below.

Both as the model sees them: the grid of views at the size of its latents' video. A chunk's imagined
frames stand under the real ones of the same moments; where an episode has just begun, or has ended
within a chunk, the real row keeps its last frame.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from wamlab.data.embodiment import FRAMES_PER_BLOCK
from wamlab.data.lerobot_write import encode_video
from wamlab.evaluate.policy import ModelPolicy
from wamlab.evaluate.worlds import Moment
from wamlab.model.vae import VAE
from wamlab.model.wam import preprocess

DONE, GOING = (46, 160, 67), (120, 124, 132)  # the strip between the rows


@torch.no_grad()
def imagined(policy: ModelPolicy, vae: VAE, robots: Sequence[int]) -> Tensor:
    """Return the frames that the policy's last chunk imagines.

    Args:
        policy: after `infer_batch`.
        vae: with its decoder.
        robots: places in the batch.

    Returns:
        [len(robots), 3, 8, h, w] in [-1, 1].
    """
    rows, cols = policy.chunk.latents.shape[-2:]
    past = [seen[list(robots), ..., :rows, :cols] for seen in policy.seen]
    latents = torch.cat([*past, policy.chunk.latents[list(robots)]], dim=2)
    return vae.decode(latents)[:, :, -FRAMES_PER_BLOCK:].float()


class Filmer:
    """Films the first episodes of the first batch; hand its `watch` to `closed_loop`.

    Args:
        policy: who acts.
        vae: with its decoder.
        count: episodes.

    Attributes:
        frames: of each episode, uint8 [2h + 4 + 2h, 2w, 3] each: seen, a strip, imagined.
    """

    def __init__(self, policy: ModelPolicy, vae: VAE, count: int) -> None:
        self.policy, self.vae, self.count = policy, vae, count
        self.frames: list[list[np.ndarray]] = [[] for _ in range(count)]
        self._tasks: list[str] = []

    def watch(self, moments: Sequence[Moment]) -> None:
        """Take the frames of one chunk."""
        begins = moments[0].steps == 0
        if begins and self._tasks:
            self.count = 0  # a later batch
        own = moments[: self.count]
        if begins:
            self._tasks = [m.world.task for m in own] or self._tasks
            self._over = [False] * len(own)
            return
        if not own:
            return
        dreamed = _images(imagined(self.policy, self.vae, range(len(own))))
        clip = self.policy.clip([m.observation() for m in own])
        seen = _images(preprocess(clip, self.policy.model.config.encoders.target_hw))
        for n, moment in enumerate(own):
            if not self._over[n]:
                color = DONE if moment.done else GOING
                self.frames[n] += [_frame(*pair, color) for pair in zip(seen[n], dreamed[n])]
            self._over[n] = moment.done

    def save(self, folder: Path) -> list[Path]:
        """Write one mp4 an episode and return their paths."""
        folder.mkdir(parents=True, exist_ok=True)
        robot, paths = self.policy.embodiment, []
        fps = round(robot.fps * FRAMES_PER_BLOCK / robot.horizon)
        for number, (task, frames) in enumerate(zip(self._tasks, self.frames)):
            words = "_".join(task.split())
            path = folder / f"episode_{number:02d}_{words}.mp4"
            path.write_bytes(encode_video(np.stack(frames), fps).data)
            paths.append(path)
        return paths


def _images(video: Tensor) -> np.ndarray:
    """[B, 3, T, h, w] in [-1, 1] -> uint8 [B, T, 2h, 2w, 3]."""
    x = ((video.clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8).movedim(1, -1).cpu().numpy()
    return x.repeat(2, axis=2).repeat(2, axis=3)


def _frame(real: np.ndarray, dream: np.ndarray, color: tuple[int, int, int]) -> np.ndarray:
    strip = np.broadcast_to(np.uint8(color), (4, real.shape[1], 3))
    return np.concatenate([real[: dream.shape[0]], strip, dream])
