"""Entries in an object store: shared, checked, bounded; a store out of order hinders nothing."""

from __future__ import annotations

import logging
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest

from maskfx.cli import cache as cache_commands
from maskfx.cli import main as cli
from maskfx.errors import CacheError, InputError
from maskfx.runtime.cache.serialize import encode
from maskfx.runtime.cache.stores import objects as objects_module
from maskfx.runtime.cache.stores import remote_entries
from maskfx.runtime.cache.stores.objects import Objects, is_url, open_objects
from maskfx.runtime.cache.stores.remote_entries import INDEX, ROWS, USED, folder_of
from maskfx.runtime.cache.stores.remote_store import RemoteStore
from maskfx.runtime.cache.stores.store_entry import HEADER, EntryKey, header_of
from maskfx.runtime.cache.tier_entry import Tier
from maskfx.runtime.cache.tiers import Tiers
from tests.factories.remote import FaultyObjects, remote, run
from tests.factories.s3 import s3
from tests.factories.step_caches import a_step, key, same

PAYLOAD = bytes(range(97)) * 3
SIZE = HEADER.size + len(PAYLOAD)


def local(root: Path) -> Objects:
    return open_objects(root.as_uri())


@pytest.fixture(params=["memory", "file", "http"])
def objects(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Objects]:
    if request.param == "http":
        with s3():
            yield open_objects("s3://bucket/prefix")
    else:
        yield FaultyObjects() if request.param == "memory" else local(tmp_path / "not" / "yet")


def taken(store: RemoteStore, wanted: EntryKey) -> bytes | None:
    got = store.get(wanted)
    return None if got is None else bytes(got)


def written(objects: Objects, *keys: EntryKey) -> RemoteStore:
    """A store with these entries, which are in the objects already."""
    store = remote(objects)
    for one in keys:
        assert store.put(one, PAYLOAD)
    assert store.settle()
    return store


def names(objects: Objects) -> list[str]:
    return sorted(info.name for info in run(objects, lambda: objects.names("")))


def index_of(one: EntryKey) -> str:
    return f"{folder_of(one.digest())}/{INDEX}"


def rows_of(one: EntryKey, payload: bytes = PAYLOAD) -> str:
    hashed = header_of(one.digest(), memoryview(payload))[-16:]
    return f"{folder_of(one.digest())}/{hashed.hex()}{ROWS}"


def until(true, seconds: float = 10.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)


# One entry.


def test_parts_of_an_entry_are_read(objects: Objects) -> None:
    store = written(objects, key())
    parts = store.parts(key())
    assert parts is not None
    assert parts.nbytes == len(PAYLOAD)
    assert bytes(parts.read(3, 200)) == PAYLOAD[3:200]
    assert bytes(parts.read(0, len(PAYLOAD))) == PAYLOAD
    assert store.parts(key(step=1)) is None
    assert store.parts(key(), ttl=1.0) is None, "read whole, which looks for its last use"
    parts.is_damaged()
    assert store.settle()
    assert store.counters.corrupt == 1
    with pytest.raises(CacheError, match="record its template again"):
        parts.read(0, 5)
    assert store.get(key()) is None


@pytest.mark.parametrize("fault", ["is absent", "is damaged", "is short", "has no ranges"])
def test_wrong_answers_over_http_are_refused(fault: str) -> None:
    with s3() as server:
        store = written(open_objects("s3://bucket/prefix"), key())
        parts = store.parts(key())
        assert parts is not None
        assert bytes(parts.read(3, 200)) == PAYLOAD[3:200]
        assert server.ranges
        server.fault, server.suffix = fault, ROWS
        if fault == "has no ranges":
            with pytest.raises(CacheError):
                parts.read(3, 200)
        else:
            with pytest.raises(CacheError) if fault != "is damaged" else nullcontext():
                assert bytes(parts.read(3, 200)) != PAYLOAD[3:200], "its reader has checksums"
        assert store.get(key()) in (None, PAYLOAD)


def test_an_answer_over_http_that_never_comes_is_waited_for_briefly() -> None:
    with s3() as server:
        store = written(open_objects("s3://bucket/prefix"), key())
        parts = store.parts(key())
        assert parts is not None
        server.fault = "hangs"
        slow = remote(open_objects("s3://bucket/prefix"), seconds=0.5)
        began = time.monotonic()
        assert slow.get(key()) is None
        assert time.monotonic() - began < 5


def test_an_entry_that_is_not_written_yet_has_no_parts() -> None:
    objects = FaultyObjects()
    objects.faults.hanging.add("put")
    store = remote(objects, seconds=0.5)
    assert store.put(key(), PAYLOAD)
    assert store.parts(key()) is None
    assert store.get(key()) == PAYLOAD
    assert not store.settle()


