"""The store against a model of it, against damage of every kind, and against its own races."""

from __future__ import annotations

import errno
import os
import random
import resource
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import xxhash
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from maskfx.cli import main as cli
from maskfx.errors import InputError
from maskfx.runtime.cache.serialize import encode
from maskfx.runtime.cache.stores import store as store_module
from maskfx.runtime.cache.stores import store_entry as entries_module
from maskfx.runtime.cache.stores.filesystem import Disk
from maskfx.runtime.cache.stores.store import SUFFIX, TEMPORARY, Store
from maskfx.runtime.cache.stores.store_entry import HEADER, EntryKey, payload_prefix
from tests.factories.step_caches import a_step, key

PAYLOAD = bytes(range(97)) * 3


class QuickDisk(Disk):
    """Doesn't wait for the disk: for tests in which no process dies."""

    def sync(self, file: int) -> None:
        pass

    def sync_directory(self, path: Path) -> None:
        pass


def files(root: Path) -> list[str]:
    return sorted(os.listdir(root))


def taken(store: Store, wanted: EntryKey) -> bytes | None:
    """What the store has, as bytes."""
    got = store.get(wanted)
    return None if got is None else bytes(got)


def in_pieces(patch: pytest.MonkeyPatch, nbytes: int) -> None:
    """Write and read files in pieces of `nbytes`."""
    for module in (entries_module, store_module):
        patch.setattr(module, "PIECE", nbytes)


def in_child(act: Callable[[], Any]) -> int:
    """Run in a forked process that leaves at once; its exit status, or minus the signal."""
    pid = os.fork()
    if not pid:
        status = 99
        try:
            act()
            status = 0
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


# Keys.


def test_a_key_has_the_same_digest_everywhere():
    made = EntryKey("köln", "flux", "abc", "bfloat16", "cpu", 1, 27, "uncond")
    assert made.digest().hex() == "845feb46e9e3cb82439bae4ad5ffe53ef8cf8ed2d3257e9d2b51624f768e3f93"


@pytest.mark.parametrize("name", [f.name for f in fields(EntryKey)])
def test_every_field_of_a_key_changes_its_digest(name: str):
    first = key()
    old = getattr(first, name)
    changed: dict[str, Any] = {name: old + 1 if isinstance(old, int) else old + "x"}
    other = replace(first, **changed)
    assert first.digest() != other.digest()


def test_fields_of_a_key_cannot_run_into_each_other():
    digests = {
        key(template=t, model=m).digest() for t, m in [("ab", "c"), ("a", "bc"), ("", "abc")]
    }
    assert len(digests) == 3


@pytest.mark.parametrize(("name", "value"), [("step", "3"), ("model", 3), ("schema", True)])
def test_a_key_refuses_other_types(name: str, value: Any):
    with pytest.raises(InputError, match=f"EntryKey.{name}={value!r} is a {type(value).__name__}"):
        key(**{name: value})


# One entry.


def test_what_was_put_is_got(tmp_path: Path):
    store = Store(tmp_path / "not" / "yet")
    assert store.get(key()) is None
    for payload in (PAYLOAD, b"", bytearray(PAYLOAD), memoryview(PAYLOAD)):
        assert store.put(key(), payload)
        assert taken(store, key()) == payload
    assert store.get(key(step=1)) is None
    assert store.drop(key())
    assert not store.drop(key())
    assert store.get(key()) is None
    assert store.counters.hits == 4
    assert store.counters.misses == 3
    assert store.counters.writes == 4
    assert store.counters.corrupt == 0
    assert files(store.root) == []


def test_large_entries_are_written_and_read_in_pieces(tmp_path: Path, monkeypatch):
    in_pieces(monkeypatch, 64)
    store = Store(tmp_path)
    for size in (63, 64, 65, 1000):
        payload = random.Random(size).randbytes(size)
        assert store.put(key(), payload)
        assert taken(store, key()) == payload


def test_use_decides_the_order(tmp_path: Path):
    now = [1000.0]
    store = Store(tmp_path, clock=lambda: now[0])
    for i in range(4):
        now[0] += 1
        store.put(key(step=i), PAYLOAD)
    now[0] += 1
    store.get(key(step=0))
    now[0] += 1
    assert store.touch(key(step=2))
    assert not store.touch(key(step=9))
    order = [key(step=i).digest() for i in (1, 3, 0, 2)]
    assert [entry.digest for entry in store.ls()] == order
    size = HEADER.size + len(PAYLOAD)
    report = store.gc(budget_bytes=2 * size + 1, keep=[order[0]])
    assert [entry.digest for entry in store.ls()] == [order[0], order[3]]
    assert (report.entries, report.nbytes, report.removed, report.freed) == (
        2,
        2 * size,
        2,
        2 * size,
    )
    now[0] += 50
    store.get(key(step=2))
    assert store.gc(ttl=40).removed == 1
    assert taken(store, key(step=2)) == PAYLOAD
    now[0] += 41
    assert store.get(key(step=2), ttl=40) is None
    assert store.counters.expired == 1
    assert files(tmp_path) == []


