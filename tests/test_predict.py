"""Predictions: a number, or none, and what is printed and drawn of it."""

import re

import pytest

from wamlab.jupyter import predict as module
from wamlab.jupyter.predict import Prediction


@pytest.fixture
def shown(monkeypatch):
    pages = []
    monkeypatch.setattr(module, "display", lambda page, *_: pages.append(page.data))
    return pages


@pytest.mark.parametrize(
    ("typed", "value", "text"),
    [
        ("", None, "measured 2 ×; you made no prediction\n"),
        ("many", None, "measured 2 ×; you made no prediction\n"),
        ("inf", None, "measured 2 ×; you made no prediction\n"),
        ("3", 3.0, "you said 3 ×, measured 2 ×: 50% too high\n"),
        (" 1,5 ", 1.5, "you said 1.5 ×, measured 2 ×: 25% too low\n"),
    ],
)
def test_a_prediction_needs_no_reader(capsys, shown, typed, value, text):
    prediction = Prediction("How much faster?", "×")
    prediction._field.value = typed
    assert prediction.value == value
    prediction.against(2.0)
    assert capsys.readouterr().out == text
    assert len(shown) == (value is not None)


def test_the_question_is_shown_with_its_code(shown):
    module.predict("Is `launch` < 3?", "s")
    assert shown == ["<b>Predict:</b> Is <code>launch</code> &lt; 3?"]


def test_a_number_may_have_no_unit(capsys, shown):
    prediction = Prediction("How far apart, relative?", "")
    assert prediction._field.placeholder == "your number"
    prediction.against(0.25)
    assert capsys.readouterr().out == "measured 0.25; you made no prediction\n"


@pytest.mark.parametrize(
    ("said", "measured", "bars"),
    [
        (3.0, 2.0, [(0, 100), (0, 66.7)]),
        (-1.0, 3.0, [(0, 25), (25, 75)]),
        (-4.0, -1.0, [(0, 100), (75, 25)]),
        (0.0, 0.0, [(0, 0), (0, 0)]),
    ],
)
def test_prediction_and_result_are_drawn_from_one_zero(shown, said, measured, bars):
    prediction = Prediction("How much?", "g")
    prediction.value = said
    prediction.against(measured)
    found = re.findall(r"left: ([\d.]+)%; width: max\(2px, ([\d.]+)%", shown[0])
    assert [(float(a), float(b)) for a, b in found] == bars
    assert "you" in shown[0]
    assert f"{measured:.3g}" in shown[0]


def test_above_a_negative_result_is_too_high(capsys, shown):
    prediction = Prediction("How much?", "%")
    prediction.value = 1.0
    prediction.against(-0.5)
    assert capsys.readouterr().out == "you said 1 %, measured -0.5 %: 300% too high\n"


def test_what_cannot_be_drawn_is_only_printed(capsys, shown):
    prediction = Prediction("How much?", "g")
    prediction.value = 1.0
    prediction.against(float("nan"))
    assert "measured nan g" in capsys.readouterr().out
    assert not shown
