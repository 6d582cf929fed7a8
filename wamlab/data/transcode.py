"""Re-encode a data set's videos once, for training: short groups of pictures, the training size.

Every frame keeps its place and its time; only the pictures are coded anew. The new data set is
written beside the old one, file by file, with a journal of what became of each, so that a run that
was interrupted goes on where it stopped.
"""

import concurrent.futures
import dataclasses
import hashlib
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import av
import numpy as np

from wamlab.config import ConfigError, lookup, to_dict
from wamlab.data.container import VideoError
from wamlab.data.frame_times import FrameTimes, frame_times
from wamlab.data.metadata import DatasetError, read_info, read_json
from wamlab.measure import append_jsonl, read_jsonl

JOURNAL = "transcode.jsonl"
# codec -> (FFmpeg's encoder, what to ask of it beside the quality, the quality if none is given)
ENCODERS: dict[str, tuple[str, dict[str, str], int]] = {
    "h264": ("libx264", {"preset": "fast", "tune": "fastdecode", "sc_threshold": "0"}, 20),
    "hevc": ("libx265", {"preset": "fast", "x265-params": "log-level=none:scenecut=0"}, 22),
    "av1": ("libsvtav1", {"preset": "10"}, 30),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class TranscodeConfig:
    """How videos are coded anew.

    `gop` is the number of frames from one keyframe to the next; no frame is predicted from a later
    one. `height` and `width` None keep the size. `crf` is the encoder's quality, lower is better.
    """

    codec: str = "h264"
    gop: int = 8
    height: int | None = None
    width: int | None = None
    crf: int | None = None

    def __post_init__(self) -> None:
        lookup(ENCODERS, self.codec, "codec")
        if self.gop < 1:
            raise ConfigError(f"gop {self.gop}: at least 1 frame")
        worst = 63 if self.codec == "av1" else 51
        if self.crf is not None and not 0 <= self.crf <= worst:
            raise ConfigError(f"crf {self.crf}: {self.codec} takes 0 (best) to {worst}")
        for name, value in (("height", self.height), ("width", self.width)):
            if value is not None and (value < 16 or value % 2):
                raise ConfigError(f"{name} {value}: an even number of at least 16 pixels")


def transcode_file(source: Path, target: Path, config: TranscodeConfig) -> dict[str, Any]:
    """Re-encode one video; the file appears whole or not at all.

    Args:
        source: any file that `frame_times` reads exactly.
        target: an .mp4.
        config: codec, size and keyframe distance.

    Returns:
        What changed: codec, size, keyframe distance and bytes before and after, frames.

    Raises:
        VideoError: the source cannot be read, or the result does not hold its frames and times.
    """
    before = frame_times(source)
    partial = target.with_name(f".{target.name}.partial.mp4")
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        _encode(source, partial, before, config)
        after = frame_times(partial)
        if len(after) != len(before) or not np.allclose(after.seconds, before.seconds, atol=2e-3):
            raise VideoError(f"{source}: its re-encoding holds other frames or times; left out")
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)
    return {"frames": len(before), "before": _facts(source, before), "after": _facts(target, after)}


def _encode(source: Path, target: Path, times: FrameTimes, config: TranscodeConfig) -> None:
    encoder, options, crf = ENCODERS[config.codec]
    options = options | {"crf": str(crf if config.crf is None else config.crf)}
    with av.open(str(source)) as reader, av.open(str(target), "w") as writer:
        rate = 1 / (times.frame_s or 1.0)
        stream = writer.add_stream(encoder, rate=round(rate) or 1, options=options)
        stream.height, stream.width = config.height or times.height, config.width or times.width
        stream.pix_fmt = "yuv420p"
        coder = stream.codec_context
        coder.gop_size, coder.max_b_frames, coder.thread_count = config.gop, 0, 1
        coder.time_base = stream.time_base = times.time_base
        for frame in _shown(reader, times, source):
            frame = frame.reformat(stream.width, stream.height, "yuv420p", interpolation="BICUBIC")
            frame.pts -= int(times.pts[times.lead])
            frame.time_base, frame.pict_type = times.time_base, av.video.frame.PictureType.NONE
            writer.mux(stream.encode(frame))
        writer.mux(stream.encode())


