"""Damage containers at random and see what the decoders make of them.

`python tests/fuzz_video.py --cases 5000` runs for minutes; the tests run a small part of it. Every
case is decoded in a child process with a time limit. Allowed outcomes are "right" (every frame
shows its own number) and "refused" (a VideoError); a wrong frame, another exception, a crash and a
hang are faults.
"""

import argparse
import collections
import dataclasses
import random
import selectors
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import barcode

LIMIT_S = 20.0
FRAMES, FPS = 60, 15
VARIABLE = [512 * k for k in range(20)]  # 30, then 10, then 30 frames a second
VARIABLE += [512 * (20 + 3 * k) for k in range(20)] + [512 * (80 + k) for k in range(20)]
CLIPS = {
    "b_frames.mp4": {},
    "faststart.mp4": {"muxer": {"movflags": "faststart"}, "b_frames": 0, "gop": 250},
    "fragmented.mp4": {"muxer": {"movflags": "frag_keyframe+empty_moov"}},
    "matroska.mkv": {},
    "variable.mp4": {"times": VARIABLE},
    "av1.mp4": {"codec": "libsvtav1", "gop": 4, "b_frames": 0, "options": {"preset": "12"}},
}


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What one decoder made of one damaged file."""

    case: str
    decoder: str
    verdict: str  # right, refused, wrong, exception, crash, hang
    detail: str

    @property
    def is_fault(self) -> bool:
        return self.verdict not in ("right", "refused")


def make_clips(folder: Path) -> dict[str, bytes]:
    """Return the undamaged files."""
    return {
        name: barcode.write(folder / name, frames=FRAMES, fps=FPS, **options).read_bytes()
        for name, options in CLIPS.items()
    }


def boxes(data: bytes, start: int, end: int, path: str = "") -> list[tuple[str, int, int]]:
    """Return (path, start, end) of every MP4 box, inner ones too."""
    found = []
    while start + 8 <= end:
        size, kind = int.from_bytes(data[start : start + 4], "big"), data[start + 4 : start + 8]
        if size < 8 or start + size > end or not kind.isalnum():
            break
        name = f"{path}/{kind.decode('latin-1')}"
        found.append((name, start, start + size))
        if kind in (b"moov", b"trak", b"mdia", b"minf", b"stbl", b"edts", b"moof", b"traf"):
            found += boxes(data, start + 8, start + size, name)
        start += size
    return found


def structure(name: str, data: bytes) -> list[int]:
    """Return the positions of bytes that are the container's own, not coded pictures."""
    if name.endswith(".mkv"):
        return [*range(min(700, len(data)))]
    keep = [b for b in boxes(data, 0, len(data)) if not b[0].startswith("/mdat")]
    inside = {i for _, start, end in keep for i in range(start, end)}
    for box, start, end in keep:
        if box.endswith("/stsd"):  # holds the codec's own headers
            inside -= set(range(start + 8, end))
    return sorted(inside)


def damage(name: str, data: bytes, rng: random.Random) -> tuple[str, bytes]:
    """Return a description and the damaged bytes."""
    kind = rng.choice(["cut", "flip", "flip", "flips", "count", "zero"])
    if kind == "cut":
        at = rng.randrange(len(data))
        return f"cut at {at}", data[:at]
    places, changed = structure(name, data), bytearray(data)
    if kind in ("flip", "flips"):
        chosen = [rng.choice(places) for _ in range(1 if kind == "flip" else rng.randint(2, 8))]
        for at in chosen:
            changed[at] ^= 1 << rng.randrange(8)
        return f"bits flipped at {chosen}", bytes(changed)
    at = rng.choice(places)
    if kind == "zero":
        changed[at : at + 4] = b"\0" * len(changed[at : at + 4])
        return f"four zeros at {at}", bytes(changed)
    value = rng.choice([0, 1, 2, 61, 255, 65535, 2**31 - 1, 2**32 - 1])
    changed[at : at + 4] = value.to_bytes(4, "big")
    return f"number {value} at {at}", bytes(changed[: len(data)])


