"""A lock ends with its owner, however that ends."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from maskfx.serve.workers.lock_file import LockFile, orphaned


def test_a_lock_ends_with_its_owner(tmp_path: Path) -> None:
    owned = LockFile(tmp_path / "lock")
    assert not orphaned(tmp_path / "lock")
    assert not orphaned(tmp_path / "missing")
    owned.close()
    assert not (tmp_path / "lock").exists()
    (tmp_path / "lock").touch()
    assert orphaned(tmp_path / "lock")


def test_a_lock_that_isnt_ours_says_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every user may write to /tmp; files of a lock that looks dead are removed."""
    (tmp_path / "lock").touch()
    (tmp_path / "link").symlink_to(tmp_path / "lock")
    assert orphaned(tmp_path / "lock")
    assert not orphaned(tmp_path / "link")
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert not orphaned(tmp_path / "lock")
