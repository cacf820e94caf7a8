"""Tiers: budgets hold, nothing is lost or read twice, and a step is the same wherever it lay."""

from __future__ import annotations

import random
import re
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from maskfx.errors import InputError
from maskfx.runtime.cache.movers import DeviceMover
from maskfx.runtime.cache.quantize import Encoding, Format
from maskfx.runtime.cache.rows import tensors_of
from maskfx.runtime.cache.step_cache import StepCache, with_tensors
from maskfx.runtime.cache.stores.filesystem import Disk
from maskfx.runtime.cache.stores.store import Store
from maskfx.runtime.cache.stores.store_entry import EntryKey
from maskfx.runtime.cache.tier_entry import Tier
from maskfx.runtime.cache.tiers import Tiers
from tests.factories.step_caches import a_step, key, same

DEVICE, HOST, DISK = Tier.DEVICE, Tier.HOST, Tier.DISK


class QuickDisk(Disk):
    """Counts what is opened and read; doesn't wait for the disk."""

    def __init__(self) -> None:
        self.reads = self.writes = 0
        self.wait = threading.Event()
        self.wait.set()

    def sync(self, file: int) -> None:
        pass

    def sync_directory(self, path: Path) -> None:
        pass

    def read(self, file: int, into: memoryview) -> int:
        self.reads += 1
        assert self.wait.wait(10)
        return super().read(file, into)

    def write(self, file: int, data: memoryview) -> None:
        self.writes += 1
        assert self.wait.wait(10)
        super().write(file, data)


@dataclass
class CopyMover:
    """A device that is memory like any other; reports which copies are whose."""

    moves: list[str] = field(default_factory=list)

    def to_device(self, cache: StepCache) -> StepCache:
        self.moves.append("device")
        return with_tensors(cache, lambda t: t.clone())

    def to_host(self, cache: StepCache) -> StepCache:
        self.moves.append("host")
        return with_tensors(cache, lambda t: t.clone())


STEPS = {i: a_step(i, sites=4, width=32, batch=1) for i in range(12)}
ONE = STEPS[0].nbytes()


def tiers_of(root: Path | None, host: float, device: float = 0, **options: Any) -> Tiers:
    """Room for a number of steps in each tier."""
    store = Store(root, QuickDisk()) if root is not None else None
    if device:
        options.setdefault("mover", CopyMover())
    return Tiers(store, host_bytes=int(host * ONE), device_bytes=int(device * ONE), **options)


def where(tiers: Tiers, count: int) -> str:
    """One letter per step: Device, Host, or neither."""
    names = {DEVICE: "D", HOST: "H", None: "-"}
    return "".join(names[tiers.where(key(step=i))] for i in range(count))


def found(tiers: Tiers, step: int) -> Tier | None:
    """Where a step is found; it must be the one that was put."""
    got = tiers.get(key(step=step))
    if got is None:
        return None
    assert same(got.cache.rows, STEPS[step].rows)
    assert same(got.cache.stats, STEPS[step].stats)
    return got.tier


# Moving down and up.


def test_the_least_recently_used_moves_down_and_use_brings_it_back(tmp_path: Path):
    tiers = tiers_of(tmp_path, host=2, device=1)
    for i in range(4):
        tiers.put(key(step=i), STEPS[i])
    assert where(tiers, 4) == "-HHD"
    assert found(tiers, 3) is DEVICE
    assert found(tiers, 1) is HOST  # 1 takes the place of 3, which finds the host full
    assert where(tiers, 4)[1] == "D"
    assert found(tiers, 0) is DISK
    assert where(tiers, 4)[0] == "D"
    assert found(tiers, 0) is DEVICE
    assert found(tiers, 9) is None
    counters = tiers.counters()
    assert counters.hits == {DEVICE: 2, HOST: 1, DISK: 1}
    assert counters.misses == 1
    assert counters.loads == 1
    assert counters.lost == 0
    assert counters.nbytes[DEVICE] == ONE
    assert counters.nbytes[HOST] <= 2 * ONE


