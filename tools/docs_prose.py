"""The written pages of docs/, and the references made from the parser and the docstrings."""

from __future__ import annotations

import argparse
import html
import re
from pathlib import Path
from typing import TYPE_CHECKING

import pdoc
import pdoc.render
from docs_page import page
from nbconvert.filters import markdown2html

from hswq_lab.cli import build_parser

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[1]
HOME = [("index.html", "hswq_lab")]
# Where a link in a source leads on the site: notebooks and written pages are pages beside each other.
_MOVED = (
    (re.compile(r"\]\((?:\.\./)?notebooks/(\w+)\.ipynb\)"), r"](\1.html)"),
    (re.compile(r"\]\((?:\.\./)?benchmarks/README\.md\)"), "](results.html)"),
    (re.compile(r"\]\((?:\.\./)?CONTRIBUTING\.md\)"), "](contributing.html)"),
    (re.compile(r"\]\((?:\.\./)?CHANGELOG\.md\)"), "](changelog.html)"),
    (re.compile(r"\]\((\w+)\.md\)"), r"](\1.html)"),
)


def sources() -> dict[str, Path]:
    """Name of each written page → its Markdown."""
    found = {path.stem: path for path in sorted((ROOT / "docs").glob("*.md"))}
    return found | {
        "results": ROOT / "benchmarks" / "README.md",
        "contributing": ROOT / "CONTRIBUTING.md",
        "changelog": ROOT / "CHANGELOG.md",
    }


def prose_page(source: Path) -> str:
    """A written page; its links lead to pages of the site."""
    text = source.read_text(encoding="utf-8")
    title = re.sub(r"[#`]", "", text.split("\n", 1)[0]).strip()
    for pattern, target in _MOVED:
        text = pattern.sub(target, text)
    return page(
        title, f'<div class="prose">{markdown2html(text)}</div>', [] if source.stem == "index" else HOME
    )


def commands_page() -> str:
    """Every verb of the command line with its help."""
    parts = ["<h1>Commands</h1>"]
    for name, parser in _parsers(build_parser()):
        parts.append(f"<h2>{html.escape(name)}</h2><pre>{html.escape(parser.format_help())}</pre>")
    return page("Commands", f'<div class="prose">{"".join(parts)}</div>', HOME)


def _parsers(parser: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    yield parser.prog, parser
    for action in parser._actions:  # noqa: SLF001 - argparse has no other way to ask
        if isinstance(action, argparse._SubParsersAction):  # noqa: SLF001
            for child in action.choices.values():
                yield from _parsers(child)


def write_prose(docs: Path) -> list[Path]:
    """Writes all pages that need no notebook into a folder; what was written."""
    pages = {name: prose_page(source) for name, source in sources().items()} | {"cli": commands_page()}
    for name, content in pages.items():
        (docs / f"{name}.html").write_text(content, encoding="utf-8")
    # With dark colours and a way back to the other pages, which pdoc's own templates lack.
    pdoc.render.configure(
        docformat="google", include_undocumented=False, template_directory=Path(__file__).parent / "api_pages"
    )
    pdoc.pdoc("hswq_lab", output_directory=docs / "api")
    return [docs / f"{name}.html" for name in pages] + [docs / "api" / "hswq_lab.html"]
