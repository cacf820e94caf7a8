"""Idle OpenMP workers are given back by whoever waits for the engine."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from maskfx.engine.cores import pausing

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
