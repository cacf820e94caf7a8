"""docs/how-to/rules.md: `explain` prints its listing; with its rules the module runs on rows."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "how-to" / "rules.md").read_text(encoding="utf-8")
MODULE, RULE, EDIT = re.findall(r"^```python\n(.*?)^```", PAGE, re.M | re.S)
[LISTING] = re.findall(r"^```text\n(.*?)^```", PAGE, re.M | re.S)
# the file that the text before a listing names last, and the listing
DIFFS = [
    (re.findall(r"`(maskfx/[\w/]+\.py)`", PAGE[: found.start()])[-1], found[1])
    for found in re.finditer(r"^```diff\n(.*?)^```", PAGE, re.M | re.S)
]
RULE_FILE = re.findall(r"`(maskfx/[\w/]+\.py)`", PAGE[: PAGE.index(RULE)])[-1]


def printed(code: str, folder: Path) -> str:
    """Run code in a process that imports the package from a folder; return what it prints."""
    path = folder / "page.py"
    path.write_text(code, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, str(path)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def changed(text: str, diff: str) -> str:
    """Return the text with the lines that a diff adds, at the only place of its other lines."""
    lines = diff.splitlines()
    before = "".join(f"{line[1:]}\n" for line in lines if not line.startswith("+"))
    after = "".join(f"{line[1:]}\n" for line in lines if not line.startswith("-"))
    assert text.count(before) == 1, f"{text.count(before)} places for\n{diff}"
    return text.replace(before, after)


def test_explain_prints_the_listing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    module = ModuleType("page")  # capture looks for the module of a class
    monkeypatch.setitem(sys.modules, "page", module)
    exec(compile(MODULE, "page", "exec"), vars(module))
    assert LISTING in capsys.readouterr().out


@pytest.mark.slow
def test_with_the_rules_of_the_page_nothing_runs_in_full(tmp_path: Path) -> None:
    skipped = shutil.ignore_patterns("__pycache__", "*.safetensors")
    shutil.copytree(ROOT / "maskfx", tmp_path / "maskfx", ignore=skipped)
    assert len(DIFFS) == 2
    for name, diff in DIFFS:
        path = tmp_path / name
        path.write_text(changed(path.read_text(encoding="utf-8"), diff), encoding="utf-8")
    path = tmp_path / RULE_FILE
    path.write_text(f"{path.read_text(encoding='utf-8')}\n\n{RULE}", encoding="utf-8")
    text = printed(MODULE + EDIT, tmp_path)
    assert "Nothing runs in full in every step." in text
    assert "Runs in full" not in text


def test_a_diff_that_is_applied_already_is_refused() -> None:
    with pytest.raises(AssertionError, match="0 places"):
        changed("a\nb\nc\n", " a\n+b\n c\n")
