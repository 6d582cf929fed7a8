"""A number that the reader writes before the measurement, and what became of it.

Without a reader (a notebook test, an export) nothing is filled in and everything still runs.
"""

import html
import math
import re

import ipywidgets as widgets
from IPython.display import HTML, display

COLOURS = {"you": "#d55e00", "measured": "#0072b2"}  # the first as in plot.mark_prediction
TRACK = "display: inline-block; position: relative; width: 320px; height: 0.8em"
BAR = "position: absolute; top: 0; bottom: 0; left: {:.1f}%; width: max(2px, {:.1f}%)"


class _Field(widgets.Text):
    """A text field that is also readable where no widget is shown: in a file, or untrusted."""

    def __repr__(self) -> str:
        return f"[{self.placeholder}{': ' if self.value else ''}{self.value}]"


class Prediction:
    """One question and the reader's answer.

    Args:
        question: what will be measured.
        unit: the answer's unit, such as "×", "ms" or "GB/s"; "" for a number without one.
    """

    def __init__(self, question: str, unit: str) -> None:
        self.question, self.unit = question, unit
        asks = f"your number ({unit})" if unit else "your number"
        self._field = _Field(placeholder=asks, layout={"width": "160px"})

    @property
    def value(self) -> float | None:
        """The number that the reader wrote, None while there is none."""
        try:
            number = float(self._field.value.strip().replace(",", "."))
        except ValueError:
            return None
        return number if math.isfinite(number) else None

    @value.setter
    def value(self, number: float | None) -> None:
        self._field.value = "" if number is None else f"{number:g}"

    def show(self) -> "Prediction":
        """Show question and field below the cell."""
        asks = re.sub(r"`([^`]+)`", r"<code>\1</code>", html.escape(self.question))
        display(HTML(f"<b>Predict:</b> {asks}"), self._field)
        return self

    def against(self, measured: float) -> None:
        """Print the prediction beside the measured value and draw both on one scale."""
        text = f"measured {self._with_unit(f'{measured:.3g}')}"
        if self.value is None:
            print(f"{text}; you made no prediction")
            return
        said = self._with_unit(f"{self.value:g}")
        print(f"you said {said}, {text}{self._distance(measured)}")
        if math.isfinite(measured):
            display(HTML(_bars({"you": self.value, "measured": measured})))

    def _with_unit(self, number: str) -> str:
        return f"{number} {self.unit}".rstrip()

    def _distance(self, measured: float) -> str:
        if not measured:
            return ""
        off = (self.value - measured) / abs(measured)
        return f": {abs(off):.0%} too {'high' if off > 0 else 'low'}"


def _bars(values: dict[str, float]) -> str:
    """Return two bars from one zero: HTML, so that it stays in the notebook without a kernel."""
    low, high = min(0.0, *values.values()), max(0.0, *values.values())
    span = high - low or 1.0
    rows = []
    for name, value in values.items():
        place = BAR.format(100 * (min(value, 0.0) - low) / span, 100 * abs(value) / span)
        rows.append(
            f'<div><span style="display: inline-block; width: 6em">{name}</span>'
            f'<span style="{TRACK}"><span style="{place}; background: {COLOURS[name]}"></span>'
            f"</span> {value:.3g}</div>"
        )
    return "".join(rows)


def predict(question: str, unit: str) -> Prediction:
    """Ask for a number before a measurement; returns at once, read `.value` afterwards."""
    return Prediction(question, unit).show()
