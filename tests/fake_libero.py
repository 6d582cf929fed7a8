"""Stands in for libero_client.py where there is no simulator: the same files, the same talk."""

import argparse
import json
import sys
from pathlib import Path

import numpy as np
from websockets.sync.client import connect

from wamlab.evaluate.wire import packb, unpackb

VIEWS = ("image", "wrist_image")


def keep(out, number, steps, success):
    rng = np.random.default_rng(number)
    views = {v: np.full((steps, 32, 32, 3), 40 * number, np.uint8) for v in VIEWS}
    numbers = {"state": rng.normal(size=(steps, 8)), "actions": rng.uniform(-1, 1, (steps, 7))}
    np.savez(out / f"episode_{number:03d}.npz", task=np.array("lift"), **views, **numbers)
    found = {"episode": number, "task": "lift", "success": success, "steps": steps}
    with (out / "results.jsonl").open("a") as file:
        file.write(json.dumps(found) + "\n")


def ask(socket):
    views = {f"observation/{v}": np.zeros((1, 32, 32, 3), np.uint8) for v in VIEWS}
    socket.send(packb({**views, "observation/state": np.zeros(8, np.float32), "prompt": "lift"}))
    return unpackb(socket.recv())["actions"]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("what")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--episodes", type=int)
    parser.add_argument("--port", type=int)
    args = parser.parse_args()
    if args.what == "record":
        for number in range(args.episodes):
            keep(args.out, number, steps=80, success=number != 1)
        return 0
    with connect(f"ws://127.0.0.1:{args.port}", compression=None) as socket:
        assert unpackb(socket.recv())["n_external_cameras"] == 1
        for number in range(args.episodes):
            assert ask(socket).shape == (16, 7)
            keep(args.out, number, steps=16, success=number == 0)
    return 0


if __name__ == "__main__":
    sys.exit(main())
