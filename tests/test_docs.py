"""make docs: every notebook is in the index, and a page shows everything without kernel and network."""

from __future__ import annotations

import re

import build_docs
import docs_prose
import nbformat
import plotly.graph_objects as go
import pytest

KNOWN = build_docs.titles()
ADDRESS = re.compile(r"""(?:src|href)=["'](?!#)([^"']+)""")


def output(**data):
    return nbformat.v4.new_output("display_data", data=data)


def a_notebook(*outputs):
    prose = nbformat.v4.new_markdown_cell("# A title\n\nand **words**")
    return nbformat.v4.new_notebook(cells=[prose, nbformat.v4.new_code_cell("1 < 2", outputs=list(outputs))])


@pytest.mark.parametrize("name", KNOWN)
def test_the_index_lists_the_notebook(name):
    assert f"(../notebooks/{name}.ipynb)" in (build_docs.DOCS / "index.md").read_text(encoding="utf-8")
    assert f'href="{name}.html"' in docs_prose.prose_page(build_docs.DOCS / "index.md")


def test_the_index_names_nothing_that_is_not_there():
    addresses = ADDRESS.findall(docs_prose.prose_page(build_docs.DOCS / "index.md"))
    assert addresses
    assert missing_from_the_site(addresses) == []


def missing_from_the_site(addresses):
    pages = {f"{name}.html" for name in (*KNOWN, *docs_prose.sources(), "cli", "api/hswq_lab")}
    return [a for a in addresses if a not in pages and not (build_docs.DOCS / a).exists()]


@pytest.mark.parametrize("name", docs_prose.sources())
def test_a_written_page_leads_to_pages_that_are_there(name):
    source = docs_prose.sources()[name]
    page = docs_prose.prose_page(source)
    outside = [a for a in ADDRESS.findall(page) if a.startswith("http")]
    assert missing_from_the_site(set(ADDRESS.findall(page)) - set(outside)) == []


@pytest.mark.parametrize("name", docs_prose.sources())
def test_a_link_in_a_source_is_good_where_the_source_lies(name):
    source = docs_prose.sources()[name]
    made = ("cli.html", "api/hswq_lab.html")
    links = re.findall(r"\]\(([^)#]+)", source.read_text(encoding="utf-8"))
    missing = [
        a for a in links if not a.startswith("http") and a not in made and not (source.parent / a).exists()
    ]
    assert missing == []


def test_the_commands_page_has_every_verb():
    page = docs_prose.commands_page()
    for verb in ("inspect", "pack", "lora merge", "compare", "lab"):
        assert f"<h2>hswq-lab {verb}</h2>" in page


def test_a_plot_becomes_a_drawing_that_needs_no_network():
    figure = go.Figure(go.Scatter(y=[1, 2, 3]))
    body = build_docs.rendered(a_notebook(output(**{build_docs.PLOTLY: figure.to_plotly_json()})))
    assert "Plotly.newPlot" in body
    assert "<strong>words</strong>" in body
    page = build_docs.page("A title", body, [("index.html", "all")])
    assert ADDRESS.findall(page) == ["plotly.min.js", "index.html"]
    assert "cdn" not in page.lower()


def test_a_progress_bar_is_left_out_and_a_panel_leaves_a_note():
    bar = output(**{build_docs.WIDGET: {"model_id": "1"}, "text/plain": "packing: 0 [00:00, ?/s]"})
    panel = output(
        **{build_docs.WIDGET: {"model_id": "2"}, "text/plain": "PackExplorer(children=(HTML(value='')))"}
    )
    body = build_docs.rendered(a_notebook(bar, panel))
    assert "packing" not in body
    assert "PackExplorer is a live panel" in body


def test_text_and_tables_stay():
    said = nbformat.v4.new_output("stream", name="stdout", text="7 layers")
    body = build_docs.rendered(a_notebook(said, output(**{"text/html": "<table><td>5</td></table>"})))
    assert "7 layers" in body
    assert "<td>5</td>" in body


def test_a_page_is_named_and_linked_to_its_neighbours(tmp_path, monkeypatch):
    monkeypatch.setattr(build_docs, "DOCS", tmp_path)
    names = list(KNOWN)
    written = build_docs.write_page(names[1], a_notebook(), names, KNOWN)
    assert written == tmp_path / f"{names[1]}.html"
    expected = ["index.html", f"{names[0]}.html", f"{names[2]}.html"]
    assert ADDRESS.findall(written.read_text(encoding="utf-8"))[:3] == expected


@pytest.mark.slow
def test_a_notebook_is_run_and_its_failure_is_not_swallowed(tmp_path):
    notebook = a_notebook()
    notebook.cells[1].source = "FAST = False\nassert FAST"
    notebook.cells[1].metadata["tags"] = ["parameters"]
    nbformat.write(notebook, tmp_path / "one.ipynb")
    assert build_docs.executed(tmp_path / "one.ipynb", fast=True).cells[1].execution_count == 1
    with pytest.raises(Exception, match="AssertionError"):
        build_docs.executed(tmp_path / "one.ipynb", fast=False)
