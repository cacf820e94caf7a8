"""AdapterResidency: one load for many requests, a bound in bytes, and nothing that leaks."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from maskfx.errors import AdapterError, Closed
from maskfx.runtime.lora.adapter import Adapter, LowRank
from maskfx.runtime.lora.residency import AdapterResidency

BYTES = 2 * 4 * 8 * 4  # of one adapter


def adapter(name: str) -> Adapter:
    update = LowRank(torch.ones(4, 8), torch.ones(8, 4), 1.0)
    return Adapter(name, name, {"unet": {"layer": update}})


@pytest.fixture
def residency() -> Iterator[AdapterResidency]:
    made = AdapterResidency(2 * BYTES, loads=2)
    yield made
    made.close()


class Gate:
    """Loads that wait until the gate opens, and count themselves."""

    def __init__(self) -> None:
        self.opened, self.loads, self.most, self.now = threading.Event(), 0, 0, 0
        self._lock = threading.Lock()

    def load(self, name: str) -> Callable[[], Adapter]:
        def loading() -> Adapter:
            with self._lock:
                self.loads += 1
                self.now += 1
                self.most = max(self.most, self.now)
            assert self.opened.wait(10)
            with self._lock:
                self.now -= 1
            return adapter(name)

        return loading


def test_ten_requests_at_once_load_a_file_once(residency: AdapterResidency) -> None:
    gate = Gate()
    with ThreadPoolExecutor(10) as threads:
        leases = list(threads.map(lambda _: residency.acquire("a", gate.load("a")), range(10)))
    assert not any(lease.ready for lease in leases)
    assert not leases[0].wait(0.01)
    gate.opened.set()
    assert leases[0].wait(10)
    assert len({id(lease.adapter()) for lease in leases}) == 1
    assert gate.loads == 1
    counts = residency.counts()
    assert (counts.loads, counts.joined, counts.hits, counts.nbytes) == (1, 9, 0, BYTES)


def test_at_most_two_files_are_loaded_at_once(residency: AdapterResidency) -> None:
    gate = Gate()
    leases = [residency.acquire(name, gate.load(name)) for name in "abcdefghij"]
    gate.opened.set()
    assert [lease.adapter().name for lease in leases] == list("abcdefghij")
    assert gate.most == 2


def test_the_least_popular_without_a_lease_is_evicted(residency: AdapterResidency) -> None:
    pinned = residency.acquire("pinned", lambda: adapter("pinned"))
    pinned.adapter()
    for name in ("a", "b", "a", "c"):
        lease = residency.acquire(name, lambda name=name: adapter(name))  # type: ignore[misc]
        lease.adapter()
        lease.release()
        lease.release()  # has no effect
    counts = residency.counts()
    assert (counts.nbytes, counts.resident, counts.evictions) == (2 * BYTES, 2, 3)
    again = residency.acquire("pinned", lambda: adapter("other"))
    assert again.adapter() is pinned.adapter()
    over = [residency.acquire(name, lambda: adapter("x")) for name in "xyz"]
    assert all(one.adapter() for one in over), "requests in flight may exceed the bound"
    assert residency.counts().nbytes == 4 * BYTES
    for lease in (*over, pinned, again):
        lease.release()
    assert residency.counts().nbytes == 2 * BYTES


def test_popular_adapters_stay_until_others_are_used_more(residency: AdapterResidency) -> None:
    """A bound of two: adapters that are used once displace one another."""
    loads: list[str] = []

    def use(*names: str) -> None:
        for name in names:

            def load(name: str = name) -> Adapter:
                loads.append(name)
                return adapter(name)

            lease = residency.acquire(name, load)
            lease.adapter()
            lease.release()

    use(*"aaabcda")
    assert loads == ["a", "b", "c", "d"]
    use(*"cccccea")
    assert loads[4:] == ["c", "e", "a"], "the third is used more than the first"


def test_what_waiting_requests_need_is_evicted_last(residency: AdapterResidency) -> None:
    gate = Gate()
    gate.opened.set()
    for name in "aabb":
        lease = residency.acquire(name, gate.load(name))
        lease.adapter()
        lease.release()
    for name in "cd":
        residency.prefetch(name, gate.load(name))
    for name in "cd":
        lease = residency.acquire(name, gate.load(name))
        assert lease.adapter().name == name
    assert gate.loads == 4


def test_a_failed_load_fails_its_requests_and_is_tried_again(residency: AdapterResidency) -> None:
    def failing() -> Adapter:
        raise AdapterError("the store is away")

    leases = [residency.acquire("a", failing) for _ in range(3)]
    for lease in leases:
        assert lease.wait(10)
        with pytest.raises(AdapterError, match="the store is away"):
            lease.adapter()
        lease.release()
    assert residency.counts().failures >= 1
    assert residency.acquire("a", lambda: adapter("a")).adapter().name == "a"


def test_loads_without_requests_are_not_started(residency: AdapterResidency) -> None:
    gate = Gate()
    blocking = [residency.acquire(name, gate.load(name)) for name in "ab"]
    cancelled = residency.acquire("c", gate.load("c"))
    cancelled.release()
    gate.opened.set()
    for lease in blocking:
        lease.adapter()
    residency.acquire("d", gate.load("d")).adapter()
    assert gate.loads == 3


def test_forgotten_adapters_are_freed_after_their_last_request(residency: AdapterResidency) -> None:
    lease = residency.acquire("file-1", lambda: adapter("a"))
    seen = weakref.ref(lease.adapter())
    residency.forget("file-")
    assert residency.counts().nbytes == 0
    assert lease.adapter() is seen()
    lease.release()
    del lease
    gc.collect()
    assert seen() is None


def test_a_prefetched_adapter_waits_for_its_request(residency: AdapterResidency) -> None:
    gate = Gate()
    residency.prefetch("a", gate.load("a"))
    lease = residency.acquire("a", gate.load("a"))
    gate.opened.set()
    assert lease.adapter().name == "a"
    lease.release()
    residency.prefetch("a", gate.load("a"))
    for name in "bbbccca":
        other = residency.acquire(name, gate.load(name))
        other.adapter()
        other.release()
    assert gate.loads == 3
    for name in "bbba":  # it is pinned no more
        other = residency.acquire(name, gate.load(name))
        other.adapter()
        other.release()
    assert gate.loads == 5


def test_close_ends_waiting_requests() -> None:
    residency, gate = AdapterResidency(BYTES, loads=1), Gate()
    running = residency.acquire("a", gate.load("a"))
    queued = residency.acquire("b", gate.load("b"))
    threading.Timer(0.05, gate.opened.set).start()
    residency.close()
    assert running.adapter().name == "a"
    with pytest.raises(Closed):
        queued.adapter()
    with pytest.raises(Closed):
        residency.acquire("c", gate.load("c"))