def test_parts_of_a_store_that_fails_are_refused() -> None:
    objects = FaultyObjects()
    store = written(objects, key())
    parts = store.parts(key())
    assert parts is not None
    objects.faults.failing.add("*")
    with pytest.raises(CacheError, match="doesn't answer"):
        parts.read(0, 5)
    assert store.parts(key()) is None


def test_what_was_put_is_got_by_another_worker(objects: Objects) -> None:
    store, other = remote(objects), remote(objects)
    assert store.get(key()) is None
    for payload in (PAYLOAD, b"", bytearray(PAYLOAD), memoryview(PAYLOAD * 2)):
        assert store.put(key(), payload)
        assert taken(store, key()) == payload  # at once
        assert store.settle()
        assert taken(store, key()) == taken(other, key()) == payload
        assert other.nbytes(key()) == HEADER.size + len(payload)
    assert other.get(key(step=1)) is None
    assert not other.touch(key(step=1))
    assert other.touch_all([key(), key()])
    assert not other.touch_all([key(), key(step=1)])
    store.drop(key())
    assert store.get(key()) is None
    assert not store.touch(key())
    assert store.settle()
    assert remote(objects).get(key()) is None
    assert not [name for name in names(objects) if name.startswith("entries/")]
    assert store.counters.writes == 4
    assert store.counters.corrupt == other.counters.corrupt == 0


def test_a_payload_is_written_before_its_index_and_removed_after_it() -> None:
    objects = FaultyObjects()
    store = written(objects, key())
    store.drop(key())
    store.settle()
    assert objects.order[:2] == [rows_of(key()), index_of(key())]
    assert objects.order[2:4] == [index_of(key()), rows_of(key())]


