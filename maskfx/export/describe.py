"""Describes a compiled denoiser as a manifest: arguments, sizes and levels, graphs, cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import version

import torch
from torch import Tensor

from maskfx.compiler.capture.arguments.grid_numbers import axis_of
from maskfx.compiler.capture.arguments.roles import Argument, is_fixed, sizes_of
from maskfx.compiler.capture.captured import Capture
from maskfx.compiler.compile import Compilation
from maskfx.errors import InputError
from maskfx.export.graph_facts import GraphFacts
from maskfx.export.manifest import FORMAT, check
from maskfx.export.value_tables import IN_ROWS, Item, ValueTables, dtype_name
from maskfx.ir.geometry.pyramid import Level
from maskfx.ir.json_values import Json
from maskfx.ir.programs.program import Interface


def describe(
    compilation: Compilation,
    graphs: Mapping[str, GraphFacts],
    denoiser: str,
    weights: str,
    versions: Mapping[str, str] | None = None,
    not_compared: Mapping[str, str] | None = None,
) -> Item:
    """Return the manifest of a compiled denoiser, checked.

    Args:
        compilation: the capture and its program, if there is one.
        graphs: by name ("edit", "record", "dense", "side_request", "side_dense").
        denoiser: the name of the denoiser's class.
        weights: the fingerprint of its weights, which recorded steps carry.
        versions: of the exporter's packages, beside maskfx and torch.
        not_compared: what wasn't compared with the denoiser ("capture", "graphs"), and why.
    """
    capture, program = compilation.capture, compilation.program
    rows = program is not None and any(name in graphs for name in IN_ROWS)
    interface = program.interface if program is not None and rows else Interface(capture.pyramid)
    tables = ValueTables(interface.taps)
    arguments = describe_arguments(capture, tables)
    latent = next((a for a in arguments if a.get("latent")), None)
    if latent is None:
        raise InputError(
            f"export of {denoiser}: no argument is the noisy picture; pass compile(roles=)"
        )
    tables.arguments = [
        tables.number(index, argument["name"]) if argument["kind"] == "number" else dims
        for index, argument in enumerate(arguments)
        for dims in [argument.get("dims", [])]
    ]
    document = {
        "format": FORMAT,
        "denoiser": denoiser,
        "versions": {"maskfx": version("maskfx"), "torch": str(torch.__version__)}
        | dict(versions or {}),
        "not_compared": dict(not_compared or {}),
        "code": "" if program is None else program.code,
        "weights": weights,
        "dtype": latent["dtype"],
        "arguments": arguments,
        "sizes": fixed_sizes(capture),
        "example": sizes_of(capture.leaves, capture.features),
        "levels": [describe_level(level) for level in interface.pyramid.levels],
        "regions": [asdict(region) for region in interface.regions],
        "taps": {name: tables.tap(tap) for name, tap in interface.taps.items()},
        "graphs": {name: tables.graph(name, facts) for name, facts in graphs.items()},
        "segments": tables.segments,
        "windows": tables.windows,
        "dimensions": tables.dimensions,
    }
    tables.names(f"grid{number}" for number in range(len(interface.pyramid.levels)))
    check(document)
    return document


def describe_level(level: Level) -> Item:
    found = asdict(level)
    return {name: list(v) if isinstance(v, tuple) else v for name, v in found.items()}


def describe_arguments(capture: Capture, tables: ValueTables) -> list[Item]:
    """Return the flattened arguments; the noisy picture is the first of rank three or more."""
    values: Sequence[object] = [None] * len(capture.leaves)
    if capture.module is not None:
        nodes = [n for n in capture.module.graph.nodes if n.op == "placeholder"]
        values = [node.meta.get("val") for node in nodes]
    found: list[Item] = []
    for index, (leaf, value) in enumerate(zip(capture.leaves, values, strict=True)):
        if leaf.tensor:
            dims = [
                size if is_fixed(role) and role != "frames" else tables.role(role)
                for role, size in zip(leaf.roles, capture.features[index], strict=False)
            ]
            item = describe_tensor(leaf, value, dims)
            numbers = capture.features[index][len(leaf.roles) :]
            if leaf.sides:
                item["sides"] = [r or n for r, n in zip(leaf.sides, numbers, strict=True)]
            found.append(item)
        elif index in capture.constants:
            constant = plain(capture.constants[index])
            found.append({"kind": "constant", "name": leaf.path, "value": constant})
        else:
            item = {"kind": "number", "name": leaf.path, "value": hint(value)}
            for axis, width in map(axis_of, leaf.roles):
                item |= {"role": axis} if is_size(axis) else {}
                item |= {"pixels": width} if width > 1 else {}
            found.append(item)
    for item in found:
        if item.get("step") and len(item["dims"]) >= 3:
            item["latent"] = True
            break
    return found


def describe_tensor(leaf: Argument, value: object, dims: list[int | str]) -> Item:
    named = "timestep" in leaf.path or leaf.path in ("t", "sigma")
    return {
        "kind": "tensor",
        "name": leaf.path,
        "dtype": dtype_name(value.dtype if isinstance(value, Tensor) else torch.float32),
        "dims": dims,
        "step": leaf.step,
        "latent": False,
        "identifies": leaf.step and named and len(dims) <= 1,
    }


def fixed_sizes(capture: Capture) -> dict[str, int | None]:
    """Return, by role, the only size that the graphs compute, or None for any."""
    shown = ((*leaf.roles, *(axis_of(r)[0] for r in leaf.sides)) for leaf in capture.leaves)
    roles = dict.fromkeys(role for own in shown for role in own if is_size(role))
    fixed = {role: n for role, n in capture.symbols.items() if isinstance(n, int)}
    fixed |= capture.frozen or {}
    if capture.pyramid.frames > 1:
        fixed["frames"] = capture.pyramid.frames
    sizes = {role: fixed.get(role) for role in roles}
    return sizes | {"batch": capture.fixed_batch}


def is_size(role: str) -> bool:
    """Return True for a role that is no scaled one: its size is one of the call's."""
    return role in ("batch", "frames", "y", "x", "tokens") or role.startswith("text:")


def hint(value: object) -> int | float:
    """Return the value at capture of a number that graphs take."""
    found = value.node.hint if isinstance(value, torch.SymInt | torch.SymFloat) else value
    return found if isinstance(found, int | float) else 0


def plain(value: object) -> Json:
    """Return a constant argument as JSON: as it is, or as its text."""
    match value:
        case None | bool() | int() | float() | str():
            return value
        case list() | tuple():
            return [plain(item) for item in value]
        case dict():
            return {str(name): plain(item) for name, item in value.items()}
    return str(value).removeprefix("torch.")
