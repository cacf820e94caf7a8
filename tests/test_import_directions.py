"""Imports inside maskfx point one way: serve -> runtime -> ops <- passes.

Reads the files with `ast`, so an import inside a function or under TYPE_CHECKING counts too.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

FOUNDATION = (
    "maskfx.ops",
    "maskfx.ir.lanes",
    "maskfx.ir.pyramid",
    "maskfx.errors",
    "maskfx.config",
)

# importing module or package -> what neither it nor anything inside it may import
FORBIDDEN: dict[str, tuple[str, ...]] = {
    "maskfx": ("maskfx.cli.main",),
    "maskfx.passes": (
        "maskfx.runtime",
        "maskfx.serve",
        "maskfx.pipelines",
        "maskfx.engine",
        "maskfx.runtime.denoiser",
        "maskfx.compiler.compile",
    ),
    "maskfx.runtime": ("maskfx.passes", "maskfx.serve", "maskfx.pipelines", "maskfx.engine"),
    "maskfx.pipelines": ("maskfx.passes", "maskfx.serve", "maskfx.engine"),
    "maskfx.engine": ("maskfx.passes", "maskfx.serve"),
    "maskfx.serve": ("maskfx.passes",),
    **dict.fromkeys(FOUNDATION, ("maskfx.passes", "maskfx.runtime", "maskfx.serve")),
}

# `import maskfx` in one of these would pull in every room at once through maskfx/__init__.py
MUST_NOT_IMPORT_THE_PUBLIC_PACKAGE = ("maskfx.passes", "maskfx.runtime", *FOUNDATION)


def is_inside(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


def module_name(path: Path, root: Path) -> str:
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def read_sources(root: Path) -> dict[str, str]:
    """Module name -> text of every file of root/maskfx."""
    paths = sorted((root / "maskfx").rglob("*.py"))
    return {module_name(path, root): path.read_text(encoding="utf-8") for path in paths}


def find_imports(source: str, modules: set[str]) -> Iterator[tuple[int, str]]:
    """(line, imported module) pairs; a relative import is given as it's written, dots first.

    `from a import b` imports a.b where that is a module, and otherwise a name of a.
    """
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            for alias in node.names:
                member = f"{base}.{alias.name}"
                yield node.lineno, member if member in modules else base


def find_broken_imports(sources: dict[str, str]) -> list[str]:
    # a package may be forbidden before it has a file
    modules = set(sources) | set(FORBIDDEN) | {name for rule in FORBIDDEN.values() for name in rule}
    broken = []
    for importer, source in sources.items():
        forbidden = [
            name for room, names in FORBIDDEN.items() if is_inside(importer, room) for name in names
        ]
        no_root = any(is_inside(importer, room) for room in MUST_NOT_IMPORT_THE_PUBLIC_PACKAGE)
        for line, target in find_imports(source, modules):
            is_broken = (
                target.startswith(".")
                or (no_root and target == "maskfx")
                or any(is_inside(target, name) for name in forbidden)
            )
            if is_broken:
                broken.append(f"{importer}:{line} imports {target}")
    return broken


def test_imports_point_one_way():
    sources = read_sources(ROOT)
    assert "maskfx" in sources, f"no maskfx package found in {ROOT}"
    assert find_broken_imports(sources) == []


@pytest.mark.parametrize(
    ("importer", "source", "seen"),
    [
        (
            "maskfx.passes.narrow",
            "import maskfx.runtime.cache.step_cache",
            "maskfx.runtime.cache.step_cache",
        ),
        ("maskfx.passes.narrow", "from maskfx import compiler", "maskfx.compiler.compile"),
        (
            "maskfx.passes",
            "from maskfx.runtime.denoiser import CompiledDenoiser",
            "maskfx.runtime.denoiser",
        ),
        ("maskfx.passes.narrow", "from maskfx import compile", "maskfx"),
        ("maskfx.runtime.engine", "from maskfx import passes", "maskfx.passes"),
        ("maskfx.runtime.engine", "from maskfx.serve.scheduling import router", "maskfx.serve"),
        ("maskfx.serve.workers.process", "import maskfx.passes.pipeline", "maskfx.passes.pipeline"),
        ("maskfx.ops", "import maskfx.runtime", "maskfx.runtime"),
        ("maskfx.errors", "import maskfx as m", "maskfx"),
        ("maskfx.compiler.compile", "from maskfx.cli.main import main", "maskfx.cli.main"),
        ("maskfx.compiler.compile", "from . import passes", "."),
        ("maskfx.compiler.compile", "from .passes import pipeline", ".passes"),
        ("maskfx.ir.lanes", "def late():\n    import maskfx.passes", "maskfx.passes"),
        ("maskfx.ir.lanes", "if TYPE_CHECKING:\n    import maskfx.serve.http", "maskfx.serve.http"),
    ],
)
def test_reports_a_broken_import(importer: str, source: str, seen: str):
    line = source.count("\n") + 1
    assert find_broken_imports({importer: source}) == [f"{importer}:{line} imports {seen}"]


@pytest.mark.parametrize(
    ("importer", "source"),
    [
        ("maskfx.passes.narrow", "from maskfx import lanes, ops"),
        ("maskfx.passes.pipeline", "from maskfx.passes.narrow import narrow"),
        ("maskfx.runtime.engine", "from maskfx import ops"),
        ("maskfx.serve.workers.process", "from maskfx.runtime.engine import Engine"),
        ("maskfx.compiler.compile", "from maskfx import passes, runtime"),
        ("maskfx.cli.main", "import maskfx"),
        # near misses: names that only begin like a forbidden one
        ("maskfx.passes.narrow", "import maskfx.runtime_facts"),
        ("maskfx.compiler.compile", "import maskfx.client"),
    ],
)
def test_allows(importer: str, source: str):
    known = dict.fromkeys(("maskfx.ir.lanes", "maskfx.ops", "maskfx.passes", "maskfx.runtime"), "")
    assert find_broken_imports({**known, importer: source}) == []
