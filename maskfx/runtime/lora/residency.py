"""AdapterResidency: the adapters in memory, bounded by bytes, and the loads in flight.

Requests hold leases. A file that several requests need at the same time is loaded once; an adapter
without a lease is evicted when the bytes exceed the bound, the least popular first; adapters that
waiting requests need come last.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass, field, replace

from maskfx.errors import Closed
from maskfx.runtime.lora.adapter import Adapter
from maskfx.runtime.popularity import LeastFrequentlyUsed

log = logging.getLogger(__name__)

Load = Callable[[], Adapter]
HALF_LIFE = 1024.0  # uses of adapters; `bench/adapters/popularity.py` compares policies
CLOSED = "the adapters are closed; make others"


@dataclass(frozen=True)
class AdapterCounts:
    """Statistics since the start.

    Args:
        hits: Leases of an adapter that was in memory.
        joined: Leases of an adapter that was being loaded for another request.
        loads: Files loaded.
        failures: Loads that failed.
        evictions: Adapters removed for room.
        waits: Requests that waited for an adapter.
        load_seconds: Time of all loads.
        wait_seconds: Time of all waits.
        nbytes: Bytes in memory now.
        resident: Number of adapters in memory now.
    """

    hits: int = 0
    joined: int = 0
    loads: int = 0
    failures: int = 0
    evictions: int = 0
    waits: int = 0
    load_seconds: float = 0.0
    wait_seconds: float = 0.0
    nbytes: int = 0
    resident: int = 0


@dataclass(eq=False)
class Resident:
    """An adapter in memory or in flight; `pins` is the number of its leases.

    `awaited` is True from a prefetch until a request takes the adapter.
    """

    key: str
    future: Future[Adapter] = field(default_factory=Future)
    pins: int = 0
    nbytes: int = 0  # 0 until it is loaded
    awaited: bool = False


class AdapterLease:
    """A request's hold on an adapter, which stays in memory until `release`."""

    def __init__(self, residency: AdapterResidency, resident: Resident) -> None:
        self._residency, self._resident, self._held = residency, resident, True

    @property
    def key(self) -> str:
        return self._resident.key

    @property
    def ready(self) -> bool:
        """Whether the load has ended, with the adapter or an error."""
        return self._resident.future.done()

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until the load has ended; return False after `seconds`."""
        try:
            self._resident.future.exception(seconds)
        except FutureTimeout:
            return False
        except CancelledError:
            pass
        return True

    def adapter(self) -> Adapter:
        """Return the adapter; wait for it, and raise the error of its load."""
        try:
            return self._resident.future.result()
        except CancelledError:
            raise Closed(CLOSED) from None

    def when_loaded(self, call: Callable[[], None]) -> None:
        """Call a function once the load has ended."""
        self._resident.future.add_done_callback(lambda _: call())

    def waited(self, seconds: float) -> None:
        """Count a wait of the request."""
        self._residency.count(waits=1, wait_seconds=seconds)

    def release(self) -> None:
        """End the hold; a load that no request needs any more doesn't start."""
        if self._held:
            self._held = False
            self._residency.release(self._resident)


class AdapterResidency:
    """Adapters by key.

    Args:
        nbytes: Bytes of the adapters in memory; those of requests in flight may exceed it.
        loads: Number of files that are loaded at the same time.
    """

    def __init__(self, nbytes: int, loads: int = 2) -> None:
        self.nbytes = nbytes
        self._threads = ThreadPoolExecutor(loads, thread_name_prefix="maskfx-adapters")
        self._residents: dict[str, Resident] = {}
        self._popularity = LeastFrequentlyUsed(HALF_LIFE)
        self._counts = AdapterCounts()
        self._lock = threading.Lock()
        self._closed = False

    def acquire(self, key: str, load: Load) -> AdapterLease:
        """Return a lease of an adapter; `load` runs in a thread unless it is there already."""
        with self._lock:
            lease = self._lease(key, load)
            lease._resident.awaited = False
            self._popularity.use(key)
            return lease

    def prefetch(self, key: str, load: Load) -> None:
        """Begin to load an adapter that a waiting request will need."""
        with self._lock:
            lease = self._lease(key, load)
            lease._resident.awaited = True
        lease.when_loaded(lease.release)

    def release(self, resident: Resident) -> None:
        with self._lock:
            resident.pins -= 1
            if not resident.pins and resident.future.cancel():
                self._remove(resident)
            self._evict()

    def forget(self, beginning: str) -> None:
        """Remove the adapters whose keys begin so; requests in flight keep them to their end."""
        with self._lock:
            for key in [key for key in self._residents if key.startswith(beginning)]:
                self._remove(self._residents[key])

    def counts(self) -> AdapterCounts:
        with self._lock:
            loaded = [one for one in self._residents.values() if one.nbytes]
            return replace(self._counts, nbytes=self._held(), resident=len(loaded))

    def count(self, **more: float) -> None:
        with self._lock:
            self._add(**more)

    def close(self) -> None:
        """Drop all adapters; loads that haven't started are cancelled."""
        with self._lock:
            self._closed = True
            for resident in self._residents.values():
                resident.future.cancel()
            self._residents.clear()
        self._threads.shutdown(cancel_futures=True)

    def _lease(self, key: str, load: Load) -> AdapterLease:
        """Return a lease; called with the lock."""
        if self._closed:
            raise Closed(CLOSED)
        found = self._residents.get(key)
        if found is None:
            found = self._residents[key] = Resident(key)
            self._threads.submit(self._load, found, load)
        elif found.future.done():
            self._add(hits=1)
        else:
            self._add(joined=1)
        found.pins += 1
        return AdapterLease(self, found)

    def _load(self, resident: Resident, load: Load) -> None:
        if not resident.future.set_running_or_notify_cancel():
            return
        began = time.monotonic()
        try:
            adapter = load()
        except BaseException as error:
            with self._lock:
                self._add(failures=1)
                self._remove(resident)  # the next request tries again
            resident.future.set_exception(error)
            return
        with self._lock:
            self._add(loads=1, load_seconds=time.monotonic() - began)
            resident.nbytes = adapter.nbytes
        resident.future.set_result(adapter)
        with self._lock:
            self._evict()

    def _evict(self) -> None:
        """Remove the least popular adapters without leases until the rest fits."""
        idle = {k: one for k, one in self._residents.items() if one.nbytes and not one.pins}
        held = self._held()
        while idle and held > self.nbytes:
            others = [key for key, one in idle.items() if not one.awaited]
            resident = idle.pop(str(self._popularity.least(others or list(idle))))
            held -= resident.nbytes
            self._remove(resident)
            self._add(evictions=1)

    def _held(self) -> int:
        return sum(one.nbytes for one in self._residents.values())

    def _remove(self, resident: Resident) -> None:
        if self._residents.get(resident.key) is resident:
            del self._residents[resident.key]

    def _add(self, **more: float) -> None:
        now = self._counts
        self._counts = replace(now, **{n: getattr(now, n) + v for n, v in more.items()})
