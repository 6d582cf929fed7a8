"""Streams with clocks of their own, brought onto one clock and one rate without aliasing.

Joints come at 120 Hz, torques at 1000 Hz, video at 30 frames a second, each stamped by its own
device. A stream is mapped to the reference clock by t' = a t + b, filtered at its native rate where
it is sampled down, and then read at the wanted instants. What cannot be known there (a gap, the
time before a stream began) is masked, never made up.
"""

import dataclasses
import itertools
from typing import Literal, NamedTuple

import numpy as np
from scipy.interpolate import CubicSpline
from scipy.spatial.transform import Rotation, Slerp

from wamlab.config import UserError
from wamlab.motion.segments import low_pass

Kind = Literal["position", "rotation", "torque", "contact", "video"]
CUT = 0.45  # of the new rate: below its Nyquist limit of 0.5
ORDER = 8  # run forwards and backwards: 96 dB an octave
GAP_SAMPLES = 3.0  # longer holes are masked


class StreamError(UserError):
    """A stream that cannot be aligned as it stands."""


class Clock(NamedTuple):
    """t' = a t + b, and the root mean square of what the events leave over, in seconds."""

    a: float = 1.0
    b: float = 0.0
    residual_s: float = 0.0

    def __call__(self, times_s: np.ndarray) -> np.ndarray:
        """Return local times on the reference clock."""
        return self.a * np.asarray(times_s, float) + self.b


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Stream:
    """Samples of one device.

    Attributes:
        kind: decides how the stream is read between its samples.
        times_s: float64 [T], ascending, on its own clock.
        values: [T, ...]; rotations are [T, ..., 3, 3], video holds frame numbers.
        clock: to the reference.
    """

    kind: Kind
    times_s: np.ndarray
    values: np.ndarray
    clock: Clock = dataclasses.field(default_factory=Clock)

    def __post_init__(self) -> None:
        if len(self.times_s) != len(self.values) or len(self.times_s) < 2:
            raise StreamError(
                f"{self.kind} stream: {len(self.times_s)} times for {len(self.values)} samples; "
                "they must be as many, and at least two"
            )
        late = np.flatnonzero(np.diff(self.times_s) <= 0)
        if len(late):
            at = int(late[0])
            raise StreamError(
                f"{self.kind} stream: sample {at + 1} at {self.times_s[at + 1]:.6f} s comes no "
                f"later than sample {at} at {self.times_s[at]:.6f} s: sort or drop them first"
            )

    @property
    def rate(self) -> float:
        """Samples a second on the reference clock: the median, so that gaps do not count."""
        return float(1 / (np.median(np.diff(self.times_s)) * self.clock.a))


def fit_clock(local_s: np.ndarray, reference_s: np.ndarray) -> Clock:
    """Fit a clock to sync events (claps, impacts) that both devices saw.

    Args:
        local_s: the events' times on the device's clock.
        reference_s: the same events on the reference clock; one event gives the offset alone.

    Raises:
        StreamError: no events, or not as many on both sides.
    """
    local, reference = np.asarray(local_s, float), np.asarray(reference_s, float)
    if local.shape != reference.shape or local.ndim != 1 or not len(local):
        raise StreamError(
            f"a clock needs the same events on both sides, got {local.size} and {reference.size}"
        )
    if len(local) == 1:
        return Clock(1.0, float(reference[0] - local[0]))
    a, b = np.polyfit(local - local[0], reference, 1)
    b -= a * local[0]
    return Clock(float(a), float(b), float(np.sqrt(np.mean((a * local + b - reference) ** 2))))


def read_at(stream: Stream, wanted_s: np.ndarray, rate: float) -> tuple[np.ndarray, np.ndarray]:
    """Read a stream at instants of the reference clock.

    A filter is used where the stream is faster than `rate`; it is zero phase, so that a value knows
    about 2 / rate seconds of its future. Data for causal control needs a causal filter instead.

    Args:
        stream: what to read.
        wanted_s: float64 [N], ascending.
        rate: of the wanted instants, Hz.

    Returns:
        Values [N, ...] (zero where invalid) and bool [N].
    """
    times = stream.clock(stream.times_s)
    values, valid = _empty(stream, len(wanted_s)), np.zeros(len(wanted_s), bool)
    holes = np.flatnonzero(np.diff(times) > GAP_SAMPLES / stream.rate) + 1
    for first, last in itertools.pairwise([0, *holes.tolist(), len(times)]):
        piece = slice(first, last)
        inside = _inside(stream, times[piece], wanted_s)
        if last - first < 2 or not inside.any():
            continue
        samples = (times[piece], stream.values[piece])
        values[inside] = _read_piece(stream, *samples, wanted_s[inside], rate=rate)
        valid |= inside
    return values, valid


