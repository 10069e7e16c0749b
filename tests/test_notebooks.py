"""Notebooks: committed without outputs and small, and every one runs with the FAST parameter."""

from __future__ import annotations

import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from hswq_lab.errors import HswqError
from hswq_lab.loading import load
from hswq_lab.session import lora_of

FOLDER = Path(__file__).parents[1] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
LARGEST = 200 * 1024
MOST_SECONDS = 240


def names(paths):
    return [path.stem for path in paths]


def with_parameters(notebook, **values):
    """As papermill does: a cell after the one tagged "parameters"."""
    place = next(i for i, cell in enumerate(notebook.cells) if "parameters" in cell.metadata.get("tags", []))
    lines = "\n".join(f"{name} = {value!r}" for name, value in values.items())
    notebook.cells.insert(place + 1, nbformat.v4.new_code_cell(lines))
    return notebook


def test_there_are_notebooks():
    assert "00_tour" in names(NOTEBOOKS)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=names(NOTEBOOKS))
def test_a_notebook_is_committed_without_outputs_and_small(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    for cell in notebook.cells:
        assert not cell.get("outputs"), "clear the outputs before you commit"
        assert cell.get("execution_count") is None
    assert "widgets" not in notebook.metadata
    assert path.stat().st_size <= LARGEST


@pytest.mark.parametrize("path", NOTEBOOKS, ids=names(NOTEBOOKS))
def test_a_notebook_has_one_parameters_cell_with_fast_off_and_begins_with_prose(path):
    notebook = nbformat.read(path, as_version=4)
    tagged = [cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", [])]
    assert len(tagged) == 1
    assert "FAST = False" in tagged[0].source
    assert notebook.cells[0].cell_type == "markdown"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=names(NOTEBOOKS))
def test_a_model_with_captions_gets_its_size_from_the_parameters_wherever_it_is_opened(path):
    code = "\n".join(
        cell.source for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"
    )
    opened = re.findall(r"captions=CAPTIONS.*", code)
    assert len(re.findall(r"^CAPTIONS = ", code, re.MULTILINE)) == bool(opened)
    assert len(re.findall(r"^SIZE = ", code, re.MULTILINE)) == bool(opened)
    assert all(re.match(r"captions=CAPTIONS, size=size\b", call, re.IGNORECASE) for call in opened)


def test_a_lora_that_does_not_ship_with_the_model_is_asked_for(tiny_model):
    assert Path(lora_of(load("mini-zimage", device="cpu"), "outline")).is_file()
    with pytest.raises(HswqError, match="no such LoRA ships with this model") as refused:
        lora_of(tiny_model, "outline")
    assert "LORA = " in refused.value.fix


@pytest.mark.slow
@pytest.mark.timeout(MOST_SECONDS)
@pytest.mark.parametrize("path", NOTEBOOKS, ids=names(NOTEBOOKS))
def test_a_notebook_runs_and_shows_no_error(path, tmp_path):
    notebook = with_parameters(nbformat.read(path, as_version=4), FAST=True, OUT=str(tmp_path))
    resources = {"metadata": {"path": str(tmp_path)}}
    NotebookClient(notebook, timeout=MOST_SECONDS, store_widget_state=False, resources=resources).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert not [output for output in outputs if output.get("name") == "stderr"]
    assert any("application/vnd.plotly.v1+json" in output.get("data", {}) for output in outputs)
