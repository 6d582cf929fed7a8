"""Decoders: one class per library, one interface, the same frames from all of them.

`DECODERS[name](path, device="cpu", start_s=0.0, end_s=None).frames_at(timestamps_s)` returns uint8
[T, C, H, W] on the device. Times count from the first shown frame plus `start_s`, in any order,
repeats allowed; `wamlab.data.frame_times` turns them into frames for every library, and each
decoder proves by the presentation time that it returns those. Pictures stand upright: the file's
display matrix is applied. One FFmpeg thread per decoder unless asked otherwise.
"""

import importlib
import importlib.util
import itertools
import os
import subprocess
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path

import av
import numpy as np
import torch

from wamlab import ffmpeg
from wamlab.config import UserError, lookup
from wamlab.data.container import VideoError
from wamlab.data.decoder import VideoDecoder

__all__ = ["DECODERS", "VideoDecoder", "VideoError", "decoder_status"]


class PyAV(VideoDecoder):
    """PyAV, converting only the wanted frames to RGB."""

    name = "pyav"

    def _open(self) -> None:
        self._file = av.open(self.path)
        self._stream = self._file.streams[self.times.stream]
        self._stream.thread_type = "SLICE" if self.threads > 1 else "NONE"
        self._stream.codec_context.thread_count = self.threads
        self._at = -1  # the entry of `times.pts` decoded last
        self._frames = self._file.decode(self._stream)

    def close(self) -> None:
        """Close the file; further calls open it again."""
        if self._pid == os.getpid():
            self._file.close()
        self._pid = None

    def _decode(self, wanted: np.ndarray) -> torch.Tensor:
        return self._upright(np.stack([_rgb(self._advance_to(int(i))) for i in wanted]))

    def _advance_to(self, index: int) -> av.VideoFrame:
        """Decode forward to the frame, from where the file stands or from the last keyframe before
        it."""
        entry, seek_entry = index + self.times.lead, self.times.seek_point(index)
        if not seek_entry <= self._at < entry:
            self._seek(seek_entry)
        *_, frame = self._decoded_to(self._pts(index))
        self._at = entry
        return frame

    def _seek(self, entry: int) -> None:
        self._file.seek(int(self.times.pts[entry]), stream=self._stream, backward=True)
        self._frames = self._file.decode(self._stream)
        self._at = entry - 1
        first = next(self._frames, None)
        if first is None or first.pts > self.times.pts[max(entry, self.times.lead)]:
            self._file.close()  # this container cannot seek there: read it from its start
            self._open()
        else:
            self._frames = itertools.chain([first], self._frames)

    def _decoded_to(self, pts: int) -> Iterator[av.VideoFrame]:
        """Yield every decoded frame up to the one at `pts`, which is the last."""
        for frame in self._frames:
            if frame.is_corrupt:
                raise self._error(f"the picture at {float(frame.time or 0):.6g} s is damaged")
            if frame.pts > pts:
                break
            yield frame
            if frame.pts == pts:
                return
        raise self._error(f"the frame at {pts * float(self.times.time_base):.6g} s is missing")


