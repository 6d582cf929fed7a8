"""A self-contained page from records: table, four pictures, and how the numbers were made."""

import base64
import html
import io
from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from wamlab.config import ConfigError
from wamlab.jupyter import plot
from wamlab.jupyter.table import baseline, html_table, print_ladder, speedup
from wamlab.measure import Record

__all__ = ["print_ladder", "write_report"]
DPI = 150
WIDTH = 9.0  # inches
CSS = """
:root { --ink: #22262b; --soft: #5c6470; --line: #e3e6ea; --blue: #0072b2; }
body { margin: 0; background: #f6f7f9; color: var(--ink);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; }
main { max-width: 980px; margin: 0 auto; padding: 40px 48px 56px; background: white; }
h1 { font-size: 28px; line-height: 1.2; margin: 0 0 6px; }
h2 { font-size: 19px; margin: 40px 0 8px; }
p { margin: 6px 0 12px; max-width: 72ch; }
.soft { color: var(--soft); font-size: 14px; }
.lead { font-size: 18px; border-left: 4px solid var(--blue); padding: 6px 0 6px 16px;
  margin: 22px 0; max-width: 66ch; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: 14px;
  font-variant-numeric: tabular-nums; }
th { text-align: right; font-weight: 600; color: var(--soft); border-bottom: 2px solid var(--ink);
  padding: 6px 8px; white-space: nowrap; }
td { text-align: right; border-bottom: 1px solid var(--line); padding: 7px 8px;
  white-space: nowrap; }
th:first-child, td:first-child, th:last-child, td:last-child { text-align: left; }
td:first-child { font-weight: 600; }
td:last-child { white-space: normal; color: var(--soft); }
tr.skipped td { color: var(--soft); font-weight: 400; }
tr.wrong td { color: #b3400b; }
figure { margin: 8px 0 4px; } img { width: 100%; height: auto; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 4px 20px; font-size: 14px; }
dt { color: var(--soft); } dd { margin: 0; }
@media print { body { background: white; } main { padding: 0; max-width: none; }
  figure, tr { break-inside: avoid; } }
"""


def write_report(
    records: Sequence[Record], out: str | Path, *, title: str = "A ladder of speed-ups"
) -> Path:
    """Write OUT/report.html, which needs no other file, and its pictures as PNG files.

    Args:
        records: rows of one ladder (scope "step", the baseline first), with decode timings (scope
            "decode") among them or not.
        out: folder of the files.
        title: the page's heading.

    Returns:
        Path of the page.

    Raises:
        ConfigError: no row of scope "step" was measured.
    """
    steps = [r for r in records if r.scope == "step"]
    if baseline(steps) is None:
        raise ConfigError(
            f"nothing to report: none of {len(records)} records is a measured row of scope 'step'"
        )
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    pictures = _pictures(steps, [r for r in records if r.scope == "decode"])
    for name, (_, _, png) in pictures.items():
        (out / f"{name}.png").write_bytes(png)
    sections = [_section(*picture) for picture in pictures.values()]
    page = out / "report.html"
    page.write_text(_page(title, steps, sections), encoding="utf-8")
    return page


def _pictures(steps: list[Record], decode: list[Record]) -> dict[str, tuple[str, str, bytes]]:
    """Return file name -> (heading, how to read it, PNG) of every picture that has its numbers."""
    base = baseline(steps).name
    found = {"speedup": ("Speed-up", _speedup_text(base), _draw(plot.plot_speedup, steps))}
    parts = [r for r in steps if r.parts_ms]
    if parts:
        found["breakdown"] = ("Where the time goes", PARTS, _draw(plot.plot_breakdown, parts))
    if any(r.losses for r in steps):
        found["losses"] = ("Still the same training", _losses_text(base), _draw_losses(steps))
    if any(r.step_ms for r in decode):
        found["decode"] = ("Decoding video", DECODE, _draw(plot.plot_decode, decode))
    return found


PARTS = (
    "Each part of a step timed by itself, waiting for the device at every boundary. That forbids "
    "overlap, and only the parts are in a bar: it need not be as long as the step in the table. It "
    "says what to speed up next."
)
DECODE = (
    "The same windows of the same video files through each decoder, outside the training step. A "
    "decoder whose frames were not the right ones is marked, whatever its time."
)


def _speedup_text(base: str) -> str:
    return (
        f"Samples trained a second by the whole machine, over those of {base}. Colour is the "
        "dimension that a row adds last: blue compute, green parallel, orange data."
    )