def test_without_a_store_the_oldest_is_lost_and_counted():
    tiers = tiers_of(None, host=2)
    for i in range(3):
        tiers.put(key(step=i), STEPS[i])
    assert where(tiers, 3) == "-HH"
    assert found(tiers, 0) is None
    assert found(tiers, 2) is HOST
    assert tiers.counters().lost == 1
    assert tiers.counters().evictions == {HOST: 1}


def test_use_decides_who_leaves(tmp_path: Path):
    tiers = tiers_of(tmp_path, host=3)
    for i in range(3):
        tiers.put(key(step=i), STEPS[i])
    found(tiers, 0)
    tiers.put(key(step=3), STEPS[3])
    assert where(tiers, 4) == "H-HH"


def test_a_step_larger_than_memory_goes_to_disk(tmp_path: Path):
    tiers = tiers_of(tmp_path, host=0.5, device=0.9)
    tiers.put(key(), STEPS[0])
    assert tiers.where(key()) is None
    assert found(tiers, 0) is DISK
    assert tiers.counters().nbytes == {}
    assert tiers.counters().lost == 0


def test_without_write_through_a_step_is_written_when_it_leaves(tmp_path: Path):
    tiers = tiers_of(tmp_path, host=1, write_through=False)
    assert tiers.store is not None
    tiers.put(key(step=0), STEPS[0])
    assert tiers.store.counters.writes == 0
    tiers.put(key(step=1), STEPS[1])
    assert tiers.store.counters.writes == 1
    assert found(tiers, 0) is DISK  # 1 had to leave for it
    assert tiers.store.counters.writes == 2
    assert found(tiers, 1) is DISK  # 0 is on disk already
    assert tiers.store.counters.writes == 2
    tiers.put(key(step=2), STEPS[2])
    tiers.close()
    assert tiers.store.counters.writes == 3
    assert found(tiers_of(tmp_path, host=1), 2) is DISK


def test_what_somebody_removed_from_disk_is_written_again(tmp_path: Path):
    tiers = tiers_of(tmp_path, host=1)
    tiers.put(key(step=0), STEPS[0])
    Store(tmp_path).gc(budget_bytes=0)
    tiers.put(key(step=1), STEPS[1])
    assert found(tiers, 0) is DISK


def test_a_restart_finds_everything_on_disk(tmp_path: Path):
    first = tiers_of(tmp_path, host=4, device=2)
    for i, step in STEPS.items():
        first.put(key(step=i), step)
    first.close()
    again = tiers_of(tmp_path, host=4, device=2)
    assert [found(again, i) for i in STEPS] == [DISK] * len(STEPS)
    assert again.counters().misses == 0


def test_replacing_and_dropping_give_the_bytes_back(tmp_path: Path):
    tiers = tiers_of(tmp_path, host=4, device=1)
    for _ in range(3):
        for i in range(3):
            tiers.put(key(step=i), STEPS[i])
    held = tiers.counters().nbytes
    assert held[DEVICE] + held[HOST] == 3 * ONE
    for i in range(3):
        tiers.drop(key(step=i))
    assert not any(tiers.counters().nbytes.values())
    assert [found(tiers, i) for i in range(3)] == [None] * 3


# Pins, time to live, budgets.


def test_a_pinned_step_stays_and_does_not_expire(tmp_path: Path):
    now = [0.0]
    tiers = tiers_of(tmp_path, host=2, ttl=10, clock=lambda: now[0])
    tiers.pin(key(step=0))
    for i in range(4):
        tiers.put(key(step=i), STEPS[i])
    assert where(tiers, 4) == "H--H"
    now[0] = 11
    tiers.gc()
    assert where(tiers, 4) == "H---"
    assert found(tiers, 0) is HOST
    tiers.unpin(key(step=0))
    for i in (1, 2):
        tiers.put(key(step=i), STEPS[i])
    assert where(tiers, 4) == "-HH-"
    with pytest.raises(InputError, match="it isn't pinned; call pin"):
        tiers.unpin(key(step=0))


