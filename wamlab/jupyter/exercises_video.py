"""Exercises of notebook 05: what a frame costs, which frame stands at a time, how many cores."""

from collections.abc import Sequence

import torch

from wamlab.jupyter._exercise import Exercise


def _frames_decoded(keyframes: Sequence[int], wanted: Sequence[int]) -> int:
    decoded, at = 0, -1
    for frame in sorted(wanted):
        start = max([k for k in keyframes if k <= frame] + [at + 1])
        decoded, at = decoded + max(frame - start + 1, 0), frame
    return decoded


def _nearest_frame(times_s: torch.Tensor, asked_s: torch.Tensor) -> torch.Tensor:
    return (asked_s[:, None] - times_s[None, :]).abs().argmin(dim=1)


def _decode_cores(samples_per_s: float, views: int, cpu_ms_per_view: float) -> float:
    return samples_per_s * views * cpu_ms_per_view / 1000


def _times() -> list[tuple]:
    steady = torch.arange(30, dtype=torch.float64) / 15
    jumps = torch.tensor([0, 1, 2, 5, 8, 11, 12, 13], dtype=torch.float64) / 30
    draw = torch.Generator().manual_seed(0)
    cases = []
    for times in (steady, jumps):
        asked = torch.rand(20, generator=draw, dtype=torch.float64) * times[-1]
        cases.append((times, torch.cat([asked, times.flip(0)])))
    return cases


EXERCISES: dict[str, Exercise] = {
    "frames-decoded": Exercise(
        task="frames_decoded(keyframes, wanted): how many frames a decoder must decode to show the "
        "frames `wanted` (a list, no repeats), where it can start at any of `keyframes` "
        "(ascending, the first is 0) or go on from where it stands. No frame needs a later one.",
        spec=_frames_decoded,
        inputs=lambda: [
            ([0, 250], [100]),
            ([0, 250], [240, 260]),
            ([0, 15, 30, 45], [14, 15, 16, 44]),
            ([0, 8, 16, 24], list(range(1, 30, 3))),
        ],
        hints=(
            "Frame 100 of a group that begins at 0 needs 101 frames.",
            "Go through the wanted frames in order and keep where the decoder stands.",
            "It starts at the last keyframe before the frame, or behind the frame decoded last, "
            "whichever is later.",
        ),
    ),
    "nearest-frame": Exercise(
        task="nearest_frame(times_s, asked_s): for each asked time (float64 [T], any order) the "
        "index of the frame nearest to it, int64 [T]; `times_s` float64 [N] are the frames' own "
        "presentation times, not always at one rate.",
        spec=_nearest_frame,
        inputs=_times,
        hints=(
            "round(asked * fps) is right only where the rate never changes.",
            "Compare every asked time with every frame's time.",
            "The smallest absolute difference along the frames wins.",
        ),
    ),
    "decode-cores": Exercise(
        task="decode_cores(samples_per_s, views, cpu_ms_per_view): CPU cores that decoding keeps "
        "busy for a GPU that trains on so many samples a second.",
        spec=_decode_cores,
        inputs=lambda: [(12.0, 3, 45.0), (4.44, 3, 816.0), (1.0, 2, 10.0)],
        hints=(
            "A core has 1000 ms of CPU time in every second.",
            "How many ms of CPU time does one sample take?",
            "samples a second, times views, times ms a view, over 1000.",
        ),
    ),
}
