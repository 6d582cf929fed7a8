import numpy as np
import pytest

from wamlab.config import ConfigError
from wamlab.data.codec import Codec
from wamlab.data.embodiment import EMBODIMENTS
from wamlab.data.normalize import (
    NORMALIZATIONS,
    Statistics,
    denormalize,
    normalize,
    relative_rows,
)

ROWS = np.random.default_rng(0).normal(size=(500, 6)) * [1, 5, 0.1, 1, 1, 0] + [0, 2, 0, -3, 0, 4]
STATS = Statistics.of(ROWS)


def inside_range(mode: str) -> np.ndarray:
    return np.clip(ROWS, STATS.q01, STATS.q99) if mode == "q99" else ROWS


@pytest.mark.parametrize("mode", [m for m in NORMALIZATIONS if m != "binary"])
def test_the_inverse_undoes_what_the_forward_did(mode):
    x = inside_range(mode)[:, :5]
    stats = STATS[:5]
    back = denormalize(normalize(x, stats, mode), stats, mode)
    np.testing.assert_allclose(back, x, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("mode", NORMALIZATIONS)
def test_a_dimension_that_never_changes_stays_finite(mode):
    y = normalize(np.array([[4.0], [0.5], [-7.0]]), STATS[5:], mode)
    assert np.isfinite(y).all()
    assert np.isfinite(denormalize(y, STATS[5:], mode)).all()
    still = {"q99": [1, 0.5, -1], "min_max": [0, 0, 0], "mean_std": [4, 0.5, -7]}
    if mode in still:
        assert y[:, 0].tolist() == still[mode]


@pytest.mark.parametrize("mode", ["q99", "min_max", "scale", "binary"])
def test_bounded_modes_end_in_minus_one_to_one(mode):
    far = ROWS * 1.0 if mode in ("scale", "min_max") else ROWS * 100
    assert np.abs(normalize(far, STATS, mode)).max() <= 1.0


def test_q99_by_hand():
    stats = STATS[:1]
    y = normalize(np.array([stats.q01, stats.q99, (stats.q01 + stats.q99) / 2]), stats, "q99")
    np.testing.assert_allclose(y[:, 0], [-1, 1, 0], atol=1e-6)


def test_relative_rows_are_every_start_and_step():
    rng = np.random.default_rng(1)
    action, state = rng.normal(size=(30, 3)), rng.normal(size=(30, 3))
    rows = relative_rows(action, state, 8)
    expected = [action[i + j] - state[i] for i in range(23) for j in range(8)]
    np.testing.assert_array_equal(rows, expected)
    assert relative_rows(action[:7], state[:7], 8).shape == (0, 3)
    third = relative_rows(action, state, 8, every=3)
    np.testing.assert_array_equal(third, rows.reshape(23, 8, 3)[::3].reshape(-1, 3))


def test_statistics_survive_json_and_say_what_is_missing():
    again = Statistics.from_json(STATS.to_json(), "x")
    np.testing.assert_array_equal(again.q99, STATS.q99)
    with pytest.raises(ConfigError, match=r"stats.json: action has no q01, q99; it has mean, std"):
        Statistics.from_json({"mean": 0, "std": 0, "min": 0, "max": 0}, "stats.json: action")


def make_codec() -> Codec:
    rng = np.random.default_rng(2)
    toy = EMBODIMENTS["toy"]
    joint, gripper = Statistics.of(rng.normal(size=(900, 7))), Statistics.of(rng.random((900, 1)))
    relative = Statistics.of(rng.normal(size=(900, 7)) * 0.3)
    return Codec(toy, (joint, gripper), (relative, gripper))


def test_actions_are_relative_to_their_own_block_and_come_back():
    codec, rng = make_codec(), np.random.default_rng(3)
    state = rng.normal(size=(4, 8)) * 0.1
    action = np.repeat(state[:, None], 24, 1) + rng.uniform(-0.3, 0.3, (4, 24, 8))
    action[..., 7] = rng.uniform(0.1, 0.9, (4, 24))
    values = codec.encode_action(action, state)
    assert values.shape == (96, 32)
    assert np.abs(values).max() <= 1
    assert not values[:, 8:].any()
    # by hand: step 5 of block 2, joint 3
    s = codec.action[0]
    rel = action[2, 5, 3] - state[2, 3]
    by_hand = 2 * (rel - s.q01[3]) / (s.q99[3] - s.q01[3]) - 1
    assert values[2 * 24 + 5, 3] == pytest.approx(by_hand, abs=1e-6)
    np.testing.assert_allclose(codec.decode_action(values, state), action, atol=1e-5)


def test_a_codec_is_stored_beside_a_checkpoint():
    codec = make_codec()
    again = Codec.from_json(codec.embodiment, codec.to_json())
    state = np.random.default_rng(4).normal(size=(2, 8))
    np.testing.assert_array_equal(again.encode_state(state), codec.encode_state(state))
    values = codec.to_json()
    del values["action"]["gripper_position"]
    with pytest.raises(ConfigError, match=r"no statistics of action 'gripper_position'"):
        Codec.from_json(codec.embodiment, values)
    values = codec.to_json()
    values["state"]["joint_position"] = STATS.to_json()
    with pytest.raises(ConfigError, match=r"have 6 dimensions, the part has 7"):
        Codec.from_json(codec.embodiment, values)


def test_masks_cover_the_real_dimensions():
    state, action = make_codec().masks()
    assert state.shape == (64,)
    assert action.shape == (32,)
    assert (state.sum(), action.sum()) == (8, 8)
    assert state[:8].all()
