"""wamlab.config: dataclass <-> JSON, dotted replace, look-up."""

import argparse
import dataclasses
from pathlib import Path
from typing import Literal

import pytest

from wamlab.config import (
    ConfigError,
    check_least,
    config_hash,
    from_dict,
    load_json,
    lookup,
    natural,
    positive,
    positive_int,
    replace,
    save_json,
    to_dict,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Inner:
    width: int = 3
    rate: float = 0.5


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outer:
    inner: Inner = Inner()
    mode: Literal["fast", "slow"] = "slow"
    names: tuple[str, ...] = ()
    pair: tuple[int, int] = (1, 2)
    root: Path | None = None
    table: dict[str, int] = dataclasses.field(default_factory=dict)
    rows: tuple[str | dict, ...] = ()


FULL = Outer(
    inner=Inner(width=7),
    mode="fast",
    names=("a", "b"),
    pair=(4, 5),
    root=Path("x/y"),
    table={"k": 1},
    rows=("compile", {"name": "recompute", "mode": "full"}),
)


def test_json_round_trip(tmp_path):
    save_json(FULL, tmp_path / "run.json")
    assert load_json(Outer, tmp_path / "run.json") == FULL
    assert from_dict(Outer, to_dict(FULL)) == FULL


def test_an_integer_is_a_float_but_a_bool_is_not_an_integer():
    assert from_dict(Inner, {"rate": 1}).rate == 1.0
    with pytest.raises(ConfigError, match=r"Inner\.width takes int, got True"):
        from_dict(Inner, {"width": True})


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"innner": {}}, "unknown Outer field 'innner'.*did you mean 'inner'"),
        ({"inner": {"widht": 1}}, "unknown Inner field 'widht'.*did you mean 'width'"),
        ({"mode": "fats"}, "'fats'.*did you mean 'fast'"),
        ({"names": "ab"}, "takes a list"),
        ({"pair": [1]}, "takes 2 values"),
        ({"inner": 3}, "takes a JSON object"),
        ({"root": 3}, r"Outer\.root takes Path"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(values, message):
    with pytest.raises(ConfigError, match=message):
        from_dict(Outer, values)


def test_a_file_error_names_the_file(tmp_path):
    path = tmp_path / "run.json"
    with pytest.raises(ConfigError, match="no such configuration file"):
        load_json(Outer, path)
    path.write_text("{")
    with pytest.raises(ConfigError, match=r"run\.json is not valid JSON"):
        load_json(Outer, path)
    path.write_text('{"x": 1}')
    with pytest.raises(ConfigError, match=r"run\.json: unknown Outer field 'x'"):
        load_json(Outer, path)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=r"run\.json is not a UTF-8 text file"):
        load_json(Outer, path)


def test_replace_reaches_into_nested_fields_and_leaves_the_original():
    changed = replace(FULL, {"inner.width": 9}, mode="slow")
    assert (changed.inner.width, changed.mode, FULL.inner.width) == (9, "slow", 7)
    with pytest.raises(ConfigError, match="did you mean 'width'"):
        replace(FULL, {"inner.wdith": 9})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"inner.width": "x"}, r"Inner\.width takes int, got 'x'"),
        ({"inner": 3}, "takes a JSON object, got 3"),
        ({"root.name": 1}, r"Outer\.root is PosixPath\('x/y'\): it has no field 'name'"),
        ({"mode": "fats"}, "did you mean 'fast'"),
    ],
)
def test_replace_takes_what_a_file_may_hold_and_nothing_else(changes, message):
    with pytest.raises(ConfigError, match=message):
        replace(FULL, changes)
    assert replace(FULL, {"inner.rate": 1, "names": ["c"]}).names == ("c",)


@pytest.mark.parametrize("value", [-0.1, float("nan"), float("inf")])
def test_a_field_below_its_least_or_not_finite_is_refused(value):
    check_least(Inner(rate=0.0), {"rate": 0, "width": 1})
    check_least(Outer(), {"root": 0})
    with pytest.raises(ConfigError, match=f"rate must be at least 0, got {value}"):
        check_least(Inner(rate=value), {"rate": 0})


@pytest.mark.parametrize(
    ("kind", "good", "bad"),
    [
        (positive_int, "1", ("0", "-1", "1.5", "x")),
        (natural, "0", ("-1", "nan")),
        (positive, "0.5", ("0", "nan", "inf", "-2", "")),
    ],
)
def test_an_option_takes_its_kind_of_number(kind, good, bad):
    assert kind(good) == float(good)
    for text in bad:
        with pytest.raises(argparse.ArgumentTypeError, match=f"takes .* number.*, got '{text}'"):
            kind(text)


def test_lookup_suggests_the_nearest_name():
    assert lookup({"torchcodec": 1}, "torchcodec", "decoder") == 1
    with pytest.raises(ConfigError, match=r"'torchcodek'.*did you mean 'torchcodec'"):
        lookup({"torchcodec": 1, "pyav": 2}, "torchcodek", "decoder")


def test_equal_values_have_equal_hashes():
    assert config_hash(FULL) == config_hash(from_dict(Outer, to_dict(FULL)))
    assert config_hash(FULL) != config_hash(replace(FULL, mode="slow"))
