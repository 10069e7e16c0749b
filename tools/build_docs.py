"""Run the notebooks in full and render them, with all other pages, as a site in docs/ that opens offline.

    python tools/build_docs.py                    # every notebook
    python tools/build_docs.py 01 03              # those whose name begins so; written pages and references always
    python tools/build_docs.py --fast             # with FAST = True, to look at the pages
    python tools/build_docs.py none               # no notebook

Written pages come from docs/*.md; each notebook has a line in docs/index.md. Plots share one plotly.js.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import nbformat
import plotly.io as pio
from docs_page import page
from docs_prose import HOME, write_prose
from nbclient import NotebookClient
from nbconvert import HTMLExporter
from plotly.offline import get_plotlyjs

from hswq_lab.theme import theme

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nbformat import NotebookNode

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS, DOCS = ROOT / "notebooks", ROOT / "docs"
PLOTLY = "application/vnd.plotly.v1+json"
WIDGET = "application/vnd.jupyter.widget-view+json"
LONGEST_CELL = 1800  # seconds, for a machine that is busy


def titles() -> dict[str, str]:
    """Name of each notebook → its title, in order."""
    found = {}
    for path in sorted(NOTEBOOKS.glob("*.ipynb")):
        first = nbformat.read(path, as_version=4).cells[0].source
        found[path.stem] = first.splitlines()[0].removeprefix("# ")
    return found


def executed(path: Path, *, fast: bool) -> NotebookNode:
    """The notebook with its outputs, run in its own folder; what it writes goes to `out/` there."""
    notebook = nbformat.read(path, as_version=4)
    if fast:
        for cell in notebook.cells:
            if "parameters" in cell.metadata.get("tags", []):
                cell.source = cell.source.replace("FAST = False", "FAST = True")
    client = NotebookClient(
        notebook,
        timeout=LONGEST_CELL,
        store_widget_state=False,
        resources={"metadata": {"path": str(path.parent)}},
    )
    client.execute()
    return notebook


def offline(output: NotebookNode) -> NotebookNode | None:
    """An output as a page without a kernel can show it; None for a progress bar and its style sheet."""
    data = output.get("data", {})
    if data.get("text/html") == theme():
        return None
    if PLOTLY in data:
        shown = pio.from_json(json.dumps(data[PLOTLY]), skip_invalid=True)
        plot = pio.to_html(
            shown, full_html=False, include_plotlyjs=False, config={"responsive": True, "displaylogo": False}
        )
        return _html(output, f'<figure class="plot">{plot}</figure>')
    if WIDGET in data:
        panel = re.match(r"(\w+)\(children=", data.get("text/plain", ""))
        return None if panel is None else _html(output, _panel(panel[1]))
    return output


def _html(output: NotebookNode, content: str) -> NotebookNode:
    return nbformat.v4.new_output(
        "display_data", data={"text/html": content}, metadata=output.get("metadata")
    )


def _panel(name: str) -> str:
    """What stands where a live panel would be: its picture if the browser test has made one."""
    picture = next(iter(sorted((DOCS / "img").glob(f"{name}.*"))), None)
    shown = "" if picture is None else f'<img alt="{name}" src="img/{picture.name}">'
    return f'<div class="panel"><p>{name} is a live panel: run the notebook in JupyterLab to use it.</p>{shown}</div>'


def rendered(notebook: NotebookNode) -> str:
    """The body of a notebook's page."""
    for cell in notebook.cells:
        if "outputs" in cell:
            cell.outputs = [shown for output in cell.outputs if (shown := offline(output)) is not None]
    body, _ = HTMLExporter(template_name="basic").from_notebook_node(notebook)
    return str(body)


def write_page(name: str, notebook: NotebookNode, known: Sequence[str], titled: dict[str, str]) -> Path:
    """Writes the page of an executed notebook, with links to its neighbours."""
    place = known.index(name)
    links = [*HOME]
    links += [(f"{known[i]}.html", titled[known[i]]) for i in (place - 1, place + 1) if 0 <= i < len(known)]
    target = DOCS / f"{name}.html"
    target.write_text(page(titled[name], rendered(notebook), links), encoding="utf-8")
    return target


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="beginnings of names (default: all)")
    parser.add_argument("--fast", action="store_true", help="run with FAST = True")
    args = parser.parse_args(arguments)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    titled = titles()
    known = list(titled)
    chosen = [name for name in known if not args.names or name.startswith(tuple(args.names))]
    (DOCS / "plotly.min.js").write_text(get_plotlyjs(), encoding="utf-8")
    for target in write_prose(DOCS):
        print(target.relative_to(ROOT), flush=True)
    for name in chosen:
        started = time.monotonic()
        notebook = executed(NOTEBOOKS / f"{name}.ipynb", fast=args.fast)
        target = write_page(name, notebook, known, titled)
        print(f"{target.relative_to(ROOT)}: {time.monotonic() - started:.0f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
