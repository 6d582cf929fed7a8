"""The ladder as a table: one list of cells, shown by rich in a terminal and as HTML in a page."""

import html
import sys
from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from wamlab.measure import Record

WIDE = 100  # columns of a terminal that has room for the quartiles
COLUMNS = ("row", "step (ms)", "samples/s", "speed-up", "peak (GiB)", "data wait", "Δ loss")


def baseline(records: Sequence[Record]) -> Record | None:
    """Return the row that the others are compared with: the first that trained whole steps."""
    return next((r for r in records if r.scope == "step" and r.samples_per_s), None)


def speedup(record: Record, base: Record | None) -> float | None:
    """Return samples/s of the whole machine over the baseline's, None where either is missing."""
    if base is None or not record.samples_per_s or not base.samples_per_s:
        return None
    return record.samples_per_s / base.samples_per_s


def cells(record: Record, base: Record | None) -> list[str]:
    """Return one row's texts, in the order of COLUMNS."""
    if record.reason:
        return [record.name, *["–"] * (len(COLUMNS) - 1)]
    step = record.step_ms
    return [
        record.name,
        f"{_ms(step.median)} ({_ms(step.q25)}–{_ms(step.q75)})" if step else "–",
        _number(record.samples_per_s, "{:.3g}"),
        _number(speedup(record, base), "{:.2f}×"),
        _number(record.peak_gib, "{:.2f}"),
        _number(record.data_wait_share, "{:.1%}"),
        "–" if record is base else _number(record.loss_rel_diff, "{:.0e}"),
    ]


def note(record: Record) -> str:
    """Return why a row does not count, or on how many ranks it ran, or nothing."""
    if record.reason:
        return record.reason if record.reason.startswith("failed") else f"skipped: {record.reason}"
    if record.wrong:
        return f"wrong: {record.wrong}"
    return f"{record.world_size} ranks" if (record.world_size or 1) > 1 else ""


def rich_table(records: Sequence[Record], *, narrow: bool = False) -> Table:
    """Return the table for a terminal, notes below; `narrow` leaves the quartiles out."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), caption_justify="left")
    for number, name in enumerate(COLUMNS):
        name = name.replace("peak (GiB)", "GiB").replace("data ", "") if narrow else name
        table.add_column(name, justify="right" if number else "left", no_wrap=not number)
    base = baseline(records)
    for record in records:
        style = "red" if record.wrong else "dim" if record.reason else None
        texts = cells(record, base)
        texts[1] = texts[1].partition(" ")[0] if narrow else texts[1]
        table.add_row(*texts, style=style)
    notes = [Text(f"{r.name}: {note(r)}") for r in records if note(r)]
    table.caption = Text("\n").join(notes) if notes else None
    return table


def html_table(records: Sequence[Record]) -> str:
    """Return the table as an HTML fragment; rows that do not count have a class for it."""
    base = baseline(records)
    head = "".join(f"<th>{html.escape(c)}</th>" for c in (*COLUMNS, "note"))
    body = []
    for record in records:
        kind = "wrong" if record.wrong else "skipped" if record.reason else ""
        texts = [*cells(record, base), note(record)]
        row = "".join(f"<td>{html.escape(c)}</td>" for c in texts)
        body.append(f'<tr class="{kind}">{row}</tr>')
    rows = "\n".join(body)
    return f'<table class="ladder"><thead><tr>{head}</tr></thead><tbody>\n{rows}\n</tbody></table>'


def print_ladder(records: Sequence[Record]) -> None:
    """Print the table in the terminal."""
    width = None if sys.stdout.isatty() else 120  # a log file has no width of its own
    console = Console(width=width)
    console.print(rich_table(records, narrow=console.width < WIDE))


def _ms(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else form.format(value)
