"""Loader: loads cached rows on a separate stream while the graph computes, ahead of their use.

A step's loads are jobs in the order of their first use. One thread processes them, step after step,
as far ahead as the staging buffer allows; its bytes are free again when the graph frees the rows.
Knows nothing of graphs, masks and plans.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, MutableMapping
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass
from math import inf
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from maskfx.errors import InputError
from maskfx.ir.argument_checks import check_flag, check_number
from maskfx.runtime.hardware.devices import CPU, free_memory

STAGED = 0.25  # of a device's free memory: the staging buffer, unless its size is given
FETCHED = 3  # jobs whose bytes are read from a store while the first of them is picked


@dataclass(frozen=True)
class LoadJob:
    """The load of one input of a graph.

    Args:
        name: The input.
        nbytes: The bytes of its rows.
        pick: Returns its rows.
        fetches: Bring what it picks from into memory, where that lies in a store.
    """

    name: str
    nbytes: int
    pick: Callable[[], Tensor]
    fetches: tuple[Callable[[], None], ...] = ()


class CopyStream(Protocol):
    """Copies rows: `start` is called where a step's loads begin, `carry` on the loader's thread,
    `arrive` where the rows are read."""

    def start(self) -> object: ...

    def carry(self, pick: Callable[[], Tensor], start: Any) -> Tensor: ...

    def arrive(self, value: Tensor) -> None: ...


class HostCopyStream:
    """Copies rows within host memory, or to a device that has no streams."""

    def start(self) -> None:
        return None

    def carry(self, pick: Callable[[], Tensor], start: None) -> Tensor:
        return pick()

    def arrive(self, value: Tensor) -> None:
        return None


class CudaCopyStream:
    """Picks rows where they lie and copies them to the device on a separate stream."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device)
        # event of each copy that was not read yet
        self._copied: MutableMapping[Tensor, torch.cuda.Event] = WeakIdKeyDictionary()

    def start(self) -> torch.cuda.Event:
        """Record an event after what the reader has queued: the recordings and tables to read."""
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.device))
        return event

    def carry(self, pick: Callable[[], Tensor], start: torch.cuda.Event) -> Tensor:
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(start)
            rows = pick()
            event = torch.cuda.Event()
            event.record(self._stream)
        self._copied[rows] = event
        return rows

    def arrive(self, value: Tensor) -> None:
        """Make the reading stream wait, not the host, and register its read with the allocator."""
        reader = torch.cuda.current_stream(self.device)
        reader.wait_event(self._copied.pop(value))
        value.record_stream(reader)


class StagedRows(Protocol):
    """Inputs of a graph that are loaded, each to be taken once."""

    def __contains__(self, name: str) -> bool: ...

    def take(self, name: str) -> Tensor: ...


class Loading:
    """The loads of one step, in flight."""

    def __init__(self, jobs: Iterable[LoadJob], lane: CopyStream, room: float = inf) -> None:
        self.jobs, self.room = list(jobs), room
        self.asked = -1  # the latest job that the reader waits for
        self.fetching = 0  # jobs whose bytes are read from stores, or will be
        self.cancelled = False
        self._lane, self._start = lane, lane.start()
        self._places = {job.name: i for i, job in enumerate(self.jobs)}
        self._values: dict[str, Future[Tensor]] = {job.name: Future() for job in self.jobs}
        self._wake: Callable[[], None] = lambda: None

    def __contains__(self, name: str) -> bool:
        return name in self._values

    @property
    def nbytes(self) -> int:
        return sum(job.nbytes for job in self.jobs)

    def pending(self) -> dict[str, int]:
        """Return the bytes of each input that isn't loaded yet."""
        left = {name for name, value in list(self._values.items()) if not value.done()}
        return {job.name: job.nbytes for job in self.jobs if job.name in left}

    def carry(self, job: LoadJob) -> Tensor:
        """Copy one job's rows, on the loader's thread."""
        return self._lane.carry(job.pick, self._start)

    def take(self, name: str) -> Tensor:
        """Wait for an input and return it; each can be taken once."""
        value = self._values[name]
        if not value.done():
            self.asked = max(self.asked, self._places[name])
            self._wake()
            value.exception()  # waits
        del self._values[name]  # the graph alone holds the rows from here on
        rows = value.result()
        self._lane.arrive(rows)
        return rows

    def wait(self) -> None:
        """Wait until all inputs are loaded, beyond the staging buffer's size if necessary."""
        self.asked = len(self.jobs) - 1
        self._wake()
        for value in list(self._values.values()):
            value.exception()

    def cancel(self) -> None:
        """Stop loading, and free what is loaded."""
        self.cancelled = True
        self._wake()
        self._values.clear()


