"""Pictures: what they draw, their units, their colours, and what they refuse."""

import dataclasses
import itertools

import matplotlib
import pytest

from wamlab.config import ConfigError
from wamlab.jupyter import plot
from wamlab.measure import Record, Timing

matplotlib.use("agg")


@pytest.fixture(autouse=True)
def _closed():
    yield
    plot.plt.close("all")


def row(name, dimension, ms, **more):
    return Record(
        name=name,
        dimension=dimension,
        step_ms=Timing(median=ms, q25=0.9 * ms, q75=1.2 * ms, n=5),
        samples_per_s=2000 / ms,
        losses=(2.0, 1.5, 1.0),
        parts_ms={"forward": 0.6 * ms, "backward": 0.3 * ms, "unheard_of": 0.1 * ms},
        **more,
    )


ROWS = [
    row("official", None, 400.0),
    row("compute", "compute", 200.0),
    Record(name="data", dimension="data", reason="torchcodec needs FFmpeg"),
    row("off", "parallel", 100.0, wrong="losses differ by 0.3"),
]


def texts(ax):
    return [t.get_text() for t in ax.texts]


def test_speedup_bars():
    ax = plot.plot_speedup(ROWS)
    assert [bar.get_width() for bar in ax.patches] == [1.0, 2.0, 4.0]
    colours = [matplotlib.colors.to_hex(bar.get_facecolor()) for bar in ax.patches]
    assert colours == [plot.COLOURS[d] for d in (None, "compute", "parallel")]
    assert ax.patches[2].get_hatch()  # a wrong row never looks like a fast one
    assert texts(ax) == [
        "1.00×   5 samples/s",
        "2.00×   10 samples/s",
        "skipped: torchcodec needs FFmpeg",
        "4.00×   20 samples/s   (wrong: losses differ)",
    ]
    assert [t.get_text() for t in ax.get_yticklabels()] == ["official", "compute", "data", "off"]


def test_waterfall_bars_hang_together():
    ax = plot.plot_waterfall(ROWS)
    spans = [(bar.get_x(), bar.get_x() + bar.get_width()) for bar in ax.patches]
    assert spans == [(0, 400.0), (200.0, 400.0), (100.0, 200.0)]


def test_breakdown_and_memory_stack_up():
    ax = plot.plot_breakdown(ROWS)
    assert sum(bar.get_width() for bar in ax.patches) == pytest.approx(700.0)
    assert [t.get_text() for t in ax.get_legend().get_texts()] == list(ROWS[0].parts_ms)
    ax = plot.plot_memory({"plain": {"weights": 2.0, "Adam": 4.0}, "sharded": {"weights": 1.0}})
    assert {bar.get_width() for bar in ax.patches} == {2.0, 4.0, 1.0, 0.0}
    assert ax.get_xlabel() == "GiB on one rank"


def test_losses_and_their_difference():
    moved = dataclasses.replace(ROWS[1], losses=(2.0, 1.5015, 1.0))
    top, bottom = plot.plot_losses([ROWS[0], moved], tolerance=1e-2)
    assert len(top.lines) == 2
    far = bottom.lines[0].get_ydata()
    assert list(far) == pytest.approx([plot.EQUAL, 1e-3, plot.EQUAL])
    assert bottom.get_yscale() == "log"


def test_decode_times():
    decoders = [
        Record(name="pyav", scope="decode", dimension="data", step_ms=ROWS[0].step_ms),
        Record(name="nvdec", scope="decode", dimension="data", reason="needs CUDA"),
    ]
    ax = plot.plot_decode(decoders)
    assert texts(ax) == ["400 ms", "skipped: needs CUDA"]


def test_every_axis_has_a_unit():
    drawn = [plot.plot_speedup(ROWS), plot.plot_waterfall(ROWS), plot.plot_breakdown(ROWS)]
    drawn.append(plot.plot_decode(ROWS[:1]))
    for ax in drawn:
        assert any(unit in ax.get_xlabel() for unit in ("ms", "samples/s", "GiB"))


def test_a_prediction_is_laid_over():
    ax = plot.plot_speedup(ROWS)
    lines = len(ax.lines)
    assert len(plot.mark_prediction(ax, None).lines) == lines
    assert len(plot.mark_prediction(ax, 3.0).lines) == lines + 1


@pytest.mark.parametrize(
    ("draw", "field"),
    [
        (plot.plot_speedup, "samples_per_s"),
        (plot.plot_waterfall, "step_ms"),
        (plot.plot_breakdown, "parts_ms"),
        (plot.plot_losses, "losses"),
        (plot.plot_decode, "step_ms"),
    ],
)
def test_a_missing_field_is_named(draw, field):
    with pytest.raises(ConfigError, match=rf"none of the records has '{field}' \(bare\)"):
        draw([Record(name="bare")])


def test_nothing_is_changed_outside_the_style():
    before = dict(matplotlib.rcParams)
    plot.plot_speedup(ROWS)
    assert dict(matplotlib.rcParams) == before


def test_colours_differ_in_grey_print():
    """Bars of different dimensions can be told apart by lightness alone."""
    shades = []
    for colour in plot.COLOURS.values():
        red, green, blue = matplotlib.colors.to_rgb(colour)
        shades.append(0.2126 * red + 0.7152 * green + 0.0722 * blue)
    shades.sort()
    assert min(b - a for a, b in itertools.pairwise(shades)) > 0.02
