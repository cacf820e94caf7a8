"""Imports inside maskfx point one way: each file may import only rooms before its own in a list.

The list is `ORDER` in `scripts/structure`, which also reads the files. An import inside a function
or under TYPE_CHECKING counts too.
"""

import ast
import runpy
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

STRUCTURE = runpy.run_path(str(Path(__file__).resolve().parent.parent / "scripts" / "structure"))
SOURCES: dict[str, str] = STRUCTURE["read_sources"]()
IMPORTS = STRUCTURE["all_imports"](SOURCES)


def test_imports_point_down_the_list() -> None:
    assert STRUCTURE["broken"](IMPORTS) == []


def test_the_parts_of_no_room_form_a_circle() -> None:
    graphs = {room: STRUCTURE["graph_of"](IMPORTS, room) for room in STRUCTURE["rooms"]()}
    assert {r: c for r, graph in graphs.items() if (c := STRUCTURE["circles"](graph))} == {}


def test_only_models_load_torch() -> None:
    """So the front, the codecs and a worker that runs the fake model start in a moment."""
    serving = [module for module in SOURCES if module.startswith("maskfx.serve")]
    heavy = {module for module in serving if "torch" in loaded(module, set())}
    assert "maskfx.serve.models.canvas" in heavy
    assert {module for module in heavy if not module.startswith("maskfx.serve.models.")} == set()


def loaded(module: str, seen: set[str]) -> set[str]:
    """All that an import of a module loads; what functions and type checkers import isn't."""
    seen.add(module)
    for target in imported_at_start(module):
        for count in range(target.count(".") + 1):  # packages first
            part = target.rsplit(".", target.count(".") - count)[0]
            if part not in seen:
                loaded(part, seen)
    return seen


@cache
def imported_at_start(module: str) -> list[str]:
    nodes = at_start(ast.parse(SOURCES.get(module, "")))
    found = (STRUCTURE["find_imports"](ast.unparse(node), SOURCES) for node in nodes)
    return [target for imports in found for _, target in imports]


def at_start(tree: ast.Module) -> Iterator[ast.stmt]:
    return (node for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom)))


@pytest.mark.parametrize(
    ("importer", "source", "seen"),
    [
        ("maskfx.passes.narrow", "import maskfx.runtime.cache", "maskfx.runtime.cache"),
        ("maskfx.passes.narrow", "from maskfx import compile", "maskfx"),
        ("maskfx.runtime.execution.executor", "from maskfx.passes import rows", "maskfx.passes"),
        ("maskfx.serve.launch", "import maskfx.passes.verify", "maskfx.passes.verify"),
        ("maskfx.pipelines", "from maskfx.compiler import a", "maskfx.compiler"),
        ("maskfx.errors", "import maskfx as m", "maskfx"),
        ("maskfx.serve.launch", "from maskfx.cli import main", "maskfx.cli"),
        ("maskfx.engine.engine", "from . import ticket", "."),
        ("maskfx.ir.geometry.lanes", "def late():\n    import maskfx.ops", "maskfx.ops"),
        ("maskfx.ir.geometry.lanes", "if TYPE_CHECKING:\n    import maskfx.serve", "maskfx.serve"),
        ("maskfx.ir.geometry.lanes", "import maskfx.utils", "maskfx.utils"),
    ],
)
def test_reports_a_broken_import(importer: str, source: str, seen: str) -> None:
    line = source.count("\n") + 1
    found = STRUCTURE["broken"](STRUCTURE["all_imports"]({importer: source}))
    assert found == [f"{importer}:{line} imports {seen}"]


def test_reports_a_circle() -> None:
    graph = {"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}
    assert STRUCTURE["circles"](graph) == [["b", "c"]]


RAY = {f"maskfx.serve.workers.ray_{part}" for part in ("actor", "cluster", "executor")}


def test_only_its_executor_imports_ray() -> None:
    """So that the package `ray` is needed with `--executor ray` only."""
    found = {
        module
        for module, source in SOURCES.items()
        for _, target in STRUCTURE["find_imports"](source, SOURCES)
        if target.split(".")[0] == "ray"
    }
    assert found == RAY
    importers = {importer for importer, _, target in IMPORTS if target in RAY}
    assert importers == {"maskfx.serve.launch", *RAY} - {"maskfx.serve.workers.ray_cluster"}
    assert not loaded("maskfx.serve.launch", set()) & {"ray", *RAY}