# Damage.


def damaged(root: Path, change: Callable[[bytes], bytes]) -> Store:
    """A store of two entries, one of them damaged."""
    store = Store(root, QuickDisk())
    store.put(key(), PAYLOAD)
    store.put(key("other"), PAYLOAD)
    path = store.path(key().digest())
    path.write_bytes(change(path.read_bytes()))
    return store


def assert_damage_is_found(store: Store) -> None:
    before = store.counters.corrupt
    assert store.get(key()) is None
    assert store.counters.corrupt == before + 1
    assert not store.path(key().digest()).exists()
    assert taken(store, key("other")) == PAYLOAD
    assert store.put(key(), PAYLOAD)
    assert taken(store, key()) == PAYLOAD


def test_a_file_cut_anywhere_is_a_miss(tmp_path: Path):
    whole = HEADER.size + len(PAYLOAD)
    for length in range(whole):
        assert_damage_is_found(damaged(tmp_path, lambda data, n=length: data[:n]))  # type: ignore[misc]


def test_a_file_that_grew_is_a_miss(tmp_path: Path):
    assert_damage_is_found(damaged(tmp_path, lambda data: data + b"\0"))


@pytest.mark.parametrize(
    ("name", "begin", "end"),
    [
        ("magic", 0, 8),
        ("version", 8, 12),
        ("digest", 12, 44),
        ("length", 44, 52),
        ("hash", 52, 68),
        ("payload", 68, 68 + len(PAYLOAD)),
    ],
)
def test_any_flipped_bit_is_a_miss(tmp_path: Path, name: str, begin: int, end: int):
    for at in range(begin, end):
        for bit in range(8) if name != "payload" else (at % 8,):

            def flip(data: bytes, at: int = at, bit: int = bit) -> bytes:
                return data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :]

            assert_damage_is_found(damaged(tmp_path, flip))


def test_zeros_where_the_data_never_arrived_are_a_miss(tmp_path: Path):
    whole = HEADER.size + len(PAYLOAD)
    for kept in (0, 8, 44, 68, 100, whole - 1):
        cut = whole - kept
        assert_damage_is_found(damaged(tmp_path, lambda d, k=kept, c=cut: d[:k] + bytes(c)))  # type: ignore[misc]


def test_the_bytes_of_an_entry_are_what_they_were(tmp_path: Path):
    """Fails if the layout changes: raise VERSION then."""
    store = Store(tmp_path, QuickDisk())
    store.put(key(), b"payload")
    data = store.path(key().digest()).read_bytes()
    assert data[:12] == b"maskfx\r\n\x01\0\0\0"
    assert data[12:44] == key().digest()
    assert data[44:52] == (7).to_bytes(8, "little")
    assert data[52:68] == xxhash.xxh3_128(data[:52] + b"payload").digest()
    assert data[68:] == b"payload"


@pytest.mark.parametrize(
    ("begin", "said"), [(0, b"maskfy\r\n"), (8, b"\x02\0\0\0"), (12, b"\0" * 32)]
)
def test_another_magic_version_or_key_is_a_miss_though_its_hash_is_right(
    tmp_path: Path, begin: int, said: bytes
):
    def change(data: bytes) -> bytes:
        head = data[:begin] + said + data[begin + len(said) : 52]
        return head + xxhash.xxh3_128(head + PAYLOAD).digest() + PAYLOAD

    assert_damage_is_found(damaged(tmp_path, change))


def test_an_entry_under_the_name_of_another_is_a_miss(tmp_path: Path):
    store = Store(tmp_path)
    store.put(key("other"), PAYLOAD)
    data = store.path(key("other").digest()).read_bytes()
    store.path(key().digest()).write_bytes(data)
    assert_damage_is_found(store)


