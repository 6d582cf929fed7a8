"""Ladders: rows, comparison, cache, and what a row that cannot run leaves."""

import dataclasses
import json

import pytest

from wamlab.config import ConfigError, UserError
from wamlab.jupyter import ladder as module
from wamlab.jupyter.ladder import Row, compare, expand, ladder
from wamlab.jupyter.launch import LaunchError
from wamlab.measure import Record, Timing, append_jsonl, read_records, stamp


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    optimizations: tuple[str, ...] = ()
    out: str = ""
    steps: int = 3
    seed: int = 0


def train(config: Config) -> Record:
    """Stand in for a training run; an optimization halves the time or does as its name says."""
    if "needy" in config.optimizations:
        raise UserError("compile needs g++: apt-get install g++")
    if "crash" in config.optimizations:
        raise RuntimeError("boom")
    off = 0.1 if "inexact" in config.optimizations else 1e-6 * len(config.optimizations)
    ms = 100.0 / 2 ** len(config.optimizations)
    for step in range(config.steps):
        append_jsonl(f"{config.out}/steps.jsonl", [{"step": step, "loss": 1.0}])
    losses = (2.0, 1.5, 1.0 + off)
    return stamp(Record(name="x", step_ms=Timing.of([ms]), samples_per_s=2e3 / ms, losses=losses))


class Recorder:
    """Stands in for `launch`: runs the target here and counts."""

    def __init__(self):
        self.calls = []

    def __call__(self, target, config, nproc, *, out, threads, monitor, env):
        assert env == module.STEADY  # in every row alike
        self.calls.append((config.optimizations, nproc, threads))
        out.mkdir(parents=True, exist_ok=True)
        return FakeJob(config)


class FakeError(LaunchError):
    def __init__(self, error):
        RuntimeError.__init__(self, f"rank 0 raised {error}")
        self.refusal = str(error) if isinstance(error, UserError) else None
        self.exception, self.log = f"{type(error).__name__}: {error}", "rank0.log"


class FakeJob:
    def __init__(self, config):
        self.config = config

    def result(self):
        try:
            return train(self.config)
        except (UserError, RuntimeError) as error:
            raise FakeError(error) from error


@pytest.fixture
def launched(monkeypatch):
    recorder = Recorder()
    monkeypatch.setattr(module, "launch", recorder)
    return recorder


ROWS = [
    Row(name="official"),
    Row(name="a", dimension="compute", optimizations=("a",)),
    Row(name="b", dimension="parallel", optimizations=("b1", "b2"), nproc=2, threads=1),
    Row(name="c", dimension="data", optimizations=("c",)),
]


def names_of(rows):
    return {row.name: row.optimizations for row in rows}


def test_rows_alone_stay_as_they_are():
    assert expand(ROWS, "alone") == ROWS


def test_cumulative_rows_add_up():
    rows = expand(ROWS, "cumulative")
    assert names_of(rows) == {
        "official": (),
        "a": ("a",),
        "b": ("a", "b1", "b2"),
        "c": ("a", "b1", "b2", "c"),
    }
    assert [(r.dimension, r.nproc) for r in rows] == [
        (None, None),
        ("compute", None),
        ("parallel", 2),
        ("data", 2),
    ]


def test_leave_one_out():
    rows = expand(ROWS, "leave_one_out")
    assert names_of(rows) == {
        "official": (),
        "all": ("a", "b1", "b2", "c"),
        "without a": ("b1", "b2", "c"),
        "without b": ("a", "c"),
        "without c": ("a", "b1", "b2"),
    }
    assert rows[3].nproc is None
    assert rows[3].dimension == "parallel"


def test_threads_alone_reach_the_cumulative_rows():
    rows = expand([Row(name="a"), Row(name="b", threads=1), Row(name="c")], "cumulative")
    assert [(r.nproc, r.threads) for r in rows] == [(None, None), (None, 1), (None, 1)]


@pytest.mark.parametrize(
    ("rows", "mode", "message"),
    [
        (ROWS, "cumulativ", "did you mean 'cumulative'"),
        ([], "alone", "rows with different names"),
        ([ROWS[0], ROWS[0]], "alone", "rows with different names"),
    ],
)
def test_bad_ladders_are_refused(rows, mode, message):
    with pytest.raises(ConfigError, match=message):
        expand(rows, mode)


