"""The page that everything in docs/ is shown in: one style sheet, light and dark, nothing from the network."""

from __future__ import annotations

import html
from importlib.resources import files
from typing import TYPE_CHECKING

from pygments.formatters import HtmlFormatter

if TYPE_CHECKING:
    from collections.abc import Sequence

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
.prose img { background: #fff; border-radius: 6px; }
.prose table { border-collapse: collapse; font-size: 14px; display: block; overflow-x: auto; margin: 8px 0 18px; }
.prose li { max-width: 72ch; }
.prose td, .prose th { border-bottom: 1px solid var(--line); padding: 6px 14px 6px 0; }
.prose td, .prose th { text-align: left; vertical-align: top; }
.prose pre { overflow: auto; padding: 10px 12px; background: var(--card); }
.prose pre { border: 1px solid var(--line); border-radius: 6px; }
.prose pre, .prose code { font: 13px/1.45 ui-monospace, Menlo, Consolas, monospace; }
thead:not(:has(th:not(:empty))) { display: none; }
"""


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
