"""A number that the reader writes before the measurement, and what became of it.

Without a reader (a notebook test, an export) nothing is filled in and everything still runs.
"""

import html

import ipywidgets as widgets
from IPython.display import HTML, display


class Prediction:
    """One question and the reader's answer.

    Args:
        question: what will be measured.
        unit: the answer's unit, such as "×", "ms" or "GB/s".
    """

    def __init__(self, question: str, unit: str) -> None:
        self.question, self.unit = question, unit
        self._field = widgets.Text(placeholder=f"your number ({unit})", layout={"width": "160px"})

    @property
    def value(self) -> float | None:
        """The number that the reader wrote, None while there is none."""
        try:
            return float(self._field.value.strip().replace(",", "."))
        except ValueError:
            return None

    @value.setter
    def value(self, number: float | None) -> None:
        self._field.value = "" if number is None else f"{number:g}"

    def show(self) -> "Prediction":
        """Show question and field below the cell."""
        display(HTML(f"<b>Predict:</b> {html.escape(self.question)}"), self._field)
        return self

    def against(self, measured: float) -> None:
        """Print the prediction beside the measured value, in the same unit."""
        text = f"measured {measured:.3g} {self.unit}"
        if self.value is None:
            print(f"{text}; you made no prediction")
            return
        print(f"you said {self.value:g} {self.unit}, {text}{self._distance(measured)}")

    def _distance(self, measured: float) -> str:
        if not measured:
            return ""
        off = self.value / measured - 1
        return f": {abs(off):.0%} too {'high' if off > 0 else 'low'}"


def predict(question: str, unit: str) -> Prediction:
    """Ask for a number before a measurement; returns at once, read `.value` afterwards."""
    return Prediction(question, unit).show()
