"""The same directory has the same identity, by whatever path and from whatever process."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from maskfx.runtime.cache.stores.bounded_calls import RemoteAccess
from maskfx.serve.workers.directory_id import NAME, directory_id
from tests.factories.remote import FaultyObjects


def test_one_directory_has_one_identity_and_others_have_others(tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "a")
    first = directory_id(tmp_path / "a")
    assert directory_id(tmp_path / "a") == first == directory_id(link)
    assert directory_id(tmp_path / "b") != first
    assert [path.name for path in (tmp_path / "a").iterdir()] == [NAME]


def test_of_many_that_write_it_at_once_one_wins(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        found = set(pool.map(directory_id, [tmp_path] * 64))
    assert len(found) == 1
    assert [path.name for path in tmp_path.iterdir()] == [NAME]


def test_one_that_cant_be_written_is_shared_with_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "link", refuse)
    assert directory_id(tmp_path) != directory_id(tmp_path)
    assert not list(tmp_path.iterdir())


def test_an_object_store_has_one_identity_for_all_its_workers(tmp_path: Path) -> None:
    url = (tmp_path / "store").as_uri()
    first = directory_id(url)
    assert directory_id(url) == first
    assert directory_id(tmp_path / "store") == first  # the same place by its path
    assert directory_id((tmp_path / "other").as_uri()) != first


def test_of_many_that_write_it_at_once_one_wins_in_an_object_store() -> None:
    with ThreadPoolExecutor(8) as pool:
        found = set(pool.map(directory_id, ["memory:///many"] * 64))
    assert len(found) == 1


def test_an_object_store_that_fails_is_shared_with_none(monkeypatch: pytest.MonkeyPatch) -> None:
    objects = FaultyObjects()
    objects.faults.failing.add("*")
    access = RemoteAccess.of(objects)
    monkeypatch.setattr("maskfx.serve.workers.directory_id.open_remote", lambda _: access)
    assert directory_id("memory:///x") != directory_id("memory:///x")
