import time
from pathlib import Path

import av
import numpy as np
import pyarrow.parquet as pq
import pytest

from wamlab.config import ConfigError
from wamlab.data import metadata
from wamlab.data.embodiment import EMBODIMENTS
from wamlab.data.lerobot import LeRobotDataset
from wamlab.data.lerobot_write import Episode, encode_video, write_dataset
from wamlab.data.toy import record, write_toy
from wamlab.data.toy_arm import forward, inverse
from wamlab.data.toy_env import Expert, ToyConfig, ToyWorld
from wamlab.data.windows import WindowDataset


@pytest.fixture(scope="module")
def recorded() -> Episode:
    """The third episode of data_samples/droid_mini, made anew."""
    return record(2, config=ToyConfig())


def run_expert(seed: int, *, noise: float = 0.0, config: ToyConfig | None = None) -> ToyWorld:
    world, rng = ToyWorld(config or ToyConfig()), np.random.default_rng(seed)
    world.reset(seed)
    expert = Expert(world)
    for _ in range(300):
        if expert.done and world.success():
            break
        world.step(expert() + np.array([*rng.normal(0, noise, 7), 0.0]))
    return world


def test_the_arms_inverse_reaches_the_point_it_was_asked_for():
    rng = np.random.default_rng(0)
    for _ in range(50):
        tool = rng.uniform([0.32, -0.3, 0.03], [0.64, 0.3, 0.3])
        yaw, swivel = rng.uniform(-3, 3), rng.uniform(-0.5, 1)
        _, _, reached, hand = forward(inverse(tool, yaw, swivel))
        np.testing.assert_allclose(reached, tool, atol=1e-9)
        np.testing.assert_allclose(hand[:, 2], [0, 0, -1], atol=1e-9)
        np.testing.assert_allclose(hand[:2, 0], [np.cos(yaw), np.sin(yaw)], atol=1e-9)


@pytest.mark.parametrize("noise", [0.0, 0.01])
def test_the_expert_solves_every_task_also_when_it_is_shaken(noise):
    assert all(run_expert(seed, noise=noise).success() for seed in range(12))


def test_the_expert_comes_back_when_the_object_is_taken_from_it():
    world = ToyWorld()
    world.reset(2)
    expert = Expert(world)
    while expert.phase < 4:
        world.step(expert())
    assert world.held is world.objects[0]
    world.held, world.gripper = None, 0.0
    while not (expert.done and world.success()):
        world.step(expert())
        assert expert.phase < 9


def test_larger_and_smaller_tables_can_be_laid():
    for objects, plates in ((1, 1), (4, 3)):
        config = ToyConfig(objects=objects, plates=plates)
        world = run_expert(3, config=config)
        assert world.success()
        assert len({(o.shape, o.color) for o in world.objects}) == objects
        assert len({p.color for p in world.plates}) == plates


def test_tasks_name_what_is_to_be_done():
    world = ToyWorld()
    tasks = set()
    for seed in range(40):
        world.reset(seed)
        tasks.add(world.task)
        thing, plate = world.objects[0], world.plates[0]
        assert world.task == f"put the {thing.color} {thing.shape} on the {plate.color} plate"
    assert len(tasks) > 25


def test_success_needs_the_named_object_at_rest_on_the_named_plate():
    world = run_expert(1)
    assert world.success()
    thing, plate = world.objects[0], world.plates[0]
    world.objects[0].position = thing.position + np.array([0.09, 0, 0])
    assert not world.success()
    world.objects[0].position = np.array([*world.plates[1].position[:2], thing.position[2]])
    assert not world.success()
    world.objects[0].position = np.array([*plate.position[:2], 0.2])
    assert not world.success()
    world.step(world.state())  # it falls
    for _ in range(5):
        world.step(world.state())
    assert world.success()


def test_a_step_is_what_the_action_says():
    world = ToyWorld()
    state = world.reset(0)
    assert state.dtype == np.float32
    assert state.shape == (8,)
    goal = state + np.array([0.05] * 7 + [1.0])
    for _ in range(12):
        state = world.step(goal)
    np.testing.assert_allclose(state, goal, atol=1e-4)
    for bad in (np.zeros(7), np.full(8, np.nan)):
        with pytest.raises(ConfigError, match=r"an action is 8 finite numbers, got"):
            world.step(bad)
    with pytest.raises(ConfigError, match=r"1 to 6 objects and 1 to 3 plates, got 0 and 2"):
        ToyConfig(objects=0)
    with pytest.raises(ConfigError, match=r"unknown toy camera rig 'droit'.*mean 'droid'"):
        ToyConfig(rig="droit")
    with pytest.raises(ConfigError, match=r"unknown toy color 'rad'.*mean 'red'"):
        ToyConfig(colors=("rad",))
    with pytest.raises(ConfigError, match=r"2 objects of 1 kinds .* no two may be alike"):
        ToyConfig(shapes=("cube",), colors=("red",))


