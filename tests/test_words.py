"""The prose rule of CONTRIBUTING.md: what `scripts/words` finds, and that it finds nothing."""

from __future__ import annotations

import importlib.util
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def words() -> ModuleType:
    loader = SourceFileLoader("words", str(ROOT / "scripts" / "words"))
    spec = importlib.util.spec_from_loader("words", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def test_the_checked_files_follow_the_rule(words: ModuleType) -> None:
    files = list(words.checked_files())
    assert len(files) > 1000
    assert {path.suffix for path in files} == {".py", ".md", ""}
    assert [fault for path in files for fault in words.found_in(path)] == []


def test_forbidden_words_are_found_in_prose_only(
    words: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "sample.py"
    path.write_text(
        '"""Nobody reads this."""\n'
        'TEXT = "somebody"  # so many rows\n\n\n'
        "def told() -> None:\n"
        '    """`who` is a name in code."""\n'
    )
    monkeypatch.setattr(words, "ROOT", tmp_path)
    found = list(words.found_in(path))
    assert [fault.split(": write")[0] for fault in found] == [
        "sample.py:1: 'Nobody'",
        "sample.py:2: 'so many'",
    ]


def test_messages_of_errors_and_logs_are_prose(
    words: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "sample"  # a script without an ending
    path.write_text(
        "#!/usr/bin/env python3\n"
        "def refuse(name):\n"
        '    log.warning("nobody reads %s", name)\n'
        '    print("nobody")\n'
        "    other = InputError(\n"
        '        f"{name}: it was told "\n'
        '        "so much; `who`"\n'
        "    )\n"
        '    raise NotLaned(f"the {name} says it")\n'
    )
    monkeypatch.setattr(words, "ROOT", tmp_path)
    found = list(words.found_in(path))
    assert [fault.split(": write")[0] for fault in found] == [
        "sample:3: 'nobody'",
        "sample:6: 'told'",
        "sample:6: 'so much'",
        "sample:9: 'says'",
    ]
