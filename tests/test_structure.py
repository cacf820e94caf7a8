"""The package stays small at the top, each room states what it is for, and the document is true."""

import ast
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "scripts" / "structure"
STRUCTURE = runpy.run_path(str(SCRIPT))
ROOMS: list[str] = STRUCTURE["rooms"]()
DOCUMENT = ROOT / "docs" / "structure.md"
SHARED_NAMES = 6  # names of classes that two or more files define
FILE = re.compile(r"`((?:\w[\w.-]*/)*\w[\w-]*\.(?:py|js|css|html|json)|(?:\w[\w.-]*/)+)`")


def test_the_top_level_is_small() -> None:
    loose = [path.name for path in (ROOT / "maskfx").glob("*.py")]
    folders = {room.split(".")[1] for room in ROOMS if "." in room}
    assert sorted(loose) == ["__init__.py", "api.py", "config.py", "errors.py"]
    assert len(loose) + len(folders) <= 16
    top = STRUCTURE["graph_of"](STRUCTURE["all_imports"](STRUCTURE["read_sources"]()), "maskfx")
    assert len(STRUCTURE["floors"](top, folders)) <= 8


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_says_what_it_does_what_it_may_import_and_where_to_begin(room: str) -> None:
    folder = ROOT / room.replace(".", "/")
    text = ast.get_docstring(ast.parse((folder / "__init__.py").read_text(encoding="utf-8"))) or ""
    assert re.search(r"^\w.*\n\n[\s\S]*^May import: ", text, re.M), text
    begin = re.search(r"Begin\swith\s`([\w./]+)`\.", text)
    assert begin is not None, text
    assert (folder / begin[1]).is_file(), text


def test_the_script_prints_every_room_and_finds_nothing_wrong() -> None:
    done = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(f"\n{room.replace('.', '/')}/ " in f"\n{done.stdout}" for room in ROOMS)


def missing(text: str) -> list[str]:
    """Files and folders that a text names and that don't exist."""
    places = (ROOT, ROOT / "maskfx", ROOT / "maskfx" / "runtime", ROOT / "maskfx" / "serve")
    names = FILE.findall(text)
    return [name for name in names if not any((place / name).exists() for place in places)]


def test_the_document_names_what_exists() -> None:
    assert missing(DOCUMENT.read_text(encoding="utf-8")) == []


def test_a_missing_name_is_seen() -> None:
    assert missing("`runtime/steps.py`, `nowhere.py` in `serve/elsewhere/`") == [
        "nowhere.py",
        "serve/elsewhere/",
    ]


def test_classes_of_one_name_become_fewer() -> None:
    """A name stands for one thing; lower the number after a rename, never raise it."""
    places: dict[str, list[str]] = {}
    for path in (ROOT / "maskfx").rglob("*.py"):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(str(path.relative_to(ROOT)))
    shared = {name: sorted(files) for name, files in places.items() if len(files) > 1}
    assert len(shared) <= SHARED_NAMES, shared
