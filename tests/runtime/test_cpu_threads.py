"""Steps take the cores that the work beside them leaves; who waits gives idle workers back."""

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from maskfx.runtime.cpu_threads import (
    beside,
    computing_with,
    pausing,
    runtimes,
    settle,
    share_cores,
)

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
