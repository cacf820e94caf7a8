"""The manifest of an exported denoiser: what each graph reads and returns, as JSON.

A server in any language makes the inputs of the graphs from it: for each input, what it is, what
makes it, its dtype and dimensions; of a recorded step, what is cached; the sites of every level of
the picture. `manifest.schema.json` describes every member. Needs the standard library alone.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from maskfx.errors import InputError
from maskfx.export.json_schema import find_errors
from maskfx.ir.json_values import Document

FORMAT = 1  # raise it with every change of what members mean
NAME = "manifest.json"
SIDES = ("side_request", "side_dense")  # graphs whose outputs other graphs read
SHOWN = 5  # errors in one message


@cache
def schema() -> dict[str, object]:
    """Return the JSON Schema of a manifest."""
    path = Path(__file__).with_name("manifest.schema.json")
    found: dict[str, object] = json.loads(path.read_text(encoding="utf-8"))
    return found


def read_manifest(directory: str | Path) -> Document:
    """Read and check the manifest of an exported denoiser."""
    path = Path(directory) / NAME
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(
            f"{path} can't be read ({error.strerror}); name a directory that maskfx.export wrote"
        ) from error
    except ValueError as error:
        raise InputError(f"{path} is no JSON ({error}); export the denoiser again") from error
    return check(document, str(path))


def check(document: object, where: str = "the manifest") -> Document:
    """Return a manifest; raise an error that names the places where it is none."""
    if isinstance(document, dict) and document.get("format", FORMAT) != FORMAT:
        raise InputError(
            f"{where} has format {document['format']!r}, this maskfx reads {FORMAT}; export the "
            "denoiser again"
        )
    errors = list(find_errors(document, schema(), "manifest"))
    if not errors and isinstance(document, dict):
        errors = list(broken_references(document))
    if not isinstance(document, dict) or errors:
        lines = [f"{place}: {text}" for place, text in errors[:SHOWN]]
        lines += [f"and {len(errors) - SHOWN} more"] if len(errors) > SHOWN else []
        raise InputError(
            f"{where} is no manifest of an export: {'; '.join(lines)}; export the denoiser again"
        )
    return document


def broken_references(document: Document) -> Iterator[tuple[str, str]]:
    """Yield the places that name a part of the manifest that isn't there."""
    levels = len(document["levels"])
    for number, level in enumerate(document["levels"]):
        if level["parent"] is not None and level["parent"] >= number:
            yield f"manifest.levels[{number}].parent", f"level {level['parent']} isn't before it"
    for name, segment in document["segments"].items():
        if segment["kind"] == "grid" and segment["level"] >= levels:
            yield f"manifest.segments.{name}", f"there is no level {segment['level']}"
        if segment["kind"] in ("fill", "each") and segment["of"] not in document["segments"]:
            yield f"manifest.segments.{name}", f"there is no segment {segment['of']}"
    for name, window in document["windows"].items():
        if max(window["source"], window["target"]) >= levels:
            yield f"manifest.windows.{name}", f"there are {levels} levels"
    for name, graph in document["graphs"].items():
        for side in ("inputs", "outputs"):
            seen: set[str] = set()
            for number, value in enumerate(graph[side]):
                place = f"manifest.graphs.{name}.{side}[{number}]"
                yield from broken_value(document, value, place)
                if value["name"] in seen:
                    yield f"{place}.name", f"another of the {side} is called {value['name']!r}"
                seen.add(value["name"])


def broken_value(document: Document, value: Document, place: str) -> Iterator[tuple[str, str]]:
    """Yield what an input or output names that isn't there."""
    for number, dim in enumerate(value["dims"]):
        if isinstance(dim, str) and dim not in document["dimensions"]:
            yield f"{place}.dims[{number}]", f"there is no dimension {dim!r}"
    if value.get("tap") is not None and value["tap"] not in document["taps"]:
        yield f"{place}.tap", f"there is no tap {value['tap']!r}"
    source = value.get("source", {})
    for member, table in (("tap", "taps"), ("window", "windows")):
        if member in source and source[member] not in document[table]:
            yield f"{place}.source.{member}", f"there is no {member} {source[member]!r}"
    for member in ("segments", "before", "after", "queries", "keys"):
        for segment in source.get(member, ()):
            if segment not in document["segments"]:
                yield f"{place}.source.{member}", f"there is no segment {segment!r}"
    if "index" in source and source["index"] >= (count := given_count(document, source)):
        yield f"{place}.source.index", f"is {source['index']}, but there are {count}"


def given_count(document: Document, source: Document) -> int:
    """Return the number of values among which a source selects one by its index."""
    origin = source.get("of", "argument")
    if origin == "argument":
        return len(document["arguments"])
    return len(document["graphs"].get(origin, {"outputs": ()})["outputs"])


def write_manifest(document: Document, directory: str | Path) -> Path:
    """Check a manifest and write it, with its schema beside it."""
    check(document)
    path = Path(directory) / NAME
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    path.with_name("manifest.schema.json").write_text(json.dumps(schema(), indent=1) + "\n")
    return path
