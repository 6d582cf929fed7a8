"""The course as pages: what is kept, what is left out, and how the pages hang together."""

import re
import shutil

import nbformat
import pytest
from conftest import ROOT
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from wamlab.__main__ import main
from wamlab.cli.course import opening_of
from wamlab.jupyter.predict import Prediction

WIDGET = {"application/vnd.jupyter.widget-view+json": {"model_id": "a"}, "text/plain": "Text()"}
FIELD = "Text(value='12', layout=Layout(width='160px'), placeholder='your number (<GB/s>)')"


def fields_of(unit):
    """What a file holds of a prediction's field, without and with a number in it."""
    prediction = Prediction("?", unit)
    yield repr(prediction._field)
    prediction.value = 40
    yield repr(prediction._field)


@pytest.fixture
def notebooks(tmp_path):
    folder = tmp_path / "notebooks"
    folder.mkdir()
    text = "# 01 · First\n\n**Question.** Is *x* < y? See [the next](02_last.ipynb#end).\n\nMore."
    shown = [
        new_output("display_data", WIDGET),
        new_output("display_data", WIDGET | {"text/html": "<b>seen</b>"}),
        new_output("display_data", WIDGET | {"text/plain": FIELD}),
        *(new_output("display_data", WIDGET | {"text/plain": f}) for f in fields_of("kg")),
        new_output("stream", name="stdout", text="measured 3 ms"),
    ]
    cells = [new_markdown_cell(text), new_code_cell("f(1)", outputs=shown, execution_count=1)]
    nbformat.write(new_notebook(cells=cells), folder / "01_first.ipynb")
    shutil.copy(ROOT / "notebooks/00_machine.ipynb", folder / "02_last.ipynb")
    return folder


def test_each_notebook_becomes_a_page_that_needs_no_network(notebooks, tmp_path, capsys):
    out = tmp_path / "pages"
    assert main(["course", "--html", str(out), "--notebooks", str(notebooks)]) == 0
    assert str(out / "index.html") in capsys.readouterr().out
    assert sorted(p.name for p in out.iterdir()) == ["01_first.html", "02_last.html", "index.html"]
    for page in out.iterdir():
        text = page.read_text()
        assert not re.findall(r"<script|<link[^>]+http|<img[^>]+src=\"(?!data:)", text)
        for link in re.findall(r'href="([\w./]+\.html)', text):
            assert (out / link).is_file()
    index = (out / "index.html").read_text()
    assert "01 · First" in index
    assert "Is x &lt; y? See the next." in index
    first, last = (out / "01_first.html").read_text(), (out / "02_last.html").read_text()
    assert "<b>seen</b>" in first
    assert "measured 3 ms" in first
    assert "Text()" not in first
    field, empty, filled = re.findall(r"<input[^\n]+/>", first)
    assert 'placeholder="your number (kg)"' in empty
    assert 'placeholder="your number (kg)" value="40"' in filled
    assert 'placeholder="your number (&lt;GB/s&gt;)"' in field
    assert 'value="12"' in field
    assert "<input" in last
    assert 'href="02_last.html#end"' in first
    assert "next: 02_last" in first
    assert "previous: 01_first" in last
    assert last.count("data:image/png;base64") >= 1


def test_the_opening_of_a_notebook_without_a_heading_is_its_file_name():
    notebook = new_notebook(cells=[new_code_cell("1")])
    assert opening_of(notebook, "07_more") == ("07_more", "")


def test_a_folder_without_notebooks_and_a_broken_one_are_refused(tmp_path, capsys):
    options = ["course", "--html", str(tmp_path / "out"), "--notebooks", str(tmp_path)]
    assert main(options) == 2
    assert "no notebooks in" in capsys.readouterr().err
    (tmp_path / "00_broken.ipynb").write_text("{")
    assert main(options) == 2
    assert "00_broken.ipynb is not a notebook" in capsys.readouterr().err
