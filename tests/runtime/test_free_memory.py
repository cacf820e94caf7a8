"""Free memory: of the machine and of a control group."""

from __future__ import annotations

from pathlib import Path

import pytest

from maskfx.runtime.hardware import devices
from maskfx.runtime.hardware.devices import CPU, free_memory


def group(folder: Path, limit: str) -> Path:
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text("3000\n")
    (folder / "memory.stat").write_text("anon 2000\ninactive_file 1000\n")
    return folder


@pytest.mark.parametrize(
    ("limit", "free"), [("10000", 8000.0), ("2500", 500.0), ("max", 4096.0 * 1024)]
)
def test_a_group_limits_the_machines_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str, free: float
) -> None:
    table = tmp_path / "meminfo"
    table.write_text("MemTotal: 9999 kB\nMemAvailable: 4096 kB\n")
    monkeypatch.setattr(devices, "MEMORY", table)
    monkeypatch.setattr(devices, "GROUP", group(tmp_path, limit))
    assert free_memory(CPU) == free


def test_without_a_group_the_machine_decides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "GROUP", tmp_path)
    assert 0 < free_memory(CPU) < float("inf")
