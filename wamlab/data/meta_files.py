"""The files of a data set's meta/, and their fields: each is fetched by what it must be.

A value that is not what it must be is named in one line: file, field, what came, what is allowed.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from wamlab.config import UserError

SHOWN = 60  # characters of a refused value in a message


class DatasetError(UserError):
    """A data set that cannot be used as it is: file, what is there, what was needed."""


@dataclass(frozen=True)
class Kind:
    """What a value must be.

    Args:
        words: the same for the reader of a message.
        read: returns the value, or None for one that is not allowed.
    """

    words: str
    read: Callable[[Any], Any]


def _number(low: float, high: float) -> Callable[[Any], float | None]:
    def read(value: Any) -> float | None:
        fits = isinstance(value, int | float) and not isinstance(value, bool)
        return float(value) if fits and low <= value <= high else None

    return read


def _whole(low: int, high: int = 2**53) -> Callable[[Any], int | None]:
    number = _number(low, high)

    def read(value: Any) -> int | None:
        return int(value) if number(value) is not None and int(value) == value else None

    return read


def _of(*types: type) -> Callable[[Any], Any]:
    return lambda value: value if isinstance(value, types) else None


def _wholes(value: Any) -> list[int] | None:
    found = [WHOLE.read(v) for v in value] if isinstance(value, list) else [None]
    return None if None in found else found


RATE = Kind("a number of frames a second, 0.000001 to 1,000,000", _number(1e-6, 1e6))
WHOLE = Kind("a whole number, 0 or more", _whole(0))
COUNT = Kind("a whole number, 1 or more", _whole(1))
LENGTH = Kind("a whole number of frames, 0 to 100,000,000", _whole(0, 10**8))
SECONDS = Kind("a number of seconds, at most 1,000,000,000", _number(-1e9, 1e9))
WHOLES = Kind("a list of whole numbers, each 0 or more", _wholes)
TEXT = Kind("a text", _of(str))
OBJECT = Kind("a JSON object", _of(dict))


def typed(value: Any, kind: Kind, where: str) -> Any:
    """Return a value that is what it must be.

    Args:
        value: as JSON gives it.
        kind: what it must be.
        where: its file and field, for the message.

    Raises:
        DatasetError: it is something else.
    """
    found = kind.read(value)
    if found is None:
        raise DatasetError(f"{where} is {shown(value)}: must be {kind.words}")
    return found


def need(values: Mapping[str, Any], name: str, kind: Kind, where: str) -> Any:
    """Return a field that must be there, see `typed`; `where` names the object that holds it."""
    if name not in values:
        raise DatasetError(f"{where}: no {name}; it has {', '.join(values) or 'nothing'}")
    return typed(values[name], kind, f"{where}: {name}")


def optional(values: Mapping[str, Any], name: str, kind: Kind, where: str, default: Any) -> Any:
    """Return a field, or `default` where it is absent or null, see `typed`."""
    if values.get(name) is None:
        return default
    return typed(values[name], kind, f"{where}: {name}")


def shown(value: Any) -> str:
    """Return a JSON value as it stands in its file, cut to a few characters."""
    text = json.dumps(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


def pattern(text: str, names: Mapping[str, Any], where: str) -> str:
    """Return a pattern of file names that can be filled in.

    Args:
        text: such as "data/episode_{episode_index:06d}.parquet".
        names: what it may name, each with a value to try.
        where: its file and field, for the message.

    Raises:
        DatasetError: it names something else, or gives no file inside the data set.
    """
    try:
        name = text.format(**names)
        sound = bool(name.encode()) and not name.startswith("/") and name.isprintable()
    except (LookupError, ValueError, AttributeError, TypeError):
        sound = False
    if not sound:
        known = ", ".join(f"{{{n}}}" for n in names)
        raise DatasetError(
            f"{where} is {shown(text)}: must be a file name inside the data set, made with {known}"
        )
    return text


def read_text(path: Path) -> str:
    """Read a text file.

    Raises:
        DatasetError: missing, unreadable, a Git-LFS pointer, or not UTF-8.
    """
    if not path.is_file():
        raise DatasetError(f"{path}: missing")
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise DatasetError(
            f"{path}: not UTF-8 text (byte {error.start} is 0x{error.object[error.start]:02x}): "
            "save it as UTF-8, or copy it again"
        ) from error
    except OSError as error:
        raise DatasetError(f"{path}: cannot be read: {error.strerror}") from error
    if text.startswith("version https://git-lfs"):
        raise DatasetError(f"{path}: a Git-LFS pointer, not the file: run `git lfs pull`")
    return text


def read_json(path: Path) -> Any:
    """Read a JSON file.

    Raises:
        DatasetError: missing, a Git-LFS pointer, not UTF-8, or not JSON.
    """
    try:
        return json.loads(read_text(path))
    except DatasetError:
        raise
    except (ValueError, RecursionError) as error:
        raise DatasetError(f"{path}: not valid JSON: {error}") from error


def read_object(path: Path) -> dict[str, Any]:
    """Read a JSON file that holds one object.

    Raises:
        DatasetError: as `read_json`, or it holds something else.
    """
    return typed(read_json(path), OBJECT, f"{path}: it")


def numbered_lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield every line of a file of one JSON object a line, each with where it stands.

    Raises:
        DatasetError: missing, a Git-LFS pointer, not UTF-8, or a line that is not a JSON object.
    """
    for number, line in enumerate(read_text(path).split("\n"), 1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise DatasetError(f"{where}: not one JSON object a line: {error}") from error
        yield where, typed(row, OBJECT, f"{where}: it")


def read_parquet(path: Path, columns: list[str] | None = None) -> pa.Table:
    """Read a table, or some of its columns, on this thread alone.

    Raises:
        DatasetError: missing, empty, a Git-LFS pointer, not Parquet, or without a column.
    """
    with _parquet(path) as file:
        absent = set(columns or ()) - set(file.schema_arrow.names)
        if absent:
            raise DatasetError(
                f"{path}: no column {', '.join(sorted(absent))}; "
                f"it has {', '.join(file.schema_arrow.names)}"
            )
        return file.read(columns=columns, use_threads=False)


def read_schema(path: Path) -> pa.Schema:
    """Return a table's columns and types.

    Raises:
        DatasetError: missing, empty, a Git-LFS pointer, or not Parquet.
    """
    with _parquet(path) as file:
        return file.schema_arrow


@contextmanager
def _parquet(path: Path) -> Iterator[pq.ParquetFile]:
    try:
        with pq.ParquetFile(path) as file:
            yield file
    except FileNotFoundError as error:
        raise DatasetError(f"{path}: missing") from error
    except (pa.ArrowException, OSError) as error:
        raise DatasetError(f"{path}: {_table_fault(path, error)}") from error


def _table_fault(path: Path, error: Exception) -> str:
    try:
        with path.open("rb") as file:
            head = file.read(64)
    except OSError as unreadable:
        return f"cannot be read: {unreadable.strerror}"
    if not head:
        return "empty (0 bytes): copy it again"
    if head.startswith(b"version https://git-lfs"):
        return "a Git-LFS pointer, not the table: run `git lfs pull`"
    return f"not a readable Parquet file ({str(error).splitlines()[0]})"
