"""Time decoders against each other, and compare the frames they return in the same run.

A sample is one training example's video: the same frames of every view of an episode. All decoders
get the same samples, one after the other within each sample, so that a busy machine slows all of
them alike. A decoder that returns other frames is marked wrong, not fast.
"""

import concurrent.futures
import dataclasses
import resource
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from wamlab.config import ConfigError, lookup
from wamlab.data.frame_times import FrameTimes, frame_times
from wamlab.data.transcode import TranscodeConfig, transcode_file
from wamlab.data.video import DECODERS, VideoDecoder, VideoError, decoder_status
from wamlab.measure import Record, Timing, stamp, synchronize

WINDOW, STRIDE = 33, 3  # a training window: 33 frames over 6.4 s at 15 fps
UNION = 4  # windows of one episode that are decoded together


@dataclasses.dataclass(frozen=True)
class Sample:
    """The files of an episode's views and the frames wanted from each."""

    views: tuple[Path, ...]
    frames: tuple[int, ...]


def view_sets(source: str | Path | Sequence[str | Path]) -> list[tuple[Path, ...]]:
    """Return the files that are decoded together: one tuple an episode, one file a view.

    Args:
        source: a video file, a LeRobot data set's folder, or a list of files that are views of one
            episode.

    Raises:
        ConfigError: there is no video.
    """
    if not isinstance(source, str | Path):
        return [tuple(Path(p) for p in source)]
    root = Path(source)
    if root.is_file():
        return [(root,)]
    groups: dict[tuple[str, str], list[Path]] = {}
    for path in sorted(root.glob("videos/**/*.mp4")):
        chunk = next((p for p in path.parts if p.startswith("chunk-")), "")
        groups.setdefault((chunk, path.name), []).append(path)
    if not groups:
        raise ConfigError(f"{root}: neither a video file nor a folder with videos/**/*.mp4")
    return [tuple(group) for group in groups.values()]


