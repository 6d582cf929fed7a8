"""A ladder of speed-ups: each row in a fresh process, one after the other, on equal work.

A row is configuration, not code: the base with its `optimizations` replaced. The first row is the
baseline; the others are compared with its losses step by step, and a row whose losses leave its
stated tolerance is marked wrong, not fast. Measured rows are cached by configuration and machine.
"""

import dataclasses
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from wamlab.config import ConfigError, UserError, config_hash, replace, save_json, unknown_name
from wamlab.jupyter._board import Board, open_board
from wamlab.jupyter.launch import LaunchError, launch
from wamlab.measure import Dimension, Record, append_jsonl, machine, read_jsonl, versions

Mode = Literal["alone", "cumulative", "leave_one_out"]
MODES = ("alone", "cumulative", "leave_one_out")
TARGET = "wamlab.train.trainer:train"
# Two things that chance or another busy process would decide, the same for every row:
# - whether glibc keeps the pages of a freed large array or gives them back depends on the order of
#   earlier allocations: a hundred thousand page faults a step or none. Every row keeps them.
# - a thread of libgomp that waits for another spins for as long as a time slice before it sleeps.
#   Beside one busy process that made steps of two threads eight times as long, and left those of
#   one thread a rank alone. A thousand turns do not, and cost nothing on a quiet machine; none at
#   all (OMP_WAIT_POLICY=PASSIVE) cost 45 % there.
STEADY = {
    "MALLOC_MMAP_THRESHOLD_": str(2**25),
    "MALLOC_TRIM_THRESHOLD_": str(2**30),
    "GOMP_SPINCOUNT": "1000",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One row of a ladder.

    Attributes:
        name: what the table calls it.
        dimension: that of the part added last; None for the baseline.
        optimizations: names, or objects with a name and parameters, for `base.optimizations`.
        nproc: ranks; None is 1 (cumulative rows: as the row before).
        threads: CPU threads a rank; None shares the cores among the ranks.
        tolerance: largest loss difference, relative to the baseline's loss of the same step.
        changes: other fields of the configuration, dotted, such as {"data.workers": 2}.
    """

    name: str
    dimension: Dimension | None = None
    optimizations: tuple[Any, ...] = ()
    nproc: int | None = None
    threads: int | None = None
    tolerance: float = 1e-2
    changes: dict[str, Any] = dataclasses.field(default_factory=dict)


def ladder(
    base: Any,
    rows: Sequence[Row],
    out: str | Path,
    *,
    mode: Mode = "alone",
    fresh: bool = False,
    target: str = TARGET,
) -> list[Record]:
    """Run every row and return its record; each is appended to OUT/records.jsonl at once.

    Args:
        base: the configuration that every row starts from: a frozen dataclass with the fields
            `optimizations` and `out`.
        rows: the rows; the first is the baseline.
        out: folder of records.jsonl and of one run folder a row.
        mode: "alone": each row as it stands; "cumulative": each adds to the rows before it;
            "leave_one_out": the baseline, all together, then all but one.
        fresh: measure again what is in the cache.
        target: what runs on the ranks; takes the configuration, returns a Record.

    Returns:
        One record a row. A row that cannot run has its `reason`; one whose losses left the
        tolerance is marked `wrong`.

    Raises:
        ConfigError: no rows, two of one name, or an unknown mode or field.
        UserError: the baseline refused its configuration or data.
        LaunchError: the baseline failed.
    """
    rows = expand(rows, mode)
    out = Path(out)
    configs = [_configure(base, row, _folder(out, row)) for row in rows]
    records: list[Record] = []
    with open_board(rows) as board:
        for row, config in zip(rows, configs):
            board.start(row.name, _folder(out, row), config)
            record = _run_row(row, config, (out, target, fresh), board)
            _refuse_without_baseline(row, record, records)
            records.append(compare(record, records[0] if records else None, row.tolerance))
            _keep(out / "records.jsonl", records[-1])
            board.finish(records)
    return records


def expand(rows: Sequence[Row], mode: Mode) -> list[Row]:
    """Return the rows that `mode` makes of the given ones.

    Raises:
        ConfigError: no rows, two of one name, or an unknown mode.
    """
    if mode not in MODES:
        raise ConfigError(unknown_name(mode, MODES, "ladder mode"))
    names = [row.name for row in rows]
    if not rows or len(set(names)) < len(names):
        raise ConfigError(f"a ladder needs rows with different names, got {names}")
    if mode == "alone":
        return list(rows)
    if mode == "cumulative":
        return [rows[0], *(_join(rows[1 : i + 1], row.name) for i, row in enumerate(rows) if i)]
    rest = rows[1:]
    without = [_join([r for r in rest if r is not row], f"without {row.name}") for row in rest]
    return [
        rows[0],
        _join(rest, "all"),
        *(dataclasses.replace(w, dimension=row.dimension) for w, row in zip(without, rest)),
    ]


def _join(parts: Sequence[Row], name: str) -> Row:
    """Return one row that does what all parts do; ranks and threads are those set last."""
    if not parts:
        return Row(name=name)
    nproc = threads = None
    for part in parts:
        if part.nproc is not None or part.threads is not None:
            nproc, threads = part.nproc or nproc, part.threads
    return Row(
        name=name,
        dimension=parts[-1].dimension,
        optimizations=tuple(o for p in parts for o in p.optimizations),
        nproc=nproc,
        threads=threads,
        tolerance=max(p.tolerance for p in parts),
        changes={k: v for p in parts for k, v in p.changes.items()},
    )


def compare(record: Record, base: Record | None, tolerance: float) -> Record:
    """Return the record with its loss difference to the baseline, marked wrong beyond `tolerance`.

    The difference is the largest over the steps of |loss - baseline's loss| / |baseline's loss|.
    """
    if base is None or not record.losses or not base.losses:
        return record
    if len(record.losses) != len(base.losses):
        why = f"{len(record.losses)} losses against the baseline's {len(base.losses)}"
        return dataclasses.replace(record, wrong=why)
    pairs = zip(record.losses, base.losses)
    far = [abs(mine - theirs) / max(abs(theirs), 1e-12) for mine, theirs in pairs]
    worst = max(far, key=lambda f: (f != f, f))  # NaN is the worst of all
    wrong = None
    if not worst <= tolerance:
        wrong = f"losses differ by {worst:.1e}, allowed {tolerance:.0e}"
    return dataclasses.replace(record, loss_rel_diff=worst, wrong=wrong)


def _configure(base: Any, row: Row, folder: Path) -> Any:
    changes = {**row.changes, "optimizations": row.optimizations, "out": str(folder)}
    return replace(base, changes)


def _folder(out: Path, row: Row) -> Path:
    return out / "rows" / re.sub(r"[^\w+.-]+", "-", row.name)


def _run_row(row: Row, config: Any, where: tuple[Path, str, bool], board: Board) -> Record:
    """Return the row's record, from the cache or from a fresh process."""
    out, target, fresh = where
    folder = _folder(out, row)
    cached = folder / "record.json"
    key = _key(row, config, target)
    if not fresh and (record := _from_cache(cached, key)):
        return _named(record, row)
    cached.unlink(missing_ok=True)
    options = {"out": folder, "threads": row.threads, "monitor": False, "env": STEADY}
    job = launch(target, config, row.nproc or 1, **options)
    try:
        with board.watch():
            record = job.result()
    except LaunchError as error:
        return _named(Record(name=row.name, reason=_reason(error)), row)
    if not record.reason:
        save_json({"key": key, "record": record.to_json()}, cached)
    return _named(record, row)


def _key(row: Row, config: Any, target: str) -> str:
    """Return what must be equal for a cached record to count: work, machine, versions."""
    shape = [row.nproc, row.threads, target]
    return config_hash([replace(config, out=""), shape, machine(), versions()])


def _from_cache(path: Path, key: str) -> Record | None:
    if not path.is_file():
        return None
    stored = json.loads(path.read_text())
    return Record.from_json(stored["record"]) if stored["key"] == key else None


def _named(record: Record, row: Row) -> Record:
    return dataclasses.replace(record, name=row.name, dimension=row.dimension)


def _reason(error: LaunchError) -> str:
    if error.refusal:
        return error.refusal
    return f"failed: {str(error).splitlines()[0]}; log {error.log}"


def _refuse_without_baseline(row: Row, record: Record, earlier: Sequence[Record]) -> None:
    if not earlier and record.reason:
        raise UserError(f"the baseline row {row.name!r} cannot run: {record.reason}")


def _keep(path: Path, record: Record) -> None:
    """Append the record; an older one of the same name and scope goes."""
    others = read_jsonl(path) if path.is_file() else []
    kept = [r for r in others if (r.get("name"), r.get("scope")) != (record.name, record.scope)]
    if len(kept) < len(others):
        partial = path.with_name(path.name + ".partial")
        partial.unlink(missing_ok=True)
        append_jsonl(partial, kept)
        partial.replace(path)
    append_jsonl(path, [record])
