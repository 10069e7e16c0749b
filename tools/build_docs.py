"""Run the notebooks in full and render them, with an index, as pages in docs/ that open offline.

    python tools/build_docs.py                    # every notebook
    python tools/build_docs.py 01 03              # those whose name begins so; the index always
    python tools/build_docs.py --fast             # with FAST = True, to look at the pages

The index is written from `docs/index.md`, where each notebook has a line. Plots share one plotly.js beside the pages.
"""

from __future__ import annotations

import argparse
import html
import json
import os
import re
import sys
import time
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

import nbformat
import plotly.io as pio
from nbclient import NotebookClient
from nbconvert import HTMLExporter
from nbconvert.filters import markdown2html
from plotly.offline import get_plotlyjs
from pygments.formatters import HtmlFormatter

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nbformat import NotebookNode

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS, DOCS = ROOT / "notebooks", ROOT / "docs"
PLOTLY = "application/vnd.plotly.v1+json"
WIDGET = "application/vnd.jupyter.widget-view+json"
LONGEST_CELL = 1800  # seconds, for a machine that is busy
STYLE = """
main { padding-top: 8px; }
.input_area { background: var(--card); border: 1px solid var(--line); border-radius: 6px; }
.input_area { overflow: auto; margin: 8px 0; }
.input_area pre { border: 0; margin: 0; background: none; font: 13px/1.45 ui-monospace, Menlo, Consolas, monospace; }
.celltag_parameters .input_area { border-left: 4px solid var(--link); }
.prompt, .anchor-link { display: none; }
.output_subarea { overflow: auto; }
.output_text pre { font: 13px/1.45 ui-monospace, Menlo, Consolas, monospace; white-space: pre-wrap; }
.output_html { margin: 8px 0; }
.text_cell_render h2 { margin-top: 34px; }
table.dataframe { border: 0; border-collapse: collapse; font-size: 13px; font-variant-numeric: tabular-nums; }
table.dataframe th, table.dataframe td { border: 0; border-bottom: 1px solid var(--line); padding: 4px 10px; }
table.dataframe th, table.dataframe td { text-align: right; }
.panel { border: 1px dashed var(--line); border-radius: 6px; padding: 12px 14px; color: var(--soft); font-size: 14px; }
img { max-width: 100%; }
thead:not(:has(th:not(:empty))) { display: none; }
"""


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
    """An output as a page without a kernel can show it; None for a progress bar."""
    data = output.get("data", {})
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


def page(title: str, body: str, links: Sequence[tuple[str, str]]) -> str:
    """A whole page.

    Args:
        title: plain text.
        body: HTML.
        links: (address, text) at the top.
    """
    look = (files("hswq_lab") / "assets" / "report.css").read_text(encoding="utf-8") + STYLE
    light, dark = (
        HtmlFormatter(style=style).get_style_defs(".highlight") for style in ("friendly", "github-dark")
    )
    colors = f"{light}\n@media (prefers-color-scheme: dark) {{ {dark} }}\n.highlight {{ background: none; }}"
    top = "".join(f'<a href="{address}">{html.escape(text)}</a>' for address, text in links)
    script = '<script src="plotly.min.js"></script>' if "Plotly.newPlot" in body else ""
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{html.escape(title)}</title><style>{look}{colors}</style>{script}</head><body>"
        f"<nav>{top}</nav><main>{body}</main></body></html>"
    )


def index_page() -> str:
    """The index, from docs/index.md: links to notebooks become links to their pages."""
    source = (DOCS / "index.md").read_text(encoding="utf-8")
    body: Any = markdown2html(re.sub(r"\(\.\./notebooks/(\w+)\.ipynb\)", r"(\1.html)", source))
    return page("hswq_lab", str(body), [])


def write_page(name: str, notebook: NotebookNode, known: Sequence[str], titled: dict[str, str]) -> Path:
    """Writes the page of an executed notebook, with links to its neighbours."""
    place = known.index(name)
    links = [("index.html", "all notebooks")]
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
    (DOCS / "index.html").write_text(index_page(), encoding="utf-8")
    for name in chosen:
        started = time.monotonic()
        notebook = executed(NOTEBOOKS / f"{name}.ipynb", fast=args.fast)
        target = write_page(name, notebook, known, titled)
        print(f"{target.relative_to(ROOT)}: {time.monotonic() - started:.0f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
