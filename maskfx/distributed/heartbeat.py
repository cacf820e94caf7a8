"""Heartbeats: what ranks write into shared memory, and which of them hang by it.

A thread of each rank counts up and notes the CPU time of the thread that computes; that thread
notes the exchange that it waits for. So they show, without a message, whether a process is stopped,
and whether a thread is blocked or waits for another rank.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

PERIOD = 0.05  # seconds between two heartbeats
LOOK = 0.05  # seconds between two looks of the parent
USED = 1_000_000  # nanoseconds of CPU time that count as progress

RUNS, STOPPED = ("R", "D"), "T"  # states: runs or waits for a core, waits for a disk; is stopped

BEATS, CPU, EXCHANGE = range(3)  # places in the memory: 64-bit numbers
SIZE = 24


@dataclass(frozen=True)
class Waits:
    """Limits of the time, in seconds, that ranks may take.

    Args:
        step: A step.
        exchange: An exchange with other ranks.
        start: The start of a rank.
        compile: A compile by Inductor, beside the ranks.
        silence: The time without a heartbeat, after which a process counts as stopped.
        stall: The time for which the thread of a step neither computes nor waits for a rank that
            does; then it counts as hung.
    """

    step: float = 120.0
    exchange: float = 30.0
    start: float = 180.0
    compile: float = 3600.0
    silence: float = 1.0
    stall: float = 1.0


class HeartbeatWriter:
    """Writes the heartbeats of this process; made in the thread that computes.

    Args:
        descriptor: The file of the `HeartbeatReader`; it is closed.
    """

    def __init__(self, descriptor: int) -> None:
        self._numbers = memoryview(mmap.mmap(descriptor, SIZE)).cast("Q")
        os.close(descriptor)
        self._clock = time.pthread_getcpuclockid(threading.get_ident())
        threading.Thread(target=self._run, name="maskfx-heartbeat", daemon=True).start()

    def _run(self) -> None:
        while True:
            self._numbers[CPU] = time.clock_gettime_ns(self._clock)
            self._numbers[BEATS] += 1
            time.sleep(PERIOD)

    @contextmanager
    def waiting(self, number: int) -> Iterator[None]:
        """Note that the thread waits for other ranks in an exchange; numbers begin at 1."""
        self._numbers[EXCHANGE] = number
        try:
            yield
        finally:
            self._numbers[EXCHANGE] = 0


@dataclass
class Signs:
    """What the heartbeats of a rank show since it was asked for something.

    Args:
        silent: Seconds without a heartbeat.
        idle: Seconds in which its thread neither computed nor came to another exchange.
        exchange: The exchange that it waits for; 0 for none.
        waited: Seconds in which it was seen to wait for that exchange; it may poll meanwhile.
    """

    silent: float = 0.0
    idle: float = 0.0
    exchange: int = 0
    waited: float = 0.0


class HeartbeatReader:
    """Memory that a rank writes its heartbeats to.

    Args:
        send: Sends the descriptor of its file to the rank.
    """

    def __init__(self, send: Callable[[int], None]) -> None:
        with tempfile.TemporaryFile() as file:
            file.truncate(SIZE)
            send(file.fileno())
            self._numbers = memoryview(mmap.mmap(file.fileno(), SIZE)).cast("Q")

    def read(self) -> tuple[int, ...]:
        """Return the number of beats, the nanoseconds of CPU time, and the exchange."""
        return tuple(self._numbers)


class Heartbeat(Protocol):
    """What a watch reads."""

    def read(self) -> tuple[int, ...]:
        """Return the number of beats, the nanoseconds of CPU time, and the exchange."""
        ...


class HeartbeatWatch:
    """Follows the heartbeats of a rank from one look to the next.

    The time between two looks counts up to a limit: this process may have been stopped too. Nor
    does the time count in which the rank's main thread runs, waits for a core or for a disk.

    Args:
        heartbeat: What the rank writes.
        now: The time.
        state: Returns the state of its main thread, see `process_state`.
    """

    def __init__(self, heartbeat: Heartbeat, now: float, state: Callable[[], str]) -> None:
        self.signs, self._heartbeat, self._last = Signs(), heartbeat, now
        self._state = state
        self._beats, self._cpu, _ = heartbeat.read()

    def look(self, now: float) -> Signs:
        beats, cpu, exchange = self._heartbeat.read()
        passed, self._last = min(now - self._last, 4 * LOOK), now
        signs, runs = self.signs, self._state() in RUNS
        signs.silent = 0.0 if runs or beats != self._beats else signs.silent + passed
        moved = exchange != signs.exchange or cpu - self._cpu > USED
        signs.idle = 0.0 if runs or moved else signs.idle + passed
        signs.waited = signs.waited + passed if exchange and exchange == signs.exchange else 0.0
        signs.exchange, self._beats = exchange, beats
        if moved:
            self._cpu = cpu
        return signs


def process_state(pid: int) -> str:
    """Return the state of a process's main thread as Linux names it; "" where it isn't known."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (OSError, UnicodeDecodeError):
        return ""
    return stat.rpartition(")")[2].split()[0]


def hung(signs: Mapping[int, Signs], waits: Waits) -> dict[int, str]:
    """Return the ranks that must be ended for a step to go on, with the reason.

    Ranks that wait for others aren't to blame while another one computes or hangs. If all wait,
    those in the earliest exchange keep the others waiting, unless they are busy with it.

    Args:
        signs: Those of the ranks that haven't answered yet.
        waits: Time limits.
    """
    found = {}
    for number, own in signs.items():
        if own.silent >= waits.silence:
            found[number] = f"it has been stopped for {own.silent:.1f} s"
        elif own.idle >= waits.stall and not own.exchange:
            found[number] = f"it has computed nothing for {own.idle:.1f} s"
    if found or not signs or min(own.waited for own in signs.values()) < waits.stall:
        return found
    first = min(own.exchange for own in signs.values())
    return {
        number: f"it has waited in exchange {first} for {own.idle:.1f} s"
        for number, own in signs.items()
        if own.exchange == first and own.idle >= waits.stall
    }
