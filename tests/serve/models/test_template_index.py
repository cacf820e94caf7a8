"""Which recordings a client's template stands for, by several workers and after a restart."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from maskfx.runtime.cache.stores.bounded_calls import RemoteAccess
from maskfx.runtime.cache.stores.remote_store import RemoteStore
from maskfx.runtime.cache.stores.store import Store
from maskfx.runtime.cache.stores.store_entry import EntryKey
from maskfx.runtime.cache.tiers import Tiers
from maskfx.serve.models.template_index import FOLDER, Recordings
from tests.factories.remote import FaultyObjects
from tests.factories.step_caches import a_step, key


@pytest.fixture
def tiers(tmp_path: Path) -> Tiers:
    return Tiers(Store(tmp_path), host_bytes=1 << 30)


def stored(tiers: Tiers) -> Store:
    assert isinstance(tiers.store, Store)
    return tiers.store


def recorded(tiers: Tiers, own: str, steps: int = 2) -> list[EntryKey]:
    keys = [key(own, step) for step in range(steps)]
    for one in keys:
        tiers.put(one, a_step(one.step))
    return keys


def test_another_life_knows_them_pins_them_and_removes_them(tiers: Tiers, tmp_path: Path) -> None:
    keys, others = recorded(tiers, "a"), recorded(tiers, "b")
    first = Recordings(tiers, tmp_path)
    first.add("hat", "a", keys, pinned=True)
    first.add("hat", "b", others, pinned=False)
    again = Tiers(Store(tmp_path), host_bytes=1 << 30)
    second = Recordings(again, tmp_path)
    assert second.on_disk() == {"hat": sum(stored(tiers).nbytes(k) for k in [*keys, *others])}
    assert set(again._pins) == set(keys)
    assert sorted(second.forget("hat")) == ["a", "b"]
    assert not again._pins
    assert not stored(again).ls()
    assert "hat" not in second
    assert not Recordings(again, tmp_path).on_disk()


def test_entries_of_other_workers_recordings_are_found(tiers: Tiers, tmp_path: Path) -> None:
    first, second = Recordings(tiers, tmp_path), Recordings(tiers, tmp_path)
    first.add("hat", "a", keys := recorded(tiers, "a"), pinned=False)
    second.add("hat", "b", more := recorded(tiers, "b"), pinned=False)
    assert set(first.entries("hat")) == {*keys, *more}
    assert first.entries("no such") == []


def test_what_is_asked_for_by_itself_is_pinned_until_it_is_forgotten(tiers: Tiers) -> None:
    keys = recorded(tiers, "a")
    recordings = Recordings(tiers, None)
    recordings.add("hat", "a", keys, pinned=False)
    assert not tiers._pins
    recordings.add("hat", "a", keys, pinned=True)
    recordings.add("hat", "a", keys, pinned=True)
    assert tiers._pins == Counter(keys)
    recordings.forget("hat")
    assert not tiers._pins


def test_what_another_name_stands_for_is_kept(tiers: Tiers, tmp_path: Path) -> None:
    keys = recorded(tiers, "a")
    here, beside = Recordings(tiers, tmp_path), Recordings(tiers, tmp_path)
    here.add("one", "a", keys, pinned=True)
    beside.add("two", "a", keys, pinned=True)  # another worker, that this one doesn't know
    assert here.forget("one") == []
    assert len(stored(tiers).ls()) == len(keys)
    assert here.forget("two") == ["a"]
    assert not stored(tiers).ls()


def test_without_a_directory_a_life_knows_its_own(tiers: Tiers) -> None:
    recordings = Recordings(tiers, None)
    recordings.add("hat", "a", recorded(tiers, "a"), pinned=False)
    assert recordings.forget("hat") == ["a"]
    assert not stored(tiers).ls()
    assert recordings.forget("hat") == []


def test_a_damaged_note_is_removed_and_a_full_disk_is_no_failure(
    tiers: Tiers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = recorded(tiers, "a")
    Recordings(tiers, tmp_path).add("hat", "a", keys, pinned=True)
    (note,) = (tmp_path / FOLDER / "hat").iterdir()
    note.write_bytes(note.read_bytes()[:-3])
    assert not Recordings(tiers, tmp_path).on_disk()
    assert not note.exists()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    recordings = Recordings(tiers, tmp_path)
    recordings.add("hat", "a", keys, pinned=True)
    assert recordings.forget("hat") == ["a"]
    assert not list((tmp_path / FOLDER).rglob("*.*"))


def test_an_object_store_has_the_index_too(tmp_path: Path) -> None:
    url = (tmp_path / "store").as_uri()
    tiers = Tiers(RemoteStore(url), host_bytes=1 << 30)
    keys, others = recorded(tiers, "a"), recorded(tiers, "b")
    first = Recordings(tiers, url)
    first.add("hat", "a", keys, pinned=True)
    first.add("coat", "b", others, pinned=False)
    first.close()
    assert tiers.flush()
    again = Tiers(RemoteStore(url), host_bytes=1 << 30)
    second = Recordings(again, url)
    assert set(second.entries("hat")) == set(keys)
    assert second.on_disk().keys() == {"hat", "coat"}
    assert set(again._pins) == set(keys)
    assert second.forget("hat") == ["a"]
    second.close()
    assert again.flush()
    assert not list((tmp_path / "store" / FOLDER).rglob("a*"))
    assert len(RemoteStore(url).ls()) == len(others)
    assert Recordings(again, url).on_disk().keys() == {"coat"}


def test_an_object_store_that_fails_leaves_a_life_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    objects = FaultyObjects()
    access = RemoteAccess.of(objects)
    monkeypatch.setattr("maskfx.runtime.cache.stores.small_files.open_remote", lambda _: access)
    objects.faults.failing.add("*")
    tiers = Tiers(RemoteStore("memory:///x", access=access), host_bytes=1 << 30)
    recordings = Recordings(tiers, "memory:///x")
    recordings.add("hat", "a", keys := recorded(tiers, "a"), pinned=True)
    assert recordings.entries("hat") == keys
    assert recordings.forget("hat") == ["a"]
