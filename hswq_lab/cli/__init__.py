"""hswq-lab: the library's verbs from a shell. Exit code 0: done and good; 1: a gate failed; 2: not done."""

from __future__ import annotations

import os
import sys
import traceback
from contextlib import redirect_stdout
from importlib import import_module
from typing import TYPE_CHECKING, TextIO, cast

from hswq_lab.cli.parser import build_parser
from hswq_lab.errors import Cancelled, HswqError
from hswq_lab.owned import remove_temporary_leftovers

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

GOOD, GATE_FAILED, NOT_DONE = 0, 1, 2
INTERRUPTED = 130  # what shells expect after Ctrl-C: 128 + SIGINT


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one verb and returns the exit code; wrong usage exits with 2 by argparse itself.

    Args:
        argv: the arguments, without the command's name; those of the process by default.
    """
    args = build_parser().parse_args(argv)
    remove_temporary_leftovers()
    try:
        # The verbs need torch, which takes seconds to import: --help and a typing error do not wait for it.
        verb = getattr(import_module(f"hswq_lab.cli.{args.module}"), args.function)
        if "threads" in args:
            import_module("torch").set_num_threads(args.threads)
        _check_targets(args)
        with redirect_stdout(cast("TextIO", _Listened(sys.stdout))):
            code: int = verb(args)
            sys.stdout.flush()
    except (KeyboardInterrupt, Cancelled):
        sys.stderr.write("\nhswq-lab: stopped; nothing half-done is left behind\n")
        return INTERRUPTED
    except HswqError as error:
        complain(error)
        return NOT_DONE
    except OSError as error:
        complain(HswqError("the system refused", file=error.filename, found=error.strerror))
        try:
            sys.stdout.flush()
        except OSError:  # it was stdout that refused
            _hear_no_more()
        return NOT_DONE
    except Exception:  # noqa: BLE001 - a fault of ours; Python's own exit code, 1, would say that a gate failed
        traceback.print_exc()
        return NOT_DONE
    return code


class _Listened:
    """stdout for as long as somebody reads: after `| head` has seen enough a verb does the rest of its work."""

    def __init__(self, out: TextIO) -> None:
        self._out = out

    def __getattr__(self, name: str) -> object:
        return getattr(self._out, name)

    def write(self, text: str) -> int:
        try:
            return self._out.write(text)
        except BrokenPipeError:
            _hear_no_more()
            return len(text)

    def flush(self) -> None:
        try:
            self._out.flush()
        except BrokenPipeError:
            _hear_no_more()


def _check_targets(args: argparse.Namespace) -> None:
    targets = import_module("hswq_lab.cli.targets")
    if "force" in args:
        targets.check_target(args)
    if "json" in args:
        targets.check_results(args)


def _hear_no_more() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def complain(error: HswqError) -> None:
    """One error as one message on stderr: the problem first, then what it is about, a line each."""
    facts = {
        "file": error.file,
        "tensor": error.tensor,
        "found": error.found,
        "expected": error.expected,
        "to do": error.fix,
    }
    lines = [f"hswq-lab: {error.problem}"]
    lines += [f"  {label}: {value}" for label, value in facts.items() if value is not None]
    sys.stderr.write("\n".join(lines) + "\n")
