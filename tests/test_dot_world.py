"""The world of one dot, the model that was trained on it, and the pictures of notebook 01."""

import matplotlib.pyplot as plt
import pytest
import torch
from matplotlib.axes import Axes

from wamlab.draws import Draws
from wamlab.jupyter import dot_world, plot_model
from wamlab.model import flow_matching
from wamlab.model.attention import Layout
from wamlab.model.cached_dit import Conditioning
from wamlab.model.dit import WorldActionDiT
from wamlab.model.flow_matching import schedule
from wamlab.model.sampling import Sampler, SamplingConfig, rollout
from wamlab.model.weights import load_policy


@pytest.fixture(autouse=True)
def closed_figures():
    plt.switch_backend("agg")
    yield
    plt.close("all")


def test_what_is_drawn_is_found_again():
    batch = dot_world.episodes(Draws(0, 0, torch.arange(32)))
    place = (batch["state"] + 1) * dot_world.GRID / 2
    found = dot_world.locate(batch["latents"])[:, :-1:2]
    assert (found - place).abs().max() < 0.3


def test_an_episode_depends_on_its_id_alone():
    many = dot_world.episodes(Draws(0, 3, torch.arange(8)))
    one = dot_world.episodes(Draws(0, 3, torch.tensor([5])))
    assert all(torch.equal(one[k][0], many[k][5]) for k in one)


def test_training_lowers_the_loss_of_other_episodes():
    draws = Draws(1, 0, torch.arange(64))

    def held_out(dit):
        with torch.no_grad():
            return flow_matching.loss(dit, dot_world.episodes(draws), draws)["loss"].item()

    torch.manual_seed(0)
    dit, losses = dot_world.train(48, batch=4)
    assert held_out(dit) < 0.85 * held_out(WorldActionDiT(dot_world.CONFIG))
    assert len(losses) == 48


def test_the_shipped_model_moves_the_dot_where_the_prompt_says(data_samples):
    dit = WorldActionDiT(dot_world.CONFIG)
    load_policy(dit, data_samples / "dot_world")
    middle = torch.full((4, 1, 2), 3.5)
    words = dot_world.condition(torch.arange(4))
    given = Conditioning(context=words["prompt_embedding"], clip_feature=words["clip_feature"])
    for dit_steps in ("all", "8"):
        sampler = Sampler(dit, SamplingConfig(guidance=1.0, dit_steps=dit_steps))
        result = rollout(sampler, dot_world.render(middle), dot_world.states(middle), given)
        heading = torch.tensor(list(dot_world.DIRECTIONS.values()))
        moved = dot_world.locate(result.latents)[:, -1] - 3.5
        assert (moved - 2 * dot_world.PIXELS_PER_FRAME * heading).abs().max() < 0.6
        assert (result.actions - 0.8 * heading[:, None]).abs().max() < 0.2


def test_every_picture_is_drawn():
    layout = Layout(
        frames=5, frame_tokens=2, frames_per_block=2, actions_per_block=3, states_per_block=1
    )
    names = {"cameras": ("a", "b"), "channels": ("x", "y")}
    views = torch.zeros(2, 9, 3, 8, 12, dtype=torch.uint8)
    mask = plot_model.plot_mask(layout)
    assert [t.get_text() for t in mask.get_xticklabels()] == [g.name for g in layout.groups()]
    pictures = [
        plot_model.plot_sample(views, torch.zeros(24, 2), prompt="pick", fps=15, **names),
        plot_model.plot_shares({"m": {"a": 1.0, "b": 3.0}}),
        plot_model.plot_equal({"w": (1.0, 1.0), "v": (2.0, 2.1)}, labels=("a", "b")),
        plot_model.plot_schedule(schedule()),
        plot_model.plot_latents({"r": torch.zeros(3, 4, 4)}, titles=("1", "2", "3")),
    ]
    assert all(isinstance(p, Axes) for p in pictures)
    plt.figure(1).canvas.draw()
