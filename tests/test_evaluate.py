"""From a training run to a verdict: converge leaves a run, evaluate lets it act."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import ROOT

from wamlab.__main__ import main
from wamlab.cli.converge import RECIPES, ConvergeConfig, converge, load_recipe
from wamlab.config import ConfigError, load_json, replace, save_json, to_dict
from wamlab.data.corpus import Corpus, CorpusLoader
from wamlab.data.loader import DataConfig
from wamlab.data.metadata import DatasetError
from wamlab.data.toy_env import ToyConfig
from wamlab.data.toy_play import ToyPlayConfig, play
from wamlab.evaluate.load import find_run, open_policy
from wamlab.evaluate.policy import PolicyConfig
from wamlab.measure import read_records
from wamlab.model.sampling import SamplingConfig
from wamlab.model.stored import CheckpointError
from wamlab.model.wam import WAMConfig, WorldActionModel
from wamlab.model.weights import save_policy
from wamlab.train.build import with_prompt_template
from wamlab.train.config import TrainConfig
from wamlab.train.trainer import train

VAE = str(ROOT / "data_samples/vae_tiny.safetensors")
PLAY = ToyPlayConfig(world=ToyConfig(objects=1, plates=1, rig="small"), episodes=2, every=12)
QUICK = PolicyConfig(
    context_chunks=1, sampling=SamplingConfig(guidance=1.0, steps=2, dit_steps="all")
)
CONFIG = ConvergeConfig(
    name="test",
    play=PLAY,
    train=TrainConfig(
        model=WAMConfig(layers=1, vae_weights=VAE),
        steps=3,
        global_batch=4,
        device="cpu",
        optimizations=("shortcuts", "fused_adamw", "batched_encoders", "prompt_cache"),
    ),
    policy=QUICK,
    evaluate_every=2,
    evaluate_episodes=1,
    episodes=2,
    max_steps=30,
)


@pytest.fixture(scope="module")
def proof(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("converge")
    for which in ("official", "optimised"):
        converge(CONFIG, seed=1, which=which, out=out)
    return out


@pytest.fixture(scope="module")
def corpus(proof: Path) -> Corpus:
    return Corpus.load(next(proof.glob("corpus_*")))


def test_both_ways_learn_the_same_and_leave_records(proof):
    official, optimised = read_records(proof / "records.jsonl")
    assert (official.name, optimised.name) == ("official", "optimised")
    assert official.optimizations == ()
    assert len(official.losses) == 3
    np.testing.assert_allclose(official.losses, optimised.losses, rtol=1e-4)
    for record in (official, optimised):
        assert record.scope == "closed_loop"
        assert record.encoders == "cached"
        assert record.extra["seed"] == 1
        assert [point["step"] for point in record.extra["curve"]] == [2, 3]
        assert record.extra["episodes"] == 2
        assert record.extra["seconds_to_80"] is None
        assert record.extra["success_low"] <= record.extra["success_rate"]


def test_a_run_whose_record_is_there_is_not_repeated(proof):
    before = (proof / "records.jsonl").read_text()
    record = converge(CONFIG, seed=1, which="official", out=proof)
    assert record.extra["seed"] == 1
    assert (proof / "records.jsonl").read_text() == before


def test_the_run_that_is_left_acts(proof, capsys):
    run = proof / "optimised_1"
    words = ["--episodes", "2", "--batch", "2", "--max-steps", "24", "--videos", "1"]
    assert main(["evaluate", str(run), *words]) == 0
    said = capsys.readouterr().out
    assert "success  0 of 2 episodes, 0.0% (95 % interval 0.0% to" in said
    (record,) = read_records(run / "evaluation/records.jsonl")
    assert (record.scope, record.extra["episodes"], record.data) == ("closed_loop", 2, "toy")
    (film,) = (run / "evaluation/videos").glob("episode_00_put_the_*.mp4")
    assert film.stat().st_size > 1000


def test_open_loop_on_a_lerobot_data_set(proof, capsys, tmp_path):
    words = ["--data", str(ROOT / "data_samples/droid_mini"), "--held-out", "4", "6"]
    run = proof / "optimised_1"
    out = ["--chunks", "3", "--out", str(tmp_path)]
    assert main(["evaluate", str(run), *words, *out]) == 0
    assert "mean absolute action error over 3 chunks: joint_position" in capsys.readouterr().out
    (record,) = read_records(tmp_path / "records.jsonl")
    assert record.scope == "open_loop"
    assert set(record.extra["action_error"]) == {"joint_position", "gripper_position"}
    assert len(record.extra["action_error_by_step"]["joint_position"]) == 24
    assert 0 < record.extra["mean_action_error"]["joint_position"] < 1


def test_checkpoint_and_export_of_a_training_run_are_the_same_policy(tmp_path):
    config = TrainConfig(
        model=WAMConfig(layers=1),
        data=DataConfig(root=str(ROOT / "data_samples/droid_mini"), embodiment="toy-small"),
        steps=2,
        warmup_steps=0,
        global_batch=1,
        device="cpu",
        out=str(tmp_path),
        save_every=2,
        export=True,
        optimizations=("fused_adamw",),
    )
    train(config)
    opened = [
        open_policy(path, QUICK)
        for path in (tmp_path, tmp_path / "weights", tmp_path / "checkpoints/step_00000002")
    ]
    weights = [dict(policy.model.dit.named_parameters()) for policy in opened]
    for name, value in weights[0].items():
        assert all(torch.equal(value, other[name]) for other in weights[1:]), name
    fresh = dict(open_policy(tmp_path, QUICK).model.dit.named_parameters())
    assert any((weights[0][n] != torch.zeros_like(fresh[n])).any() for n in fresh)
    assert opened[0].codec.embodiment.name == "toy-small"


def test_public_weights_bring_their_prompt_template_or_a_warning(tmp_path, capsys):
    """A prompt of another form is silently off the distribution of released weights."""
    policy = tmp_path / "public" / "checkpoint-10"
    save_policy(WorldActionModel(WAMConfig(layers=1)).dit, policy)
    config = TrainConfig(
        model=WAMConfig(layers=1),
        data=DataConfig(root=str(ROOT / "data_samples/droid_mini"), embodiment="toy-small"),
        validation=DataConfig(root=str(ROOT / "data_samples/droid_mini"), prompt="Mine."),
        validate_every=1,
        validation_batches=1,
        policy=str(policy),
        steps=1,
        warmup_steps=0,
        global_batch=1,
        device="cpu",
        out=str(tmp_path / "run"),
        export=True,
    )
    assert with_prompt_template(config) == config
    assert "has no experiment_cfg that names its prompt template" in capsys.readouterr().out
    experiment = tmp_path / "public" / "experiment_cfg"
    experiment.mkdir()
    (experiment / "conf.yaml").write_text("prompt_template: 'Do {instr}.'")
    with pytest.raises(ConfigError, match=r"'Do {instr}.' may use {instruction} and {views} only"):
        with_prompt_template(config)
    own = replace(config, {"data.prompt": "Please {instruction}."})
    assert with_prompt_template(own) == own
    (experiment / "conf.yaml").write_text("prompt_template: 'Do {instruction}.'")
    assert with_prompt_template(config).validation.prompt == "Mine."
    train(config)
    assert capsys.readouterr().out.count("WARNING") == 0
    assert json.loads((tmp_path / "run/run.json").read_text())["data"]["prompt"] == (
        "Do {instruction}."
    )
    robot = open_policy(tmp_path / "run", QUICK).embodiment
    assert robot.prompt_text("Lift the cube.") == "Do lift the cube."


def test_a_folder_that_is_no_run_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r"no run.json in it or above it; name a run's"):
        find_run(tmp_path)
    save_json({"model": to_dict(WAMConfig()), "data": None}, tmp_path / "run.json")
    with pytest.raises(CheckpointError, match=r"neither weights/ nor a complete checkpoint"):
        find_run(tmp_path)
    (tmp_path / "weights").mkdir()
    with pytest.raises(CheckpointError, match=r"no acting.json, and run.json names no data set"):
        find_run(tmp_path).acting()


def test_a_corpus_holds_what_was_played(corpus):
    played = play(0, config=PLAY)
    robot, codec = corpus.codec.embodiment, corpus.codec
    rows = corpus.tensors["episode"] == 0
    starts = np.arange(0, len(played.states) - robot.horizon, PLAY.every)
    assert int(rows.sum()) == len(starts)
    anchors = played.states[starts]
    normal = corpus.tensors["action"][rows].numpy().reshape(-1, 32)
    decoded = codec.decode_action(normal, anchors)
    wanted = played.actions[starts[:, None] + np.arange(robot.horizon)]
    inside = np.abs(normal.reshape(*wanted.shape[:2], -1)[..., :8]) < 1  # the rest is clipped
    np.testing.assert_allclose(decoded[inside], wanted[inside], atol=1e-5)
    assert inside.mean() > 0.7
    assert set(corpus.prompts) == {robot.prompt_text(play(s, config=PLAY).task) for s in (0, 1)}


def test_the_same_play_again(corpus):
    first, again = play(1, config=PLAY), play(1, config=PLAY)
    np.testing.assert_array_equal(first.views, again.views)
    np.testing.assert_array_equal(first.actions, again.actions)


@pytest.mark.parametrize("strategy", ["step", "shard", "union"])
def test_the_order_of_a_corpus_does_not_depend_on_ranks_or_micro_batches(corpus, strategy):
    how = {"global_batch": 4, "seed": 3, "strategy": strategy}
    whole = CorpusLoader(corpus, micro_batch=4, **how)
    parts = [CorpusLoader(corpus, micro_batch=1, rank=r, world_size=2, **how) for r in (0, 1)]
    for step in range(3):
        ids = next(whole)["sample_id"].tolist()
        assert ids == whole.ids_of_step(step).tolist()
        assert ids == [int(next(p)["sample_id"]) for p in parts for _ in range(2)]


def test_a_corpus_that_cannot_be_used_is_refused(corpus, tmp_path):
    with pytest.raises(DatasetError, match=r"no corpus.json, so no corpus"):
        Corpus.load(tmp_path)
    less = {n: t for n, t in corpus.tensors.items() if n != "clip_feature"}
    with pytest.raises(DatasetError, match="clip_feature missing"):
        Corpus(less, corpus.prompts, corpus.words, corpus.codec, {})
    with pytest.raises(DatasetError, match="as many rows each"):
        dataclasses.replace(corpus, tensors=corpus.tensors | {"state": torch.zeros(1)})
    with pytest.raises(ConfigError, match="must be a multiple of 2 ranks times micro_batch 3"):
        CorpusLoader(corpus, global_batch=8, micro_batch=3, seed=0, world_size=2)
    with pytest.raises(ConfigError, match="every must be a multiple of the 3 steps"):
        ToyPlayConfig(every=4)


def test_the_recipes_are_whole(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert Path(load_recipe("toy-cpu").train.model.vae_weights).is_file()
    assert {p.stem for p in RECIPES.glob("*.json")} >= {"toy-cpu", "toy-gpu"}
    for path in RECIPES.glob("*.json"):
        config = load_json(ConvergeConfig, path)
        assert config.name == path.stem
        assert path.read_text() == json.dumps(to_dict(config), indent=2) + "\n"
