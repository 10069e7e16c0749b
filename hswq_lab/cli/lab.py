"""hswq-lab doctor and lab: what this installation can do, and the notebooks in JupyterLab."""

from __future__ import annotations

import importlib.util
import os
import secrets
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import hswq_lab as hl
from hswq_lab.cli import GOOD, NOT_DONE
from hswq_lab.cli.common import finish, say
from hswq_lab.errors import HswqError

if TYPE_CHECKING:
    import argparse


def doctor(args: argparse.Namespace) -> int:
    """Shows the report; fails if something will not work."""
    report = hl.doctor()
    say(report)
    return finish(args, report, passed=report.healthy)


def lab(args: argparse.Namespace) -> int:
    """Starts JupyterLab on the notebooks and waits for its end."""
    folder = _notebooks(args.folder)
    if importlib.util.find_spec("jupyterlab") is None:
        raise HswqError("JupyterLab is not installed here", fix="pip install 'hswq-lab[notebook]'")
    command = [sys.executable, "-m", "jupyterlab", "--ip=127.0.0.1", f"--port={args.port}"]
    command += [f"--ServerApp.root_dir={folder}"]
    if args.no_browser:
        command.append("--no-browser")
    # By the environment and not as an argument: every user of the machine can read arguments.
    token = os.environ.get("JUPYTER_TOKEN") or secrets.token_urlsafe(24)
    say(f"JupyterLab on {folder}; stop it with Ctrl-C")
    done = subprocess.run(command, env={**os.environ, "JUPYTER_TOKEN": token}, check=False)
    return GOOD if done.returncode == 0 else NOT_DONE


def _notebooks(folder: Path | None) -> Path:
    chosen = folder or Path(__file__).parents[2] / "notebooks"
    if not chosen.is_dir():
        raise HswqError("there is no such folder", file=chosen, fix="name one: hswq-lab lab FOLDER")
    return chosen.resolve()
