"""Checks a call's arguments against a manifest: names, types, shapes, and sizes that must agree."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from maskfx.errors import InputError, MissingRequest
from maskfx.export.host.arrays import Array, dtype_of, name_of
from maskfx.ir.geometry.grids import mask_shape
from maskfx.ir.json_values import Document

Sizes = dict[str, int]  # by role
UNNAMED = "return_dict"  # the only constant that doesn't belong to a recording


@dataclass(frozen=True)
class Arguments:
    """The flattened arguments of one call, checked.

    Args:
        values: one for each argument of the manifest; None for constants.
        sizes: the sizes of the call by role.
        step: the arguments that identify the step.
        constants: the arguments that aren't tensors.
    """

    values: list[object]
    sizes: Sizes
    step: dict[str, Array]
    constants: list[object]

    @property
    def mask_shape(self) -> tuple[int, ...]:
        """Return the shape of a mask: (height, width) of the latent, frames first, or (tokens,)."""
        return mask_shape(self.sizes)


def check_arguments(manifest: Document, given: Mapping[str, object]) -> Arguments:
    """Return the arguments of a call in the order of the manifest.

    Args:
        manifest: the manifest.
        given: the arguments by name; nested ones as they are, or by path ("kwargs.name").
    """
    found = dict(flattened(given))
    described = manifest["arguments"]
    known = [argument["name"] for argument in described]
    unknown = sorted(found.keys() - set(known))
    if unknown:
        raise InputError(
            f"arguments {unknown} are none of this denoiser's: {known}; correct their names, or "
            "leave them out"
        )
    missing = [a["name"] for a in described if a["kind"] != "constant" and a["name"] not in found]
    if missing:
        raise MissingRequest(f"arguments {missing} are missing; the denoiser reads {known}")
    batch = batch_of(manifest, found)
    values = [value_of(argument, found, batch) for argument in described]
    sizes = check_shapes(manifest, values)
    pairs = list(zip(described, values, strict=True))
    return Arguments(
        values,
        sizes,
        {a["name"]: value for a, value in pairs if a.get("identifies")},
        [
            a["value"] if a["kind"] == "constant" else value.item()
            for a, value in pairs
            if a["kind"] != "tensor" and a["name"].split(".")[0] != UNNAMED
        ],
    )


def flattened(value: object, path: str = "") -> Iterator[tuple[str, object]]:
    """Yield the leaves of nested arguments with their paths."""
    if isinstance(value, Mapping | list | tuple):
        parts = value.items() if isinstance(value, Mapping) else enumerate(value)
        for name, part in parts:
            yield from flattened(part, f"{path}.{name}" if path else str(name))
    else:
        yield path, value


def batch_of(manifest: Document, found: Mapping[str, Any]) -> int:
    """Return the batch size of the noisy picture."""
    for argument in manifest["arguments"]:
        if argument.get("latent"):
            shape = np.shape(found[argument["name"]])
            for dim, size in zip(argument["dims"], shape, strict=False):
                if role_of(manifest, dim) == "batch":
                    return int(size)
    return 1


def role_of(manifest: Document, dim: int | str) -> str:
    """Return the role of an argument's dimension; "" for a fixed size."""
    return "" if isinstance(dim, int) else str(manifest["dimensions"][dim]["role"])


def value_of(argument: Document, found: Mapping[str, object], batch: int) -> Any:
    """Return an argument as an array of its type, None for a constant.

    One number for a whole batch, such as a timestep, becomes one for each batch element.
    """
    name = argument["name"]
    if argument["kind"] == "constant":
        if name in found and not is_constant(found[name], argument["value"]):
            raise InputError(
                f"{name}: this export computes {argument['value']!r} only, got {found[name]!r:.60};"
                " export the denoiser with this value"
            )
        return None
    if argument["kind"] == "number":
        return np.asarray(found[name])
    value, wanted = found[name], dtype_of(argument["dtype"])
    if isinstance(value, int | float) and not isinstance(value, bool):
        value = np.asarray(value, dtype=wanted)
    if not isinstance(value, np.ndarray):
        raise InputError(
            f"{name}: expected an array, got a {type(value).__name__}; pass a numpy array"
        )
    if value.dtype != wanted:
        raise InputError(
            f"{name}: expected {argument['dtype']}, got {name_of(value.dtype)}; convert it"
        )
    if len(argument["dims"]) == 1 and value.size == 1 and value.ndim <= 1 and argument["step"]:
        value = np.broadcast_to(value.reshape(1), (batch,))
    return value