class PyAVNaive(PyAV):
    """PyAV as LeRobot-style readers use it: every decoded frame becomes an RGB tensor and is kept;
    the wanted ones are chosen afterwards."""

    name = "pyav-naive"

    def _decode(self, wanted: np.ndarray) -> torch.Tensor:
        self._seek(self.times.seek_point(int(wanted[0])))
        loaded, pts = [], []
        for frame in self._decoded_to(self._pts(wanted[-1])):
            turned = np.rot90(frame.to_rgb().to_ndarray(), self.times.rotation // 90)
            loaded.append(torch.from_numpy(np.ascontiguousarray(turned)).permute(2, 0, 1))
            pts.append(frame.pts)
        self._at = int(wanted[-1]) + self.times.lead
        missing = {self._pts(i) for i in wanted} - set(pts)
        if missing:
            raise self._error(f"{len(missing)} of {len(wanted)} frames are missing")
        return torch.stack([loaded[pts.index(self._pts(i))] for i in wanted])


class TorchCodec(VideoDecoder):
    """torchcodec on the CPU."""

    name = "torchcodec"
    _where = "cpu"

    def _open(self) -> None:
        decoders = ffmpeg.load_torchcodec()
        mapping, self._shift = self.times.mapping(*self.span)
        self._file = decoders.VideoDecoder(
            self.path,
            stream_index=self.times.stream,
            num_ffmpeg_threads=self.threads,
            device=self._where,
            custom_frame_mappings=mapping,
        )

    def _decode(self, wanted: np.ndarray) -> torch.Tensor:
        batch = self._file.get_frames_at((wanted + self._shift).tolist())
        self._prove(wanted, batch.pts_seconds.cpu().numpy(), self.times.absolute_s)
        return batch.data


class TorchCodecCuda(TorchCodec):
    """torchcodec on the GPU's video decoder (NVDEC); the frames stay on the GPU."""

    name = "torchcodec-cuda"

    def __init__(
        self, path: str | Path, *, device: torch.device | str = "cuda", **options: float | None
    ) -> None:
        super().__init__(path, device=device, **options)
        self._where = str(self.device) if self.device.type == "cuda" else "cuda"

    def _open(self) -> None:
        super()._open()
        if self._file.cpu_fallback:
            raise self._error(f"it fell back to the CPU ({self._file.cpu_fallback})")


class OpenCV(VideoDecoder):
    """OpenCV's own FFmpeg; it seeks by an average rate, so the time of each frame is checked."""

    name, needs = "opencv", "cv2"
    SEEK = 40  # frames that it reads in the time of a seek

    def _open(self) -> None:
        os.environ.setdefault("OPENCV_FFMPEG_LOGLEVEL", "8")  # its refusals are raised instead
        self._cv2 = importlib.import_module(self.needs)
        options = [self._cv2.CAP_PROP_N_THREADS, self.threads]
        self._file = self._cv2.VideoCapture(self.path, self._cv2.CAP_FFMPEG, options)
        self._file.set(self._cv2.CAP_PROP_ORIENTATION_AUTO, 0)
        self._at = -1

    def close(self) -> None:
        """Release the file; further calls open it again."""
        if self._pid == os.getpid():
            self._file.release()
        self._pid = None

    def _decode(self, wanted: np.ndarray) -> torch.Tensor:
        return self._upright(np.stack([self._frame(int(i)) for i in wanted]))

    def _frame(self, index: int) -> np.ndarray:
        start = self.times.seek_point(index) - self.times.lead
        if self._at >= index or start - self._at > self.SEEK:
            self._file.set(self._cv2.CAP_PROP_POS_MSEC, self.times.seconds[max(start, 0)] * 1e3)
            self._grab()
        if self._at > index:  # its seek went too far: read from the start
            self._file.release()
            self._open()
        while self._at < index:
            self._grab()
        ok, frame_BGR = self._file.retrieve()
        if not ok:
            raise self._error(f"no picture at {self.times.seconds[index]:.6g} s")
        return self._cv2.cvtColor(frame_BGR, self._cv2.COLOR_BGR2RGB)

    def _grab(self) -> None:
        if not self._file.grab():
            codec = self.times.codec
            raise self._error(f"it returns no frame of this {codec} stream, and no error")
        now = self._file.get(self._cv2.CAP_PROP_POS_MSEC) / 1e3
        at = int(np.argmin(np.abs(self.times.seconds - now)))
        self._prove(np.array([at]), np.array([now]), self.times.seconds)
        self._at = at


class Decord(VideoDecoder):
    """decord, decord2 or eva-decord: three packages that own one module; install one of them."""

    name, needs = "decord", "decord"

    def _open(self) -> None:
        self._decord = importlib.import_module(self.needs)
        on_cpu = self._decord.cpu(0)
        try:
            self._file = self._decord.VideoReader(self.path, on_cpu, num_threads=self.threads)
        except self._decord.DECORDError as error:
            raise self._error(_first_line(error)) from error
        if len(self._file) != len(self.times):
            raise self._error(f"it sees {len(self._file)} of {len(self.times)} frames")

    def _decode(self, wanted: np.ndarray) -> torch.Tensor:
        now = self._file.get_frame_timestamp(wanted)[:, 0]
        self._prove(wanted, now, self.times.seconds)
        try:
            frames = self._file.get_batch(wanted).asnumpy()
        except self._decord.DECORDError as error:  # on some CPUs 3.4 fails on some widths
            raise self._error(_first_line(error)) from error
        height, width = self.times.height, self.times.width
        if not self.times.rotation:
            return self._upright(frames)
        if height == width or self.times.rotation == 180:
            raise self._error("whether it turns pictures by itself depends on its version")
        if frames.shape[1:3] == (height, width):
            return torch.from_numpy(frames).permute(0, 3, 1, 2)
        return self._upright(frames)


class FFmpegPipe(VideoDecoder):
    """The `ffmpeg` program, one process a call, raw frames through a pipe."""

    name = "ffmpeg"
    RUNS = 60  # runs of consecutive frames a process: its expression parser takes about 100

    def _open(self) -> None:
        self._exe = ffmpeg.program()
        if self._exe is None:
            raise self._error(f"{decoder_status(self.name)}")

    def _decode(self, wanted: np.ndarray) -> torch.Tensor:
        runs = np.split(wanted, np.flatnonzero(np.diff(wanted) > 1) + 1)
        parts = [runs[i : i + self.RUNS] for i in range(0, len(runs), self.RUNS)]
        return self._upright(np.concatenate([self._run(part) for part in parts]))

    def _run(self, runs: list[np.ndarray]) -> np.ndarray:
        wanted = np.concatenate(runs)
        start_s = self.times.absolute_s[wanted[0]] - self.times.frame_s / 2
        ends = [(self._pts(run[0]), self._pts(run[-1])) for run in runs]
        select = "+".join(f"between(pts\\,{low}\\,{high})" for low, high in ends)
        command = [self._exe, "-v", "error", "-nostdin", "-threads", str(self.threads)]
        command += ["-copyts", "-noautorotate", "-seek_timestamp", "1"]
        command += ["-noaccurate_seek", "-ss", f"{start_s:.6f}"]  # `select` does the cutting
        command += ["-i", self.path, "-map", f"0:{self.times.stream}", "-vf", f"select={select}"]
        command += ["-frames:v", str(len(wanted)), "-fps_mode", "passthrough"]
        command += ["-filter_threads", "1", "-pix_fmt", "rgb24", "-f", "rawvideo", "-"]
        run = subprocess.run(command, capture_output=True, check=False)
        size = (self.times.height, self.times.width)
        size = size[::-1] if self.times.rotation in (90, 270) else size
        if run.returncode or len(run.stdout) != len(wanted) * size[0] * size[1] * 3:
            why = run.stderr.decode(errors="replace").strip() or "frames are missing"
            raise self._error(_first_line(why))
        return np.frombuffer(run.stdout, np.uint8).reshape(len(wanted), *size, 3)


class PyNvVideoCodec(VideoDecoder):
    """NVIDIA's PyNvVideoCodec (NVDEC)."""

    name, needs = "pynvvideocodec", "PyNvVideoCodec"

    def __init__(
        self, path: str | Path, *, device: torch.device | str = "cuda", **options: float | None
    ) -> None:
        super().__init__(path, device=device, **options)

    def _open(self) -> None:
        nvc = importlib.import_module(self.needs)
        self._file = nvc.SimpleDecoder(
            self.path,
            gpu_id=self.device.index or 0,
            use_device_memory=True,
            output_color_type=nvc.OutputColorType.RGB,
        )
        if len(self._file) != len(self.times):
            raise self._error(f"it sees {len(self._file)} of {len(self.times)} frames")

    def _decode(self, wanted: np.ndarray) -> torch.Tensor:
        frames = self._file.get_batch_frames_by_index(wanted.tolist())
        stamps = np.array([frame.getPTS() for frame in frames])
        milliseconds = np.abs(stamps - self.times.absolute_s[wanted] * 1e3) <= 1
        if not (milliseconds | (stamps == self.times.pts[wanted + self.times.lead])).all():
            raise self._error("it returns frames of other times")
        batch = torch.stack([torch.from_dlpack(frame) for frame in frames])
        turned = torch.rot90(batch, self.times.rotation // 90, dims=(1, 2))
        return turned.permute(0, 3, 1, 2)


DECODERS: dict[str, type[VideoDecoder]] = {
    "pyav-naive": PyAVNaive,
    "pyav": PyAV,
    "torchcodec": TorchCodec,
    "torchcodec-cuda": TorchCodecCuda,
    "opencv": OpenCV,
    "decord": Decord,
    "ffmpeg": FFmpegPipe,
    "pynvvideocodec": PyNvVideoCodec,
}


def decoder_status(name: str) -> str | None:
    """Return None if the decoder works here, else "not installed ..." or "does not import: why"."""
    decoder = lookup(DECODERS, name, "decoder")
    if name.endswith("cuda") and not torch.cuda.is_available():
        return "needs an NVIDIA GPU"
    if issubclass(decoder, TorchCodec):
        return _error_of(ffmpeg.load_torchcodec)
    if decoder is FFmpegPipe:
        return None if ffmpeg.program() else "not installed: no `ffmpeg` program"
    if decoder.needs is None:
        return None
    if importlib.util.find_spec(decoder.needs) is None:
        return f"not installed: no module {decoder.needs}"
    owners = metadata.packages_distributions().get(decoder.needs, [])
    if len(set(owners)) > 1:
        return f"does not import: {' and '.join(sorted(set(owners)))} share one module; keep one"
    return _error_of(lambda: importlib.import_module(decoder.needs))


def _error_of(load: Callable[[], object]) -> str | None:
    try:
        load()
    except (ImportError, OSError, RuntimeError, UserError) as error:
        return f"does not import: {_first_line(error)}"
    return None


# From PyAV 17 on each frame's conversion starts threads of its own unless told otherwise: several
# times slower at these sizes, and a forked child that frees such a frame hangs.
_ONE_THREAD = {"threads": 1} if int(av.__version__.split(".")[0]) >= 17 else {}


def _first_line(error: object) -> str:
    return str(error).strip().partition("\n")[0][:300]


def _rgb(frame: av.VideoFrame) -> np.ndarray:
    return frame.to_ndarray(format="rgb24", **_ONE_THREAD)