def align(streams: dict[str, Stream], rate: float, window_s: float) -> dict[str, np.ndarray]:
    """Cut the time that all streams share into windows at one rate.

    Args:
        streams: name -> stream.
        rate: Hz.
        window_s: seconds a window; what is left over at the end is dropped.

    Returns:
        `time_s` [B, T], and for each stream NAME [B, T, ...] and NAME_valid [B, T]; a torque stream
        also gives NAME_hf, the RMS of what the filter took away, so that an impact is not lost.

    Raises:
        StreamError: the streams share less than one window.
    """
    ends = [s.clock(s.times_s[[0, -1]]) for s in streams.values()]
    start, stop = max(e[0] for e in ends), min(e[1] for e in ends)
    frames = round(window_s * rate)
    count = int(np.floor((stop - start) * rate + 1e-6) + 1) // frames
    if count < 1:
        raise StreamError(
            f"the streams share {max(stop - start, 0):.3f} s, a window takes {window_s:g} s"
        )
    wanted = start + np.arange(count * frames) / rate
    found = {"time_s": wanted}
    for name, stream in streams.items():
        found[name], found[f"{name}_valid"] = read_at(stream, wanted, rate)
        if stream.kind == "torque" and stream.rate > rate:
            found[f"{name}_hf"] = _lost(stream, wanted, rate)
    return {k: v.reshape(count, frames, *v.shape[1:]) for k, v in found.items()}


def _empty(stream: Stream, count: int) -> np.ndarray:
    shape = (count, *stream.values.shape[1:])
    if stream.kind == "rotation":
        return np.broadcast_to(np.eye(3), shape).copy()
    return np.zeros(shape, stream.values.dtype if stream.kind in ("video", "contact") else float)


def _inside(stream: Stream, times: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    slack = 1e-9 + (1 / stream.rate if stream.kind == "video" else 0.0)  # a frame lasts a while
    return (wanted >= times[0] - 1e-9) & (wanted <= times[-1] + slack)


def _read_piece(
    stream: Stream, times: np.ndarray, values: np.ndarray, wanted: np.ndarray, *, rate: float
) -> np.ndarray:
    if stream.kind == "video":  # the frame on show: never a later one
        return values[np.searchsorted(times, wanted + 1e-9, side="right") - 1]
    if stream.kind == "contact":
        right = np.searchsorted(times, wanted).clip(1, len(times) - 1)
        return values[right - (wanted - times[right - 1] <= times[right] - wanted)]
    if stream.kind == "rotation":
        return _slerp(times, values, wanted)
    if stream.rate > rate * 1.01:
        values = low_pass(values, stream.rate, CUT * rate, ORDER)
    return CubicSpline(times, values, axis=0)(wanted)


def _slerp(times: np.ndarray, values: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    wanted = wanted.clip(times[0], times[-1])
    flat = values.reshape(len(values), -1, 3, 3)
    turned = [Slerp(times, Rotation.from_matrix(flat[:, j]))(wanted) for j in range(flat.shape[1])]
    return np.stack([r.as_matrix() for r in turned], 1).reshape(len(wanted), *values.shape[1:])


def _lost(stream: Stream, wanted: np.ndarray, rate: float) -> np.ndarray:
    """Return the RMS, over one period of the new rate, of what lies above the cut."""
    above = stream.values - low_pass(stream.values, stream.rate, CUT * rate, ORDER)
    power = np.cumsum(np.concatenate([np.zeros_like(above[:1]), above**2]), axis=0)
    times = stream.clock(stream.times_s)
    first = np.searchsorted(times, wanted - 0.5 / rate)
    last = np.maximum(np.searchsorted(times, wanted + 0.5 / rate), first + 1).clip(max=len(times))
    first = np.minimum(first, last - 1)
    count = (last - first).reshape(-1, *[1] * (above.ndim - 1))
    return np.sqrt((power[last] - power[first]).clip(0) / count)