def _window(count: int, rng: np.random.Generator) -> np.ndarray:
    size = min(WINDOW, count)
    stride = min(STRIDE, max(1, (count - 1) // max(size - 1, 1)))  # a short file is spread less
    return rng.integers(count - (size - 1) * stride) + np.arange(size) * stride


def _consecutive(count: int, rng: np.random.Generator) -> np.ndarray:
    size = min(WINDOW, count)
    return rng.integers(count - size + 1) + np.arange(size)


PATTERNS = {
    "window": _window,
    "consecutive": _consecutive,
    "one": lambda count, rng: rng.integers(count, size=1),
    "episode": lambda count, rng: np.arange(count),
    "union": lambda count, rng: np.unique([_window(count, rng) for _ in range(UNION)]),
}


def draw_samples(
    source: str | Path | Sequence[str | Path], pattern: str, *, count: int, seed: int = 0
) -> list[Sample]:
    """Draw `count` samples: an episode each, and by `pattern` the frames wanted from all of its
    views."""
    draw, rng = lookup(PATTERNS, pattern, "pattern"), np.random.default_rng(seed)
    sets, samples = view_sets(source), []
    for _ in range(count):
        views = sets[rng.integers(len(sets))]
        shortest = min(len(frame_times(v)) for v in views)
        samples.append(Sample(views, tuple(int(i) for i in draw(shortest, rng))))
    return samples


def frames_decoded(times: FrameTimes, frames: Sequence[int]) -> int:
    """Return how many frames are decoded to show `frames`: each run starts at a keyframe."""
    total, at = 0, -1
    for index in sorted(frames):
        total += index + times.lead - max(times.seek_point(index), at + 1) + 1
        at = index + times.lead
    return total


def time_decoders(
    source: str | Path | Sequence[str | Path],
    decoders: Sequence[str] = ("pyav-naive", "pyav", "torchcodec"),
    pattern: str = "window",
    *,
    cached: bool = False,
    samples: int = 10,
    warmup: int = 2,
    device: torch.device | str = "cpu",
    threads: int = 1,
    views_at_once: bool = False,
    seed: int = 0,
) -> list[Record]:
    """Time decoders on the same samples and compare their frames.

    Args:
        source: what `view_sets` takes.
        decoders: names of DECODERS; one that cannot run here gets a record with its reason.
        pattern: a name of PATTERNS.
        cached: keep each file's decoder open between samples; else each view of each sample gets a
            fresh one. The file's frame times are known either way (`scan_ms` says their cost).
        samples: measured samples.
        warmup: samples decoded first and not counted.
        device: where the frames are wanted.
        threads: FFmpeg threads a decoder.
        views_at_once: decode a sample's views in as many threads, else one after the other.
        seed: of the draw of the samples.

    Returns:
        A record of scope "decode" for each decoder: `step_ms` is the wall time a sample, all views.
    """
    reasons = {n: lookup(DECODERS, n, "decoder") and decoder_status(n) for n in decoders}
    spent = {name: _Spent() for name in decoders if reasons[name] is None}
    drawn = draw_samples(source, pattern, count=warmup + samples, seed=seed)
    options = {"cached": cached, "device": torch.device(device), "threads": threads}
    bench = _Bench(spent, options, len(drawn[0].views) if views_at_once else 1)
    for number, sample in enumerate(drawn):
        bench.measure(sample, counts=number >= warmup, first=number)
    bench.close()
    setting = {"pattern": pattern, "cached": cached, "threads": threads}
    setting["views_at_once"] = views_at_once
    setting |= _describe(drawn[warmup:]) | {"source": _source_name(source)}
    return [_record(n, reasons[n], spent.get(n), setting, str(device)) for n in decoders]


@dataclasses.dataclass
class _Spent:
    """What each sample cost one decoder, and how its frames differ from the reference."""

    wall_ms: list[float] = dataclasses.field(default_factory=list)
    cpu_ms: list[float] = dataclasses.field(default_factory=list)
    max_diff: int = 0
    wrong: str | None = None

    def compare(self, references: "list[_Reference]", views: list[torch.Tensor]) -> None:
        """Note the largest difference of a sample's frames, and whether they are others."""
        for reference, frames in zip(references, views):
            difference, wrong = reference.compare(frames)
            self.max_diff, self.wrong = max(self.max_diff, difference), self.wrong or wrong


class _Bench:
    """Runs every decoder on a sample and compares its frames with those that PyAV decodes."""

    def __init__(self, spent: dict[str, _Spent], options: dict[str, Any], views: int) -> None:
        self.spent, self.cached = spent, options.pop("cached")
        self.options = options
        self.pool = concurrent.futures.ThreadPoolExecutor(views) if views > 1 else None
        self.open: dict[tuple[str, Path], VideoDecoder] = {}

    def measure(self, sample: Sample, *, counts: bool, first: int) -> None:
        """Decode one sample with every decoder that still counts; `first` says which begins."""
        names = [name for name, spent in self.spent.items() if spent.wrong is None]
        references = [_Reference(view, sample.frames) for view in sample.views]
        shift = first % max(len(names), 1)
        for name in names[shift:] + names[:shift]:
            try:
                wall_ms, cpu_ms, frames = self._decode(name, sample, references)
            except VideoError as error:
                self.spent[name].wrong = str(error)
                continue
            self.spent[name].compare(references, frames)
            if counts:
                self.spent[name].wall_ms.append(wall_ms)
                self.spent[name].cpu_ms.append(cpu_ms)

    def _decode(
        self, name: str, sample: Sample, references: "list[_Reference]"
    ) -> tuple[float, float, list[torch.Tensor]]:
        """Return wall and CPU milliseconds of all views, and their frames."""

        def one(view: Path, reference: _Reference) -> torch.Tensor:
            return self._frames(name, view, reference.times_s)

        each = self.pool.map if self.pool else map
        wall, cpu = time.perf_counter(), cpu_seconds()
        frames = list(each(one, sample.views, references))
        synchronize(self.options["device"])
        return (time.perf_counter() - wall) * 1e3, (cpu_seconds() - cpu) * 1e3, frames

    def _frames(self, name: str, view: Path, times_s: np.ndarray) -> torch.Tensor:
        decoder = self.open.pop((name, view), None)
        if decoder is None:
            decoder = DECODERS[name](view, **self.options)
        frames = decoder.frames_at(times_s)
        if self.cached:
            self.open[name, view] = decoder
        else:
            decoder.close()
        return frames

    def close(self) -> None:
        """Close the decoders that were kept open."""
        for decoder in self.open.values():
            decoder.close()
        if self.pool:
            self.pool.shutdown()


class _Reference:
    """The wanted frames of a view and their neighbours, decoded by PyAV.

    Libraries convert to RGB with slightly different rounding, so frames are not compared bit by
    bit: the frame is right if it is nearer to the wanted one than to either neighbour, and near to
    it.
    """

    NEAR = 8.0  # mean levels of 255; conversions differ by less than 2

    def __init__(self, view: Path, frames: Sequence[int]) -> None:
        seconds = frame_times(view).seconds
        own = np.asarray(frames)
        around = np.clip([own - 1, own, own + 1], 0, len(seconds) - 1)
        unique, self.where = np.unique(around, return_inverse=True)
        self.where = self.where.reshape(3, -1)
        self.times_s = seconds[own]
        decoder = DECODERS["pyav"](view)
        self.frames = decoder.frames_at(seconds[unique]).numpy()
        decoder.close()

    def compare(self, frames: torch.Tensor) -> tuple[int, str | None]:
        """Return the largest difference in levels, and why frames are wrong (None: right)."""
        largest = 0
        for k, frame in enumerate(frames.cpu().numpy()):
            before, own, after = (self._far(frame, self.where[n, k]) for n in range(3))
            if own[0] > min(before[0], after[0]) + 1e-6 or own[0] > self.NEAR:
                return largest, f"returns another frame at {self.times_s[k]:.4g} s than PyAV"
            largest = max(largest, own[1])
        return largest, None

    def _far(self, frame: np.ndarray, index: int) -> tuple[float, int]:
        """Return the mean and the largest difference to a reference frame, in levels."""
        other = self.frames[index]
        difference = np.maximum(frame, other) - np.minimum(frame, other)
        return float(difference.mean()), int(difference.max())


def gain_parts(records: Sequence[Record]) -> dict[str, float]:
    """Return how much faster torchcodec is than pyav-naive, and which part comes from what.

    Returns:
        Ratios of wall time: "total" = "not converting unwanted frames" times "the library".

    Raises:
        ConfigError: one of the three decoders was not measured.
    """
    times = {r.name: r.step_ms.median for r in records if r.step_ms}
    missing = {"pyav-naive", "pyav", "torchcodec"} - set(times)
    if missing:
        raise ConfigError(f"no time of {', '.join(sorted(missing))}: measure it in the same run")
    return {
        "total": times["pyav-naive"] / times["torchcodec"],
        "not converting unwanted frames": times["pyav-naive"] / times["pyav"],
        "the library": times["pyav"] / times["torchcodec"],
    }


def re_encode(
    source: str | Path | Sequence[str | Path], folder: Path, config: TranscodeConfig
) -> list[Path]:
    """Return the views of a source's first episode coded anew, made if they are not there yet."""
    size = f"{config.height or 'same'}x{config.width or 'same'}"
    made = []
    for number, view in enumerate(view_sets(source)[0]):
        target = folder / f"{config.codec}_gop{config.gop}_{size}" / f"{number}_{view.stem}.mp4"
        if not target.is_file():
            transcode_file(view, target, config)
        made.append(target)
    return made


def cpu_seconds() -> float:
    """Return the CPU time of this process and of the children it has waited for, in seconds."""
    used = [resource.getrusage(w) for w in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(u.ru_utime + u.ru_stime for u in used)


def _describe(drawn: Sequence[Sample]) -> dict[str, object]:
    """Return what was decoded: codec, size, keyframe distance, frames wanted and frames decoded."""
    tables = [[frame_times(v) for v in s.views] for s in drawn]
    first = tables[0][0]
    decoded = [sum(frames_decoded(t, s.frames) for t in ts) for s, ts in zip(drawn, tables)]
    keys = np.flatnonzero(first.key)
    return {
        "codec": first.codec,
        "height": first.height,
        "width": first.width,
        "gop": int(np.diff(keys).max()) if len(keys) > 1 else len(first),
        "views": len(drawn[0].views),
        "frames_per_view": len(drawn[0].frames),
        "frames_decoded": float(np.median(decoded)),
    }


def _source_name(source: str | Path | Sequence[str | Path]) -> str:
    paths = [source] if isinstance(source, str | Path) else source
    return ", ".join(Path(p).name for p in paths)


def _record(
    name: str, reason: str | None, spent: _Spent | None, setting: dict[str, object], device: str
) -> Record:
    extra, record = dict(setting), Record(name=name, scope="decode", dimension="data")
    data = extra.pop("source")
    if spent and spent.wall_ms and spent.wrong is None:
        wall, cpu = Timing.of(spent.wall_ms), Timing.of(spent.cpu_ms)
        extra |= {"ms_per_view": wall.median / setting["views"], "cpu_ms": dataclasses.asdict(cpu)}
        extra |= {"max_diff": spent.max_diff}
        record = dataclasses.replace(record, step_ms=wall, samples_per_s=1e3 / wall.median)
    wrong = spent.wrong if spent else None
    return stamp(
        dataclasses.replace(
            record, reason=reason, wrong=wrong, device=device, data=data, extra=extra
        )
    )
