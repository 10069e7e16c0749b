"""hl.doctor: everything is listed, known-bad pairs are found, and the result is a result like any other."""

from __future__ import annotations

import json
import sys

import pytest

import hswq_lab as hl
from hswq_lab import checkup as doctor
from hswq_lab import ops
from hswq_lab.checkup import Check, DoctorReport
from hswq_lab.errors import HswqError

GOOD = {
    "plotly": "7.1.0",
    "anywidget": "0.11.0",
    "kaleido": "1.5.0",
    "ipywidgets": "8.1.9",
    "jupyterlab": "4.6.6",
}


def pairs(**versions):
    rules = [rule for rule in doctor.KNOWN_BAD if rule is not doctor._cpu_torch_beside_a_card]
    return [check for rule in rules if (check := rule((GOOD | versions).get)) is not None]


def test_it_names_versions_back_ends_front_end_and_browser():
    report = doctor.doctor()
    frame = report.to_frame()
    assert {"system", "versions", "extension", "notebook", "export", "pairs"} == set(frame["topic"])
    assert set(frame[frame.topic == "extension"]["item"]) == set(ops.backends())
    found = dict(zip(frame["item"], frame["found"], strict=True))
    assert found["torch"].startswith("2.")
    assert found["numpy"][0].isdigit()
    text = str(report)
    assert text.count("\n") >= len(frame)
    for check in report.checks:
        assert check.item in text
        assert check.advice in text


def test_a_back_end_that_is_not_there_says_why(monkeypatch):
    missing = ops.Backend("cuda", False, False, (), "", False, "no nvcc was found")
    monkeypatch.setattr(ops, "backends", lambda: {"cuda": missing})
    (check,) = doctor._extension()
    assert (check.found, check.state, check.advice) == ("not built", "note", "no nvcc was found")
    usable = ops.Backend("cuda", True, True, ("sm_120f",), "a card", True, "")
    monkeypatch.setattr(ops, "backends", lambda: {"cuda": usable})
    (check,) = doctor._extension()
    assert (check.found, check.state) == ("ready, a card, native FP4", "ok")


def test_a_missing_package_is_a_problem(monkeypatch):
    installed = doctor.installed
    monkeypatch.setattr(doctor, "installed", lambda name: None if name == "tqdm" else installed(name))
    checks = {check.item: check for check in doctor._versions()}
    assert checks["tqdm"].state == "problem"
    assert checks["torch"].state == "ok"
    assert doctor.installed("no-such-package-anywhere") is None


@pytest.mark.parametrize(
    ("versions", "item", "state"),
    [
        ({"anywidget": None}, "plotly, anywidget", "problem"),
        ({"kaleido": "0.2.1"}, "plotly, kaleido", "problem"),
        ({"ipywidgets": "7.8.5"}, "ipywidgets", "problem"),
        ({"diffusers": "0.42.1"}, "diffusers, NVFP4", "note"),
    ],
)
def test_pairs_known_not_to_work_are_found(versions, item, state):
    (check,) = pairs(**versions)
    assert (check.item, check.state) == (item, state)
    assert check.advice


@pytest.mark.parametrize(
    "versions",
    [
        {},
        {"kaleido": None},
        {"kaleido": "1.0.0rc11"},
        {"plotly": "5.24.1", "anywidget": None},
        {"diffusers": "0.36.0"},
    ],
)
def test_good_pairs_are_left_alone(versions):
    assert pairs(**versions) == []


def test_a_kernel_whose_server_is_elsewhere_gets_a_note(monkeypatch):
    monkeypatch.setitem(sys.modules, "ipykernel", object())
    (check,) = pairs(jupyterlab=None)
    assert check.state == "note"
    assert "server" in check.advice


@pytest.mark.parametrize(
    ("environ", "module", "name"),
    [
        ({}, None, "none"),
        ({}, "ipykernel", "a Jupyter kernel"),
        ({"JPY_SESSION_NAME": "a.ipynb"}, "ipykernel", "JupyterLab"),
        ({"JPY_SESSION_NAME": "a.ipynb", "VSCODE_PID": "1"}, "ipykernel", "JupyterLab"),
        ({"VSCODE_PID": "1"}, "ipykernel", "VS Code"),
        ({"VSCODE_PID": "1"}, None, "none"),
    ],
)
def test_front_ends(monkeypatch, environ, module, name):
    monkeypatch.delitem(sys.modules, "ipykernel", raising=False)
    if module is not None:
        monkeypatch.setitem(sys.modules, module, object())
    assert doctor.front_end(environ).startswith(name)


def test_the_result_is_a_table(tmp_path):
    report = DoctorReport([Check("a", "b", "c"), Check("a", "d", "e", "problem", "mend it")])
    assert not report.healthy
    assert "1 problem(s)" in str(report)
    slow = DoctorReport([Check("extension", "cpu", "not built", "note", "no compiler")])
    assert str(slow).endswith("no problems; 1 thing(s) marked with - work in another way or are not there")
    content = json.loads(report.save(tmp_path / "d.json").read_text())
    assert content["checks"][1]["advice"] == "mend it"
    assert content["healthy"] is False
    assert "mend it" in report.save(tmp_path / "d.html").read_text()
    assert "mend it" in report.save(tmp_path / "d.csv").read_text()
    with pytest.raises(HswqError, match="no figure"):
        report.figure()


def test_the_public_name_is_the_function_whatever_was_imported_before():
    assert hl.doctor is doctor.doctor
