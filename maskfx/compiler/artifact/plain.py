"""Python values as JSON and back: numbers, containers, dtypes, and the dataclasses of a program.

No pickle: only the types listed here are written, and nothing else is built from a file.
"""

from __future__ import annotations

import dataclasses
import math
import typing
from collections.abc import Callable
from typing import Any

import torch

from maskfx.compiler.capture.arguments.roles import Argument
from maskfx.errors import CompileError
from maskfx.ir.geometry import cuts, lanes, pyramid
from maskfx.ir.json_values import Json
from maskfx.ir.programs import program, sources


class Unsavable(CompileError):
    """A program holds a value that an artifact can't hold; the message names it."""


CLASSES: dict[str, type] = {
    kind.__name__: kind
    for kind in (
        Argument,
        *(lanes.Batch, lanes.Feature, lanes.Frames, lanes.Y, lanes.X, lanes.Part),
        *(lanes.Tokens, lanes.Lane),
        *(cuts.Cut, cuts.Cuts, pyramid.Window, pyramid.Level, pyramid.Pyramid),
        *typing.get_args(sources.Source),
        *(program.Region, program.Tap, program.Derived, program.Product, program.Interface),
    )
}
# values of PyTorch that are written by their name in the module `torch`
NAMED = (torch.dtype, torch.layout, torch.memory_format)


def encoded(value: object, node: Callable[[object], Json] | None = None) -> Json:
    """Return a value as JSON.

    Args:
        value: what to write.
        node: encodes devices, and values of other types, such as the nodes of a graph.
    """
    match value:
        case None | bool() | int() | str() if type(value) in (type(None), bool, int, str):
            return value
        case float() if type(value) is float:
            return value if math.isfinite(value) else {"float": repr(value)}
        case list():
            return [encoded(item, node) for item in value]
        case tuple():
            return {"tuple": [encoded(item, node) for item in value]}
        case dict():
            return {"dict": [[encoded(k, node), encoded(v, node)] for k, v in value.items()]}
        case slice():
            return {"slice": [encoded(v, node) for v in (value.start, value.stop, value.step)]}
        case torch.device() if node is None:
            return {"device": str(value)}
    if isinstance(value, NAMED):
        return {"torch": str(value).removeprefix("torch.")}
    if dataclasses.is_dataclass(value) and CLASSES.get(type(value).__name__) is type(value):
        own = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
        return {type(value).__name__: {name: encoded(v, node) for name, v in own.items()}}
    if node is not None:
        return node(value)
    raise Unsavable(f"a {type(value).__name__} can't be saved: {value!r:.80}")


def decoded(value: object, node: Callable[[str, Any], object] | None = None) -> Any:
    """Return the value that `encoded` wrote; `node` decodes what its `node` wrote."""
    if isinstance(value, list):
        return [decoded(item, node) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, held),) = value.items()
    match kind:
        case "float":
            return float(held)
        case "tuple":
            return tuple(decoded(item, node) for item in held)
        case "dict":
            return {decoded(k, node): decoded(v, node) for k, v in held}
        case "slice":
            return slice(*(decoded(item, node) for item in held))
        case "device":
            return torch.device(held)
        case "torch":
            found = getattr(torch, held)
            if not isinstance(found, NAMED):
                raise Unsavable(f"torch.{held} is no value of an artifact")
            return found
    if kind in CLASSES:
        return CLASSES[kind](**{name: decoded(item, node) for name, item in held.items()})
    if node is None:
        raise Unsavable(f"an artifact holds a {kind!r}, which this version doesn't know")
    return node(kind, held)
