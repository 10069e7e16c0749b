"""JupyterLab and a headless Chromium for tests: start both, run a notebook, use its widgets as a person would."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from importlib.util import find_spec
from pathlib import Path

CHROMIUM_FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
)
SETTINGS = {
    "@jupyterlab/apputils-extension/notification": {
        "fetchNews": "false",
        "checkForUpdates": False,
        "doNotDisturbMode": True,
    },
    "@jupyterlab/notebook-extension/tracker": {"windowingMode": "none"},
    "@jupyterlab/docmanager-extension/plugin": {"autosave": False},
}


class LabServer:
    """A JupyterLab on the loopback interface with all of its files in one folder; a context manager.

    Args:
        folder: an empty folder; notebooks go to its "work" folder.
        theme: "JupyterLab Light" or "JupyterLab Dark".
    """

    def __init__(self, folder: Path, theme: str = "JupyterLab Light") -> None:
        self.root = folder / "work"
        self.root.mkdir()
        self.token = secrets.token_hex(16)
        self.port = _free_port()
        self._folder = folder
        settings = SETTINGS | {"@jupyterlab/apputils-extension/themes": {"theme": theme}}
        for name, content in settings.items():
            plugin, _, part = name.rpartition("/")
            path = folder / "settings" / plugin / f"{part}.jupyterlab-settings"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(content))

    def __enter__(self):
        options = {
            "IdentityProvider.token": self.token,
            "ServerApp.root_dir": self.root,
            "ServerApp.port_retries": 0,
            "ServerApp.terminals_enabled": False,
            "LabApp.check_for_updates_class": "jupyterlab.NeverCheckForUpdate",
            "LabApp.news_url": None,
            "LabApp.extension_manager": "readonly",
        }
        command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", "--ip=127.0.0.1"]
        command += [f"--port={self.port}", *(f"--{name}={value}" for name, value in options.items())]
        folders = ("JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "IPYTHONDIR")
        environment = {**os.environ, **{name: str(self._folder / name) for name in folders}}
        environment["JUPYTERLAB_SETTINGS_DIR"] = str(self._folder / "settings")
        environment["JUPYTERLAB_WORKSPACES_DIR"] = str(self._folder / "workspaces")
        log = (self._folder / "server.log").open("w")
        self._process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        log.close()
        self._wait(lambda: self.rest("status") is not None, 90, "the server did not start")
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def rest(self, what: str, method: str = "GET"):
        """The answer of the server's REST interface; None while it does not answer, and to a DELETE."""
        address = f"http://127.0.0.1:{self.port}/api/{what}"
        headers = {"Authorization": f"token {self.token}"}
        request = urllib.request.Request(address, headers=headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=5) as answer:  # noqa: S310
                return json.load(answer) if method == "GET" else None
        except OSError:
            return None

    def stop_kernels(self) -> None:
        """Ends every session, so that the next notebook finds none."""
        for session in self.rest("sessions") or []:
            self.rest(f"sessions/{session['id']}", "DELETE")

    def wait_for_kernel(self) -> None:
        """Waits until a kernel is idle and the page is connected to it."""

        def ready() -> bool:
            kernels = [session["kernel"] for session in self.rest("sessions") or []]
            return any(k["execution_state"] == "idle" and k["connections"] >= 1 for k in kernels)

        self._wait(ready, 90, "no kernel came up")

    def _wait(self, ready, seconds: float, problem: str) -> None:
        end = time.monotonic() + seconds
        while not ready():
            if time.monotonic() > end or self._process.poll() is not None:
                raise RuntimeError(f"{problem}\n{(self._folder / 'server.log').read_text()[-3000:]}")
            time.sleep(0.2)


