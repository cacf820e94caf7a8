"""The folder of what is kept on this machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from maskfx.ops.cache_folder import kept_folder


@pytest.fixture(autouse=True)
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MASKFX_KERNEL_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)


@pytest.mark.parametrize("name", ["MASKFX_KERNEL_CACHE", "XDG_CACHE_HOME"])
def test_a_named_folder_needs_no_home(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", homeless)
    with pytest.raises(RuntimeError):
        kept_folder()
    monkeypatch.setenv(name, "/kept")
    assert kept_folder() == Path("/kept", *(["maskfx"] if name == "XDG_CACHE_HOME" else []))


@pytest.mark.parametrize("base", ["", "relative/cache"])
def test_a_relative_base_is_ignored(base: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", base)
    assert kept_folder() == Path.home() / ".cache" / "maskfx"
