"""Cores that other processes keep busy are measured from the system's counters."""

import subprocess
import sys
import time

import pytest

from maskfx.runtime.hardware.busy_cores import (
    PERIOD,
    STATISTICS,
    BusyCores,
    ticks_busy,
    whole_cores,
)

TEXT = """cpu  100 20 30 400 50 6 7 8 9 10
cpu0 10 2 3 400 50 6 7 8 9 10
cpu1 1 0 0 4000 0 0 0 0 1 0
cpu12 1000 0 0 1 0 0 0 0 0 0
intr 12 34
"""


def test_ticks_of_own_cores_without_idle_ones_and_guests() -> None:
    assert ticks_busy(TEXT, {0}) == 10 + 2 + 3 + 6 + 7 + 8
    assert ticks_busy(TEXT, {1, 12}) == 1 + 1000
    assert ticks_busy(TEXT, ()) == 0


@pytest.mark.parametrize(
    ("cores", "left"), [(-0.2, 0), (0.0, 0), (0.39, 0), (0.41, 1), (1.3, 1), (1.5, 2), (7.0, 7)]
)
def test_a_core_counts_if_it_is_used_enough(cores: float, left: int) -> None:
    assert whole_cores(cores) == left


class Counters:
    def __init__(self) -> None:
        self.now = self.used = 0.0
        self.busy: float | None = 0.0
        self.reads = 0

    def cores(self) -> BusyCores:
        return BusyCores(lambda: self.now, lambda: self.used, self.read)

    def read(self) -> float | None:
        self.reads += 1
        return self.busy


def test_others_used_what_this_process_did_not() -> None:
    counters = Counters()
    cores = counters.cores()
    counters.now, counters.used, counters.busy = 2.0, 1.5, 3.6
    assert cores.by_others() == 1  # 1.05 cores
    counters.now, counters.used, counters.busy = 3.0, 3.5, 5.6
    assert cores.by_others() == 0, "of the time since the last measurement"


def test_a_measurement_takes_its_time() -> None:
    counters = Counters()
    cores = counters.cores()
    counters.now, counters.busy = PERIOD / 2, PERIOD
    assert cores.by_others() == 0
    assert counters.reads == 1
    counters.now = PERIOD
    assert cores.by_others() == 1
    assert counters.reads == 2


def test_without_counters_no_core_is_busy() -> None:
    counters = Counters()
    counters.busy = None
    cores = counters.cores()
    counters.now = counters.used = 9.0
    assert cores.by_others() == 0


@pytest.mark.skipif(not STATISTICS.exists(), reason="cores are counted in /proc")
def test_a_busy_process_is_seen() -> None:
    cores = BusyCores()
    child = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        until, found = time.monotonic() + 20, 0
        while not found and time.monotonic() < until:
            time.sleep(PERIOD)
            found = cores.by_others()
    finally:
        child.kill()
        child.wait()
    assert found >= 1
