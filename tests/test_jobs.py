"""Jobs and progress: states, cancel, errors, one start only; sub-tasks fill their share of the whole."""

from __future__ import annotations

import pickle
import threading

import pytest

from hswq_lab.errors import Cancelled, HswqError
from hswq_lab.jobs import Job
from hswq_lab.progress import part, silent


def counted(progress):
    for done in range(5):
        progress(done, 4, f"unit {done}")
    return "result"


def test_a_job_ends_with_its_result():
    ticks, told = [], threading.Event()

    def watch(job):
        ticks.append((job.state, job.done, job.total, job.label))
        if job.state == "done":
            told.set()

    job = Job(counted, on_change=watch)
    assert job.state == "idle"
    assert job.start().wait(10) == "result"
    assert job.state == "done"
    assert job.error is None
    assert ticks[:5] == [("running", n, 4, f"unit {n}") for n in range(5)]
    assert told.wait(10)
    assert ticks[-1][0] == "done"


def test_wait_raises_what_the_work_raised():
    def fails(progress):
        progress(0, 1, "start")
        raise ValueError("broken inside")

    job = Job(fails).start()
    with pytest.raises(ValueError, match="broken inside"):
        job.wait(10)
    assert job.state == "failed"
    assert isinstance(job.error, ValueError)


def test_cancel_takes_effect_at_the_next_unit():
    reached = threading.Event()
    go_on = threading.Event()
    seen = []

    def work(progress):
        for done in range(100):
            progress(done, 100, "unit")
            seen.append(done)
            reached.set()
            go_on.wait(10)

    job = Job(work).start()
    assert reached.wait(10)
    job.cancel()
    go_on.set()
    with pytest.raises(Cancelled):
        job.wait(10)
    assert job.state == "cancelled"
    assert seen == [0]


def test_a_second_start_is_refused():
    job = Job(counted).start()
    with pytest.raises(HswqError, match="started before"):
        job.start()
    job.wait(10)
    with pytest.raises(HswqError, match="started before"):
        job.start()


def test_waiting_for_nothing_or_not_long_enough_is_said():
    with pytest.raises(HswqError, match="never started"):
        Job(counted).wait()
    gate = threading.Event()

    def slow(progress):
        progress(1, 4, "first")
        gate.wait(10)

    job = Job(slow).start()
    with pytest.raises(HswqError, match="still running"):
        job.wait(0.01)
    while job.done == 0:
        pass
    assert job.seconds_left is not None
    assert job.seconds_left >= 0
    gate.set()
    job.wait(10)
    assert job.seconds_left is None


def test_part_fills_its_share_of_the_whole():
    told = []
    inner = part(lambda done, total, label: told.append((done, total, label)), 3, 7, 10)
    for done in range(3):
        inner(done, 2, "half")
    assert told == [(3, 10, "half"), (5, 10, "half"), (7, 10, "half")]
    inner(0, 0, "nothing to do")
    assert told[-1] == (3, 10, "nothing to do")
    part(lambda done, total, label: told.append((done, total, label)), 0, 1, 2, "own name")(1, 1, "other")
    assert told[-1] == (1, 2, "own name")
    assert silent(0, 1, "x") is None


@pytest.mark.parametrize("kind", [HswqError, Cancelled])
def test_errors_come_back_from_worker_processes_whole(kind):
    error = kind("broken", file="a.safetensors", tensor="w", found=[1], expected=(2,), fix="mend it")
    copy = pickle.loads(pickle.dumps(error))  # noqa: S301  # our own bytes
    assert type(copy) is kind
    assert vars(copy) == vars(error)
    assert str(copy) == "broken; file: a.safetensors; tensor: w; found: [1]; expected: (2,); to do: mend it"