def test_pins_that_fill_memory_send_the_rest_to_disk(tmp_path: Path):
    tiers = tiers_of(tmp_path, host=2)
    for i in range(2):
        tiers.pin(key(step=i))
        tiers.put(key(step=i), STEPS[i])
    tiers.put(key(step=2), STEPS[2])
    assert where(tiers, 3) == "HH-"
    assert found(tiers, 2) is DISK
    assert where(tiers, 3) == "HH-"


def test_what_is_unused_for_too_long_is_a_miss_in_every_tier(tmp_path: Path):
    now = [1000.0]
    tiers = tiers_of(tmp_path, host=2, ttl=10, clock=lambda: now[0])
    assert isinstance(tiers.store, Store)
    tiers.store.clock = lambda: now[0]
    for i in range(3):
        tiers.put(key(step=i), STEPS[i])
    now[0] += 9
    assert found(tiers, 2) is HOST  # used now
    now[0] += 9
    assert found(tiers, 0) is None  # on disk alone
    assert found(tiers, 1) is None
    assert found(tiers, 2) is HOST
    assert tiers.counters().expired == 1
    assert tiers.store.counters.expired >= 1
    assert tiers.counters().misses == 2


def test_the_disk_keeps_its_budget_and_the_pinned(tmp_path: Path):
    tiers = tiers_of(tmp_path, host=1, disk_bytes=6 * ONE)
    assert tiers.store is not None  # two entries fit, with what is written about their tensors
    tiers.pin(key(step=0))
    for i in range(8):
        tiers.put(key(step=i), STEPS[i])
    entries = tiers.store.ls()
    assert sum(entry.nbytes for entry in entries) <= 6 * ONE
    kept = {entry.digest for entry in entries}
    assert key(step=0).digest() in kept
    assert key(step=7).digest() in kept
    assert key(step=1).digest() not in kept


# A step is the same wherever it lay.

WIDE = {i: a_step(i, sites=4, width=320, batch=1) for i in range(4)}


@pytest.mark.parametrize("format", [Format.INT8, Format.BF16], ids=str)
def test_a_rounded_step_is_the_same_in_every_tier(tmp_path: Path, format: Format):
    encoding = Encoding(rows=format, output=format, stats=format)
    size = WIDE[0].packed(encoding).nbytes()
    tiers = Tiers(
        Store(tmp_path, QuickDisk()),
        host_bytes=size,
        device_bytes=size,
        mover=CopyMover(),
        encoding=encoding,
        write_through=False,
    )
    tiers.put(key(step=0), WIDE[0])
    got = [tiers.get(key(step=0))]
    tiers.put(key(step=1), WIDE[1])
    got.append(tiers.get(key(step=0)))
    for i in (2, 3):
        tiers.put(key(step=i), WIDE[i])
    got.append(tiers.get(key(step=0)))
    Store(tmp_path).gc(budget_bytes=0)
    for i in (1, 2, 3):  # 0 leaves, and isn't on disk any more
        tiers.put(key(step=i), WIDE[i])
    got.append(tiers.get(key(step=0)))
    assert [g.tier for g in got if g] == [DEVICE, HOST, DISK, DISK]
    assert all(g and same(g.cache, WIDE[0].packed(encoding)) for g in got)
    assert not same(WIDE[0].packed(encoding), WIDE[0])


def test_rounded_steps_fill_a_tier_by_what_they_hold():
    eight = Encoding(rows=Format.INT8)
    size = WIDE[0].packed(eight).nbytes()
    assert 3 * size < WIDE[0].nbytes()
    tiers = Tiers(host_bytes=2 * size, device_bytes=size, mover=CopyMover(), encoding=eight)
    for i in range(4):
        tiers.put(key(step=i), WIDE[i])
    assert where(tiers, 4) == "-HHD"
    assert tiers.counters().nbytes == {DEVICE: size, HOST: 2 * size}
    got = tiers.get(key(step=1))
    assert got is not None
    assert got.cache.nbytes() == size