def test_the_world_follows_from_its_seed():
    first, again, other = ToyWorld(), ToyWorld(), ToyWorld()
    for world, seed in ((first, 7), (again, 7), (other, 8)):
        world.reset(seed)
    action = first.state() + 0.1
    np.testing.assert_array_equal(first.step(action), again.step(action))
    for name, view in first.render().items():
        np.testing.assert_array_equal(view, again.render()[name])
        assert (view != other.render()[name]).any()


@pytest.mark.parametrize(
    ("rig", "sizes"), [("droid", [(180, 320)] * 3), ("libero", [(256, 256)] * 2)]
)
def test_views_have_the_sizes_and_names_that_the_robot_expects(rig, sizes):
    world = ToyWorld(ToyConfig(rig=rig))
    world.reset(0)
    views = world.render()
    assert tuple(views) == EMBODIMENTS["toy" if rig == "droid" else "libero"].views
    assert [v.shape[:2] for v in views.values()] == sizes
    assert all(v.dtype == np.uint8 for v in views.values())


def test_every_part_of_the_state_can_be_seen():
    world = ToyWorld()
    start = world.reset(4)
    before = world.render()
    for dimension in range(8):
        world.reset(4)
        goal = start.copy()
        goal[dimension] += 0.25
        for _ in range(4):
            world.step(goal)
        after = world.render()
        moved = {n: (np.abs(before[n].astype(int) - after[n]) > 20).mean() for n in before}
        assert max(moved.values()) > 0.002, (dimension, moved)


def test_thousands_of_steps_a_second():
    world = ToyWorld()
    world.reset(0)
    action = world.state() + 0.1
    start = time.process_time()
    for _ in range(1000):
        world.step(action)
    assert 1000 / (time.process_time() - start) > 1500  # 8,000 to 12,000 on a quiet core


def test_the_same_episode_writes_the_same_files(recorded, tmp_path):
    toy = EMBODIMENTS["toy"]
    names = {c: [f"d{i}" for i in range(8)] for c in ("observation.state", "action")}
    for name in ("a", "b"):
        settings = {"version": "v3.0", "fps": 15, "embodiment": toy, "names": names}
        write_dataset([recorded], root=tmp_path / name, **settings)
    found = (tmp_path / "a").rglob("*")
    files = sorted(p.relative_to(tmp_path / "a") for p in found if p.is_file())
    assert len(files) == 11
    for file in files:
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes(), file


def test_the_committed_samples_are_what_the_command_makes(recorded, data_samples: Path):
    table = pq.read_table(data_samples / "droid_mini/data/chunk-000/episode_000002.parquet")
    for name, values in recorded.columns.items():
        np.testing.assert_allclose(table[name].to_pylist(), values, atol=1e-5)
    data = LeRobotDataset(data_samples / "droid_mini", EMBODIMENTS["toy"], progress=False)
    windows = WindowDataset(data)
    steps = np.array([0, len(table) - 1])
    for name in data.embodiment.views:
        frames = data.frames(2, name, steps, windows.open_video).permute(0, 2, 3, 1).numpy()
        drawn = recorded.views[f"observation.images.{name}"][steps]
        assert np.abs(frames.astype(int) - drawn).mean() < 6  # H.264 at crf 23


@pytest.mark.parametrize("folder", ["droid_mini", "libero_mini"])
def test_the_committed_samples_are_small_and_long_enough(data_samples: Path, folder):
    info = metadata.read_info(data_samples / folder)
    episodes = metadata.read_episodes(info)
    assert episodes.lengths.min() >= 120
    assert info.total_frames == episodes.offsets[-1]
    assert sum(p.stat().st_size for p in (data_samples / folder).rglob("*.mp4")) < 6e6


def test_recorded_actions_are_the_experts_and_lead_the_state(recorded):
    state, action = recorded.columns["observation.state"], recorded.columns["action"]
    assert len(state) == len(action) >= 128
    lead = np.abs(action[:-1, :7] - state[1:, :7]).mean()
    stay = np.abs(action[:-1, :7] - state[:-1, :7]).mean()
    assert lead < stay
    assert set(np.unique(action[:, 7])) == {0.0, 1.0}
    assert state[:, 7].max() < 1  # the fingers stop at the object


def test_videos_are_encoded_as_droids_are(tmp_path):
    frames = np.random.default_rng(0).integers(0, 255, (260, 32, 32, 3), np.uint8)
    path = tmp_path / "x.mp4"
    path.write_bytes(encode_video(frames, 15).data)
    with av.open(str(path)) as file:
        stream = file.streams.video[0]
        packets = [p for p in file.demux(stream) if p.size]
        assert [i for i, p in enumerate(packets) if p.is_keyframe] == [0, 250]
        assert all(p.pts == p.dts for p in packets)  # no B-frames
        assert stream.average_rate == 15
        assert stream.codec_context.name == "h264"


@pytest.mark.slow
def test_a_data_set_does_not_depend_on_who_recorded_it(tmp_path):
    for workers in (1, 2):
        write_toy(tmp_path / f"{workers}", episodes=3, version="v3.0", seed=4, workers=workers)
    found = (tmp_path / "1").rglob("*")
    for file in (p.relative_to(tmp_path / "1") for p in found if p.is_file()):
        assert (tmp_path / "1" / file).read_bytes() == (tmp_path / "2" / file).read_bytes(), file