class LabPage:
    """A notebook in a browser page; keeps whatever the page complains about in `complaints`.

    What anywidget says after its two seconds on a busy machine is in `late`: panels work without what it gives up
    (test_a_plot_follows_the_kernel_on_a_page_that_was_too_busy_at_first).
    """

    def __init__(self, page, server: LabServer) -> None:
        self.page = page
        self.server = server
        self.complaints: list[str] = []
        self.late: list[str] = []
        page.on("console", lambda m: self._heard(m.text) if m.type == "error" else None)
        page.on("pageerror", lambda error: self._heard(str(error)))
        page.on("requestfailed", lambda request: self.complaints.append(f"failed: {request.url}"))

    def _heard(self, text: str) -> None:
        heard = self.late if "Failed to initialize model" in text else self.complaints
        heard.append(text)

    def open(self, notebook: Path, *, more: str = "", **parameters: object) -> None:
        """Copies a notebook into the server's folder, with other parameters and a last cell `more`; opens it."""
        content = json.loads(notebook.read_text(encoding="utf-8"))
        lines = [f"{name} = {value!r}\n" for name, value in parameters.items()]
        for cell in content["cells"]:
            if "parameters" in cell["metadata"].get("tags", []):
                cell["source"] = [*cell["source"], "\n", *lines]
        if more:
            content["cells"].append(_code_cell("more", more))
        self._show(notebook.name, content)

    def open_cells(self, *sources: str) -> None:
        """Opens a notebook of code cells."""
        cells = [_code_cell(f"cell{place}", source) for place, source in enumerate(sources)]
        kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
        content = {"cells": cells, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}
        self._show("cells.ipynb", content)

    def _show(self, name: str, content: dict) -> None:
        (self.server.root / name).write_text(json.dumps(content), encoding="utf-8")
        address = f"http://127.0.0.1:{self.server.port}/lab/workspaces/e2e/tree/{name}"
        self.page.goto(f"{address}?reset&token={self.server.token}")
        self.page.wait_for_selector(".jp-NotebookPanel .jp-Notebook", timeout=60_000)
        self.server.wait_for_kernel()

    def run_all(self, seconds: float = 240) -> None:
        """Runs every cell and waits until each prompt has a number; fails at an error output."""
        self.menu("Run", "Run All Cells")
        self.wait_until_run(seconds)

    def restart_and_run_all(self, seconds: float = 240) -> None:
        """Restarts the kernel and runs every cell, as `run_all`."""
        self.menu("Kernel", "Restart Kernel and Run All Cells…")
        self.page.get_by_role("button", name="Confirm Kernel Restart").click()
        self.page.wait_for_function(
            "() => [...document.querySelectorAll('.jp-CodeCell .jp-InputPrompt')].some(p => !/\\d/.test(p.textContent))"
        )
        self.wait_until_run(seconds)

    def menu(self, menu: str, item: str) -> None:
        """Clicks an item of a menu."""
        self.page.get_by_role("menuitem", name=menu, exact=True).click()
        self.page.locator(".lm-Menu-item", has_text=item).first.click()

    def wait_until_run(self, seconds: float) -> None:
        """Waits until the prompt of each cell has a number; fails at an error output."""
        self.page.wait_for_function(
            """() => {
              const prompts = [...document.querySelectorAll('.jp-CodeCell .jp-InputPrompt')].map(p => p.textContent);
              const errors = document.querySelectorAll('[data-mime-type*="stderr"]').length;
              return errors > 0 || prompts.every(text => /\\[\\d+\\]/.test(text));
            }""",
            timeout=1000 * seconds,
        )
        assert self.page.locator('[data-mime-type*="stderr"]').all_text_contents() == []

    def panel(self, css_class: str, place: int = 0):
        """The panel with a class (the first one, or another place among them), scrolled into view."""
        found = self.page.locator(f".jp-OutputArea-output .{css_class}").nth(place)
        found.scroll_into_view_if_needed()
        return found

    def active_cell(self) -> int:
        """The place of the cell that JupyterLab takes for the active one."""
        return self.page.evaluate(
            "() => [...document.querySelectorAll('.jp-Cell')].findIndex(c => c.classList.contains('jp-mod-active'))"
        )

    def click_point(self, css_class: str, trace: int, point: int) -> None:
        """Clicks a point of the first plot of a panel."""
        x, y = self.page.evaluate(
            """([css, trace, point]) => {
              const plot = document.querySelector(`.${css} .js-plotly-plot`);
              plot.scrollIntoView({ block: 'center' });
              const { xaxis, yaxis } = plot._fullData[trace];
              const axis = (name) => plot._fullLayout[name.replace(/^(.)/, '$1axis')];
              const [across, up] = [axis(xaxis), axis(yaxis)];
              const box = plot.getBoundingClientRect();
              return [
                box.left + across._offset + across.d2p(plot.data[trace].x[point]),
                box.top + up._offset + up.d2p(plot.data[trace].y[point]),
              ];
            }""",
            [css_class, trace, point],
        )
        self.page.mouse.move(x - 3, y)
        self.page.mouse.move(x, y, steps=3)
        self.page.mouse.down()
        self.page.mouse.up()

    def wait_for(self, condition: str, argument: object = None, seconds: float = 60) -> None:
        """Waits until a JavaScript condition (a function of the argument) holds in the page."""
        self.page.wait_for_function(condition, arg=argument, timeout=1000 * seconds)


def _code_cell(name: str, source: str) -> dict:
    return {
        "cell_type": "code", "id": name, "metadata": {}, "source": [source], "outputs": [], "execution_count": None
    }  # fmt: skip


def why_no_browser_test() -> str | None:
    """None where a browser test can run, else what is missing."""
    for module in ("playwright", "jupyterlab"):
        if find_spec(module) is None:
            return f"the package {module} is not installed"
    return None if chromium() else "no Chromium was found"


def chromium() -> str | None:
    """The browser for the tests."""
    return shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