def test_foreign_files_stay_unless_they_carry_our_suffix(tmp_path: Path):
    store = Store(tmp_path)
    store.put(key(), PAYLOAD)
    for name in ("README", "notes.txt", "x.maskfx.bak", ".hidden"):
        (tmp_path / name).write_text("not ours")
    ours = ["zz" + SUFFIX, "abcd" + SUFFIX, "ab" * 32 + SUFFIX, ("AB" * 32) + SUFFIX, SUFFIX]
    for name in ours:
        (tmp_path / name).write_text("not ours")
    (tmp_path / ("cd" * 32 + SUFFIX)).symlink_to(tmp_path / "README")
    os.mkfifo(tmp_path / ("ce" * 32 + SUFFIX))
    (tmp_path / ("cf" * 32 + SUFFIX)).mkdir()
    assert len(store.ls()) == 2  # "ab..." has a name like ours
    report = store.verify()
    assert report.entries == 1
    assert report.removed == len(ours) + 2
    assert report.unreadable == 1  # the directory
    left = {"README", "notes.txt", "x.maskfx.bak", ".hidden", "cf" * 32 + SUFFIX}
    assert set(files(tmp_path)) == {*left, store.path(key().digest()).name}
    assert (tmp_path / "README").read_text() == "not ours"
    assert store.verify().removed == 0


def test_a_file_in_place_of_the_directory_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    store = Store(tmp_path / "store")
    store.root.touch()
    assert not store.put(key(), PAYLOAD)
    [told] = [record.message for record in caplog.records]
    assert "Not a directory" in told


def test_damage_is_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    store = damaged(tmp_path, lambda data: data[:-1])
    path = store.path(key("other").digest())
    path.write_bytes(b"")
    assert store.get(key()) is None
    assert store.get(key("other")) is None
    [told] = [record.message for record in caplog.records]
    assert str(tmp_path) in told
    assert store.path(key().digest()).name in told


@pytest.mark.parametrize("kind", ["link", "pipe", "directory"])
def test_what_is_no_file_is_a_miss(tmp_path: Path, kind: str):
    store = Store(tmp_path / "store")
    store.put(key("other"), PAYLOAD)
    path, target = store.path(key().digest()), tmp_path / "target"
    target.write_bytes(store.path(key("other").digest()).read_bytes())
    match kind:
        case "link":
            path.symlink_to(target)
        case "pipe":
            os.mkfifo(path)
        case _:
            path.mkdir()
    assert store.get(key()) is None
    assert store.counters.corrupt == 1
    assert target.exists()
    assert path.exists() == (kind == "directory")
    assert store.put(key(), PAYLOAD) == (kind != "directory")


def test_a_file_replaced_while_it_was_found_damaged_stays(tmp_path: Path):
    class Replacing(Disk):
        """Another process writes the entry anew between reading and removing."""

        def read(self, file: int, into: memoryview) -> int:
            Store(tmp_path).put(key(), PAYLOAD)
            return super().read(file, into)

    store = damaged(tmp_path, lambda data: data[:-1])
    store.disk = Replacing()
    assert store.get(key()) is None
    store.disk = Disk()
    assert taken(store, key()) == PAYLOAD


def test_after_a_restart_every_intact_entry_is_a_hit(tmp_path: Path):
    store = Store(tmp_path, QuickDisk())
    payloads = {i: random.Random(i).randbytes(200 + i) for i in range(500)}
    for i, payload in payloads.items():
        assert store.put(key(step=i), payload)
    bad = set(random.Random(0).sample(sorted(payloads), 25))
    for i in bad:
        path = store.path(key(step=i).digest())
        data = bytearray(path.read_bytes())
        data[i % len(data)] ^= 1
        path.write_bytes(data)
    again = Store(tmp_path)
    got = {i: taken(again, key(step=i)) for i in payloads}
    assert {i for i, payload in got.items() if payload is None} == bad
    assert all(got[i] == payloads[i] for i in payloads if i not in bad)
    assert again.counters.corrupt == len(bad)
    assert len(files(tmp_path)) == len(payloads) - len(bad)


# Dying at every action of a write.


@dataclass
class WatchedDisk(Disk):
    """Calls a hook before and after each action; the hook may fail, or never come back."""

    hook: Callable[[str, str, tuple[Any, ...]], None]


def _watched(name: str) -> Callable[..., Any]:
    plain = getattr(Disk, name)

    def action(self: WatchedDisk, *given: Any) -> Any:
        self.hook("before", name, given)
        result = plain(self, *given)
        self.hook("after", name, given)
        return result

    return action


ACTIONS = [name for name, value in vars(Disk).items() if callable(value) and name[0] != "_"]
for _name in ACTIONS:
    setattr(WatchedDisk, _name, _watched(_name))

