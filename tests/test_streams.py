"""Streams: clocks, aliasing, gaps, and what may not be known before its time."""

import numpy as np
import pytest
from scipy.spatial.transform import Rotation

from wamlab.motion.streams import Clock, Stream, StreamError, align, fit_clock, read_at


def torque(times):
    """20 and 5 N m that belong there; 4 and 2 N m at 115 and 233 Hz that do not."""
    wanted = 20 * np.sin(2 * np.pi * 1.3 * times) + 5 * np.sin(2 * np.pi * 7 * times + 1)
    noise = 4 * np.sin(2 * np.pi * 115 * times) + 2 * np.sin(2 * np.pi * 233 * times)
    return wanted, wanted + noise


def rmse(a, b):
    return float(np.sqrt(np.mean((a - b) ** 2)))


def inner(times, margin=0.1):
    return (times > times[0] + margin) & (times < times[-1] - margin)


@pytest.mark.parametrize("jitter", [0.0, 0.1])
def test_sampling_down_does_not_alias(jitter):
    rng = np.random.default_rng(0)
    times = np.arange(4000) / 1000 + jitter / 1000 * rng.uniform(-1, 1, 4000)
    _, seen = torque(times)
    at = np.arange(12, 470) / 120
    keep, truth = inner(at), torque(at)[0]
    linear = rmse(np.interp(at, times, seen)[keep], truth[keep])
    mine, valid = read_at(Stream(kind="torque", times_s=times, values=seen), at, 120.0)
    assert valid.all()
    assert linear > 2.5
    assert rmse(mine[keep], truth[keep]) < linear * (0.01 if not jitter else 0.1)


def test_impact_energy_is_kept_apart():
    times = np.arange(3000) / 1000
    _, seen = torque(times)
    found = align({"tau": Stream(kind="torque", times_s=times, values=seen)}, 120.0, 1.0)
    assert found["tau"].shape == (3, 120)
    wanted = np.sqrt(4**2 / 2 + 2**2 / 2)
    assert np.median(found["tau_hf"]) == pytest.approx(wanted, rel=0.15)


def test_two_events_give_rate_and_offset_one_the_offset():
    local = np.array([1.0, 61.0, 121.0])
    clock = fit_clock(local, 1.00005 * local + 3.2)
    assert clock.a == pytest.approx(1.00005, abs=1e-9)
    assert clock.b == pytest.approx(3.2, abs=1e-6)
    assert clock.residual_s < 1e-9
    assert fit_clock([5.0], [7.5]) == Clock(1.0, 2.5)
    noisy = fit_clock(local, local + np.array([0, 0.004, 0]))
    assert noisy.residual_s > 1e-3
    with pytest.raises(StreamError, match="the same events on both sides, got 2 and 1"):
        fit_clock([1.0, 2.0], [1.0])


def test_streams_meet_on_the_reference_clock():
    """A torque sensor 0.37 s and 50 ppm off shows the same sine at the same instant."""
    t, local = np.arange(480) / 120, np.arange(4000) / 1000
    clock = Clock(1.00005, 0.37)
    streams = {
        "joints": Stream(kind="position", times_s=t, values=np.sin(2 * np.pi * t)),
        "tau": Stream(kind="torque", times_s=local, values=np.sin(2 * np.pi * clock(local)),
                      clock=clock),
    }  # fmt: skip
    found = align(streams, 60.0, 1.0)
    assert found["joints"].shape == (3, 60)
    assert np.abs(found["joints"] - found["tau"])[:, 6:-6].max() < 2e-3
    assert found["tau_valid"].all()
    assert found["time_s"][0, 0] == pytest.approx(0.37)


def test_a_gap_is_masked_and_not_bridged():
    times = np.arange(1000) / 1000
    keep = (times < 0.4) | (times > 0.45)
    values = np.where(times < 0.4, 1.0, 100.0)[keep]
    stream = Stream(kind="torque", times_s=times[keep], values=values)
    at = np.arange(0, 120) / 120
    found, valid = read_at(stream, at, 120.0)
    assert not valid[(at > 0.4) & (at < 0.45)].any()
    assert (found[~valid] == 0).all()
    np.testing.assert_allclose(found[valid & (at < 0.4)], 1.0, atol=1e-6)
    np.testing.assert_allclose(found[valid & (at > 0.45)], 100.0, atol=1e-4)


def test_video_never_shows_a_later_frame():
    pts = np.arange(30) / 30
    video = Stream(kind="video", times_s=pts, values=np.arange(30))
    at = np.array([0.0, 0.0332, 0.0334, 0.5, 29 / 30 + 0.01])
    frames, valid = read_at(video, at, 120.0)
    assert valid.all()
    assert frames.tolist() == [0, 0, 1, 15, 29]
    assert not read_at(video, np.array([2.0]), 120.0)[1].any()


def test_rotations_are_slerped_and_contacts_nearest():
    angles = np.array([0.0, 0.2, 0.4])
    rot = Rotation.from_euler("x", angles[:, None]).as_matrix()[:, None]
    times = np.array([0.0, 0.1, 0.2])
    found, _ = read_at(Stream(kind="rotation", times_s=times, values=rot), np.array([0.05]), 120.0)
    np.testing.assert_allclose(found[0, 0], Rotation.from_euler("x", 0.1).as_matrix(), atol=1e-12)
    contact = Stream(kind="contact", times_s=times, values=np.array([True, False, True]))
    found, _ = read_at(contact, np.array([0.04, 0.06, 0.16]), 120.0)
    assert found.tolist() == [True, False, True]


def test_sampling_up_is_cubic():
    t = np.arange(31) / 30
    stream = Stream(kind="position", times_s=t, values=t**3)
    at = np.linspace(0, 1, 77)
    np.testing.assert_allclose(read_at(stream, at, 120.0)[0], at**3, atol=1e-12)


def test_what_is_refused():
    with pytest.raises(StreamError, match="2 times for 3 samples"):
        Stream(kind="torque", times_s=np.arange(2.0), values=np.zeros(3))
    with pytest.raises(StreamError, match=r"sample 2 at 1\.000000 s comes no later than sample 1"):
        Stream(kind="torque", times_s=np.array([0.0, 1.0, 1.0]), values=np.zeros(3))
    a = Stream(kind="position", times_s=np.arange(3.0), values=np.zeros(3))
    b = Stream(kind="position", times_s=np.arange(3.0), values=np.zeros(3), clock=Clock(1.0, 9.0))
    with pytest.raises(StreamError, match=r"share 0\.000 s, a window takes 1 s"):
        align({"a": a, "b": b}, 10.0, 1.0)