class Loader:
    """Runs the loads of all steps, one after another, to the device of each step's batch.

    Args:
        bandwidth: Bytes per second. If lower than the machine's, loads take as long as over such a
            link (for measurements on a CPU).
        staging_bytes: Bytes that may be loaded and unread; None takes a quarter of the memory that
            is free on the device when its first load begins. A waiting reader is always served,
            over this budget if necessary (counted in `overruns`): a buffer that is too small makes
            a step slower but never blocks it forever.
        overlap: Load ahead of the reader. Without, each input is loaded when the graph asks for
            it, so that loads and compute take turns (to measure what overlapping gains).
        lane: Copies the rows; by default a stream of the batch's device.
        clock: Returns the time in seconds.
        sleep: Waits for a number of seconds.
        copies: On a CPU, copy rows of its memory too, as if they lay elsewhere. Without, only rows
            that have to be read from a store are loaded there.
        stored: Whether recorded steps are kept in a store, such as a directory.
    """

    def __init__(
        self,
        bandwidth: float = inf,
        staging_bytes: float | None = None,
        lane: CopyStream | None = None,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
        overlap: bool = True,
        copies: bool = True,
        stored: bool = False,
    ) -> None:
        check_number("Loader", "bandwidth", bandwidth, "bytes per second", above=True)
        check_number("Loader", "staging_bytes", staging_bytes, "bytes", or_none=True)
        for name, flag in (("overlap", overlap), ("copies", copies), ("stored", stored)):
            check_flag("Loader", name, flag)
        self.bandwidth, self.staging_bytes, self.overlap = bandwidth, staging_bytes, overlap
        self.copies, self.stored = copies, stored
        self.overruns = 0
        self.staged = 0
        self.loaded_bytes = 0
        self._lane = lane
        self._lanes: dict[torch.device, CopyStream] = {}
        self._rooms: dict[torch.device, float] = {}
        self._clock, self._sleep = clock, sleep
        self._queue: deque[Loading] = deque()
        self._change = threading.Condition(threading.RLock())  # a finalizer may run within
        self._free_at = 0.0  # when the throttled link is free again
        self._thread: threading.Thread | None = None
        self._stores: ThreadPoolExecutor | None = None  # one thread, which only reads
        self._closed = False

    def __reduce_ex__(self, protocol: object) -> Any:
        """Return what deep copies and pickles are made from: its settings."""
        parts = self._lane, self._clock, self._sleep
        return Loader, (
            *(self.bandwidth, self.staging_bytes, *parts),
            *(self.overlap, self.copies, self.stored),
        )

    def begin(self, jobs: Iterable[LoadJob], device: torch.device = CPU) -> Loading:
        """Start loading to a device, after all loads that were begun before."""
        loading = Loading(jobs, self._lane or self._lane_to(device), self.room(device))
        loading._wake = self._notify
        with self._change:
            if self._closed:
                raise InputError("this Loader is closed; make another one")
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="maskfx-load", daemon=True)
                self._thread.start()
            self._queue.append(loading)
            self._change.notify_all()
        return loading

    def has_link(self, device: torch.device) -> bool:
        """Return True if rows in host memory cross a link to the device, which takes time.

        On a CPU they lie in the memory that it computes in, unless a bandwidth was given.
        """
        return self.bandwidth < inf or device.type != "cpu"

    def takes_all(self, device: torch.device) -> bool:
        """Return True if rows in host memory are loaded to a device, not only those in stores."""
        return self.copies or self.has_link(device)

    def room(self, device: torch.device) -> float:
        """Return the bytes of a device's staging buffer."""
        if self.staging_bytes is not None:
            return self.staging_bytes
        if device not in self._rooms:
            self._rooms[device] = STAGED * free_memory(device)
        return self._rooms[device]

    def _lane_to(self, device: torch.device) -> CopyStream:
        if device not in self._lanes:
            self._lanes[device] = (
                CudaCopyStream(device) if device.type == "cuda" else HostCopyStream()
            )
        return self._lanes[device]

    def close(self) -> None:
        """Stop loading; inputs that aren't loaded raise CancelledError in their readers."""
        with self._change:
            self._closed = True
            self._change.notify_all()
        if self._thread is not None:
            self._thread.join()
        if self._stores is not None:
            self._stores.shutdown(cancel_futures=True)

    # On the loader's thread.

    def _work(self) -> None:
        while True:
            with self._change:
                idle = not self._queue
                while not self._queue and not self._closed:
                    self._change.wait()
                if self._closed:
                    break
                loading = self._queue.popleft()
            for place, job in enumerate(loading.jobs):
                self._fetch_ahead(loading, place)
                idle = self._reserve(loading, place, job) or idle
                if self._closed or loading.cancelled:
                    self._give_back(job.nbytes)
                    break
                self._load(loading, job, idle)
                idle = False
            if self._closed:
                self._refuse(loading)
                break
        for left in self._queue:
            self._refuse(left)

    def _fetch_ahead(self, loading: Loading, place: int) -> None:
        """Read the next jobs' bytes from their stores on a thread of its own.

        So a store is read while rows are checked and picked on this thread.
        """
        if not self.overlap:
            return
        with self._change:
            following = [loading, *self._queue]
        left = FETCHED
        for one in following:
            stop = min(place + left, len(one.jobs))
            for job in one.jobs[max(place, one.fetching) : stop]:
                if job.fetches and not one.cancelled:
                    if self._stores is None:
                        self._stores = ThreadPoolExecutor(1, "maskfx-read")
                    for fetch in job.fetches:
                        self._stores.submit(fetch)
            one.fetching = max(one.fetching, stop)
            left, place = left - max(stop - place, 0), 0
            if left <= 0:
                break

    def _reserve(self, loading: Loading, place: int, job: LoadJob) -> bool:
        """Reserve bytes of the staging buffer; return True if the link was idle meanwhile."""
        waited = False
        with self._change:
            while not self.overlap and loading.asked < place:
                if self._closed or loading.cancelled or self._awaited():
                    break
                waited = True
                self._change.wait()
            while self.staged + job.nbytes > loading.room and self.staged:
                if self._closed or loading.cancelled:
                    break
                if loading.asked >= place or self._awaited():
                    self.overruns += 1  # a reader waits, for this job or one behind it
                    break
                waited = True
                self._change.wait()
            self.staged += job.nbytes
        return waited

    def _awaited(self) -> bool:
        """Return True if a reader waits for loads that are queued behind."""
        return any(later.asked >= 0 and not later.cancelled for later in self._queue)

    def _load(self, loading: Loading, job: LoadJob, idle: bool) -> None:
        target = loading._values.get(job.name)
        begun = self._clock() if idle else self._free_at
        try:
            rows = loading.carry(job)
        except BaseException as error:
            self._give_back(job.nbytes)
            if target is not None:
                target.set_exception(error)
            return
        if self.bandwidth < inf:
            self._free_at = max(begun, self._free_at) + job.nbytes / self.bandwidth
            left = self._free_at - self._clock()
            if left > 0:
                self._sleep(left)
        weakref.finalize(rows, self._give_back, job.nbytes)
        self.loaded_bytes += job.nbytes
        if target is not None:  # not cancelled meanwhile
            target.set_result(rows)

    def _refuse(self, loading: Loading) -> None:
        for value in list(loading._values.values()):
            if not value.done():
                value.set_exception(CancelledError("the Loader was closed"))

    def _give_back(self, nbytes: int) -> None:
        with self._change:
            self.staged -= nbytes
            self._change.notify_all()

    def _notify(self) -> None:
        with self._change:
            self._change.notify_all()