def judge(path: str, decoder: str) -> tuple[str, str]:
    """Decode every frame of a damaged clip; runs in the child process."""
    from wamlab.data.video import DECODERS, VideoError

    try:
        times = [k / FPS for k in range(FRAMES)]
        if "variable" in path:
            times = [pts / 15360 for pts in VARIABLE]
        reader = DECODERS[decoder](path)
        numbers = barcode.read(reader.frames_at(times))
        reader.close()
    except VideoError as error:
        return "refused", str(error)
    except Exception as error:  # any other class is the fault that is looked for
        return "exception", f"{type(error).__name__}: {error}"
    wrong = [k for k in range(FRAMES) if numbers[k] != k]
    return ("wrong", f"frames {wrong[:8]} show others") if wrong else ("right", "")


class Child:
    """A process that judges files, one a line, and is replaced when it crashes or hangs."""

    def __init__(self, decoder: str) -> None:
        self.decoder, self.process = decoder, None

    def judge(self, path: Path) -> tuple[str, str]:
        if self.process is None or self.process.poll() is not None:
            command = [sys.executable, __file__, "--child", self.decoder]
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            self._answer(120.0)  # "ready": the imports are not part of the limit
        self.process.stdin.write(f"{path}\n")
        self.process.stdin.flush()
        line = self._answer(LIMIT_S)
        if line is None:
            self.process.kill()
            self.process.wait()
            return "hang", f"no answer in {LIMIT_S:.0f} s"
        if not line:
            return "crash", f"exit code {self.process.wait()}"
        verdict, _, detail = line.rstrip("\n").partition("\t")
        return verdict, detail

    def _answer(self, limit_s: float) -> str | None:
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)
            if not selector.select(limit_s):
                return None
        return self.process.stdout.readline()

    def close(self) -> None:
        if self.process is not None:
            self.process.stdin.close()
            self.process.stdout.close()
            self.process.wait()


def run(cases: int, decoders: list[str], *, seed: int, keep: Path | None = None) -> list[Outcome]:
    """Damage `cases` files and judge each with every decoder."""
    rng, outcomes = random.Random(seed), []
    children = [Child(decoder) for decoder in decoders]
    with tempfile.TemporaryDirectory() as folder:
        clips = make_clips(Path(folder))
        for number in range(cases):
            name = rng.choice(sorted(clips))
            what, data = damage(name, clips[name], rng)
            path = Path(folder) / f"case{number}_{name}"
            path.write_bytes(data)
            for child in children:
                outcome = Outcome(f"{number} {name} {what}", child.decoder, *child.judge(path))
                outcomes.append(outcome)
                if outcome.is_fault and keep:
                    keep.mkdir(parents=True, exist_ok=True)
                    (keep / path.name).write_bytes(data)
            path.unlink()
    for child in children:
        child.close()
    return outcomes


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--decoders", nargs="+", default=["pyav", "torchcodec"])
    parser.add_argument("--keep", type=Path, help="a folder for the files that show a fault")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print("ready", flush=True)
        for line in sys.stdin:
            verdict, detail = judge(line.strip(), args.child)
            print(verdict, detail.replace("\n", " "), sep="\t", flush=True)
        return 0
    outcomes = run(args.cases, args.decoders, seed=args.seed, keep=args.keep)
    for outcome in outcomes:
        if outcome.is_fault:
            print(outcome.decoder, outcome.case, outcome.verdict, outcome.detail, sep=" | ")
    for decoder in args.decoders:
        counts = collections.Counter(o.verdict for o in outcomes if o.decoder == decoder)
        print(decoder, dict(counts))
    return int(any(o.is_fault for o in outcomes))


if __name__ == "__main__":
    sys.exit(main())
