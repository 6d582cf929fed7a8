"""Tables of a Markdown file from record files: each stands between two comments and is rewritten.

    <!-- records: notebooks/measurements/demo_cpu.jsonl step -->
    | row | ...
    <!-- end -->

The path, without spaces, is relative to the Markdown file; the word after it is the scope of the
records shown. Nothing but the table stands between the comments.
"""

import re
from collections.abc import Callable, Sequence
from pathlib import Path

from wamlab.config import ConfigError, lookup
from wamlab.hardware import peak_flops
from wamlab.jupyter.table import baseline, speedup
from wamlab.measure import Record, read_records

BLOCK = re.compile(r"(<!-- records: (\S+) (\S+) -->\n)(?:\|.*\n)*(?=<!-- end -->)")


def update(path: Path) -> int:
    """Rewrite every table of a Markdown file from its records.

    Args:
        path: the file; written only if a table changed.

    Returns:
        How many tables there are.

    Raises:
        ConfigError: no table, one whose comments are not as above, a scope that has none, or a file
            of records without such a record.
        OSError: a file is missing.
    """

    def fill(block: re.Match[str]) -> str:
        return f"{block[1]}{table(read_records(path.parent / block[2]), block[3], block[2])}\n"

    stored = path.read_bytes().decode()
    before = stored.replace("\r\n", "\n")
    after, count = BLOCK.subn(fill, before)
    wanted = before.count("<!-- records:")
    if not count or count < wanted:
        raise ConfigError(
            f"{path}: {count} of {wanted} tables stand between <!-- records: FILE SCOPE --> and "
            "<!-- end -->, with nothing but the table between these two lines"
        )
    if after != before:
        path.write_bytes((after.replace("\n", "\r\n") if stored != before else after).encode())
    return count


def table(records: Sequence[Record], scope: str, source: object = "") -> str:
    """Return the Markdown table of the records of a scope.

    Args:
        records: of any scopes.
        scope: a key of TABLES.
        source: where they are from, for errors.

    Raises:
        ConfigError: a scope that has no table, no record of it, or one that lacks its numbers.
    """
    build = lookup(TABLES, scope, "scope of a table")
    shown = [r for r in records if r.scope == scope]
    if not shown:
        raise ConfigError(f"{source} has no record of scope {scope!r}")
    try:
        return build(shown)
    except (KeyError, TypeError, AttributeError, ZeroDivisionError) as error:
        raise ConfigError(
            f"{source}: a record of scope {scope!r} lacks a number: {error}"
        ) from error


def steps(records: Sequence[Record]) -> str:
    """Return a ladder: rows of whole training steps, the baseline first."""
    base = baseline(records)
    rows = []
    for r in records:
        if r.reason or r.wrong or not r.step_ms:
            rows.append([r.name, r.wrong or r.reason, "", "", ""])
            continue
        far = "" if r is base or r.loss_rel_diff is None else f"{r.loss_rel_diff:.0e}"
        rate = f"{r.samples_per_s:.2f}"
        rows.append([r.name, f"{r.step_ms.median:,.0f}", rate, _times(speedup(r, base)), far])
    head = ["row", "step, median (ms)", "samples/s", "speed-up", "largest loss difference"]
    return _table(head, rows)


def transformers(records: Sequence[Record]) -> str:
    """Return the transformer's forward and backward, cases of one size and micro-batch together."""

    def case(r: Record) -> tuple:
        return r.model, r.layers or 0, r.micro_batch

    official = {case(r): r for r in records if r.name == "official"}
    rows = []
    for r in sorted(records, key=lambda r: (case(r), -r.step_ms.median)):
        base, peak = official.get(case(r)), peak_flops(r.device, r.precision)
        ratio = base.step_ms.median / r.step_ms.median if base and base is not r else None
        rows.append(
            [
                f"{r.model}{f', {r.layers} layers' if r.layers else ''}, micro-batch "
                f"{r.micro_batch}",
                f"{', '.join(r.optimizations) or r.name}; recompute {r.recompute}",
                f"{r.step_ms.median:,.1f}",
                f"{r.mfu * peak / 1e12:.0f}" if r.mfu and peak else "",
                _times(ratio),
            ]
        )
    return _table(["case", "way", "ms", "model TFLOP/s", "speed-up"], rows)


def encoders(records: Sequence[Record]) -> str:
    """Return the frozen encoders alone, milliseconds a sample."""
    rows = []
    for r in records:
        x = r.extra
        clip = f"{r.model}, {x['frames']} x {x['height']} x {x['width']}, batch {r.micro_batch}"
        rows.append([clip, r.name, f"{x['sample_ms']:,.1f}", f"{x['tflops_per_s']:.0f}"])
    return _table(["encoder and clip", "way", "ms a sample", "TFLOP/s"], rows)


TABLES: dict[str, Callable[[Sequence[Record]], str]] = {
    "step": steps,
    "dit": transformers,
    "encode": encoders,
}


def _times(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.2f}×"


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)
