"""`wamlab serve`: from a run's folder to actions over a WebSocket, and a clean end."""

import os
import re
import signal
import subprocess
import sys

import numpy as np
import pytest
from conftest import ROOT
from websockets.exceptions import ConnectionClosedOK
from websockets.sync.client import connect

from wamlab.__main__ import main
from wamlab.config import save_json
from wamlab.data.data_config import DataConfig
from wamlab.data.toy import ToyWorld
from wamlab.evaluate.wire import packb, unpackb
from wamlab.model.wam import WAMConfig, WorldActionModel
from wamlab.model.weights import save_policy


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    config = WAMConfig(layers=1)
    save_policy(WorldActionModel(config).dit, folder / "weights")
    data = DataConfig(root=str(ROOT / "data_samples/droid_mini"))
    save_json({"model": config, "data": data, "precision": "fp32"}, folder / "run.json")
    return folder


def test_a_checkpoint_answers_and_ends_on_an_interrupt(run_folder):
    command = [sys.executable, "-m", "wamlab", "serve", str(run_folder), "--port", "0"]
    options = ["--device", "cpu", "--image-size", "180", "320"]
    server = subprocess.Popen(
        [*command, *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    try:
        line = server.stdout.readline()
        found = re.fullmatch(r"serving toy on ws://127\.0\.0\.1:(\d+); Ctrl-C stops\n", line)
        assert found, line + server.stdout.read()
        with connect(f"ws://127.0.0.1:{found[1]}", compression=None, max_size=None) as socket:
            assert unpackb(socket.recv())["image_resolution"] == [180, 320]
            for _ in range(2):
                socket.send(packb(observation()))
                actions = unpackb(socket.recv(timeout=120))
                assert actions.shape == (24, 8)
                assert np.isfinite(actions).all()
            server.send_signal(signal.SIGINT)
            with pytest.raises(ConnectionClosedOK):
                socket.recv(timeout=60)
        assert server.wait(60) == 0
        assert server.stdout.read() == "stopped\n"
    finally:
        server.kill()
        server.wait()
        server.stdout.close()


def observation():
    world = ToyWorld()
    state = world.reset(0)
    views = {f"observation/{name}": view for name, view in world.render().items()}
    joints = {"observation/joint_position": state[:7], "observation/gripper_position": state[7:]}
    return {"endpoint": "infer", "session_id": "s", "prompt": world.task, **views, **joints}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--port", "99999"], "port 99999: a port is 0"),
        (["--sessions", "0"], "sessions must be at least 1"),
        (["--host", "203.0.113.7"], "cannot listen on 203.0.113.7:8000"),
        ([], "no run.json in it or above it"),
    ],
)
def test_a_mistake_is_one_line(run_folder, tmp_path, capsys, options, message):
    checkpoint = run_folder if "--host" in options else tmp_path
    assert main(["serve", str(checkpoint), "--device", "cpu", *options]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert ("open to whoever reaches it" in captured.out) == ("--host" in options)