DOCUMENT = (
    b'{"__metadata__":{"maskfx":"..."},"0":{"dtype":"F32","shape":[24],"data_offsets":[0,96]}}'
)
STEP = len(DOCUMENT).to_bytes(8, "little") + DOCUMENT + bytes(range(96))
OLD = STEP[::-1]
SMALL = 80  # bytes per write here, so that a payload takes several
# bytes of the file that are there when the process dies inside a write
PARTS = {
    "nothing": 0,
    "the first byte": 1,
    "inside the magic": 5,
    "the magic": 8,
    "inside the version": 10,
    "the version": 12,
    "inside the digest": 30,
    "the digest": 44,
    "inside the length": 47,
    "the length": 52,
    "inside the hash": 60,
    "all but one byte of the header": HEADER.size - 1,
    "the header": HEADER.size,
    "inside the payload's length": HEADER.size + 3,
    "the payload's length": HEADER.size + 8,
    "inside the document": HEADER.size + 30,
    "the first piece": HEADER.size + SMALL,
    "the document": HEADER.size + 8 + len(DOCUMENT),
    "the first byte of a tensor": HEADER.size + 8 + len(DOCUMENT) + 1,
    "inside a tensor": HEADER.size + 8 + len(DOCUMENT) + 40,
    "the second piece": HEADER.size + 2 * SMALL,
    "all but one byte": HEADER.size + len(STEP) - 1,
}


def actions_of_a_write() -> list[str]:
    """Every action of a write, in order: `before rename`, `after rename`, ..."""
    seen: list[str] = []
    with TemporaryDirectory() as root, pytest.MonkeyPatch.context() as patch:
        in_pieces(patch, SMALL)
        disk = WatchedDisk(lambda when, name, _: seen.append(f"{when} {name}"))
        assert Store(Path(root) / "store", disk).put(key(), STEP)
    return seen


TRACE = actions_of_a_write()
FAILPOINTS = [f"{i} {action}" for i, action in enumerate(TRACE)]
FAILPOINTS += [f"inside a write: {part}" for part in PARTS]


def dying_disk(failpoint: str, die: Callable[[], None]) -> Disk:
    """A disk whose process dies at a failpoint."""
    part = PARTS.get(failpoint.removeprefix("inside a write: "))
    passed, written = [0], [0]

    def hook(when: str, name: str, given: tuple[Any, ...]) -> None:
        if part is None and f"{passed[0]} {when} {name}" == failpoint:
            die()
        passed[0] += 1
        if part is not None and (when, name) == ("before", "write_some"):
            file, data = given
            if written[0] + len(data) > part:
                os.write(file, data[: part - written[0]])
                die()
            written[0] += len(data)

    return WatchedDisk(hook)


def test_there_are_enough_failpoints_and_the_order_of_a_write_is_right():
    assert len(FAILPOINTS) >= 40
    assert len(set(FAILPOINTS)) == len(FAILPOINTS)
    places = [TRACE.index(f"after {name}") for name in ("create", "lock", "write", "sync")]
    places += [TRACE.index("before rename"), TRACE.index("after rename")]
    places += [TRACE.index("before sync_directory")]
    assert places == sorted(places)
    last_write = max(i for i, action in enumerate(TRACE) if action == "after write")
    assert last_write < TRACE.index("before sync") < TRACE.index("before rename")


@pytest.mark.parametrize("failpoint", FAILPOINTS)
@pytest.mark.parametrize("end", ["exit", "kill"])
def test_dying_at_any_action_leaves_a_whole_entry_or_none(
    tmp_path: Path, monkeypatch, failpoint: str, end: str
):
    in_pieces(monkeypatch, SMALL)

    def die() -> None:
        if end == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        os._exit(42)

    renamed = TRACE.index("after rename")
    place = int(failpoint.split()[0]) if failpoint[0].isdigit() else 0
    for scene, old in (("fresh", None), ("replacing", OLD)):
        root = tmp_path / scene
        if old is not None:
            Store(root, QuickDisk()).put(key(), old)
            Store(root, QuickDisk()).put(key("other"), PAYLOAD)
        status = in_child(lambda r=root: Store(r, dying_disk(failpoint, die)).put(key(), STEP))  # type: ignore[misc]
        assert status == (-signal.SIGKILL if end == "kill" else 42)
        store = Store(root, QuickDisk(), abandoned_after=0)
        assert taken(store, key()) == (STEP if place >= renamed else old)
        assert store.counters.corrupt == 0
        assert taken(store, key("other")) == (PAYLOAD if old is not None else None)
        assert len(store.ls()) == len(files_with(root, SUFFIX))
        store.gc()
        assert files_with(root, TEMPORARY) == []
        assert store.put(key(), PAYLOAD)
        assert taken(store, key()) == PAYLOAD
        assert store.verify().removed == 0