def test_a_rounded_step_is_written_once_and_only_when_asked(tmp_path: Path):
    for write_through in (True, False):
        root = tmp_path / str(write_through)
        eight = Encoding(rows=Format.INT8)
        tiers = Tiers(
            Store(root, QuickDisk()), host_bytes=10**6, encoding=eight, write_through=write_through
        )
        assert tiers.store is not None
        tiers.put(key(), WIDE[0])
        assert tiers.store.counters.writes == write_through
        tiers.close()
        assert tiers.store.counters.writes == 1
        assert tiers.store.ls()[0].nbytes < WIDE[0].packed(eight).nbytes() + 5000


def test_only_the_taps_asked_for_are_kept(tmp_path: Path):
    tiers = tiers_of(tmp_path, host=2)
    tiers.put(key(), STEPS[0], keep={"keys"})
    for where_now in (HOST, DISK):
        got = tiers.get(key())
        assert got is not None
        assert got.tier is where_now
        assert list(got.cache.rows) == ["keys"]
        tiers = tiers_of(tmp_path, host=2)
    assert list(STEPS[0].rows) == ["keys", "values", "halo"]


def test_a_step_that_cannot_be_stored_stays_in_memory(tmp_path: Path):
    odd = a_step(0, sites=4, width=32, batch=1)
    odd.constants.append(object())
    for encoding in (Encoding(), Encoding(rows=Format.INT8)):
        rounded = odd.packed(encoding)
        tiers = Tiers(Store(tmp_path, QuickDisk()), host_bytes=rounded.nbytes(), encoding=encoding)
        tiers.put(key("odd"), odd)
        got = tiers.get(key("odd"))
        assert got is not None
        assert got.cache is odd if encoding.lossless else same(got.cache, rounded)
        assert not tiers.flush()
        tiers.put(key(step=1), STEPS[1])
        assert tiers.get(key("odd")) is None
        assert tiers.counters().lost == 1


# Damage.


def test_an_entry_that_cant_be_decoded_is_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    tiers = tiers_of(tmp_path, host=1)
    assert isinstance(tiers.store, Store)
    for i in range(2):
        assert tiers.store.put(key(step=i), b"whole, but no step")
        assert found(tiers, i) is None
    [told] = [record.message for record in caplog.records]
    assert "can't be decoded" in told


def test_bytes_and_time_of_reads_are_counted(tmp_path: Path):
    tiers = tiers_of(tmp_path, host=1)
    for i in range(3):
        tiers.put(key(step=i), STEPS[i])
    assert (tiers.counters().read_bytes, tiers.counters().read_seconds) == (0, 0.0)
    assert found(tiers, 0) is DISK
    assert found(tiers, 0) is HOST
    once = tiers.counters()
    assert once.read_bytes >= ONE
    assert once.read_seconds > 0
    assert isinstance(tiers.store, Store)
    assert isinstance(tiers.store.disk, QuickDisk)
    tiers.store.disk.wait.clear()
    both = [tiers.prefetch(key(step=i)) for i in (1, 2)]  # at the same time: counted once
    began = time.monotonic()
    time.sleep(0.3)
    tiers.store.disk.wait.set()
    assert all(one.result(10) for one in both)
    spent = time.monotonic() - began
    again = tiers.counters()
    assert again.read_bytes == 3 * once.read_bytes
    assert 0.25 <= again.read_seconds - once.read_seconds <= spent + 0.05


def test_a_damaged_file_is_a_miss_and_counted(tmp_path: Path):
    tiers = tiers_of(tmp_path, host=1)
    assert isinstance(tiers.store, Store)
    for i in range(3):
        tiers.put(key(step=i), STEPS[i])
    path = tiers.store.path(key(step=0).digest())
    path.write_bytes(path.read_bytes()[:-1])
    assert tiers.store.put(key(step=1), b"whole, but no step")
    assert found(tiers, 0) is None
    assert found(tiers, 1) is None
    assert not path.exists()
    assert len(tiers.store.ls()) == 1
    assert tiers.counters().corrupt == 2
    assert tiers.counters().misses == 2
    assert found(tiers, 2) is HOST


