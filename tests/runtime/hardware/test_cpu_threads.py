"""Steps take the cores that the work beside them leaves; waiting threads return idle workers."""

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import maskfx
from maskfx.runtime.execution import graph_runs
from maskfx.runtime.hardware import cpu_threads
from maskfx.runtime.hardware.cpu_threads import (
    beside,
    computing_with,
    pausing,
    runtimes,
    settle,
    share_cores,
    sharing_cores,
)
from tests.factories.masks import MASKS
from tests.factories.zoo import ZOO

COUNTING = """
import os, threading, time, torch
import maskfx
from maskfx.engine.ticket import Ticket

def workers():
    return len(os.listdir("/proc/self/task")) - len(threading.enumerate())

torch.set_num_threads(3)
x = torch.randn(2_000_000)
ticket = Ticket(lambda: None)
ticket.finish(1)
for _ in range(2):  # and they come again
    before = workers()
    x.sin()
    print(workers() - before)
    assert ticket.result() == 1
    until = time.monotonic() + 10  # threads take a moment to end
    while workers() > before and time.monotonic() < until:
        time.sleep(0.01)
    print(workers() - before)
print(torch.get_num_threads())
"""


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="threads are counted in /proc")
def test_who_waits_for_a_result_gives_its_workers_back() -> None:
    if not pausing():
        pytest.skip("PyTorch's workers aren't GNU's here")
    told = subprocess.run(
        [sys.executable, "-c", COUNTING],
        env={**os.environ, "OMP_NUM_THREADS": "3"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert told.stdout.split() == ["2", "0", "2", "0", "3"]


needs_gnu = pytest.mark.skipif(not runtimes(), reason="PyTorch's workers aren't GNU's here")


def in_a_thread(work: Callable[[], None]) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()


@needs_gnu
def test_who_shares_takes_what_others_leave(three: None) -> None:
    found = []

    def work() -> None:
        share_cores()
        for threads in (1, 2, 5):
            with beside(threads):
                settle()
                found.append(torch.get_num_threads())
        settle()
        found.append(torch.get_num_threads())

    in_a_thread(work)
    assert found == [2, 1, 1, 3]
    with beside(1):
        settle()  # a thread that doesn't share keeps its own
        assert torch.get_num_threads() == 3


@needs_gnu
def test_a_number_of_threads_is_of_one_thread_and_for_a_while(three: None) -> None:
    found = []

    def work() -> None:
        with computing_with(1):
            found.append(torch.get_num_threads())
        found.append(torch.get_num_threads())

    in_a_thread(work)
    assert found == [1, 3]
    assert torch.get_num_threads() == 3


@needs_gnu
def test_cores_of_other_programs_are_left_to_them(
    three: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A helper is seen as another program too, and counts once."""
    others = iter([0, 1, 2, 2, 7, 0])
    monkeypatch.setattr(cpu_threads.busy, "by_others", lambda: next(others))
    found = []

    def work() -> None:
        share_cores()
        for helpers in (0, 0, 1, 2, 0, 0):
            with beside(helpers):
                settle()
                found.append(torch.get_num_threads())

    in_a_thread(work)
    assert found == [3, 2, 1, 1, 1, 3]


def test_other_programs_take_cores_without_a_thread_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_threads.busy, "total", 8)
    found = []
    for others in (0, 2, 4, 5, 7, 9):
        monkeypatch.setattr(cpu_threads.busy, "by_others", lambda others=others: others)
        found.append(cpu_threads.cores_left(4))
    assert found == [4, 4, 4, 3, 1, 1]


@needs_gnu
def test_a_thread_shares_its_cores_for_a_while(
    three: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    others = [1]
    monkeypatch.setattr(cpu_threads.busy, "by_others", lambda: others[0])
    found = []

    def work() -> None:
        with sharing_cores(), sharing_cores():
            found.append(torch.get_num_threads())
            others[0] = 2
            settle()
            found.append(torch.get_num_threads())
        settle()
        found.append(torch.get_num_threads())

    in_a_thread(work)
    assert found == [2, 1, 3]


@needs_gnu
def test_an_edit_outside_of_an_engine_leaves_cores_to_other_programs(
    three: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_threads.busy, "by_others", lambda: 1)
    case = ZOO["AuraFlowTransformer2DModel"]
    size = case.sizes[0]
    denoiser = maskfx.compile(case.build())
    _, cache = denoiser.record(**case.inputs(size, 0))
    seen: list[int] = []
    monkeypatch.setattr(graph_runs, "settle", lambda: seen.append(torch.get_num_threads()))
    mask = MASKS["stroke"](case.mask_shape(size), 0)
    denoiser.edit([maskfx.EditStep(case.inputs(size, 0), mask, cache)])
    assert set(seen) == {2}
    assert torch.get_num_threads() == 3
