"""wamlab.config: dataclass <-> JSON, dotted replace, look-up."""

import dataclasses
from pathlib import Path
from typing import Literal

import pytest

from wamlab.config import (
    ConfigError,
    config_hash,
    from_dict,
    load_json,
    lookup,
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


def test_replace_reaches_into_nested_fields_and_leaves_the_original():
    changed = replace(FULL, {"inner.width": 9}, mode="slow")
    assert (changed.inner.width, changed.mode, FULL.inner.width) == (9, "slow", 7)
    with pytest.raises(ConfigError, match="did you mean 'width'"):
        replace(FULL, {"inner.wdith": 9})


def test_lookup_suggests_the_nearest_name():
    assert lookup({"torchcodec": 1}, "torchcodec", "decoder") == 1
    with pytest.raises(ConfigError, match=r"'torchcodek'.*did you mean 'torchcodec'"):
        lookup({"torchcodec": 1, "pyav": 2}, "torchcodek", "decoder")


def test_equal_values_have_equal_hashes():
    assert config_hash(FULL) == config_hash(from_dict(Outer, to_dict(FULL)))
    assert config_hash(FULL) != config_hash(replace(FULL, mode="slow"))
