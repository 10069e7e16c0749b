"""gather: order, errors, cancel, a worker that dies; a sweep on a Dask cluster whose worker is killed."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import distributed
import pytest
import torch

from hswq_lab import executors
from hswq_lab.cli.common import workers as cli_workers
from hswq_lab.errors import Cancelled, HswqError
from hswq_lab.executors import gather, local_pool
from hswq_lab.trajectory import compare


def slow_first(number):
    time.sleep(0.1 if number == 0 else 0)
    return number * number


def die(number):
    os.kill(os.getpid(), signal.SIGKILL)


def test_results_come_in_the_order_of_the_units():
    ticks = []
    with ThreadPoolExecutor(3) as pool:
        labels = [f"unit {n}" for n in range(5)]
        found = gather(pool, slow_first, [(n,) for n in range(5)], labels, lambda *tick: ticks.append(tick))
    assert found == [0, 1, 4, 9, 16]
    assert ticks[0][:2] == (0, 5)
    assert ticks[-1] == (5, 5, "unit 0")


def test_no_units_are_no_results():
    with ThreadPoolExecutor(1) as pool:
        assert gather(pool, slow_first, [], []) == []


def test_an_error_cancels_the_rest():
    started = []

    def work(number):
        started.append(number)
        time.sleep(0.02)
        raise ValueError(number)

    with ThreadPoolExecutor(1) as pool, pytest.raises(ValueError, match="0"):
        gather(pool, work, [(n,) for n in range(50)], ["x"] * 50)
    assert len(started) < 5


def test_cancel_works_while_a_long_unit_runs():
    gate = threading.Event()
    calls = []

    def cancel_third_time(done, total, label):
        calls.append(done)
        if len(calls) == 3:
            raise Cancelled("enough")

    with ThreadPoolExecutor(1) as pool:
        start = time.monotonic()
        with pytest.raises(Cancelled):
            gather(pool, lambda: gate.wait(10), [(), ()], ["a", "b"], cancel_third_time)
        assert time.monotonic() - start < 5
        gate.set()
    assert calls == [0, 0, 0]


def test_a_pool_whose_worker_dies_says_so():
    with local_pool(1) as pool, pytest.raises(HswqError, match="worker process died"):
        gather(pool, die, [(1,)], ["x"])


@pytest.mark.parametrize("other", [3, "dask", ThreadPoolExecutor])
def test_what_is_no_executor_says_so(other):
    with pytest.raises(HswqError, match=r"runs on an executor.*expected: a concurrent\.futures\.Executor"):
        gather(other, slow_first, [(1,)], ["x"])


def test_an_executor_that_is_shut_down_says_so():
    pool = ThreadPoolExecutor(1)
    pool.shutdown()
    with pytest.raises(HswqError, match="takes no work"):
        gather(pool, slow_first, [(1,)], ["x"])


def test_an_executor_that_is_shut_down_midway_is_not_waited_for():
    gate = threading.Event()
    pool = ThreadPoolExecutor(1)

    def shut(done, total, label):
        pool.shutdown(wait=False, cancel_futures=True)

    try:
        with pytest.raises(HswqError, match="shut down before all was done"):
            gather(pool, lambda: gate.wait(10), [()] * 3, ["a", "b", "c"], shut)
    finally:
        gate.set()


def visible_card(_):
    time.sleep(0.2)  # so that no worker takes two
    return os.environ.get("CUDA_VISIBLE_DEVICES"), os.getpid()


def test_a_pool_has_a_process_a_core_unless_told_otherwise():
    with local_pool() as pool:
        assert pool._max_workers == len(os.sched_getaffinity(0))
    with local_pool(3) as pool:
        assert pool._max_workers == 3
    with pytest.raises(HswqError, match="at least one"):
        local_pool(0)


def test_each_process_of_a_pool_sees_one_card(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(HswqError, match="no card"):
        local_pool(device="cuda")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,GPU-abc")
    with local_pool(device="cuda:0") as pool:
        found = set(gather(pool, visible_card, [(n,) for n in range(4)], ["x"] * 4))
    assert sorted(card for card, _ in found) == ["3", "GPU-abc"]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert executors._cards() == ["0", "1"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # distributed's own, at start and when a worker is killed
def test_a_dask_cluster_survives_the_loss_of_a_worker(tiny_model, tiny_pack):
    variants = {"parity": tiny_pack.in_mode("parity"), "tc": tiny_pack.in_mode("tc")}
    seeds, steps = tuple(range(1, 9)), 8
    serial = compare(tiny_model, variants, seeds, steps=steps)
    with (
        distributed.LocalCluster(
            n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None
        ) as cluster,
        distributed.Client(cluster) as client,
    ):
        victims = sorted(client.run(os.getpid).values())
        killed = []

        def kill_one(done, total, label):
            if done >= 5 and not killed:
                os.kill(victims[0], signal.SIGKILL)
                killed.append(done)

        spread = compare(
            tiny_model, variants, seeds, steps=steps, progress=kill_one, executor=client.get_executor()
        )
        assert killed
        assert killed[0] < len(seeds) * 3
        survivors = sorted(client.run(os.getpid).values())
    assert victims[0] not in survivors
    assert spread.traces == serial.traces
    for ours, theirs in zip(spread.variant_runs["tc"], serial.variant_runs["tc"], strict=True):
        assert ours.latents.equal(theirs.latents)


def interrupted_in_a_long_unit():
    with cli_workers(2) as pool:
        unit = pool.submit(time.sleep, 3600)
        while not unit.running():
            time.sleep(0.05)
        raise KeyboardInterrupt


def test_an_interrupted_verb_does_not_wait_for_its_workers():
    with pytest.raises(KeyboardInterrupt):
        interrupted_in_a_long_unit()
    assert multiprocessing.active_children() == []