def files_with(root: Path, suffix: str) -> list[str]:
    return [name for name in files(root) if name.endswith(suffix)] if root.exists() else []


@pytest.mark.parametrize("failpoint", FAILPOINTS)
def test_an_error_at_any_action_harms_nobody(tmp_path: Path, monkeypatch, failpoint: str):
    in_pieces(monkeypatch, SMALL)

    def fail() -> None:
        raise OSError(errno.ENOSPC, "no space left on device")

    renamed = TRACE.index("after rename")
    place = int(failpoint.split()[0]) if failpoint[0].isdigit() else 0
    Store(tmp_path, QuickDisk()).put(key(), OLD)
    store = Store(tmp_path, dying_disk(failpoint, fail))
    store.put(key(), STEP)
    reader = Store(tmp_path)
    assert taken(reader, key()) == (STEP if place >= renamed else OLD)
    assert reader.counters.corrupt == 0
    if place < renamed:
        assert store.counters.failed_writes == 1
        assert store.counters.writes == 0
    # the one file that may stay is gone at the next look
    Store(tmp_path, abandoned_after=0).gc()
    assert len(files(tmp_path)) == 1


def test_a_living_writer_keeps_its_temporary_file(tmp_path: Path):
    cleaned = []

    def hook(when: str, name: str, _: tuple[Any, ...]) -> None:
        if (when, name) == ("before", "rename"):
            cleaned.append(Store(tmp_path, abandoned_after=0).gc().removed)

    assert Store(tmp_path, WatchedDisk(hook)).put(key(), PAYLOAD)
    assert cleaned == [0]
    leftover = tmp_path / f"x{TEMPORARY}"
    leftover.write_bytes(b"left behind")
    assert Store(tmp_path).gc().removed == 0  # too young to judge
    assert Store(tmp_path, abandoned_after=0).gc().removed == 1
    assert not leftover.exists()


def test_an_interrupted_write_cleans_up(tmp_path: Path):
    def interrupt() -> None:
        raise KeyboardInterrupt

    disk = dying_disk("inside a write: the magic", interrupt)
    with pytest.raises(KeyboardInterrupt):
        Store(tmp_path, disk).put(key(), STEP)
    assert files(tmp_path) == []


