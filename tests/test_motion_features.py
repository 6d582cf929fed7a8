"""Features that turn back into the motion, and metrics that see what they should."""

import math

import numpy as np
import pytest
import torch

from wamlab.motion.features import (
    Motion,
    Normalizer,
    about_z,
    accel_err,
    from_columns,
    from_features,
    heading,
    mpjpe_cm,
    pa_mpjpe_cm,
    skate,
    to_features,
    vel_err,
)
from wamlab.motion.segments import contacts
from wamlab.motion.synthetic import make


@pytest.fixture(scope="module")
def motion():
    clips = [make(s).clip.frames(60, 300) for s in (0, 1, 4)]
    places = [c.positions() for c in clips]
    down = np.stack([contacts(p, 120.0) for p in places])
    rot = np.stack([c.local_rot for c in clips])
    return Motion(*(torch.as_tensor(x) for x in (np.stack(places), rot, down)))


def moved(place, angle=0.7, shift=(3.0, -2.0, 0.0)):
    return place @ about_z(torch.tensor(angle, dtype=place.dtype)).T + place.new_tensor(shift)


def test_features_turn_back_into_the_motion(motion):
    features = to_features(motion, 120.0)
    assert features.shape[-1] == 8 + 12 * 19
    back = from_features(features, 120.0)
    assert mpjpe_cm(back.place, motion.place) < 1e-9
    again = to_features(back, 120.0)
    torch.testing.assert_close(again, features, atol=1e-9, rtol=1e-9)
    torch.testing.assert_close(back.rot[:, :, 1:], motion.rot[:, :, 1:])


def test_features_do_not_know_where_and_which_way(motion):
    turn = about_z(torch.tensor(2.0, dtype=torch.float64))
    rot = motion.rot.clone()
    rot[:, :, 0] = turn @ rot[:, :, 0]
    other = Motion(moved(motion.place, 2.0), rot, motion.contact)
    torch.testing.assert_close(to_features(other, 120.0), to_features(motion, 120.0))


def test_heading_is_unwrapped(motion):
    angles = torch.linspace(0, 9.0, motion.place.shape[1], dtype=torch.float64)
    turning = torch.einsum("tij,btkj->btki", about_z(angles), motion.place)
    found = heading(turning) - heading(motion.place)
    torch.testing.assert_close(found - found[:, :1], angles.expand_as(found))


def test_columns_make_rotations():
    rot = from_columns(torch.randn(50, 6, dtype=torch.float64))
    eye = torch.eye(3, dtype=torch.float64).expand_as(rot)
    torch.testing.assert_close(rot @ rot.mT, eye)
    assert torch.det(rot).min() > 0.999
    torch.testing.assert_close(from_columns(rot[..., :2].mT.flatten(1)), rot)


def test_normalizer(motion):
    features = to_features(motion, 120.0).flatten(0, 1)
    normal = Normalizer.of(features)
    assert normal.std.min() >= 1e-3
    torch.testing.assert_close(normal.undo(normal(features)), features)


def test_mpjpe_aligns_the_first_frame_alone(motion):
    place = motion.place
    assert mpjpe_cm(moved(place), place) < 1e-9
    assert mpjpe_cm(place + place.new_tensor([0, 0, 0.05]), place) == pytest.approx(5.0)
    drift = torch.linspace(0, 0.2, place.shape[1], dtype=place.dtype)[None, :, None, None]
    assert mpjpe_cm(place + drift * place.new_tensor([1, 0, 0]), place) == pytest.approx(10.0)


def test_mpjpe_of_valid_joints(motion):
    wrong = motion.place.clone()
    wrong[:, :, 4] += 1
    valid = torch.ones(19, dtype=torch.bool)
    assert mpjpe_cm(wrong, motion.place, valid) > 1
    valid[4] = False
    assert mpjpe_cm(wrong, motion.place, valid) == 0


def test_procrustes_forgives_turn_scale_and_shift_but_no_mirror(motion):
    place = motion.place
    assert pa_mpjpe_cm(moved(1.3 * place), place) < 1e-6
    assert pa_mpjpe_cm(place * place.new_tensor([1, -1, 1]), place) > 1


def test_velocity_acceleration_and_skate(motion):
    place, t = motion.place, torch.arange(motion.place.shape[1]).double() / 120.0
    slide = (0.3 * t)[None, :, None, None] * place.new_tensor([1, 0, 0])
    assert vel_err(place + slide, place, 120.0) == pytest.approx(30.0, rel=1e-6)
    assert accel_err(place + slide, place, 120.0) < 1e-6
    down = torch.ones_like(motion.contact)
    still = place[:, :1].expand_as(place)
    assert skate(still + slide, down, 120.0) == pytest.approx(30.0, rel=1e-6)
    assert skate(place, motion.contact, 120.0) < 5.0
    assert not math.isnan(skate(place, torch.zeros_like(down), 120.0))