def test_a_disk_that_refuses_writes_costs_what_leaves_memory(tmp_path: Path):
    (tmp_path / "file").write_text("in the way")
    tiers = tiers_of(tmp_path / "file", host=1)
    tiers.put(key(step=0), STEPS[0])
    assert found(tiers, 0) is HOST
    tiers.put(key(step=1), STEPS[1])
    assert found(tiers, 0) is None
    assert found(tiers, 1) is HOST
    assert tiers.counters().lost == 1


# Many at once.


def test_callers_share_one_read(tmp_path: Path):
    tiers_of(tmp_path, host=1).put(key(), STEPS[0])
    tiers = tiers_of(tmp_path, host=1)
    disk = disk_of(tiers)
    disk.wait.clear()
    with ThreadPoolExecutor(8) as pool:
        futures = [pool.submit(tiers.get, key()) for _ in range(8)]
        until(lambda: tiers.counters().shared == 7)
        disk.wait.set()
        got = [future.result(10) for future in futures]
    assert all(g is not None and g.tier is DISK for g in got)
    assert len({id(g.cache) for g in got if g is not None}) == 1
    assert tiers.counters().loads == 1
    assert disk.reads == 2  # one header, one payload
    assert tiers.counters().hits == {DISK: 8}
    assert found(tiers, 0) is HOST


def test_a_failing_read_fails_for_all_who_wait_and_for_none_after(tmp_path: Path):
    tiers_of(tmp_path, host=1).put(key(), STEPS[0])
    tiers = tiers_of(tmp_path, host=1)
    disk = disk_of(tiers)

    class Broken(CopyMover):
        def to_host(self, cache: StepCache) -> StepCache:
            raise RuntimeError("out of memory")

    tiers._mover = Broken()
    disk.wait.clear()
    with ThreadPoolExecutor(4) as pool:
        futures = [pool.submit(tiers.get, key()) for _ in range(4)]
        until(lambda: tiers.counters().shared == 3)
        disk.wait.set()
        assert all(isinstance(f.exception(10), RuntimeError) for f in futures)
    assert not any(tiers.counters().nbytes.values())
    tiers._mover = CopyMover()
    assert found(tiers, 0) is DISK


def test_prefetch_reads_while_the_request_waits(tmp_path: Path):
    tiers_of(tmp_path, host=1).put(key(), STEPS[0])
    tiers = tiers_of(tmp_path, host=2, device=1)
    disk = disk_of(tiers)
    disk.wait.clear()
    ahead = tiers.prefetch(key())
    until(lambda: disk.reads == 1)
    assert not ahead.done()
    with ThreadPoolExecutor(1) as pool:
        late = pool.submit(found, tiers, 0)
        until(lambda: tiers.counters().shared == 1)
        disk.wait.set()
        assert late.result(10) is DISK
    assert ahead.result(10) is True
    assert tiers.counters().loads == 1
    assert tiers.prefetch(key(step=5)).result(10) is False
    assert tiers.counters().misses == 0  # no call asked for it yet


def test_prefetched_steps_are_found_in_memory(tmp_path: Path):
    tiers_of(tmp_path, host=1).put(key(), STEPS[0])
    tiers = tiers_of(tmp_path, host=2, device=1)
    assert tiers.prefetch(key()).result(10)
    assert tiers.where(key()) is HOST
    assert tiers.prefetch(key()).result(10)
    assert found(tiers, 0) is HOST
    assert found(tiers, 0) is DEVICE
    assert tiers.counters().loads == 1
    tiers.close()


def test_a_step_dropped_while_it_is_read_does_not_come_back(tmp_path: Path):
    tiers_of(tmp_path, host=1).put(key(), STEPS[0])
    tiers = tiers_of(tmp_path, host=1)
    disk = disk_of(tiers)
    disk.wait.clear()
    tiers.prefetch(key())
    until(lambda: disk.reads == 1)
    tiers.drop(key())  # which needn't wait
    disk.wait.set()
    tiers.close()
    assert tiers.where(key()) is None
    assert found(tiers, 0) is None
    assert not tiers._loading
    assert tiers.counters().nbytes[HOST] == 0


