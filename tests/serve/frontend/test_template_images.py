"""Templates' pictures: kept, found again after a restart, never half."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import msgspec
import numpy as np
import pytest
import xxhash

from maskfx.runtime.cache.stores.bounded_calls import RemoteAccess
from maskfx.runtime.cache.stores.small_files import UNFINISHED
from maskfx.serve.errors import ApiError
from maskfx.serve.frontend.template_images import ENDING, FOLDER, StoredImage, TemplateImages
from tests.factories.remote import FaultyObjects

PICTURE = np.arange(48 * 64 * 3, dtype=np.uint32).astype(np.uint8).reshape(48, 64, 3)


def filled(folder: Path, id: str = "t") -> Path:
    images = TemplateImages(folder)
    images.write(images.keep(id, PICTURE, 5))
    return folder / FOLDER / (id + ENDING)


def test_a_picture_outlives_the_server(tmp_path: Path) -> None:
    filled(tmp_path)
    (leaf,) = TemplateImages(tmp_path)
    assert (leaf.id, leaf.created) == ("t", 5)
    assert np.array_equal(leaf.pixels, PICTURE)


def test_without_a_folder_memory_has_it() -> None:
    images = TemplateImages(None)
    images.write(images.keep("t", PICTURE, 5))
    assert np.array_equal(images.get("t").pixels, PICTURE)
    assert "t" in images


def test_a_forgotten_one_is_gone_from_disk(tmp_path: Path) -> None:
    path = filled(tmp_path)
    images = TemplateImages(tmp_path)
    images.forget("t")
    assert not path.exists()
    for call in (images.get, images.forget):
        with pytest.raises(ApiError) as caught:
            call("t")
        assert caught.value.code == "template_not_found"


@pytest.mark.parametrize(
    "name", ["", ".", "..", "../x", "/etc/passwd", "a/b", "a\0b", "x" * 129, ".hidden", "é", "a\n"]
)
def test_names_that_could_be_paths_are_refused(tmp_path: Path, name: str) -> None:
    images = TemplateImages(tmp_path)
    with pytest.raises(ApiError) as caught:
        images.keep(name, PICTURE, 5)
    assert caught.value.code == "invalid_value"
    assert not list(tmp_path.iterdir())


def test_any_damage_is_a_miss_and_the_file_goes(tmp_path: Path) -> None:
    path = filled(tmp_path)
    whole = path.read_bytes()
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 1
    for damaged in (b"", whole[:1], whole[: len(whole) // 2], whole[:-1], bytes(flipped), b"junk"):
        path.write_bytes(damaged)
        assert not list(TemplateImages(tmp_path))
        assert not path.exists()
    path.with_name("other" + ENDING).write_bytes(whole)  # another's name
    assert not list(TemplateImages(tmp_path))


def test_what_a_crash_left_unfinished_is_collected(tmp_path: Path) -> None:
    path = filled(tmp_path)
    left = path.with_name("t-0011" + UNFINISHED)
    left.write_bytes(b"half")
    assert len(list(TemplateImages(tmp_path))) == 1
    assert not left.exists()


def test_a_folder_that_cant_be_written_leaves_memory(tmp_path: Path) -> None:
    (tmp_path / FOLDER).write_text("in the way")
    images = TemplateImages(tmp_path)
    images.write(images.keep("t", PICTURE, 5))
    assert "t" in images
    assert os.listdir(tmp_path) == [FOLDER]


def test_memory_is_bounded() -> None:
    images = TemplateImages(None, most_bytes=2 * PICTURE.nbytes)
    images.keep("a", PICTURE, 1)
    images.keep("b", PICTURE, 1)
    images.keep("b", PICTURE, 2)  # in its own place
    with pytest.raises(ApiError) as caught:
        images.keep("c", PICTURE, 1)
    assert caught.value.code == "out_of_resources"


def test_what_cant_be_read_hinders_nothing_and_stays(tmp_path: Path) -> None:
    path = filled(tmp_path)
    odd = path.with_name("odd" + ENDING)
    odd.mkdir()
    path.with_name("x" + UNFINISHED).mkdir()
    assert [leaf.id for leaf in TemplateImages(tmp_path)] == ["t"]
    assert odd.exists()


def test_impossible_sizes_are_damage(tmp_path: Path) -> None:
    path = filled(tmp_path)
    kept = StoredImage("t", 5, -1, -1, b"abc", xxhash.xxh3_128_digest(b"abc"))
    path.write_bytes(msgspec.msgpack.encode(kept))
    assert not list(TemplateImages(tmp_path))
    assert not path.exists()


def test_who_is_forgotten_or_replaced_while_it_is_written_isnt_written(tmp_path: Path) -> None:
    images = TemplateImages(tmp_path)
    gone = images.keep("gone", PICTURE, 1)
    images.forget("gone")
    images.write(gone)
    old, new = images.keep("t", PICTURE, 2), images.keep("t", PICTURE, 3)
    images.write(new)
    images.write(old)
    assert os.listdir(tmp_path / FOLDER) == ["t" + ENDING]
    assert [leaf.created for leaf in TemplateImages(tmp_path)] == [3]


# In an object store.


def test_an_object_store_has_it_for_the_next_server(tmp_path: Path) -> None:
    url = (tmp_path / "store").as_uri()
    images = TemplateImages(url)
    images.write(images.keep("t", PICTURE, 5))
    again = TemplateImages(url)
    assert [(leaf.id, leaf.created) for leaf in again] == [("t", 5)]
    assert np.array_equal(again.get("t").pixels, PICTURE)
    (path,) = (tmp_path / "store" / FOLDER).iterdir()
    path.write_bytes(path.read_bytes()[:-1])
    assert not list(TemplateImages(url))  # damaged
    again.write(again.get("t"))
    again.forget("t")
    assert not list(TemplateImages(url))
    assert not path.exists()


def test_an_object_store_that_fails_leaves_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    objects = FaultyObjects()
    access = RemoteAccess.of(objects, pause=0.0)
    monkeypatch.setattr("maskfx.runtime.cache.stores.small_files.open_remote", lambda _: access)
    images = TemplateImages("memory:///x")
    images.write(images.keep("kept", PICTURE, 1))
    objects.faults.failing.add("*")
    images.write(images.keep("t", PICTURE, 1))
    assert "t" in images
    assert not list(TemplateImages("memory:///x"))
    gone: list[str] = []

    async def report() -> None:
        images.report_unknown(["t", "kept", "other"], gone.append)
        await asyncio.gather(*images._looking)

    asyncio.run(report())
    assert gone == []  # it may be there
    objects.faults.failing.clear()
    asyncio.run(report())
    assert gone == ["other"]