def _losses_text(base: str) -> str:
    return (
        "A fast row counts only if it trains the same. Every row saw the same samples, noise and "
        f"timesteps; below, how far its loss is from that of {base} at each step."
    )


def _draw(draw: object, records: list[Record]) -> bytes:
    with plot.style():
        figure = Figure(figsize=(WIDTH, 1.3 + 0.46 * len(records)), layout="constrained")
        draw(records, figure.subplots())
        return _png(figure)


def _draw_losses(records: list[Record]) -> bytes:
    with plot.style():
        figure = Figure(figsize=(WIDTH, 5.2), layout="constrained")
        axes = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
        plot.plot_losses(records, tuple(axes))
        return _png(figure)


def _png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=DPI)
    return buffer.getvalue()


def _section(heading: str, text: str, png: bytes) -> str:
    data = base64.b64encode(png).decode()
    image = f'<img alt="{html.escape(heading)}" src="data:image/png;base64,{data}">'
    return f"<h2>{heading}</h2><p>{html.escape(text)}</p><figure>{image}</figure>"


def _page(title: str, steps: list[Record], sections: list[str]) -> str:
    body = [
        f"<h1>{html.escape(title)}</h1>",
        f'<p class="soft">{html.escape(_machine_line(steps))}</p>',
        f'<p class="lead">{html.escape(_headline(steps))}</p>',
        f'<div class="wide">{html_table(steps)}</div>',
        f'<p class="soft">{html.escape(TABLE)}</p>',
        *sections,
        f"<h2>How it was measured</h2>{_facts(steps)}",
    ]
    head = f'<meta charset="utf-8"><title>{html.escape(title)}</title><style>{CSS}</style>'
    size = '<meta name="viewport" content="width=device-width">'
    return f'<!doctype html><html lang="en"><head>{head}{size}</head><body><main>' + (
        "\n".join(body) + "</main></body></html>\n"
    )


TABLE = (
    "step: median (quartiles) of one global batch. Data wait: share of the step spent waiting for "
    "the loader. Δ loss: largest relative difference to the first row at any step."
)


def _headline(steps: list[Record]) -> str:
    base = baseline(steps)
    rows = [r for r in steps if speedup(r, base) and not r.wrong and r is not base]
    if not rows:
        return f"Only {base.name} could be measured: {base.samples_per_s:.3g} samples/s."
    best = max(rows, key=lambda r: r.samples_per_s)
    return (
        f"{best.name} trains {speedup(best, base):.2f} times as many samples a second as "
        f"{base.name} on this machine: {best.samples_per_s:.3g} against {base.samples_per_s:.3g}."
    )


def _machine_line(steps: list[Record]) -> str:
    record = baseline(steps)
    machine = record.machine or {}
    gpus = machine.get("gpus") or []
    chips = [f"{len(gpus)} × {gpus[0]}"] if gpus else []
    cpu = f"{machine.get('cpu', 'unknown processor')}, {machine.get('cores', '?')} cores"
    return " · ".join([*chips, cpu, record.time_utc or ""])


def _spread(steps: list[Record]) -> float:
    times = [r.step_ms for r in steps if r.step_ms and not r.wrong]
    return max(((t.q75 - t.q25) / t.median for t in times), default=0.0)


def _facts(steps: list[Record]) -> str:
    base = baseline(steps)
    repeats = base.step_ms.n if base.step_ms else None
    warmup = len(base.losses) - repeats if base.losses and repeats else None
    versions = base.versions or {}
    facts = {
        "Work": f"model {base.model}, global batch {base.global_batch}, {base.precision}; every "
        "row trains the same samples with the same noise, in a fresh process",
        "Warm-up": f"{warmup} steps not counted" if warmup is not None else "not recorded",
        "Repeats": f"{repeats} steps; median and quartiles",
        "Ranks": ", ".join(f"{r.name}: {r.world_size}" for r in steps if r.world_size),
        "Versions": ", ".join(f"{k} {v}" for k, v in versions.items() if v),
        "Limits": f"few repeats of a small model, a process a row: the steps of one row spread by "
        f"up to {_spread(steps):.0%} (quartiles), and smaller differences between rows are noise; "
        "ratios hold for this machine and this size only",
    }
    rows = "".join(f"<dt>{k}</dt><dd>{html.escape(v)}</dd>" for k, v in facts.items())
    return f"<dl>{rows}</dl>"
