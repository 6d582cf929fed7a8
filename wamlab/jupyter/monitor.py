"""The live view of one run, fed from its folder alone: any run, started anywhere, alive or
ended.

A thread reads what is new in steps.jsonl and redraws, so that the cell returns and other cells
run. At the end the widgets give way to a line of text and a picture, which need no kernel to be
read.
"""

import html
import io
import json
import statistics
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import ipywidgets as widgets
from IPython.display import HTML, Image, display
from matplotlib.figure import Figure

from wamlab.config import ConfigError
from wamlab.jupyter._folder import RunFolder
from wamlab.jupyter._ship import MODULE
from wamlab.jupyter.plot import COLOURS, GREY

POLL_S = 0.25  # at most 4 updates a second
DRAW_S = 1.0  # a picture costs about 0.1 s of a core that the run may need
LOG_LINES = 6
MAX_POINTS = 1000
LOSSES = {"loss": "#22262b", "dynamics_loss": COLOURS["compute"], "action_loss": COLOURS["data"]}


class StepFile:
    """Reads a growing steps.jsonl, each line once.

    Args:
        path: the file; it may not exist yet.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.rows = path, []
        self._offset = 0

    def update(self) -> bool:
        """Read the whole lines that were added; True if there were any."""
        if not self.path.is_file():
            return False
        with self.path.open("rb") as file:
            file.seek(self._offset)
            text = file.read()
        whole = text[: text.rfind(b"\n") + 1]  # the last line may be half written
        self._offset += len(whole)
        self.rows += [json.loads(line) for line in whole.splitlines()]
        return bool(whole)

    def last(self, name: str) -> float | None:
        """Return the newest value of a field."""
        return self.rows[-1].get(name) if self.rows else None


class Monitor:
    """Progress with time left, losses, throughput, MFU, data wait, peak memory and a Stop button.

    Args:
        folder: a run folder.

    Raises:
        ConfigError: the folder holds no run.
    """

    def __init__(self, folder: str | Path) -> None:
        self.files = RunFolder(folder)
        self.job = self.files.read("job.json")
        if self.job is None:
            raise ConfigError(f"{folder} holds no run (no job.json in it)")
        self.steps = StepFile(self.files.path / "steps.jsonl")
        self.total = (self.job["config"] or {}).get("steps")
        self.redraws = 0  # pictures and texts sent to the page
        self._running, self._stale = True, False
        self._thread = threading.Thread(target=self._follow, daemon=True)

    def show(self) -> "Monitor":
        """Show the monitor below the cell and return at once."""
        self._bar = widgets.IntProgress(max=self.total or 1, layout={"width": "220px"})
        self._label = widgets.Label("starting")
        self._stop = widgets.Button(description="Stop", button_style="danger")
        self._stop.on_click(self._on_stop)
        self._log = widgets.HTML()
        line = widgets.HBox([self._bar, self._stop])
        stack = widgets.VBox([line, self._label, self._log])
        self._control = display(stack, display_id=True)
        self._picture = display(HTML(""), display_id=True)
        self._thread.start()
        return self

    def finish(self) -> None:
        """Wait until the state after the run's end has been drawn."""
        self._thread.join(10.0)

    def _on_stop(self, button: Any) -> None:
        self.files.request_stop()
        self._stop.disabled, self._stop.description = True, "stopping"

    def _follow(self) -> None:
        drawn = 0.0
        while True:
            running = (
                self.files.status() == "running"
            )  # asked first: what came before is read below
            new = self.steps.update()
            if new:
                self._stale = True
            self._show_line()
            if self._stale and (not running or time.monotonic() - drawn > DRAW_S):
                drawn, self._stale = time.monotonic(), False
                self._picture.update(Image(picture(self.steps.rows)))
                self.redraws += 1
            if not running:
                break
            time.sleep(POLL_S)
        name = self.job["target"].removeprefix(f"{MODULE}:")
        text = f"{self.files.status()}: {self.summary()}"
        self._control.update(HTML(f"<b>{html.escape(name)}</b> {html.escape(text)}"))

    def _show_line(self) -> None:
        text = self.summary()
        lines = html.escape("\n".join(self.files.tail(0, LOG_LINES)))
        log = f'<pre style="margin:0;font-size:11px;color:{GREY}">{lines}</pre>' if lines else ""
        if text != self._label.value:
            self._label.value = text
            self._bar.value = len(self.steps.rows)
            self.redraws += 1
        if log != self._log.value:
            self._log.value = log

    def summary(self) -> str:
        """Return the state in a line: steps, time left, loss, throughput, MFU, memory, wait."""
        ranks = f"{self.job['nproc']} rank" + "s" * (self.job["nproc"] > 1)
        if not self.steps.rows:
            return ranks
        last = self.steps.last
        done = len(self.steps.rows)
        parts = [f"{ranks}, step {done}" + (f" of {self.total}" if self.total else "")]
        if self.total and done < self.total and self._running:
            parts.append(f"{self._left(done)} left")
        for name, form in FORMS.items():
            value = last(name)
            if value is not None:
                parts.append(form.format(value))
        if last("data_wait_ms") is not None and last("step_ms"):
            parts.append(f"data wait {last('data_wait_ms') / last('step_ms'):.0%}")
        return " · ".join(parts)

    def _left(self, done: int) -> str:
        times = [row["step_ms"] for row in self.steps.rows[-10:] if row.get("step_ms")]
        if not times:
            return "unknown time"
        seconds = statistics.median(times) * (self.total - done) / 1e3
        return str(timedelta(seconds=round(seconds)))


FORMS = {
    "loss": "loss {:.4g}",
    "samples_per_s": "{:.3g} samples/s",
    "mfu": "MFU {:.1%}",
    "peak_gib": "peak {:.2f} GiB",
}


def picture(rows: list[dict[str, Any]]) -> bytes:
    """Return a PNG of the losses and the throughput by step.

    Drawn without pyplot, whose state belongs to the thread that runs the cells.
    """
    figure = Figure(figsize=(8, 2.4), dpi=100, layout="constrained")
    left, right = figure.subplots(1, 2)
    rows = rows[:: max(1, len(rows) // MAX_POINTS)]
    steps = [row.get("step", number) for number, row in enumerate(rows)]
    for name, colour in LOSSES.items():
        values = [row.get(name) for row in rows]
        if any(v is not None for v in values):
            shown = [float("nan") if v is None else v for v in values]
            left.plot(steps, shown, color=colour, label=name.replace("_", " "), lw=1.3)
            left.legend(frameon=False, fontsize=8)
    rates = [row.get("samples_per_s") or float("nan") for row in rows]
    right.plot(steps, rates, color=COLOURS["parallel"], lw=1.3)
    right.set_ylim(bottom=0)
    for ax, label in ((left, "loss"), (right, "samples/s")):
        ax.set_xlabel("step")
        ax.set_ylabel(label)
        ax.spines[["top", "right"]].set_visible(False)
        ax.xaxis.get_major_locator().set_params(integer=True)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()
