"""Clips whose every frame shows its own number, so that a wrong frame cannot pass for a right one.

Frame k shows k as ten vertical bars, each a tenth of the width, bit 0 leftmost, bright for 1 and
dark for 0; the middle of a bar is read.
"""

from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import torch

BITS = 10


def picture(number: int, height: int = 96, width: int = 160) -> np.ndarray:
    """Return frame `number`, uint8 [H, W, 3]."""
    bars = np.array([220 if number >> bit & 1 else 30 for bit in range(BITS)], np.uint8)
    row = bars[np.minimum(np.arange(width) // (width // BITS), BITS - 1)]
    return np.broadcast_to(row[None, :, None], (height, width, 3)).copy()


def read(frames_TCHW: torch.Tensor, rotation: int = 0) -> list[int]:
    """Return the number that each frame shows; `rotation` undoes a display matrix's turn."""
    grey = torch.rot90(frames_TCHW.float().mean(1), -rotation // 90, dims=(1, 2))
    _, height, width = grey.shape
    bar = width // BITS
    middle = grey[:, height // 4 : height - height // 4]
    numbers = torch.zeros(len(grey), dtype=torch.long)
    for bit in range(BITS):
        low = bit * bar + bar // 4
        bright = middle[:, :, low : low + bar // 2].mean((1, 2)) > 128
        numbers += bright.long() << bit
    return numbers.tolist()


def write(
    path: Path,
    *,
    frames: int = 60,
    codec: str = "libx264",
    fps: int = 15,
    gop: int = 12,
    b_frames: int = 2,
    size: tuple[int, int] = (96, 160),
    times: list[int] | None = None,
    time_base: Fraction = Fraction(1, 15360),
    rotation: int = 0,
    options: dict[str, str] | None = None,
    muxer: dict[str, str] | None = None,
) -> Path:
    """Write a clip.

    Args:
        times: presentation times in units of `time_base`; default a constant rate from 0.
        rotation: of the display matrix, in degrees counterclockwise.
        options: of the encoder.
        muxer: options of the container.
    """
    step = int(1 / (fps * time_base))
    times = times or [k * step for k in range(frames)]
    with av.open(str(path), "w", options=muxer or {}) as file:
        stream = file.add_stream(codec, rate=fps, options=options or {})
        stream.height, stream.width = size
        stream.pix_fmt = "yuv420p"
        stream.codec_context.gop_size = gop
        stream.codec_context.max_b_frames = b_frames
        stream.codec_context.time_base = stream.time_base = time_base
        if rotation:
            stream.set_display_rotation(rotation)
        for number, pts in enumerate(times):
            frame = av.VideoFrame.from_ndarray(picture(number, *size), format="rgb24")
            frame.pts, frame.time_base = pts, time_base
            file.mux(stream.encode(frame))
        file.mux(stream.encode())
    return path