def is_constant(value: object, wanted: object) -> bool:
    """Return True if the value is the constant, or its text where JSON has no such value."""
    return type(value) is type(wanted) and value == wanted or str(value).endswith(str(wanted))


def check_shapes(manifest: Document, values: list[Any]) -> Sizes:
    """Return the sizes of the arguments by role; raise an error where they disagree."""
    sizes: Sizes = {}
    seen: dict[str, str] = {}
    scaled = []
    given = [
        (argument["name"], *pair)
        for argument, value in zip(manifest["arguments"], values, strict=True)
        for pair in sides_in(argument, value, role_of(manifest, (argument.get("dims") or [0])[0]))
    ]
    for name, wanted, number in given:
        axis, _, width = str(wanted).partition("*")
        if axis in ("frames", "y", "x"):
            sizes.setdefault(axis, number // int(width or 1))
            seen.setdefault(axis, name)
    for argument, value in zip(manifest["arguments"], values, strict=True):
        if argument.get("role"):
            sites = int(value) // argument.get("pixels", 1)
            sizes[argument["role"]], seen[argument["role"]] = sites, argument["name"]
        if argument["kind"] != "tensor":
            continue
        name, dims = argument["name"], argument["dims"]
        if value.ndim != len(dims):
            raise InputError(
                f"{name}: expected {len(dims)} dimensions {dims}, got {value.shape}; reshape it"
            )
        for number, (dim, size) in enumerate(zip(dims, value.shape, strict=True)):
            role = role_of(manifest, dim)
            if not role and size != dim:
                raise InputError(
                    f"{name}: dimension {number} is {size}, expected {dim}; pass an array of this "
                    "size"
                )
            if role and role not in manifest["sizes"]:
                scaled.append((name, number, role, size))
            elif role and sizes.setdefault(role, size) != size:
                raise InputError(
                    f"{name}: its {role} is {size}, but {sizes[role]} in {seen[role]}; pass "
                    "arguments that agree"
                )
            seen.setdefault(role, name)
    sizes.setdefault("batch", 1)
    for name, number, role, size in scaled:
        if size != scaled_size(role, sizes):
            wanted = scaled_size(role, sizes)
            raise InputError(
                f"{name}: dimension {number} ({role}) is {size}, expected {wanted}; pass arguments "
                "that agree"
            )
    for name, wanted, number in given:
        right = wanted if isinstance(wanted, int) else scaled_size(wanted, sizes)
        parts = str(wanted)[:2] in ("y/", "x/") and sizes[str(wanted)[0]] % int(str(wanted)[2:])
        if number != right or parts:
            raise InputError(
                f"{name}: a number in it ({wanted}) is {number}, expected {right} of a picture of "
                f"{sizes}; pass the sides of the picture, or export the denoiser with this number"
            )
    for role, fixed in manifest["sizes"].items():
        if role != "batch" and fixed is not None and sizes.get(role) != fixed:
            raise InputError(
                f"{seen.get(role, role)}: its {role} is {sizes.get(role)}, but this export "
                f"computes {fixed} only; export the denoiser at this size"
            )
    return sizes


def sides_in(argument: Document, value: Any, first: str) -> list[tuple[int | str, int]]:
    """Return the numbers in an argument that are sides, each with what the manifest states.

    Args:
        argument: the argument's description.
        value: its value.
        first: the role of its first dimension; if it is the batch, all samples have equal numbers.
    """
    wanted = argument.get("sides")
    if not wanted:
        return []
    each = value[:1] if first == "batch" else value
    if each.size != len(wanted):
        raise InputError(
            f"{argument['name']}: expected {len(wanted)} numbers, got {each.size}; pass {wanted}"
        )
    if (value != each).any():
        raise InputError(
            f"{argument['name']}: samples have different numbers; pass them in separate calls"
        )
    return list(zip(wanted, map(int, each.flat), strict=True))


def number_at(source: Document, value: Any) -> int:
    """Return a side of the picture that a graph reads from an argument."""
    return int(value.reshape(-1)[source["place"]]) // int(source["width"])


def scaled_size(role: str, sizes: Mapping[str, int]) -> int:
    """Return a size of the call, or of a dimension whose role is another's at some scale."""
    if role in sizes:
        return sizes[role]
    if role.startswith("tokens/"):
        return sizes.get("frames", 1) * sizes["y"] * sizes["x"] // int(role[7:])
    if role == "batch*frames":  # an entry for each frame of each request
        return sizes["batch"] * sizes["frames"]
    axis, sign, scale = role[0], role[1], int(role[2:])
    return -(-sizes[axis] // scale) if sign == "/" else sizes[axis] * scale