def test_a_step_put_while_the_old_one_is_read_stays(tmp_path: Path):
    tiers_of(tmp_path, host=1).put(key(), STEPS[1])
    tiers = tiers_of(tmp_path, host=2, write_through=False)
    disk = disk_of(tiers)
    disk.wait.clear()
    under_way = tiers.prefetch(key())
    until(lambda: disk.reads == 1)
    tiers.put(key(), STEPS[0])
    disk.wait.set()
    assert under_way.result(10)
    assert found(tiers, 0) is HOST
    assert tiers.counters().nbytes[HOST] == ONE


@pytest.mark.parametrize("how", ["evicted", "flushed"])
def test_a_step_dropped_while_it_is_written_does_not_come_back(tmp_path: Path, how: str):
    tiers = tiers_of(tmp_path, host=1, write_through=False)
    tiers.put(key(), STEPS[0])
    disk = disk_of(tiers)
    disk.wait.clear()
    with ThreadPoolExecutor(2) as pool:
        other = (
            pool.submit(tiers.put, key(step=1), STEPS[1])
            if how == "evicted"
            else pool.submit(tiers.flush)
        )
        until(lambda: disk.writes == 1)
        dropped = pool.submit(tiers.drop, key())
        time.sleep(0.02)
        disk.wait.set()
        dropped.result(10)
        other.result(10)
    assert found(tiers, 0) is None
    assert Store(tmp_path).get(key()) is None


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"host_bytes": -1}, "host_bytes=-1"),
        ({"host_bytes": 1, "disk_bytes": 5}, "give store="),
        ({"host_bytes": 1, "ttl": float("nan")}, "ttl=nan"),
    ],
)
def test_limits_that_mean_nothing_are_refused(given: dict[str, Any], told: str):
    with pytest.raises(InputError, match=re.escape(told)):
        Tiers(**given)


class Strict(CopyMover):
    """Fails if a tier holds more than its budget at any time of a move."""

    tiers: Tiers

    def check(self) -> None:
        held = self.tiers.counters().nbytes
        for tier, budget in self.tiers._budget.items():
            assert 0 <= held[tier] <= budget, (tier, held, budget)

    def to_device(self, cache: StepCache) -> StepCache:
        self.check()
        return super().to_device(cache)

    def to_host(self, cache: StepCache) -> StepCache:
        self.check()
        return super().to_host(cache)


@pytest.mark.parametrize("seconds", [2.0, pytest.param(4.0, marks=pytest.mark.slow)])
@pytest.mark.parametrize("write_through", [True, False])
def test_threads_never_get_a_wrong_step_nor_exceed_a_budget(
    tmp_path: Path, seconds: float, write_through: bool
):
    mover = Strict()
    tiers = tiers_of(tmp_path, host=4, device=2, mover=mover, write_through=write_through)
    mover.tiers = tiers
    end = time.monotonic() + seconds

    def act(seed: int) -> int:
        draw, hits = random.Random(seed), 0
        torch.set_num_threads(1)
        while time.monotonic() < end:
            step = draw.randrange(len(STEPS))
            match draw.randrange(12):
                case 0 | 1:
                    tiers.put(key(step=step), STEPS[step])
                case 2:
                    tiers.prefetch(key(step=step))
                case 3:
                    tiers.pin(key(step=step))
                    found(tiers, step)
                    tiers.unpin(key(step=step))
                case 4 if draw.random() < 0.2:
                    tiers.drop(key(step=step))
                case 5 if draw.random() < 0.1:
                    tiers.flush()
                case _:
                    hits += found(tiers, step) is not None
        return hits

    with ThreadPoolExecutor(4) as pool:
        hits = [future.result() for future in [pool.submit(act, seed) for seed in range(4)]]
    tiers.close()
    assert min(hits) > 0
    counters = tiers.counters()
    assert counters.corrupt == counters.lost == 0
    held = {tier: 0 for tier in (DEVICE, HOST)}
    for i in STEPS:
        at = tiers.where(key(step=i))
        if at is not None:
            held[at] += ONE
    assert held == {tier: counters.nbytes[tier] for tier in held}
    assert not tiers._pins
    assert not tiers._loading


