"""The notebook rules, and the notebooks that a bare pytest runs."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
QUICK = ["00_machine", "06_end_to_end"]


def ids(path: Path) -> str:
    return path.stem


def texts(path: Path) -> list[str]:
    return [c.source for c in nbformat.read(path, 4).cells if c.cell_type == "markdown"]


def code_cells(path: Path) -> list:
    return [c for c in nbformat.read(path, 4).cells if c.cell_type == "code" and c.source.strip()]


def test_the_quick_notebooks_exist():
    assert {p.stem for p in NOTEBOOKS} >= set(QUICK)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=ids)
def test_outputs_are_committed_from_one_run_without_errors(path):
    cells = code_cells(path)
    assert [c.execution_count for c in cells] == list(range(1, len(cells) + 1))
    for cell in cells:
        assert not [o for o in cell.outputs if o.output_type == "error"]
    assert path.stat().st_size <= 400 * 1024, "outputs take more than 400 KB"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=ids)
def test_shape_of_a_notebook(path):
    cells = code_cells(path)
    assert 8 <= len(cells) <= 45
    assert "SCALE" in cells[0].source, "imports and SCALE stand in the first code cell"
    for cell in cells:
        assert len(cell.source.splitlines()) <= 30, f"a cell is too long:\n{cell.source[:200]}"
    prose = sum(
        len(c.source.split()) for c in nbformat.read(path, 4).cells if c.cell_type == "markdown"
    )
    lines = sum(len(c.source.splitlines()) for c in cells)
    assert 3 <= prose / lines <= 20, f"{prose} words of prose for {lines} lines of code"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=ids)
def test_each_notebook_opens_with_a_question_and_ends_with_what_to_take_along(path):
    cells = nbformat.read(path, 4).cells
    assert re.match(rf"# {path.stem[:2]} · .+\?\n", cells[0].source), "the title asks the question"
    for promise in ("**Afterwards you can** ", "**It takes** "):
        assert promise in cells[0].source
    end = cells[-1]
    assert end.cell_type == "markdown"
    assert "## To take along" in end.source
    assert "**Where the code lives:**" in end.source
    last = path == NOTEBOOKS[-1]
    assert last or f"**Next:** {NOTEBOOKS[NOTEBOOKS.index(path) + 1].stem[:2]} " in end.source


@pytest.mark.parametrize("path", NOTEBOOKS, ids=ids)
def test_files_and_notebooks_that_a_text_names_are_there(path):
    text = "\n".join(texts(path))
    for name in re.findall(r"`((?:wamlab|notebooks|tests|data_samples)/[\w./]+)`", text):
        assert (ROOT / name).exists(), name
    for number in re.findall(r"notebooks? (\d\d)\b|\*\*Next:\*\* (\d\d)", text):
        assert any(p.stem.startswith("".join(number)) for p in NOTEBOOKS), number
    for file, names in re.findall(r"`(wamlab/[\w/]+\.py)` \(([^)]*)\)", text):
        for name in re.findall(r"`(\w+)`", names):
            assert re.search(
                rf"^(def|class) {name}\b|^{name}\b.* = ", (ROOT / file).read_text(), re.M
            )


@pytest.mark.parametrize("path", NOTEBOOKS, ids=ids)
def test_each_prediction_is_compared_with_its_result_and_keeps_its_field(path):
    code = "\n".join(c.source for c in code_cells(path))
    asked = re.findall(r"^(\w+) = predict\(", code, re.M)
    assert asked
    for name in asked:
        assert f"{name}.against(" in code, name
    assert "widgets" in nbformat.read(path, 4).metadata, "the state of the fields is saved"


def test_the_course_has_its_exercises():
    code = "\n".join(c.source for p in NOTEBOOKS for c in code_cells(p))
    asked = set(re.findall(r'check\("([\w-]+)"', code))
    assert len(asked) >= 25
    for name in asked:
        assert f'task("{name}")' in code, name


@pytest.mark.parametrize("path", NOTEBOOKS, ids=ids)
def test_definitions_over_ten_lines_live_in_wamlab(path):
    for cell in code_cells(path):
        tree = ast.parse("\n".join(x for x in cell.source.splitlines() if x[:1] not in "%!"))
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                length = node.end_lineno - node.lineno + 1
                assert length <= 12, f"{path.stem}: {node.name} is {length} lines long"


@pytest.mark.timeout(1500)  # a cold C++ compile of the blocks takes minutes
@pytest.mark.parametrize("name", QUICK)
def test_quick_notebook_runs(name):
    """The two notebooks of a bare pytest; the whole course is `pytest --nbval-lax notebooks`."""
    options = ["--nbval-lax", "--nbval-current-env", "--nbval-cell-timeout=600"]
    run = subprocess.run(
        [sys.executable, "-m", "pytest", *options, str(ROOT / "notebooks" / f"{name}.ipynb")],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-1000:]
