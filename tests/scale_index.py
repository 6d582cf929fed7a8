"""Opens an index of 100,000 episodes (30 million frames, 8 columns) and says what it costs.

    python tests/scale_index.py FOLDER [--episodes 100000] [--version v3.0]

Not part of the suite: it writes a few GB of synthetic tables into FOLDER the first time. A worker
is a fresh process that opens the data set, finds the valid starts and reads the numbers of 2,000
random samples. Private memory is what the process cannot share with others: its anonymous pages.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from tqdm import tqdm

from wamlab.data.embodiment import EMBODIMENTS
from wamlab.data.lerobot import LeRobotDataset
from wamlab.data.lerobot_write import PATHS
from wamlab.data.sampler import Sampler
from wamlab.data.windows import WindowDataset

LENGTH, PER_FILE = 300, 1000
CAMERAS = [f"observation.images.{v}" for v in EMBODIMENTS["toy"].views]


def write_tables(root: Path, episodes: int, version: str) -> None:
    """Write tables and meta/, no videos; eight columns a frame."""
    rng = np.random.default_rng(0)
    together = PER_FILE if version == "v3.0" else 1
    rows = LENGTH * together
    columns = {
        name: pa.FixedSizeListArray.from_arrays(rng.random(rows * 8, np.float32), 8)
        for name in ("observation.state", "action")
    }
    steps = np.tile(np.arange(LENGTH), together)
    for first in tqdm(range(0, episodes, together), desc="writing tables"):
        ids = np.repeat(np.arange(first, first + together), LENGTH)
        table = columns | {
            "timestamp": (steps / 15).astype(np.float32),
            "frame_index": steps,
            "episode_index": ids,
            "index": np.arange(first * LENGTH, first * LENGTH + rows),
            "task_index": ids % 500,
            "next.done": steps == LENGTH - 1,
        }
        where = {"episode_chunk": first // 1000, "episode_index": first}
        where |= {"chunk_index": 0, "file_index": first // together}
        path = root / PATHS[version]["data_path"].format(**where)
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.table(table), path, compression="none", use_dictionary=False)
    write_meta(root, episodes, version, together)


def write_meta(root: Path, episodes: int, version: str, together: int) -> None:
    """Write meta/ for such tables."""
    video = {"dtype": "video", "shape": [180, 320, 3], "names": ["height", "width", "channels"]}
    info = {"codebase_version": version, "fps": 15, "chunks_size": 1000, **PATHS[version]}
    info |= {"total_episodes": episodes, "total_frames": episodes * LENGTH}
    info["features"] = dict.fromkeys(CAMERAS, video)
    (root / "meta/episodes/chunk-000").mkdir(parents=True)
    tasks = [{"task_index": i, "task": f"task number {i}"} for i in range(500)]
    ids = np.arange(episodes)
    if version == "v3.0":
        found = {"episode_index": ids, "length": np.full(episodes, LENGTH)}
        found |= {"dataset_from_index": ids * LENGTH}
        found |= {"data/chunk_index": ids * 0, "data/file_index": ids // together}
        for key in CAMERAS:
            found |= {f"videos/{key}/chunk_index": ids * 0, f"videos/{key}/file_index": ids // 50}
            found[f"videos/{key}/from_timestamp"] = ids % 50 * LENGTH / 15
            found[f"videos/{key}/to_timestamp"] = (ids % 50 + 1) * LENGTH / 15
        pq.write_table(pa.table(found), root / "meta/episodes/chunk-000/file-000.parquet")
        pq.write_table(pa.Table.from_pylist(tasks), root / "meta/tasks.parquet")
    else:
        with (root / "meta/episodes.jsonl").open("w") as file:
            for i in ids.tolist():
                row = {"episode_index": i, "tasks": [f"task number {i % 500}"], "length": LENGTH}
                file.write(json.dumps(row) + "\n")
        lines = "".join(json.dumps(t) + "\n" for t in tasks)
        (root / "meta/tasks.jsonl").write_text(lines)
    (root / "meta/info.json").write_text(json.dumps(info))


def private_mb() -> float:
    """Return this process's anonymous memory in MB."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Anonymous")) / 1024


def open_as_worker(root: Path) -> None:
    """Open the data set as a worker does and print what it cost."""
    before, start = private_mb(), time.perf_counter()
    data = LeRobotDataset(root, EMBODIMENTS["toy"])
    opened = time.perf_counter()
    windows = WindowDataset(data)
    found = time.perf_counter()
    sampler = Sampler(windows, seed=0)
    for index in sampler.ids_of_step(0, 2000).tolist():
        windows._numbers(index, 0, windows.index.locate(index))
    read = time.perf_counter()
    print(
        f"opened {len(data.episodes):,} episodes ({len(data):,} frames, "
        f"{len(data.columns.arrays)} mapped columns) in {opened - start:.2f} s, "
        f"{len(windows):,} starts in {found - opened:.2f} s, "
        f"{(read - found) / 2:.2f} ms a sample's numbers, "
        f"private memory {private_mb():.0f} MB, {private_mb() - before:.0f} MB of it for the index"
    )


def main() -> None:
    """Write what is missing, then open it in two fresh processes."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--episodes", type=int, default=100_000)
    parser.add_argument("--version", default="v3.0", choices=tuple(PATHS))
    parser.add_argument("--worker", action="store_true", help="open only, in this process")
    args = parser.parse_args()
    root = args.folder / f"{args.version}-{args.episodes}"
    if args.worker:
        return open_as_worker(root)
    if not (root / "meta/info.json").is_file():
        write_tables(root, args.episodes, args.version)
    command = [sys.executable, __file__, str(args.folder), "--worker"]
    command += ["--episodes", str(args.episodes), "--version", args.version]
    for what in ("first, with the conversion", "again", "again"):
        print(f"{what}:", flush=True)
        subprocess.run(command, check=True)


if __name__ == "__main__":
    main()
