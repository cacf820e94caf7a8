"""Checks a JSON document against a JSON Schema; an error names the place in the document.

Knows the keywords that `manifest.schema.json` uses, and refuses a schema with others. Needs the
standard library alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

Schema = Mapping[str, Any]
Errors = Iterator[tuple[str, str]]  # a place, and what is wrong there

TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
}
NOTES = {"$schema", "$id", "$defs", "title", "description"}
KNOWN = {"$ref", "type", "enum", "const", "pattern", "minimum", "minItems", "maxItems", "oneOf"}
KNOWN |= {"items", "required", "properties", "additionalProperties"}


def find_errors(value: object, schema: Schema, place: str, root: Schema | None = None) -> Errors:
    """Yield the places of a document that break a schema, and what is wrong there.

    Args:
        value: the document, or a part of it.
        schema: the schema of this part.
        place: the name of this part in messages.
        root: the whole schema, in which "$ref" is looked up; `schema` by default.
    """
    root = schema if root is None else root
    unknown = schema.keys() - KNOWN - NOTES
    if unknown:
        raise ValueError(f"{place}: a schema with the unknown keywords {sorted(unknown)}")
    if "$ref" in schema:
        yield from find_errors(value, definition(schema, root), place, root)
    if "type" in schema and not is_typed(value, schema["type"]):
        names = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
        yield place, f"expected {' or '.join(names)}, got {value!r:.80}"
        return
    yield from scalar_errors(value, schema, place)
    if isinstance(value, list):
        yield from list_errors(value, schema, place, root)
    elif isinstance(value, dict):
        yield from object_errors(value, schema, place, root)
    if "oneOf" in schema:
        yield from alternative_errors(value, schema["oneOf"], place, root)


def definition(schema: Schema, root: Schema) -> Schema:
    """Return the schema that another refers to: "#/$defs/NAME"."""
    found: Schema = root["$defs"][schema["$ref"].removeprefix("#/$defs/")]
    return found


def is_typed(value: object, names: str | list[str]) -> bool:
    names = [names] if isinstance(names, str) else names
    if isinstance(value, bool):
        return "boolean" in names
    return any(isinstance(value, TYPES[name]) for name in names)


def scalar_errors(value: object, schema: Schema, place: str) -> Errors:
    if "enum" in schema and value not in schema["enum"]:
        yield place, f"expected one of {', '.join(map(repr, schema['enum']))}, got {value!r:.80}"
    if "const" in schema and value != schema["const"]:
        yield place, f"expected {schema['const']!r}, got {value!r:.80}"
    if isinstance(value, str) and not re.search(schema.get("pattern", ""), value):
        yield place, f"expected text that matches {schema['pattern']}, got {value!r:.80}"
    if isinstance(value, int | float) and value < schema.get("minimum", value):
        yield place, f"expected {schema['minimum']} or more, got {value}"


def list_errors(value: list[object], schema: Schema, place: str, root: Schema) -> Errors:
    least, most = schema.get("minItems", 0), schema.get("maxItems", len(value))
    if not least <= len(value) <= most:
        wanted = f"{least} or more" if len(value) < least else f"{most} or fewer"
        yield place, f"expected {wanted} items, got {len(value)}"
    for number, item in enumerate(value):
        yield from find_errors(item, schema.get("items", {}), f"{place}[{number}]", root)


def object_errors(value: dict[str, object], schema: Schema, place: str, root: Schema) -> Errors:
    known, others = schema.get("properties", {}), schema.get("additionalProperties", {})
    for name in schema.get("required", ()):
        if name not in value:
            yield f"{place}.{name}", "is missing"
    for name, member in value.items():
        if name in known:
            yield from find_errors(member, known[name], f"{place}.{name}", root)
        elif others is False:
            yield f"{place}.{name}", f"is no member here; these are: {', '.join(known)}"
        else:
            yield from find_errors(member, others, f"{place}.{name}", root)


def alternative_errors(value: object, options: list[Schema], place: str, root: Schema) -> Errors:
    """Check against alternatives that differ in the constant of a member.

    The errors are those of the alternative with the document's constant.
    """
    tried = []
    for option in options:
        schema = definition(option, root) if "$ref" in option else option
        errors = list(find_errors(value, schema, place, root))
        if not errors:
            return
        tried.append((constants_of(schema), errors))
    members = value if isinstance(value, dict) else {}
    for constants, errors in tried:
        if constants and all(members.get(name) == wanted for name, wanted in constants.items()):
            yield from errors
            return
    wanted = [repr(text) for constants, _ in tried for text in constants.values()]
    yield place, f"fits no alternative ({', '.join(wanted)}): {value!r:.80}"


def constants_of(schema: Schema) -> dict[str, object]:
    """Return the members that an alternative is recognised by."""
    members = schema.get("properties", {})
    return {name: part["const"] for name, part in members.items() if "const" in part}