def test_large_entries_are_read_in_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (objects_module, remote_entries):
        monkeypatch.setattr(module, "PIECE", 64)
    objects = FaultyObjects()
    for size in (63, 64, 65, 1000):
        payload, before = random.Random(size).randbytes(size), objects.faults.calls["read"]
        store = remote(objects)
        assert store.put(key(), payload)
        assert store.settle()
        assert taken(remote(objects), key()) == payload
        ranges = 0 if size <= 64 else -(-size // 64)
        assert objects.faults.calls["read"] - before == ranges


def test_the_last_of_many_actions_holds(objects: Objects) -> None:
    store = remote(objects)
    for i in range(20):
        store.put(key(), PAYLOAD + bytes([i]))
        if i % 3 == 0:
            store.drop(key())
    assert store.settle()
    assert taken(remote(objects), key()) == PAYLOAD + bytes([19])


# Damage.


def damages(data: bytes) -> list[bytes]:
    flipped = bytearray(data)
    flipped[len(data) // 2] ^= 4
    return [b"", data[:1], data[: len(data) // 2], data[:-1], data + b"\0", bytes(flipped)]


@pytest.mark.parametrize("part", [INDEX, ROWS])
def test_damage_is_found_reported_removed_and_written_again(
    part: str, objects: Objects, caplog: pytest.LogCaptureFixture
) -> None:
    store = written(objects, key(), key("other"))
    name = index_of(key()) if part == INDEX else rows_of(key())
    whole = run(objects, lambda: objects.get(name, 1 << 20))[1]
    for damaged in damages(whole):
        run(objects, lambda data=damaged: objects.put(name, data))  # type: ignore[misc]
        caplog.clear()
        reader = remote(objects)
        assert reader.get(key()) is None
        assert reader.counters.corrupt == 1
        assert "is damaged" in caplog.text
        assert key().digest().hex() in caplog.text
        assert not reader.reads.paused
        assert reader.settle()
        assert not [n for n in names(objects) if key().digest().hex() in n]
        assert taken(reader, key("other")) == PAYLOAD
        assert reader.put(key(), PAYLOAD)
        assert reader.settle()
        assert taken(remote(objects), key()) == PAYLOAD
    assert store.counters.corrupt == 0


def test_an_entry_under_anothers_name_or_with_another_version_is_damage(objects: Objects) -> None:
    written(objects, key(), key("other"))
    found = run(objects, lambda: objects.get(index_of(key("other")), 1 << 20))[1]
    for other in (found, found[:8] + (99).to_bytes(4, "little") + found[12:]):
        run(objects, lambda data=other: objects.put(index_of(key()), data))  # type: ignore[misc]
        reader = remote(objects)
        assert reader.get(key()) is None
        assert reader.counters.corrupt == 1
        reader.settle()


def test_a_claimed_length_takes_no_memory(objects: Objects) -> None:
    written(objects, key())
    found = bytearray(run(objects, lambda: objects.get(index_of(key()), 1 << 20))[1])
    found[44:52] = (1 << 60).to_bytes(8, "little")
    run(objects, lambda: objects.put(index_of(key()), bytes(found)))
    reader = remote(objects)
    assert reader.get(key()) is None
    assert reader.counters.corrupt == 1


def test_a_torn_write_is_no_entry(objects: Objects) -> None:
    """A writer that died between the payload and the index, and one before the payload."""
    run(objects, lambda: objects.put(rows_of(key()), PAYLOAD))
    run(objects, lambda: objects.put(f"{folder_of(key().digest())}/{USED}", b"used"))
    store = remote(objects)
    assert store.get(key()) is None
    assert not store.touch(key())
    assert store.ls() == []
    assert store.counters.corrupt == 0
    assert store.gc().removed == 0  # its writer may be alive
    assert remote(objects, abandoned_after=0.0, clock=lambda: time.time() + 5).gc().freed == len(
        PAYLOAD
    )
    assert names(objects) == []
    written(objects, key())
    run(objects, lambda: objects.remove(rows_of(key())))
    assert store.get(key()) is None
    assert store.counters.corrupt == 1
    assert store.settle()
    assert names(objects) == []


def test_a_replaced_payload_is_removed_later(objects: Objects) -> None:
    store = written(objects, key())
    store.put(key(), PAYLOAD + b"!")
    store.settle()
    assert rows_of(key()) in names(objects)
    assert remote(objects, abandoned_after=0.0, clock=lambda: time.time() + 5).gc().freed == len(
        PAYLOAD
    )
    assert rows_of(key()) not in names(objects)
    assert taken(remote(objects), key()) == PAYLOAD + b"!"


# Limits.


def test_the_least_recently_used_go_beyond_the_limit() -> None:
    objects = FaultyObjects()
    store = remote(objects, noted_after=0.0)
    for i in range(4):
        store.put(key(step=i), PAYLOAD)
        store.settle()
        time.sleep(0.01)
    assert taken(remote(objects, noted_after=0.0), key(step=0)) == PAYLOAD
    until(lambda: any(name.endswith("/used") for name in names(objects)))
    order = [entry.digest for entry in store.ls()]
    assert order == [key(step=i).digest() for i in (1, 2, 3, 0)]
    report = store.gc(budget_bytes=2 * SIZE + 10, keep=[order[0]])
    assert [entry.digest for entry in store.ls()] == [order[0], order[3]]
    assert (report.entries, report.removed, report.freed) == (2, 2, 2 * SIZE)
    assert store.counters.removed == 2
    assert store.get(key(step=2)) is None


def test_the_limit_holds_in_the_background() -> None:
    objects = FaultyObjects()
    store = remote(objects, looked_after=0.0)
    tiers = Tiers(store, host_bytes=0, disk_bytes=3 * len(encode(a_step(0))) + 2000)
    for i in range(8):
        tiers.put(key(step=i), a_step(i))
    assert tiers.flush()
    other = remote(objects)
    until(lambda: len(other.ls()) == 3)
    assert other.total_bytes() >= 0


def test_an_entry_unused_for_its_time_to_live_is_removed(objects: Objects) -> None:
    written(objects, key())
    late = remote(objects, clock=lambda: time.time() + 100)
    assert late.get(key(), ttl=1000) is not None
    assert remote(objects, clock=lambda: time.time() + 100).get(key(), ttl=50) is None
    until(lambda: names(objects) == [])


def test_too_large_a_backlog_is_refused_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    objects = FaultyObjects()
    objects.faults.hanging.add("put")
    store = remote(objects, seconds=0.5, backlog_bytes=len(PAYLOAD) + 1)
    assert store.put(key(), PAYLOAD)
    assert not store.put(key(step=1), PAYLOAD)
    assert "too many wait" in caplog.text
    assert store.counters.failed_writes == 1


# A store that is out of order.


@pytest.mark.parametrize("fault", ["failing", "hanging"])
def test_reads_are_misses_at_once_after_the_first_and_go_on_later(
    fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    objects = FaultyObjects()
    written(objects, key())
    getattr(objects.faults, fault).add("*")
    store = remote(objects, seconds=0.3, pause=0.6)
    began = time.monotonic()
    for _ in range(50):
        assert store.get(key()) is None
        assert store.touch(key()) is False
        assert store.nbytes(key()) == 0
    assert time.monotonic() - began < (2.0 if fault == "hanging" else 1.0)
    assert store.counters.failed_reads >= 100
    assert store.counters.corrupt == 0
    assert [r.levelno for r in caplog.records if "reads from" in r.message] == [logging.WARNING]
    getattr(objects.faults, fault).clear()
    until(lambda: taken(store, key()) == PAYLOAD)
    assert "succeed again" in caplog.text


@pytest.mark.parametrize("fault", ["failing", "hanging"])
def test_writes_never_block_and_entries_stay_in_memory(fault: str) -> None:
    objects = FaultyObjects()
    getattr(objects.faults, fault).add("put")
    tiers = Tiers(remote(objects, seconds=0.2, pause=0.3), host_bytes=1 << 30)
    began = time.monotonic()
    for i in range(10):
        tiers.put(key(step=i), a_step(i))
    assert time.monotonic() - began < 1.0
    for i in range(10):
        found = tiers.get(key(step=i))
        assert found is not None
        assert found.tier is Tier.HOST
    assert not tiers.flush()
    objects.faults.failing.clear()
    objects.faults.hanging.clear()
    store = remote(objects)
    assert store.put(key(step=0), encode(a_step(0)))
    assert store.settle()


def test_a_loop_that_is_held_up_holds_up_no_reader() -> None:
    objects = FaultyObjects()

    async def sleep(name: str) -> None:
        time.sleep(3)  # a call that doesn't give way

    objects.faults.check = sleep  # type: ignore[method-assign]
    store = remote(objects, seconds=0.2)
    began = time.monotonic()
    assert store.get(key()) is None
    assert time.monotonic() - began < 2.5
    time.sleep(3)  # for the tests that follow


# Tiers.


def test_two_workers_share_and_each_fetches_once() -> None:
    objects = FaultyObjects()
    first = Tiers(remote(objects), host_bytes=1 << 30)
    first.put(key(), a_step(3))
    assert first.flush()
    reader = FaultyObjects(objects._store)  # type: ignore[arg-type]
    second = Tiers(remote(reader), host_bytes=1 << 30)
    found = second.get(key())
    assert found is not None
    assert found.tier is Tier.DISK
    assert same(found.cache, a_step(3))
    calls = reader.faults.calls["get"]
    again = second.get(key())
    assert again is not None
    assert again.tier is Tier.HOST
    assert reader.faults.calls["get"] == calls == 2
    assert second.holds([key()])
    assert not second.holds([key(), key(step=1)])
    second.drop(key())
    second.flush()
    assert remote(objects).get(key()) is None


# URLs and the command line.


def test_a_url_is_no_directory() -> None:
    assert is_url("s3://bucket/prefix")
    assert is_url("memory:///")
    assert not is_url("templates")
    assert not is_url("/var/a:b")
    assert not is_url(Path("s3:/bucket"))


@pytest.mark.parametrize("url", ["ftp://host/x", "s3://", "az://container/prefix", "nonsense://"])
def test_a_url_that_cant_be_opened_is_an_error_with_the_kinds(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AZURE_STORAGE_ACCOUNT_NAME", "AZURE_ACCOUNT_NAME"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(InputError, match=r"can't be opened .* give s3://BUCKET/PREFIX, gs://"):
        RemoteStore(url)


def test_without_the_extra_a_url_names_it_and_nothing_imports_it() -> None:
    code = """
import sys
sys.modules["obstore"] = None
import maskfx, maskfx.runtime.cache.tiers, maskfx.serve.launch, maskfx.serve.config
from maskfx.serve.config import ServeSettings
maskfx.Store("x"), maskfx.RemoteStore
try:
    maskfx.RemoteStore("s3://bucket/prefix")
except maskfx.InputError as error:
    print(error)
sys.exit(maskfx.serve.launch.serve(ServeSettings(model="fake", cache_dir="s3://bucket/prefix")))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert "pip install 'maskfx[remote]'" in done.stdout
    assert "cache_dir: s3://bucket/prefix: an object store needs the package" in done.stderr
    assert "pip install 'maskfx[remote]'" in done.stderr
    assert done.returncode == 2


def test_the_commands_take_a_url(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    url = (tmp_path / "store").as_uri()
    store = RemoteStore(url)
    labels = {"template": "cat"}
    for i in range(3):
        store.put(key(step=i), encode(a_step(i), labels=labels))
    assert store.settle()
    assert cli.main(["cache", "ls", url]) == 0
    shown = capsys.readouterr().out
    assert "3 entries" in shown
    assert "template=cat" in shown
    assert cli.main(["cache", "verify", url]) == 0
    name = next((tmp_path / "store").rglob("*" + ROWS))
    name.write_bytes(name.read_bytes()[:-1])
    assert cli.main(["cache", "verify", url]) == 1
    assert "2 entries" in capsys.readouterr().out
    assert cli.main(["cache", "gc", url, "--budget", "0"]) == 0
    assert not list((tmp_path / "store").rglob("*" + ROWS))


def test_a_command_on_a_store_that_fails_ends_with_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    objects = FaultyObjects()
    for failing, status in ((set[str](), 0), ({"*"}, 1)):
        objects.faults.failing = failing
        monkeypatch.setattr(cache_commands, "_store", lambda _: remote(objects))
        for command in ("ls", "verify", "gc"):
            assert cli.main(["cache", command, objects.url]) == status, (command, failing)
            assert ("answers are absent" in capsys.readouterr().err) == bool(status)
