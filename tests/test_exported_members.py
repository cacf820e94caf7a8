"""The public names of maskfx. A change here changes the interface: say so in CHANGELOG.md."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import maskfx

EXPORTED = [
    "Adapter",
    "AdapterError",
    "Adapters",
    "BatchPolicy",
    "Budget",
    "BudgetError",
    "Busy",
    "CacheError",
    "Cancelled",
    "CaptureError",
    "Closed",
    "CompileError",
    "CompiledDenoiser",
    "DeadlineMissed",
    "DenseStep",
    "DeviceMover",
    "Difference",
    "EditSession",
    "EditStep",
    "Engine",
    "EngineError",
    "HelperProcesses",
    "InputError",
    "Loader",
    "Lora",
    "LowRank",
    "MaskError",
    "MaskfxError",
    "Masks",
    "MissingRequest",
    "NumberError",
    "OwnProcesses",
    "PatchReuse",
    "Quality",
    "Ranks",
    "RecordStep",
    "RemoteStore",
    "ReusePolicy",
    "SignatureError",
    "StepCache",
    "Store",
    "Template",
    "Templates",
    "Tiers",
    "compile",
    "decompile",
    "editing",
    "explain",
    "export",
    "ip_adapters",
    "reference",
    "template",
]


def test_exports_exactly_these_names_in_order():
    assert list(maskfx.__all__) == EXPORTED
    assert sorted(EXPORTED) == EXPORTED


def test_every_exported_name_exists():
    missing = [name for name in EXPORTED if not hasattr(maskfx, name)]
    assert missing == []


def test_the_type_checker_is_told_the_same_homes():
    tree = ast.parse(Path(maskfx.__file__).read_text(encoding="utf-8"))
    told = {
        alias.name: node.module
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("maskfx.")
        for alias in node.names
    }
    # a room that is called is listed as the function that it calls
    rooms = {name: home for name, home in maskfx.HOMES.items() if home == f"maskfx.{name}"}
    assert all(told[name].startswith(f"{home}.") for name, home in rooms.items())
    assert {**told, **rooms} == maskfx.HOMES


@pytest.mark.parametrize(("old", "new"), maskfx.RENAMED.items())
def test_former_names_still_work_and_say_what_to_use(old: str, new: str):
    with pytest.warns(DeprecationWarning, match=f"maskfx.{old} is called maskfx.{new} now"):
        found = getattr(maskfx, old)
    assert found is getattr(maskfx, new)


def test_nothing_heavy_is_imported_before_it_is_used():
    code = """
import sys, maskfx
assert "torch" not in sys.modules
maskfx.compile
assert "torch" in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