def _shown(
    reader: av.container.InputContainer, times: FrameTimes, source: Path
) -> Iterator[av.VideoFrame]:
    """Yield the shown frames in order, upright."""
    stream = reader.streams[times.stream]
    stream.thread_type, stream.codec_context.thread_count = "NONE", 1
    for frame in reader.decode(stream):
        if frame.is_corrupt:
            raise VideoError(f"{source}: the picture at {frame.time:.6g} s is damaged")
        if times.rotation:
            turned = np.rot90(frame.to_ndarray(format="rgb24"), times.rotation // 90)
            upright = av.VideoFrame.from_ndarray(np.ascontiguousarray(turned), format="rgb24")
            upright.pts, frame = frame.pts, upright
        yield frame


def _facts(path: Path, times: FrameTimes) -> dict[str, Any]:
    keys = np.flatnonzero(times.key)
    return {
        "codec": times.codec,
        "size": f"{times.height}x{times.width}",
        "gop": int(np.diff(keys).max()) if len(keys) > 1 else len(times),
        "bytes": path.stat().st_size,
    }


def transcode_dataset(
    root: str | Path,
    out: str | Path,
    config: TranscodeConfig | None = None,
    *,
    workers: int = 1,
    report: Callable[[int, int], None] = lambda done, total: None,
) -> list[dict[str, Any]]:
    """Write a data set with re-encoded videos; all else is copied bit by bit.

    Args:
        root: a LeRobot data set (v2.0, v2.1 or v3.0).
        out: the new data set's folder; one that holds an unfinished run of the same settings is
            continued.
        config: how to encode; default short H.264 groups at the same size.
        workers: files encoded at once.
        report: called with (files done, files in all) after each file.

    Returns:
        A row a file: `file`, `change` ("copied", "re-encoded", "edited"), `sha256` before and
        after, and for a video what `transcode_file` returns.

    Raises:
        DatasetError: no data set, or `out` holds something else.
        VideoError: a video that cannot be read.
    """
    root, out = Path(root), Path(out)
    config = config or TranscodeConfig()
    read_info(root)
    files = sorted(p.relative_to(root) for p in root.rglob("*") if _belongs(p, root))
    done = _journal(root, out, config)
    todo = [f for f in files if str(f) not in done]
    report(len(files) - len(todo), len(files))
    with concurrent.futures.ThreadPoolExecutor(workers) as pool:
        running = [pool.submit(_one, root, out, file, config) for file in todo]
        try:
            for number, task in enumerate(concurrent.futures.as_completed(running), 1):
                row = task.result()
                append_jsonl(out / JOURNAL, [row])
                done[row["file"]] = row
                report(len(files) - len(todo) + number, len(files))
        finally:
            pool.shutdown(cancel_futures=True)
    return [done[str(f)] for f in files]


def _belongs(path: Path, root: Path) -> bool:
    inside = path.relative_to(root)
    return path.is_file() and not any(part.startswith(".") for part in inside.parts)


def _journal(root: Path, out: Path, config: TranscodeConfig) -> dict[str, dict[str, Any]]:
    """Return the rows of an unfinished run whose files are still as they were written."""
    if out.resolve() == root.resolve() or root.resolve() in out.resolve().parents:
        raise DatasetError(f"{out}: the new data set must lie outside of {root}")
    head = {"config": to_dict(config), "root": str(root.resolve())}
    path = out / JOURNAL
    if not path.is_file():
        if out.is_dir() and any(out.iterdir()):
            raise DatasetError(f"{out}: holds something else; choose an empty folder")
        append_jsonl(path, [head])
        return {}
    first, *rows = read_jsonl(path)
    if first != head:
        raise DatasetError(f"{path}: written with {first}, not {head}: remove {out} to start anew")
    whole = [r for r in rows if (out / r["file"]).is_file()]
    return {r["file"]: r for r in whole if r["bytes"] == (out / r["file"]).stat().st_size}


def _one(root: Path, out: Path, file: Path, config: TranscodeConfig) -> dict[str, Any]:
    """Make one file of the new data set and return its row."""
    source, target = root / file, out / file
    row: dict[str, Any] = {"file": str(file), "change": "copied"}
    target.parent.mkdir(parents=True, exist_ok=True)
    if file.suffix == ".mp4" and file.parts[0] == "videos":
        row |= {"change": "re-encoded", **transcode_file(source, target, config)}
    elif str(file) == "meta/info.json":
        edited = json.dumps(_edited_info(read_json(source), config), indent=2) + "\n"
        row["change"] = "copied" if edited == source.read_text() else "edited"
        target.write_text(edited)
    else:
        partial = target.with_name(f".{target.name}.partial")
        shutil.copyfile(source, partial)
        partial.replace(target)
    sums = {"before": _sha256(source), "after": _sha256(target)}
    return row | {"sha256": sums, "bytes": target.stat().st_size}


def _edited_info(info: dict[str, Any], config: TranscodeConfig) -> dict[str, Any]:
    """Return info.json with the new codec and size of every camera."""
    size = {"height": config.height, "width": config.width}
    size = {axis: pixels for axis, pixels in size.items() if pixels is not None}
    for feature in info.get("features", {}).values():
        if feature.get("dtype") != "video":
            continue
        names = feature.get("names") or []
        for axis in [a for a in size if a in names]:
            feature["shape"][names.index(axis)] = size[axis]
        for facts in (feature.get("info"), feature.get("video_info")):
            for key, value in {"codec": config.codec, "pix_fmt": "yuv420p", **size}.items():
                if facts and f"video.{key}" in facts:
                    facts[f"video.{key}"] = value
    return info


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
