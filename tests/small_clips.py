"""Small video files whose frames say their own number."""

from pathlib import Path

import av
import numpy as np

HEIGHT, WIDTH, BITS = 48, 80, 10


def barcode(number: int, height: int = HEIGHT, width: int = WIDTH) -> np.ndarray:
    """Return uint8 [H, W, 3]: bit k of `number` is the k-th vertical bar, bright for 1."""
    bits = (number >> np.arange(BITS)) & 1
    row = np.where(np.repeat(bits, width // BITS), 220, 30).astype(np.uint8)
    return np.broadcast_to(row[None, :, None], (height, width, 3)).copy()


def read_barcodes(frames_T3HW: np.ndarray) -> list[int]:
    """Return the numbers that the frames show."""
    frames = np.asarray(frames_T3HW)
    height, step = frames.shape[2], frames.shape[3] // BITS
    middle = frames[:, :, height // 4 : -(height // 4)]
    bars = middle.reshape(*middle.shape[:3], BITS, step)[..., step // 4 : -(step // 4)]
    return ((bars.mean((1, 2, 4)) > 128) @ (1 << np.arange(BITS))).tolist()


def write_clip(path: Path, frames: list[np.ndarray], *, fps: int = 15, gop: int = 250, **options):
    """Write RGB frames [H, W, 3] as H.264, without B-frames, ultrafast."""
    path.parent.mkdir(parents=True, exist_ok=True)
    settings = {"preset": "ultrafast", "tune": "zerolatency", "crf": "18"} | options
    with av.open(path, "w") as file:
        stream = file.add_stream("libx264", rate=fps, options=settings)
        stream.height, stream.width = frames[0].shape[:2]
        stream.pix_fmt, stream.codec_context.gop_size = "yuv420p", gop
        for frame in frames:
            file.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        file.mux(stream.encode())