# Against a plain twin: one thread, every sequence.


class Plain:
    """What the tiers should do without a device, as a list in the order of use."""

    def __init__(self, room: int) -> None:
        self.room, self.memory, self.disk, self.pins = room, [], set(), set()  # type: ignore[var-annotated]

    def use(self, step: int) -> None:
        self.memory = [s for s in self.memory if s != step]
        free = [s for s in self.memory if s not in self.pins]
        if len(self.memory) == self.room and not free:
            return
        if len(self.memory) == self.room:
            self.memory.remove(free[0])
        self.memory.append(step)

    def get(self, step: int) -> Tier | None:
        tier = HOST if step in self.memory else DISK if step in self.disk else None
        if tier is not None:
            self.use(step)
        return tier


@pytest.mark.parametrize("seed", range(20))
def test_one_thread_does_what_a_list_would_do(tmp_path: Path, seed: int):
    draw = random.Random(seed)
    room = draw.choice([1, 2, 3, 5])
    tiers, plain = tiers_of(tmp_path, host=room + 0.5), Plain(room)
    for _ in range(150):
        step = draw.randrange(8)
        match draw.randrange(6):
            case 0 | 1:
                tiers.put(key(step=step), STEPS[step])
                plain.use(step)
                plain.disk.add(step)
            case 2 if step not in plain.pins and len(plain.pins) < 2:
                tiers.pin(key(step=step))
                plain.pins.add(step)
            case 3 if plain.pins:
                step = draw.choice(sorted(plain.pins))
                tiers.unpin(key(step=step))
                plain.pins.remove(step)
            case _:
                assert found(tiers, step) is plain.get(step)
        assert {i for i in STEPS if tiers.where(key(step=i))} == set(plain.memory)


def test_a_device_tier_needs_a_mover():
    with pytest.raises(InputError, match=r"give mover=maskfx\.DeviceMover"):
        Tiers(host_bytes=1, device_bytes=1)


@pytest.mark.gpu
@pytest.mark.parametrize("encoding", [Encoding(), Encoding(rows=Format.INT8)])
def test_steps_move_between_a_gpu_pinned_memory_and_disk(tmp_path: Path, encoding: Encoding):
    mover = DeviceMover(torch.device("cuda"))
    tiers = tiers_of(tmp_path, host=1, device=1, mover=mover, encoding=encoding)
    for i in range(3):
        tiers.put(key(step=i), STEPS[i])
    for i in (2, 1, 0):
        got = tiers.get(key(step=i))
        assert got is not None
        assert all(t.is_cuda for rows in got.cache.rows.values() for t in tensors_of(rows))
        back = mover.to_host(got.cache)
        assert all(t.is_pinned() for rows in back.rows.values() for t in tensors_of(rows))
        assert same(back.rows, STEPS[i].packed(encoding).rows)


def disk_of(tiers: Tiers) -> QuickDisk:
    assert isinstance(tiers.store, Store)
    assert isinstance(tiers.store.disk, QuickDisk)
    return tiers.store.disk


def until(true: Callable[[], bool]) -> None:
    """Wait for other threads, ten seconds at most."""
    end = time.monotonic() + 10
    while not true():
        assert time.monotonic() < end, "the other threads never got there"
        time.sleep(0.001)


def test_keys_are_what_tiers_are_asked_by(tmp_path: Path):
    tiers = tiers_of(tmp_path, host=2)
    tiers.put(key(step=1), STEPS[1])
    assert tiers.get(EntryKey("t", "m", "r", "float32", "n", 1, 1)) is not None
    assert tiers.get(key(step=1, branch="uncond")) is None
