"""What a reader sees while a ladder runs: the table so far and the progress of the current row.

A terminal gets rich's live display, a notebook an HTML table that is redrawn in place, anything
else (a log, CI) one line a row.
"""

import contextlib
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from wamlab.jupyter.launch import in_notebook
from wamlab.jupyter.table import WIDE, cells, html_table, note, rich_table
from wamlab.measure import Record

REDRAW_S = 0.5


class Board:
    """Prints one line a row; the live boards refine it."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names, self.records = list(names), []
        self.current, self.folder, self.steps = "", Path(), None
        self.started = time.monotonic()

    def start(self, name: str, folder: Path, config: Any) -> None:
        """Tell that a row begins."""
        self.current, self.folder, self.steps = name, folder, _steps_of(config)
        self.started = time.monotonic()
        self.draw()

    def finish(self, records: Sequence[Record]) -> None:
        """Tell that the last of `records` is there."""
        self.records, self.current = list(records), ""
        self.draw()

    @contextlib.contextmanager
    def watch(self) -> Iterator[None]:
        """Redraw while the caller waits for the row."""
        ended = threading.Event()

        def redraw() -> None:
            while not ended.wait(REDRAW_S):
                self.draw()

        thread = threading.Thread(target=redraw, daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def done(self) -> int:
        """Return how many steps the current row has written."""
        try:
            return (self.folder / "steps.jsonl").read_bytes().count(b"\n")
        except FileNotFoundError:
            return 0

    def draw(self) -> None:
        """Show the state."""


class LineBoard(Board):
    """One line when a row has ended."""

    def finish(self, records: Sequence[Record]) -> None:
        """Print the row."""
        super().finish(records)
        name, step, rate, ratio = cells(records[-1], records[0])[:4]
        said = "" if records[-1].reason else f"{step} ms, {rate} samples/s, {ratio}"
        print(": ".join(filter(None, (name, said, note(records[-1])))), flush=True)


class TerminalBoard(Board):
    """rich's live display: the table and one bar."""

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__(names)
        bar = BarColumn(bar_width=30)
        text = TextColumn("{task.description}"), bar, TextColumn("{task.fields[said]}")
        self.progress = Progress(*text, TimeElapsedColumn())
        self.task = self.progress.add_task("", total=None, said="")
        self.live = Live(console=Console(), refresh_per_second=4, transient=True)
        self.live.start()

    def start(self, name: str, folder: Path, config: Any) -> None:
        """Begin the row's bar."""
        self.progress.reset(self.task, total=None)
        super().start(name, folder, config)

    def draw(self) -> None:
        """Redraw table and bar."""
        done, count = self.done(), f"row {len(self.records) + 1} of {len(self.names)}"
        said = f"step {done} of {self.steps}" if done else "starting, compiling"
        self.progress.update(
            self.task,
            description=f"{count}: {self.current}",
            completed=done,
            total=self.steps if done else None,
            said=said,
        )
        narrow = self.live.console.width < WIDE
        table = rich_table(self.records, narrow=narrow) if self.records else Text("")
        self.live.update(Group(table, self.progress) if self.current else table)

    def close(self) -> None:
        """Take the display away; the caller prints the final table."""
        self.live.stop()


class NotebookBoard(Board):
    """An HTML table, redrawn in place; its last state stays in the saved notebook."""

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__(names)
        from IPython.display import HTML, display

        self._html = HTML
        self._handle = display(HTML(""), display_id=True)
        self._shown = ""

    def draw(self) -> None:
        """Redraw the table if its text has changed."""
        line = ""
        if self.current:
            done = self.done()
            said = f"step {done} of {self.steps or '?'}" if done else "starting, compiling"
            spent = time.monotonic() - self.started
            line = f"<p>row {len(self.records) + 1} of {len(self.names)}: "
            line += f"<b>{self.current}</b>, {said}, {spent:.0f} s</p>"
        text = html_table(self.records) + line
        if text != self._shown:
            self._shown = text
            self._handle.update(self._html(text))


@contextlib.contextmanager
def open_board(rows: Sequence[Any]) -> Iterator[Board]:
    """Yield the board that fits where the output goes, and take it away at the end."""
    names = [row.name for row in rows]
    if in_notebook():
        yield NotebookBoard(names)
    elif sys.stdout.isatty():
        board = TerminalBoard(names)
        try:
            yield board
        finally:
            board.close()
    else:
        yield LineBoard(names)


def _steps_of(config: Any) -> int | None:
    """Return how many steps a row makes, None where its configuration has no `steps`."""
    return getattr(config, "steps", None)
