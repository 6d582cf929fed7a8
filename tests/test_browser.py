"""JupyterLab in headless Chromium: notebooks run, the monitor's chart moves, Stop ends the ranks.

Needs the system's Chromium (Debian: `apt-get install chromium fonts-dejavu-core`) and Playwright,
which never downloads a browser here. Screenshots stay in runs/browser/ as artefacts.
"""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import nbformat
import processes
import pytest

from wamlab.jupyter.launch import Job

ROOT = Path(__file__).resolve().parent.parent
SHOTS = ROOT / "runs" / "browser"
TOKEN = "wamlab-browser-test"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
]
SETTINGS = {  # off-screen cells stay in the page, and no dialog opens by itself
    "@jupyterlab/notebook-extension/tracker.jupyterlab-settings": {
        "windowingMode": "none",
        "autoStartDefaultKernel": True,
    },
    "@jupyterlab/apputils-extension/notification.jupyterlab-settings": {
        "fetchNews": "false",
        "checkForUpdates": False,
    },
}
KERNEL_READY = """async () => {
    const widget = window.jupyterapp.shell.currentWidget;
    await widget.context.ready;
    await widget.sessionContext.ready;
    await widget.sessionContext.session.kernel.info;
}"""
RUN_ALL = """() => {
    window.__done = false;
    window.jupyterapp.commands.execute('notebook:run-all-cells').then(() => window.__done = true);
}"""
pytestmark = [
    pytest.mark.browser,
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="needs chromium: apt-get install chromium"),
]
playwright = pytest.importorskip("playwright.sync_api")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("lab")


@pytest.fixture(scope="module")
def server(folder):
    """A JupyterLab on a free port, with settings and run files of its own."""
    home, port = folder / ".home", free_port()
    for name, values in SETTINGS.items():
        file = home / "settings" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(values))
    variables = {
        "JUPYTER_TOKEN": TOKEN,
        "JUPYTER_CONFIG_DIR": home / "config",
        "JUPYTER_RUNTIME_DIR": home / "runtime",
        "JUPYTERLAB_SETTINGS_DIR": home / "settings",
        "JUPYTERLAB_WORKSPACES_DIR": home / "workspaces",
        "IPYTHONDIR": home / "ipython",
        "PYTHONPATH": ROOT / "tests",
    }
    options = [f"--ServerApp.root_dir={folder}", f"--ServerApp.port={port}"]
    options += ["--ServerApp.ip=127.0.0.1", "--ServerApp.port_retries=0", "--no-browser"]
    options += ["--allow-root", "--LabApp.expose_app_in_browser=True"]
    options += ["--LabApp.extension_manager=readonly"]
    with (folder / "server.log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "jupyterlab", *options],
            env={**os.environ, **{k: str(v) for k, v in variables.items()}},
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        wait_until_up(f"http://127.0.0.1:{port}/api/status?token={TOKEN}", process, folder)
        # a workspace of its own: else the notebooks of the page before are opened again
        yield f"http://127.0.0.1:{port}/lab/workspaces/{{0}}/tree/{{0}}.ipynb?token={TOKEN}"
    finally:
        stop_server(process)


def wait_until_up(url: str, process: subprocess.Popen, folder: Path) -> None:
    for _ in range(1800):
        assert process.poll() is None, (folder / "server.log").read_text()[-2000:]
        with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=5):
            return
        time.sleep(0.1)
    raise AssertionError((folder / "server.log").read_text()[-2000:])


def stop_server(process: subprocess.Popen) -> None:
    for number, wait_s in ((signal.SIGINT, 1), (signal.SIGINT, 10), (signal.SIGTERM, 10)):
        if process.poll() is None:
            process.send_signal(number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(wait_s)
    if process.poll() is None:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as driver:
        opened = driver.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield opened
        opened.close()


@pytest.fixture
def page(browser, request):
    """A page; however the test ends, a screenshot of its end stays."""
    opened = browser.new_page(viewport={"width": 1280, "height": 1100})
    yield opened
    shot(opened, f"{request.node.name}_end")
    opened.close()


def shot(page, name: str) -> None:
    SHOTS.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=SHOTS / f"{name}.png")


def run_all(page, url: str):
    """Open a notebook, wait for its kernel, start all cells and return the notebook's panel."""
    page.goto(url)
    panel = page.locator(".jp-NotebookPanel:not(.lm-mod-hidden)")
    panel.wait_for(timeout=120_000)
    page.evaluate(KERNEL_READY)  # the idle mark alone comes before the session exists
    page.evaluate_handle(RUN_ALL)
    return panel


def write_notebook(path: Path, *cells: str) -> None:
    made = [nbformat.v4.new_code_cell(cell) for cell in cells]
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    nbformat.write(nbformat.v4.new_notebook(cells=made, metadata={"kernelspec": kernel}), path)


def test_the_chart_moves_and_stop_ends_the_ranks(server, folder, page):
    """A click is handled because the cell has returned; the picture and a line of text stay."""
    out = folder / "run"
    config = {"steps": 5000, "pause": 0.05}
    write_notebook(
        folder / "monitor.ipynb",
        "from wamlab.jupyter.launch import launch",
        f"job = launch('rank_targets:train', {config}, 2, out={str(out)!r})",
        "print('ALL-CELLS-DONE')",
    )
    panel = run_all(page, server.format("monitor"))
    output = panel.locator(".jp-OutputArea-output")
    expect = playwright.expect
    expect(output.filter(has_text="ALL-CELLS-DONE")).to_have_count(1, timeout=120_000)
    page.wait_for_function("() => window.__done === true", timeout=60_000)
    picture = output.locator("img")
    expect(picture).to_have_count(1, timeout=120_000)
    first = picture.get_attribute("src")
    expect(picture).not_to_have_attribute("src", first, timeout=60_000)
    bar = panel.locator(".widget-hprogress .progress-bar").evaluate("e => e.style.width")
    assert 0 < float(bar.removesuffix("%")) < 100
    shot(page, "monitor_live")
    assert processes.of_run(out)
    panel.get_by_role("button", name="Stop", exact=True).click()
    expect(output.filter(has_text="stopped: 2 ranks, step")).to_have_count(1, timeout=60_000)
    processes.wait_gone(out, 5.0)
    assert Job.attach(out).wait(10) == "stopped"
    expect(picture).to_have_count(1)


def test_notebook_00_runs_in_a_browser(server, folder, page):
    shutil.copy(ROOT / "notebooks" / "00_machine.ipynb", folder / "00_machine.ipynb")
    cells = nbformat.read(folder / "00_machine.ipynb", 4).cells
    for cell in cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    kernel = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
    bare = nbformat.v4.new_notebook(cells=cells, metadata=kernel)
    nbformat.write(bare, folder / "00_machine.ipynb")
    panel = run_all(page, server.format("00_machine"))
    page.wait_for_function("() => window.__done === true", timeout=300_000)
    playwright.expect(panel.locator(".jp-Notebook-ExecutionIndicator")).to_have_attribute(
        "data-status", "idle"
    )
    errors = panel.locator("[data-mime-type='application/vnd.jupyter.error']").all_inner_texts()
    assert not errors, errors
    last = panel.locator(".jp-OutputArea-output").last.inner_text()
    assert last.strip() == "status: failed", f"the cells stopped after: {last}"
    assert panel.locator(".jp-OutputArea-output img").count() >= 2
    predictions = panel.get_by_placeholder("your number (GFLOP/s)")
    predictions.scroll_into_view_if_needed()
    predictions.fill("40")
    shot(page, "notebook_00")
