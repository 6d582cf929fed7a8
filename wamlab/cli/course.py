"""`wamlab course --html OUT`: the notebooks and their outputs as pages, for those who only read."""

import argparse
import html
import re
from pathlib import Path
from typing import Any

import nbformat
from nbconvert import HTMLExporter

from wamlab.cli.lab import NOTEBOOKS
from wamlab.config import UserError

WIDGET = "application/vnd.jupyter.widget-view+json"
INDEX = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>wamlab: the course</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>
body { margin: 0; background: #f6f7f9; color: #22262b;
  font: 17px/1.55 system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; }
main { max-width: 760px; margin: 0 auto; padding: 48px 48px 64px; background: white; }
h1 { font-size: 30px; margin: 0 0 4px; }
h2 { font-size: 19px; margin: 32px 0 4px; } p { margin: 4px 0; }
a { color: #0072b2; text-decoration: none; } a:hover { text-decoration: underline; }
</style></head><body><main><h1>The course</h1>
<p>Notebooks as they ran, outputs included. To run them yourself: <code>wamlab lab</code>.</p>
{entries}
</main></body></html>
"""
STYLE = "<style>pre { word-break: normal !important; overflow-wrap: anywhere; }</style>"
LINK = '<a style="color: #0072b2" href="{1}.html">{0}</a>'
NAV = (
    '<p style="font: 15px system-ui, sans-serif; max-width: 960px; margin: 12px auto;">{links}</p>'
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `wamlab course`."""
    parser.add_argument("--html", type=Path, required=True, metavar="OUT", help="folder to write")
    parser.add_argument(
        "--notebooks", type=Path, default=NOTEBOOKS, help="folder of notebooks (default: wamlab's)"
    )


def run(args: argparse.Namespace) -> int:
    """Write one page a notebook and index.html, and print where."""
    print(f"course: {export(args.notebooks, args.html)}")
    return 0


def export(notebooks: Path, out: Path) -> Path:
    """Write OUT/index.html and one page for each notebook; no page needs the network.

    Args:
        notebooks: folder of .ipynb files, read in the order of their names.
        out: folder of the pages; made if it is missing.

    Returns:
        Path of the index.

    Raises:
        UserError: no notebook there, or one that cannot be read.
    """
    paths = sorted(notebooks.glob("*.ipynb"))
    if not paths:
        raise UserError(f"no notebooks in {notebooks}: name the folder with --notebooks")
    out.mkdir(parents=True, exist_ok=True)
    entries = []
    for number, path in enumerate(paths):
        notebook = _read(path)
        near = {"previous": paths[:number][-1:], "next": paths[number + 1 : number + 2]}
        (out / f"{path.stem}.html").write_text(_page(notebook, path, near), encoding="utf-8")
        title, opening = opening_of(notebook, path.stem)
        head = f'<h2><a href="{path.stem}.html">{html.escape(title)}</a></h2>'
        entries.append(f"{head}<p>{html.escape(opening)}</p>")
    index = out / "index.html"
    index.write_text(INDEX.replace("{entries}", "\n".join(entries)), encoding="utf-8")
    return index


def _read(path: Path) -> Any:
    try:
        return nbformat.read(path, 4)
    except (nbformat.reader.NotJSONError, nbformat.ValidationError, AttributeError) as error:
        raise UserError(f"{path} is not a notebook: {str(error).splitlines()[0]}") from error


def opening_of(notebook: Any, default: str) -> tuple[str, str]:
    """Return a notebook's title and its first paragraph, as plain text."""
    first = next((c.source for c in notebook.cells if c.cell_type == "markdown"), "")
    blocks = [b.strip() for b in first.split("\n\n") if b.strip()]
    title = blocks.pop(0).lstrip("# ") if blocks and blocks[0].startswith("#") else default
    text = next((b for b in blocks if not b.startswith(("#", "```", "|"))), "")
    plain = re.sub(r"\s+", " ", re.sub(r"[*`]|\]\([^)]*\)|\[", "", text))
    return title, plain.removeprefix("Question. ")


def _page(notebook: Any, path: Path, near: dict[str, list[Path]]) -> str:
    links = {"the course": "index"} | {
        f"{w}: {p.stem}": p.stem for w, ps in near.items() for p in ps
    }
    nav = NAV.format(links=" · ".join(LINK.format(*link) for link in links.items()))
    exporter = HTMLExporter(mathjax_url="", require_js_url="", jquery_url="", embed_images=True)
    resources = {"metadata": {"name": path.stem, "path": str(path.parent)}}
    page, _ = exporter.from_notebook_node(still(notebook), resources)
    page = re.sub(r"<script[^>]*>.*?</script>", "", page, flags=re.S)  # MathJax, Mermaid: downloads
    page = re.sub(r"(<body[^>]*>)", lambda m: m[1] + STYLE + nav, page, count=1)
    return page.replace("</body>", nav + "</body>")


def still(notebook: Any) -> Any:
    """Return the notebook with links to pages and plain fields in place of widgets.

    A widget needs a kernel. A field for a number stays a field, so that a reader can still write
    a prediction down before scrolling on; any other widget goes.
    """
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            cell.source = re.sub(r"(\]\([\w./-]+)\.ipynb(#[^)]*)?\)", r"\1.html\2)", cell.source)
        if cell.cell_type == "code":
            for output in cell.outputs:
                if WIDGET in output.get("data", {}):
                    output.data = _without_widget(output.data)
            cell.outputs = [o for o in cell.outputs if o.get("data", True)]
    notebook.metadata.pop("widgets", None)
    return notebook


def _without_widget(data: Any) -> dict[str, str]:
    if "text/html" in data:
        return {"text/html": data["text/html"]}
    text = data.get("text/plain", "")
    if field := re.search(r"^\[(your number[^:]*)(?:: (.*))?\]$", text):
        hint, number = field.groups("")
    elif field := re.search(r"^Text\(value='([^']*)'.*placeholder='([^']*)'", text):
        number, hint = field.groups()
    else:
        return {}  # what is left is only the widget's name
    number, hint = html.escape(number), html.escape(hint)
    return {"text/html": f'<input value="{number}" placeholder="{hint}" aria-label="{hint}">'}