# Disks that are full, closed or gone.


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of 256 kB."""
    root = tmp_path / "small"
    root.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(root)]
    try:
        mounted = subprocess.run(command, capture_output=True, check=False).returncode == 0
    except OSError:
        mounted = False
    if not mounted:
        pytest.skip("mounting a small tmpfs isn't allowed here; RLIMIT_FSIZE is tested instead")
    yield root
    subprocess.run(["umount", "-l", str(root)], check=True)


def test_a_full_disk_refuses_writes_and_serves_reads(small_disk: Path):
    store = Store(small_disk)
    payload = random.Random(0).randbytes(60_000)
    written = [i for i in range(8) if store.put(key(step=i), payload)]
    assert len(written) == 4
    assert store.counters.failed_writes == 4
    assert len(files(small_disk)) == 4
    assert all(taken(store, key(step=i)) == payload for i in written)
    assert not store.put(key(step=0), payload)  # replacing needs room too
    assert taken(store, key(step=0)) == payload
    store.gc(budget_bytes=130_000)
    assert store.put(key(step=9), payload)
    assert taken(store, key(step=9)) == payload


def test_a_limit_on_file_size_is_a_failed_write(tmp_path: Path):
    def act() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
        store = Store(tmp_path)
        assert not store.put(key(), PAYLOAD)
        assert store.put(key("small"), b"x")
        assert store.counters.failed_writes == 1

    assert in_child(act) == 0
    store = Store(tmp_path)
    assert store.get(key()) is None
    assert taken(store, key("small")) == b"x"
    assert len(files(tmp_path)) == 1


def test_without_permission_reads_go_on_and_nothing_is_harmed(tmp_path: Path):
    root = tmp_path / "store"
    store = Store(root)
    store.put(key(), PAYLOAD)
    store.put(key("secret"), PAYLOAD)
    store.put(key("bad"), PAYLOAD)
    bad = store.path(key("bad").digest())
    bad.write_bytes(bad.read_bytes()[:-1])
    store.path(key("secret").digest()).chmod(0)
    root.chmod(0o555)

    def act() -> None:
        os.chdir(root)  # the folders above it belong to root alone
        if os.geteuid() == 0:  # root may do anything: be another user
            os.setegid(65534)
            os.seteuid(65534)
        closed = Store(Path())
        assert taken(closed, key()) == PAYLOAD
        assert closed.get(key("secret")) is None
        assert closed.counters.failed_reads == 1
        assert closed.get(key("bad")) is None
        assert closed.counters.corrupt == 1
        assert not closed.put(key("new"), PAYLOAD)
        assert closed.counters.failed_writes == 1
        assert not closed.drop(key())
        assert closed.gc(budget_bytes=0).removed == 0
        report = closed.verify()
        assert (report.entries, report.removed, report.unreadable) == (1, 0, 2)

    status = in_child(act)
    root.chmod(0o755)
    assert status == 0
    assert len(files(root)) == 3
    store.path(key("secret").digest()).chmod(stat.S_IRUSR | stat.S_IWUSR)
    assert taken(store, key("secret")) == PAYLOAD


def test_a_directory_that_is_gone_or_a_file_is_a_miss(tmp_path: Path):
    store = Store(tmp_path / "gone")
    assert store.get(key()) is None
    assert store.ls() == []
    assert store.verify().entries == store.gc(0).entries == 0
    assert not store.touch(key())
    assert store.put(key(), PAYLOAD)
    store.path(key().digest()).unlink()
    store.root.rmdir()
    assert store.get(key()) is None
    assert store.put(key(), PAYLOAD)  # made again
    blocked = Store(tmp_path / "file")
    blocked.root.write_text("in the way")
    assert blocked.get(key()) is None
    assert not blocked.put(key(), PAYLOAD)
    assert blocked.ls() == []
    assert blocked.root.read_text() == "in the way"


def test_an_error_while_reading_is_a_miss_and_removes_nothing(tmp_path: Path):
    class Failing(Disk):
        def read(self, file: int, into: memoryview) -> int:
            raise OSError(errno.EIO, "input/output error")

    Store(tmp_path).put(key(), PAYLOAD)
    store = Store(tmp_path, Failing())
    assert store.get(key()) is None
    assert store.counters.failed_reads == 1
    assert store.verify().unreadable == 1
    assert taken(Store(tmp_path), key()) == PAYLOAD


def test_short_reads_and_writes_are_continued(tmp_path: Path):
    class Slow(Disk):
        def write_some(self, file: int, data: memoryview) -> int:
            return super().write_some(file, data[:7])

    assert Store(tmp_path, Slow()).put(key(), PAYLOAD)
    assert taken(Store(tmp_path), key()) == PAYLOAD


# Races.


def payload_of(step: int, version: int) -> bytes:
    return random.Random(step).randbytes(5000 + step) + version.to_bytes(4, "little")


@pytest.mark.parametrize("seconds", [1.5, pytest.param(4.0, marks=pytest.mark.slow)])
def test_two_processes_write_read_and_evict_without_a_wrong_byte(tmp_path: Path, seconds: float):
    end = time.monotonic() + seconds

    def act(seed: int) -> None:
        draw, store = random.Random(seed), Store(tmp_path, QuickDisk())
        hits = 0
        while time.monotonic() < end or hits <= 10 and time.monotonic() < end + 20:
            step = draw.randrange(12)
            match draw.randrange(8):
                case 0 | 1:
                    assert store.put(key(step=step), payload_of(step, draw.randrange(2**32)))
                case 2:
                    store.gc(budget_bytes=draw.randrange(60_000))
                case 3:
                    store.drop(key(step=step))
                case _:
                    got = store.get(key(step=step))
                    if got is not None:
                        hits += 1
                        assert bytes(got[:-4]) == payload_of(step, 0)[:-4]
        assert hits > 10
        assert store.counters.corrupt == 0

    children = []
    for seed in range(3):
        pid = os.fork()
        if not pid:
            status = 1
            try:
                act(seed)
                status = 0
            finally:
                os._exit(status)
        children.append(pid)
    assert [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children] == [0] * 3
    store = Store(tmp_path, abandoned_after=0)
    store.gc()
    assert store.verify().removed == 0
    assert files_with(tmp_path, TEMPORARY) == []


def test_an_entry_evicted_while_it_is_read_is_read_to_its_end(tmp_path: Path):
    class Evicting(Disk):
        def read(self, file: int, into: memoryview) -> int:
            Store(tmp_path).gc(budget_bytes=0)
            return super().read(file, into)

    Store(tmp_path).put(key(), PAYLOAD)
    store = Store(tmp_path, Evicting())
    assert taken(store, key()) == PAYLOAD
    assert store.get(key()) is None
    assert store.counters.corrupt == 0


@pytest.mark.slow
def test_a_process_killed_from_outside_leaves_whole_entries(tmp_path: Path):
    code = (
        "import sys, pathlib; from maskfx.runtime.cache.stores.store import Store\n"
        "from tests.factories.step_caches import key\n"
        "store = Store(pathlib.Path(sys.argv[1])); n = 0\n"
        "print('ready', flush=True)\n"
        "while True: store.put(key(step=n % 20), bytes([n % 256]) * 300_000); n += 1\n"
    )
    for round in range(3):
        child = subprocess.Popen(
            [sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, cwd=Path.cwd()
        )
        assert child.stdout is not None
        assert child.stdout.readline() == b"ready\n"
        time.sleep(0.2 + 0.1 * round)
        child.send_signal(signal.SIGKILL)
        child.wait()
        child.stdout.close()
        store = Store(tmp_path, abandoned_after=0)
        report = store.verify()
        assert report.entries > 0
        assert store.counters.corrupt == 0
        for step in range(20):
            got = store.get(key(step=step))
            assert got is None or (len(got) == 300_000 and len(set(got)) == 1)
        assert files_with(tmp_path, TEMPORARY) == []


# Everything at once, against a model.


@dataclass
class Known:
    payload: bytes
    used: int
    bad: bool = field(default=False)


class Model(RuleBasedStateMachine):
    """Any sequence of actions: the store does what a table would do."""

    steps = st.integers(0, 5)

    def __init__(self) -> None:
        super().__init__()
        self.folder = TemporaryDirectory()
        self.root = Path(self.folder.name)
        self.now = 1_000_000
        self.known: dict[int, Known] = {}
        self.foreign = 0
        self.corrupt = 0
        self.open()

    def teardown(self) -> None:
        self.folder.cleanup()

    @rule()
    def open(self) -> None:
        self.store = Store(self.root, QuickDisk(), clock=lambda: self.now)
        self.corrupt = 0

    @rule(step=steps, payload=st.binary(max_size=40))
    def put(self, step: int, payload: bytes) -> None:
        self.now += 1
        assert self.store.put(key(step=step), payload)
        self.known[step] = Known(payload, self.now)

    @rule(step=steps, failpoint=st.sampled_from(FAILPOINTS[: TRACE.index("after rename")]))
    def fail_to_put(self, step: int, failpoint: str) -> None:
        def fail() -> None:
            raise OSError(errno.ENOSPC, "no space left on device")

        self.store.disk, disk = dying_disk(failpoint, fail), self.store.disk
        # a payload of one piece passes fewer actions; one that gets through is a put
        if self.store.put(key(step=step), STEP):
            self.known[step] = Known(STEP, self.now)
        self.store.disk = disk
        self.store.gc()

    @rule(step=steps, ttl=st.none() | st.integers(0, 20))
    def get(self, step: int, ttl: int | None) -> None:
        self.now += 1
        got, kept = self.store.get(key(step=step), ttl), self.known.get(step)
        if kept is None:
            assert got is None
        elif ttl is not None and self.now - kept.used > ttl:
            assert got is None
            del self.known[step]
        elif kept.bad:
            assert got is None
            self.corrupt += 1
            del self.known[step]
        else:
            assert got is not None
            assert bytes(got) == kept.payload
            kept.used = self.now

    @rule(step=steps)
    def drop(self, step: int) -> None:
        assert self.store.drop(key(step=step)) == (self.known.pop(step, None) is not None)

    @rule(step=steps, place=st.floats(0, 1, exclude_max=True), cut=st.booleans())
    def damage(self, step: int, place: float, cut: bool) -> None:
        kept = self.known.get(step)
        if kept is None or kept.bad:
            return
        path = self.store.path(key(step=step).digest())
        data = bytearray(path.read_bytes())
        at = int(place * len(data))
        data[at] ^= 1
        path.write_bytes(data[:at] if cut else data)
        os.utime(path, (kept.used, kept.used))
        kept.bad = True

    @rule(name=st.sampled_from(["a", "b" * 64, "README"]), ours=st.booleans())
    def drop_a_foreign_file(self, name: str, ours: bool) -> None:
        (self.root / (name + (SUFFIX if ours and name != "README" else ".txt"))).write_text("?")

    @rule(seconds=st.integers(1, 30))
    def wait(self, seconds: int) -> None:
        self.now += seconds

    @rule(budget=st.none() | st.integers(0, 600), ttl=st.none() | st.integers(0, 40))
    def gc(self, budget: int | None, ttl: int | None) -> None:
        self.remove_foreign()
        sizes = {entry.digest: entry.nbytes for entry in self.store.ls()}
        size = {step: sizes[key(step=step).digest()] for step in self.known}
        order = sorted(self.known, key=lambda s: (self.known[s].used, key(step=s).digest().hex()))
        for step in order:
            old = ttl is not None and self.now - self.known[step].used > ttl
            if old or (budget is not None and sum(size[s] for s in self.known) > budget):
                del self.known[step]
        report = self.store.gc(budget, ttl)
        assert report.entries == len(self.known)
        assert report.nbytes == sum(size[s] for s in self.known)

    def remove_foreign(self) -> None:
        for path in self.root.glob("*" + SUFFIX):
            if path.name[0] == "a" and len(path.name) < 20 or path.name.startswith("b" * 64):
                path.unlink()

    @rule()
    def verify(self) -> None:
        self.remove_foreign()
        bad = [step for step, kept in self.known.items() if kept.bad]
        report = self.store.verify()
        assert report.removed == len(bad)
        self.corrupt += len(bad)
        for step in bad:
            del self.known[step]
        assert report.entries == len(self.known)

    @invariant()
    def the_directory_is_the_index(self) -> None:
        self.remove_foreign()
        digests = {entry.digest for entry in self.store.ls()}
        assert digests == {key(step=step).digest() for step in self.known}
        assert self.store.counters.corrupt == self.corrupt


Model.TestCase.settings = settings(
    max_examples=60, stateful_step_count=30, deadline=None, derandomize=True, database=None
)
TestAgainstAModel = Model.TestCase


# The command.


def test_the_command_lists_verifies_and_trims(tmp_path: Path, capsys):
    store = Store(tmp_path)
    for i in range(3):
        made = key("köln", step=i)
        store.put(made, encode(a_step(i), labels=made.labels()))
    assert cli.main(["cache", "ls", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "template=köln model=m revision=r dtype=float32 numerics=n schema=1 step=2" in out
    assert out.splitlines()[-1].startswith("3 entries, ")
    assert cli.main(["cache", "verify", str(tmp_path)]) == 0
    path = store.path(key("köln", step=1).digest())
    path.write_bytes(path.read_bytes()[:-1])
    assert cli.main(["cache", "verify", str(tmp_path)]) == 1
    assert "removed 1" in capsys.readouterr().out
    assert cli.main(["cache", "gc", str(tmp_path), "--budget", str(path_size(store))]) == 0
    assert capsys.readouterr().out.startswith("1 entries, ")
    assert cli.main(["cache", "gc", str(tmp_path), "--ttl", "0"]) == 0
    assert store.ls() == []


def path_size(store: Store) -> int:
    assert all(payload_prefix(entry)[:8] for entry in store.ls())
    return max(entry.nbytes for entry in store.ls())


def test_the_command_says_what_is_wrong(tmp_path: Path, capsys):
    assert cli.main(["cache", "ls", str(tmp_path / "no")]) == 2
    assert "no such directory; give the directory of a Store" in capsys.readouterr().err
    assert cli.main(["cache", "gc", str(tmp_path), "--budget", "-1"]) == 2
    assert "--budget -1: give 0 or more" in capsys.readouterr().err


class Narrow(QuickDisk):
    """A disk with room for small files only."""

    room = 100

    def write(self, file: int, data: memoryview) -> None:
        if len(data) > self.room:
            raise OSError(errno.ENOSPC, "no space left on device")
        super().write(file, data)


def test_a_disk_with_room_for_small_entries_is_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    disk = Narrow()
    store = Store(tmp_path, disk=disk)
    for seed in range(3):
        assert not store.put(key(f"large {seed}"), PAYLOAD)
        assert store.put(key(f"small {seed}"), b"small")
    assert [message.split(": ")[1] for message in caplog.messages] == ["entries can't be written"]
    disk.room = 1 << 20
    assert store.put(key("later"), PAYLOAD)
    assert caplog.messages[1:] == [f"{tmp_path}: entries can be written again"]
