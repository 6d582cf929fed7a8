"""Dataclass <-> JSON, dotted replacement, and name look-up that answers "did you mean".

Every configuration in wamlab is a frozen, keyword-only dataclass at the top of the file that reads
it. This module is the one place that turns such a dataclass into JSON and back; unknown keys are
refused, never ignored.
"""

import argparse
import dataclasses
import difflib
import hashlib
import json
import math
import types
import typing
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, NoReturn, TypeVar

T = TypeVar("T")


class UserError(ValueError):
    """A caller's mistake or a faulty file; the command line prints one line and exits with 2."""


class ConfigError(UserError):
    """A configuration, name or option that is refused: what came, what is allowed, what to do."""


class RunError(RuntimeError):
    """A run in other processes that failed; the command line prints it and exits with 1.

    Attributes:
        refusal: what the run said where it refused its configuration, which exits with 2; or None.
    """

    refusal: str | None = None


class Parser(argparse.ArgumentParser):
    """Reads a command's options; a line that it cannot read is refused like any other mistake."""

    def error(self, message: str) -> NoReturn:
        """Refuse the command line."""
        raise ConfigError(f"{message}; see `{self.prog} --help`")


def lookup(table: Mapping[str, T], name: str, kind: str) -> T:
    """Return `table[name]`, or refuse with the allowed names and the nearest one.

    Args:
        table: one of wamlab's plain dicts (MODEL_SIZES, DECODERS, EMBODIMENTS, OPTIMIZATIONS, ...).
        name: what the user wrote.
        kind: what the table holds, in the singular, for the message.

    Raises:
        ConfigError: no such name.
    """
    check_name(name, table, kind)
    return table[name]


def check_name(name: str, allowed: Collection[str], kind: str) -> None:
    """Refuse a name that is not among the allowed ones, see `lookup`."""
    if name not in allowed:
        raise ConfigError(unknown_name(name, allowed, kind))


def unknown_name(name: str, allowed: Iterable[str], kind: str) -> str:
    """Return the message for an unknown name, with the nearest allowed one."""
    allowed = [str(a) for a in allowed]
    near = difflib.get_close_matches(str(name), allowed, n=1, cutoff=0.5)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return f"unknown {kind} {name!r}: allowed are {', '.join(sorted(allowed))}{hint}"


def check_least(config: Any, least: Mapping[str, float]) -> None:
    """Refuse fields that are below their least value or not finite; null passes.

    Raises:
        ConfigError: naming the field and its least value.
    """
    for field, low in least.items():
        value = getattr(config, field)
        if value is not None and not low <= value < math.inf:
            raise ConfigError(f"{field} must be at least {low}, got {value}")


def _number(kind: type, fits: Callable[[float], bool], rule: str) -> Callable[[str], Any]:
    def convert(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not (math.isfinite(value) and fits(value)):
            raise argparse.ArgumentTypeError(f"takes {rule}, got {text!r}")
        return value

    return convert


# kinds of numbers that a command's option takes: the `type` of argparse
positive_int = _number(int, lambda n: n >= 1, "a whole number of 1 or more")
natural = _number(int, lambda n: n >= 0, "a whole number of 0 or more")
positive = _number(float, lambda x: x > 0, "a number above 0")


def to_dict(config: Any) -> Any:
    """Return a dataclass (nested ones and tuples included) as plain JSON values."""
    if dataclasses.is_dataclass(config) and not isinstance(config, type):
        return {f.name: to_dict(getattr(config, f.name)) for f in dataclasses.fields(config)}
    if isinstance(config, Mapping):
        return {str(k): to_dict(v) for k, v in config.items()}
    if isinstance(config, list | tuple):
        return [to_dict(v) for v in config]
    if isinstance(config, Path):
        return str(config)
    return config


def from_dict(cls: type[T], values: Mapping[str, Any]) -> T:
    """Build the dataclass `cls` from JSON values.

    Args:
        cls: a dataclass whose fields are numbers, texts, paths, literals, tuples, mappings, unions
            of them, or dataclasses again.
        values: a JSON object; fields that it lacks keep their defaults.

    Raises:
        ConfigError: an unknown key (with the nearest field), or a value of the wrong type.
    """
    if not isinstance(values, Mapping):
        raise ConfigError(f"{cls.__name__} takes a JSON object, got {values!r}")
    hints = typing.get_type_hints(cls)
    fields = {f.name for f in dataclasses.fields(cls) if f.init}
    for key in values:
        check_name(key, fields, f"{cls.__name__} field")
    try:
        built = {k: _convert(hints[k], v, f"{cls.__name__}.{k}") for k, v in values.items()}
        return cls(**built)
    except TypeError as error:
        raise ConfigError(f"{cls.__name__}: {error}") from error


def load_json(cls: type[T], path: str | Path) -> T:
    """Read one dataclass from a JSON file.

    Raises:
        ConfigError: the file is missing, is not JSON, or does not fit `cls`.
    """
    path = Path(path)
    if not path.is_file():
        raise ConfigError(f"no such configuration file: {path}")
    try:
        values = json.loads(read_text(path))
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path} is not valid JSON: {error}") from error
    try:
        return from_dict(cls, values)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def read_text(path: Path) -> str:
    """Return a text file's content.

    Raises:
        ConfigError: it is not UTF-8.
    """
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not a UTF-8 text file: {error}") from error