def test_every_row_is_measured_and_kept(launched, tmp_path, capsys):
    append_jsonl(tmp_path / "records.jsonl", [Record(name="official", scope="decode")])
    records = ladder(Config(), ROWS, tmp_path)
    assert [r.name for r in records] == ["official", "a", "b", "c"]
    assert [r.dimension for r in records] == [None, "compute", "parallel", "data"]
    assert launched.calls[2] == (("b1", "b2"), 2, 1)
    assert records[0].loss_rel_diff is None
    assert records[2].loss_rel_diff == pytest.approx(2e-6)
    assert not any(r.wrong for r in records)
    assert read_records(tmp_path / "records.jsonl")[1:] == records
    ladder(Config(), ROWS[:2], tmp_path, fresh=True)  # measured again: the old lines go
    names = [(r.name, r.scope) for r in read_records(tmp_path / "records.jsonl")]
    assert sorted(names) == sorted({*names})
    assert "a: 50 (50–50) ms, 40 samples/s, 2.00×" in capsys.readouterr().out


def test_measured_rows_come_from_the_cache(launched, tmp_path):
    first = ladder(Config(), ROWS, tmp_path)
    assert ladder(Config(), ROWS, tmp_path) == first
    assert len(launched.calls) == 4
    ladder(Config(seed=1), ROWS[:1], tmp_path)  # other work
    ladder(Config(seed=1), [dataclasses.replace(ROWS[0], threads=2)], tmp_path)  # other threads
    assert len(launched.calls) == 6


def test_rows_that_do_not_count_say_why(launched, tmp_path):
    rows = [
        ROWS[0],
        Row(name="needy", dimension="compute", optimizations=("needy",)),
        Row(name="crash", optimizations=("crash",)),
        Row(name="inexact", optimizations=("inexact",)),
        Row(name="tolerant", optimizations=("inexact",), tolerance=0.2),
    ]
    _, needy, crash, inexact, tolerant = ladder(Config(), rows, tmp_path)
    assert needy.reason == "compile needs g++: apt-get install g++"
    assert needy.dimension == "compute"
    assert needy.samples_per_s is None
    assert crash.reason == "failed: rank 0 raised boom; log rank0.log"
    assert inexact.wrong == "losses differ by 1.0e-01, allowed 1e-02"
    assert tolerant.wrong is None
    assert tolerant.loss_rel_diff == pytest.approx(0.1)
    lines = (tmp_path / "records.jsonl").read_text().splitlines()
    assert json.loads(lines[1])["reason"] == needy.reason
    ladder(Config(), rows, tmp_path)
    assert [c[0] for c in launched.calls[5:]] == [("needy",), ("crash",)]  # reasons are not cached


def test_a_baseline_that_cannot_run_ends_the_ladder(launched, tmp_path):
    rows = [Row(name="official", optimizations=("needy",)), ROWS[1]]
    with pytest.raises(
        UserError, match="baseline row 'official' cannot run: compile needs g\\+\\+"
    ):
        ladder(Config(), rows, tmp_path)
    assert len(launched.calls) == 1


@pytest.mark.parametrize(
    ("losses", "wrong"),
    [
        ((2.0, 1.0), None),
        ((2.0, 1.1), "losses differ by 1.0e-01"),
        ((2.0, float("nan")), "losses differ by nan"),
        ((2.0,), "1 losses against the baseline's 2"),
    ],
)
def test_compare(losses, wrong):
    base = Record(name="base", losses=(2.0, 1.0))
    found = compare(Record(name="x", losses=losses), base, 1e-2).wrong
    assert found is None if wrong is None else found.startswith(wrong)


def test_an_interrupt_keeps_the_rows_so_far(launched, tmp_path, monkeypatch):
    def interrupted(self):
        if self.config.optimizations:
            raise KeyboardInterrupt
        return train(self.config)

    monkeypatch.setattr(FakeJob, "result", interrupted)
    with pytest.raises(KeyboardInterrupt):
        ladder(Config(), ROWS, tmp_path)
    assert [r.name for r in read_records(tmp_path / "records.jsonl")] == ["official"]


def test_a_ladder_in_fresh_processes(tmp_path):
    """Nothing is faked: launcher, cache and records on real ranks."""
    rows = [ROWS[0], Row(name="needy", optimizations=("needy",))]
    first, second = ladder(Config(), rows, tmp_path, target="test_ladder:train")
    assert first.samples_per_s == 20.0
    assert second.reason == "compile needs g++: apt-get install g++"
    assert (tmp_path / "rows" / "official" / "steps.jsonl").read_text().count("\n") == 3
