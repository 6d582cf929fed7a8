"""Exercises: every specification passes its own check, every stub fails, nothing raises."""

import importlib
import pkgutil

import pytest
import solutions
import torch

from wamlab import jupyter
from wamlab.jupyter import exercise
from wamlab.jupyter._exercise import Exercise
from wamlab.jupyter.exercise import EXERCISES, attempt, check, hint, task

TOPICS = {
    module.name: importlib.import_module(f"solutions.{module.name}").SOLUTIONS
    for module in pkgutil.iter_modules(solutions.__path__)
}


@pytest.mark.parametrize("name", EXERCISES)
def test_the_specification_solves_and_the_stub_does_not(name):
    stated = EXERCISES[name]
    assert attempt(name, stated.spec).solved, attempt(name, stated.spec).text
    assert not attempt(name, lambda *args: None).solved
    assert len(stated.hints) == 3
    assert len(stated.inputs()) >= 2
    assert stated.task.split("(")[0] == name.replace("-", "_")


def test_the_exercises_of_every_notebook_have_their_solutions():
    stated = {f"exercises_{topic}" for topic in TOPICS}
    modules = {m.name for m in pkgutil.iter_modules(jupyter.__path__)}
    assert stated == {name for name in modules if name.startswith("exercises_")}
    assert EXERCISES.keys() == {name for topic in TOPICS.values() for name in topic}
    for topic, solved in TOPICS.items():
        module = importlib.import_module(f"wamlab.jupyter.exercises_{topic}")
        assert solved.keys() == module.EXERCISES.keys(), topic


@pytest.mark.parametrize(
    ("topic", "name"), [(t, n) for t, solved in TOPICS.items() for n in solved]
)
def test_the_solution_in_other_words_solves_it(topic, name):
    outcome = attempt(name, TOPICS[topic][name])
    assert outcome.solved, outcome.text


@pytest.fixture
def double(monkeypatch):
    made = Exercise(
        task="double(x): twice x.",
        spec=lambda x: 2 * x,
        inputs=lambda: [(torch.arange(3.0),), (torch.full((2, 4), 7.0),)],
        hints=("more", "x and x", "x + x"),
        tolerance=1e-3,
    )
    monkeypatch.setitem(exercise.EXERCISES, "double", made)


@pytest.mark.parametrize(
    ("fn", "said"),
    [
        (lambda x: x + x, "✓ double: solved"),
        (lambda x: 2.0005 * x, "✓ double: solved"),
        (lambda x: 3 * x, "largest relative error  5.00e-01"),
        (
            lambda x: x,
            "case 1\n  yours     float32 [3]: [0, 1, 2]\n  expected  float32 [3]: [0, 2, 4]",
        ),
        (lambda x: x[:1], "not comparable"),
        (lambda x: x * float("nan"), "not comparable"),
        (lambda x: "four", "not comparable"),
        (lambda x: None, "not solved yet"),
        (lambda x: ..., "not solved yet"),
        (lambda x: 1 / 0, "your function raised ZeroDivisionError: division by zero"),
        (lambda: 1, "your function raised TypeError"),
        (7, "your function raised TypeError"),
    ],
)
def test_check_prints_and_never_raises(double, capsys, fn, said):
    check("double", fn)
    assert said in capsys.readouterr().out


def test_inputs_are_fresh_for_the_reader(double):
    """A function that changes its argument cannot change what is expected."""
    assert not attempt("double", lambda x: x.zero_()).solved
    assert attempt("double", lambda x: x.mul_(2)).solved


def test_nested_results_are_compared(monkeypatch):
    def spec(n):
        return {"shape": (n, 2), "name": "a", "flag": True, "none": None}

    made = Exercise(task="t(n)", spec=spec, inputs=lambda: [(1,), (2,)], hints=("", "", ""))
    monkeypatch.setitem(exercise.EXERCISES, "t", made)
    assert attempt("t", spec).solved
    for key, value in {"shape": (3, 2), "name": "b", "flag": False, "none": 0}.items():
        assert not attempt("t", lambda n, k=key, v=value: spec(n) | {k: v}).solved
    assert not attempt("t", lambda n: [1]).solved


def test_hints_come_in_three_steps(double, capsys):
    for step in (0, 1, 2, 3, 9):
        hint("double", step)
    said = capsys.readouterr().out.splitlines()
    assert said == [
        "hint 1 of 3: more",
        "hint 1 of 3: more",
        "hint 2 of 3: x and x",
        "hint 3 of 3: x + x",
        "hint 3 of 3: x + x",
    ]
    task("double")
    assert capsys.readouterr().out == "double(x): twice x.\n"


def test_an_unknown_exercise_is_said_not_raised(double, capsys):
    check("doubel", lambda x: x)
    hint("doubel")
    task("doubel")
    assert capsys.readouterr().out.count("did you mean 'double'?") == 3