def find_recipe(folder: Path, name: str, others: Iterable[str] = ()) -> Path:
    """Return the file of a recipe that `folder` holds, or the file that `name` is itself.

    Raises:
        ConfigError: a bare word that is neither; `others` are further words that stand for one.
    """
    recipe = folder / f"{name}.json"
    if not recipe.is_file() and not Path(name).exists() and not Path(name).suffix:
        check_name(name, [*others, *(p.stem for p in folder.glob("*.json"))], "run")
    return recipe if recipe.is_file() else Path(name)


def save_json(config: Any, path: str | Path) -> None:
    """Write a dataclass (or plain values) as JSON; the file appears whole or not at all."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(to_dict(config), indent=2) + "\n")
    partial.replace(path)


def replace(config: T, changes: Mapping[str, Any] | None = None, /, **kwargs: Any) -> T:
    """Return a copy of `config` with fields changed; a dotted key reaches into a nested dataclass.

    Args:
        config: a dataclass.
        changes: field -> value; the place for dotted keys.
        kwargs: the same for plain fields.

    Raises:
        ConfigError: an unknown field, or a value of the wrong type.
    """
    cls = type(config)
    hints = typing.get_type_hints(cls)
    for key, value in {**(changes or {}), **kwargs}.items():
        head, _, rest = key.partition(".")
        check_name(head, [f.name for f in dataclasses.fields(cls)], f"{cls.__name__} field")
        inner = getattr(config, head)
        if rest and not dataclasses.is_dataclass(inner):
            raise ConfigError(f"{cls.__name__}.{head} is {inner!r}: it has no field {rest!r}")
        value = replace(inner, {rest: value}) if rest else value
        config = dataclasses.replace(
            config, **{head: _convert(hints[head], value, f"{cls.__name__}.{head}")}
        )
    return config


def config_hash(config: Any) -> str:
    """Return 12 hexadecimal digits that name a configuration: equal values, equal hash."""
    text = json.dumps(to_dict(config), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _convert(hint: Any, value: Any, where: str) -> Any:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return value
    if origin in (typing.Union, types.UnionType):
        return _convert_union(args, value, where)
    if origin is typing.Literal:
        if value in args:
            return value
        raise ConfigError(unknown_name(value, args, where))
    if origin is tuple:
        if not isinstance(value, list | tuple):
            raise ConfigError(f"{where} takes a list, got {value!r}")
        inner = [args[0]] * len(value) if len(args) == 2 and args[1] is Ellipsis else args
        if len(inner) != len(value):
            raise ConfigError(f"{where} takes {len(inner)} values, got {value!r}")
        return tuple(_convert(a, v, where) for a, v in zip(inner, value))
    if origin in (dict, Mapping) or hint is dict:
        if not isinstance(value, Mapping):
            raise ConfigError(f"{where} takes a JSON object, got {value!r}")
        return {k: _convert(args[1], v, f"{where}.{k}") if args else v for k, v in value.items()}
    if dataclasses.is_dataclass(hint):
        return value if isinstance(value, hint) else from_dict(hint, value)
    return _convert_plain(hint, value, where)


def _convert_union(args: tuple, value: Any, where: str) -> Any:
    if value is None and type(None) in args:
        return None
    errors = []
    for arg in args:
        if arg is type(None):
            continue
        try:
            return _convert(arg, value, where)
        except ConfigError as error:
            errors.append(str(error))
    raise ConfigError(errors[0] if errors else f"{where} must be null, got {value!r}")


def _convert_plain(hint: Any, value: Any, where: str) -> Any:
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if hint is Path and isinstance(value, str):
        return Path(value)
    if isinstance(hint, type) and isinstance(value, hint):
        if isinstance(value, bool) and hint is not bool:
            raise ConfigError(f"{where} takes {hint.__name__}, got {value!r}")
        return value
    raise ConfigError(f"{where} takes {getattr(hint, '__name__', hint)}, got {value!r}")
