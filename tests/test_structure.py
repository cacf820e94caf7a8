"""docs/structure.md names every file of the package, and nothing that isn't there."""

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DOCUMENT = ROOT / "docs" / "structure.md"
ENDINGS = ("py", "js", "css", "html", "svg", "md", "json", "typed", "/")
NAME = re.compile(r"`((?:\w[\w.-]*/)*(?:\w[\w-]*\.\w+)?|Dockerfile)`")
ROW = re.compile(r"\| `([\w./-]+)` \|")

# packages say nothing; a marker for type checkers
SILENT = ("__init__.py", "py.typed")


def named_in(line: str) -> Iterator[tuple[str, list[Path]]]:
    """Each name of a line that is a file's or a folder's, and where it may lie."""
    row = ROW.match(line)
    own = ROOT / (row[1] if row[1].endswith("/") else Path(row[1]).parent) if row else ROOT
    for name in NAME.findall(line):
        if name.endswith(ENDINGS) or name == "Dockerfile":
            yield name, [folder / name for folder in (ROOT, ROOT / "maskfx", own)]


def found(line: str) -> list[Path]:
    places = (
        next((place for place in there if place.exists()), None) for _, there in named_in(line)
    )
    return [place for place in places if place is not None]


def missing(text: str) -> list[str]:
    """Names of files and folders that there are none of."""
    return [
        name
        for line in text.splitlines()
        for name, places in named_in(line)
        if not any(place.exists() for place in places)
    ]


def unnamed(text: str, files: list[Path]) -> list[str]:
    """Files that neither a name nor a folder's row stands for."""
    named = {place for line in text.splitlines() for place in found(line)}
    rows = [match[1] for match in map(ROW.match, text.splitlines()) if match is not None]
    folders = {ROOT / row for row in rows if row.endswith("/")}
    return [
        path.relative_to(ROOT).as_posix()
        for path in files
        if path not in named and path.parent not in folders and path.name not in SILENT
    ]


def files_of(folder: Path) -> list[Path]:
    return [
        path
        for path in sorted(folder.rglob("*"))
        if path.is_file() and "__pycache__" not in path.parts
    ]


def test_every_file_of_the_package_is_named() -> None:
    weights = ROOT / "maskfx" / "shipped"  # a pipeline's folder is laid out as diffusers does it
    files = [path for path in files_of(ROOT / "maskfx") if weights not in path.parent.parents]
    assert unnamed(DOCUMENT.read_text(encoding="utf-8"), files) == []


def test_every_name_exists() -> None:
    assert missing(DOCUMENT.read_text(encoding="utf-8")) == []


def test_a_missing_name_is_seen() -> None:
    text = "| `maskfx/cli/main.py` | with `nowhere.py` |\n1. **Step** (`serve/elsewhere.py`, `cli/main.py`)"
    assert missing(text) == ["nowhere.py", "serve/elsewhere.py"]


def test_an_unnamed_file_is_seen() -> None:
    files = [ROOT / "maskfx" / "cli.py", ROOT / "maskfx" / "serve" / "page" / "page.js"]
    assert unnamed("| `maskfx/errors.py` | what `cli/main.py` tells |", files) == [
        "maskfx/serve/page/page.js"
    ]
    assert unnamed("| `maskfx/serve/page/` | the page |", files) == ["maskfx/cli/main.py"]
