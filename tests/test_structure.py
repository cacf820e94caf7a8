"""The package stays small at the top, each room states what it is for, and the document is true."""

import ast
import re
import runpy
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "scripts" / "structure"
STRUCTURE = runpy.run_path(str(SCRIPT))
ROOMS: list[str] = STRUCTURE["rooms"]()
SOURCES: dict[str, str] = STRUCTURE["read_sources"]()
IMPORTS: list[tuple[str, int, str]] = STRUCTURE["all_imports"](SOURCES)
DOCUMENT = ROOT / "docs" / "structure.md"
DETAILS = sorted((ROOT / "docs" / "explanation").glob("*.md"))
WORDS = 1800  # ten minutes' reading
LINES = 400  # of a file of the package
SHARED_NAMES = 6  # names of classes that two or more files define
FILE = re.compile(r"`((?:\w[\w.-]*/)*\w[\w-]*\.(?:py|js|css|html|json)|(?:\w[\w.-]*/)+)`")


def test_the_top_level_is_small() -> None:
    loose = [path.name for path in (ROOT / "maskfx").glob("*.py")]
    folders = {room.split(".")[1] for room in ROOMS if "." in room}
    assert sorted(loose) == ["__init__.py", "api.py", "config.py", "errors.py"]
    assert len(loose) + len(folders) <= 17  # 14 before export, distributed, scheduling
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


def allowed(line: str) -> set[str] | None:
    """The items of a "May import" line, without its note after a semicolon; None: every room."""
    items = re.split(r",\s", line.partition(";")[0])
    if items == ["nothing of maskfx"]:
        return set()
    return None if items[0].startswith("every ") else set(items)


def covers(item: str, module: str) -> bool:
    """Whether an item is this module, a room that holds it, or `ROOM/*.py` for a room's files."""
    path = module.replace(".", "/")
    if item == "maskfx":  # the public names alone
        return path == "maskfx"
    if item.endswith("/*.py"):
        return path.rpartition("/")[0] == f"maskfx/{item.removesuffix('/*.py')}"
    return path == f"maskfx/{item}" or path.startswith(f"maskfx/{item}/")


def unlisted(room: str, text: str, imports: Iterable[tuple[str, int, str]]) -> list[str]:
    """Imports of a room from outside of it that its docstring doesn't list."""
    line = re.search(r"^May import: (.*?)\.\sBegin\swith", text, re.M | re.S)
    assert line is not None, text
    items = allowed(" ".join(line[1].split()))
    return [
        f"{importer}:{number} imports {target}"
        for importer, number, target in imports
        if f"{importer}.".startswith(f"{room}.")
        and not f"{target}.".startswith(f"{room}.")
        and not (items is None or any(covers(item, target) for item in items))
    ]


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_nothing_that_its_docstring_does_not_list(room: str) -> None:
    text = ast.get_docstring(ast.parse(SOURCES[room])) or ""
    assert unlisted(room, text, IMPORTS) == []
    line = re.search(r"^May import: (.*?)\.\sBegin\swith", text, re.M | re.S)
    assert line is not None
    names = {*SOURCES, *(module.rpartition(".")[0] for module in SOURCES)}
    for item in allowed(" ".join(line[1].split())) or ():
        module = f"maskfx.{item.removesuffix('/*.py').replace('/', '.')}"
        assert item == "maskfx" or module in names, f"{item} doesn't exist"


@pytest.mark.parametrize(
    ("line", "target", "listed"),
    [
        ("ir, errors", "maskfx.ir.geometry.lanes", True),
        ("ir, errors", "maskfx.ops", False),
        ("ir; not ops", "maskfx.ops", False),
        ("ir/geometry/grids", "maskfx.ir.geometry.lanes", False),
        ("runtime/cache", "maskfx.runtime.cache.stores.store", True),
        ("runtime/*.py", "maskfx.runtime.steps", True),
        ("runtime/*.py", "maskfx.runtime.cache.stores.store", False),
        ("maskfx", "maskfx.runtime", False),
        ("maskfx", "maskfx", True),
        ("nothing of maskfx", "maskfx.errors", False),
        ("every other room", "maskfx.ops", True),
        ("ir", "maskfx.engine.ticket", True),  # the room's own
    ],
)
def test_an_import_that_is_not_listed_is_found(line: str, target: str, listed: bool) -> None:
    text = f"A room.\n\nMay import: {line}. Begin\nwith `engine.py`."
    found = unlisted("maskfx.engine", text, [("maskfx.engine.engine", 3, target)])
    assert found == ([] if listed else [f"maskfx.engine.engine:3 imports {target}"])


def test_the_script_prints_every_room_and_finds_nothing_wrong() -> None:
    done = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(f"\n{room.replace('.', '/')}/ " in f"\n{done.stdout}" for room in ROOMS)


def missing(text: str) -> list[str]:
    """Files and folders that a text names and that don't exist."""
    places = (ROOT, ROOT / "maskfx", ROOT / "maskfx" / "runtime", ROOT / "maskfx" / "serve")
    names = FILE.findall(text)
    return [name for name in names if not any((place / name).exists() for place in places)]


@pytest.mark.parametrize("path", [DOCUMENT, *DETAILS], ids=lambda path: path.stem)
def test_the_document_names_what_exists(path: Path) -> None:
    assert missing(path.read_text(encoding="utf-8")) == []


def test_the_document_is_short_and_leads_to_all_details() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    assert len(text.split()) <= WORDS
    assert text.count("\n```\n") == 2  # one figure
    assert {path.name for path in DETAILS} == set(re.findall(r"explanation/([\w-]+\.md)", text))


def test_a_missing_name_is_seen() -> None:
    assert missing("`runtime/steps.py`, `nowhere.py` in `serve/elsewhere/`") == [
        "nowhere.py",
        "serve/elsewhere/",
    ]


def test_files_are_short() -> None:
    long = {name: text.count("\n") for name, text in SOURCES.items() if text.count("\n") > LINES}
    assert long == {}


def test_classes_of_one_name_become_fewer() -> None:
    """A name stands for one thing; lower the number after a rename, never raise it."""
    places: dict[str, list[str]] = {}
    for path in (ROOT / "maskfx").rglob("*.py"):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(str(path.relative_to(ROOT)))
    shared = {name: sorted(files) for name, files in places.items() if len(files) > 1}
    assert len(shared) <= SHARED_NAMES, shared
