"""Sides of the picture in tensors (`tensor_sides.py`) are the picture's own sizes in an export.

Of a picture on a grid the export has symbolic sizes, which Python gets where it reads the tensor.
Packed tokens show none. There the export takes the sides as integers in place of the tensor, and
the graph is then changed to read them from the tensor.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx
from torch.fx.graph import _PyTreeCodeGen
from torch.types import IntLikeType
from torch.utils import _pytree as pytree

from maskfx.compiler.capture.arguments.grid_numbers import axis_of, side_of
from maskfx.compiler.capture.arguments.roles import Argument, numbers_of, role_size
from maskfx.compiler.capture.tracing.known_numbers import KnownNumbers, Numbers
from maskfx.ops.number_at import number_at

Flat = tuple[list[Argument], list[Any], pytree.TreeSpec]  # arguments, values and their structure
AXES = ("y", "x")
SIDES = ("frames", *AXES)


def opened_argument(leaves: Sequence[Argument]) -> int | None:
    """Return the number of the tensor that alone shows the sides of a picture, or None."""
    shown = {role.partition("*")[0] for leaf in leaves for role in leaf.roles}
    for number, leaf in enumerate(leaves):
        sides = {axis_of(role)[0] for role in leaf.sides}
        if not leaf.held and shown.isdisjoint(AXES) and sides.issuperset(AXES):
            return number
    return None


def sides_of(leaf: Argument, value: Tensor) -> dict[str, tuple[int, int, int]]:
    """Return the sides of a picture in a tensor: place, number in sites, and width of a site."""
    found: dict[str, tuple[int, int, int]] = {}
    for place, (role, number) in enumerate(zip(leaf.sides, value.flatten().tolist(), strict=False)):
        axis, width = axis_of(role)
        if axis in SIDES:
            found.setdefault(axis, (place, side_of(role, number)[1], width))
    return found


def opened(leaves: Sequence[Argument], values: Sequence[Any], spec: pytree.TreeSpec) -> Flat:
    """Return the arguments with a picture's sides, in sites, in place of the tensor with them."""
    number = opened_argument(leaves)
    if number is None:
        return list(leaves), list(values), spec
    leaf, sides = leaves[number], sides_of(leaves[number], values[number])
    inside = [replace(leaf, tensor=False, roles=(axis,), sides=()) for axis in sides]
    counts = [count for _, count, _ in sides.values()]
    own: list[Any] = [*values[:number], counts, *values[number + 1 :]]
    found, structure = pytree.tree_flatten(pytree.tree_unflatten(own, spec))
    return [*leaves[:number], *inside, *leaves[number + 1 :]], found, structure


@contextlib.contextmanager
def known_sides(
    module: torch.nn.Module,
    leaves: Sequence[Argument],
    values: Sequence[Any],
    spec: pytree.TreeSpec,
    known: KnownNumbers,
) -> Iterator[None]:
    """Let Python read the picture's symbolic sizes from tensors with its sides, in an export.

    Args:
        module: the module.
        leaves, values, spec: its arguments before they were opened.
        known: the numbers that Python reads in place of those in tensors.
    """
    read = [i for i, leaf in enumerate(leaves) if leaf.sides and not leaf.held]
    if not read:
        yield
        return
    number = opened_argument(leaves)
    inside = opened(leaves, values, spec)[0]
    flat = {i: numbers_of(leaves[i], values[i]) for i in read}

    def given(
        _: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        found = pytree.tree_leaves(dict(kwargs))
        if len(found) != len(inside):
            return None
        sizes = shown_sizes(inside, found)
        if number is not None:
            found[number : number + 1 + len(inside) - len(leaves)] = [None]
        for i in read:
            numbers = numbers_at(leaves[i], flat[i], values[i].shape, sizes)
            if i == number:
                found[i] = filled(leaves[i], values[i], numbers, sizes)
            known.know(found[i], numbers)
        return args, pytree.tree_unflatten(found, spec)

    hook = module.register_forward_pre_hook(given, with_kwargs=True)
    try:
        yield
    finally:
        hook.remove()


def shown_sizes(leaves: Sequence[Argument], values: Sequence[Any]) -> dict[str, Any]:
    """Return the sizes that arguments show under export, by role."""
    sizes: dict[str, Any] = {}
    for leaf, value in zip(leaves, values, strict=True):
        shape: Sequence[IntLikeType] = value.shape if leaf.tensor else (value,)
        for role, size in zip(leaf.roles, shape, strict=leaf.tensor):
            sizes.setdefault(role, size)
    return sizes


def numbers_at(
    leaf: Argument, numbers: Sequence[int], shape: Sequence[int], sizes: Mapping[str, Any]
) -> Numbers:
    """Return the numbers in a tensor as an array, those with a role as sizes of the picture.

    Args:
        leaf: the argument.
        numbers: those of one sample in the call.
        shape: the shape of the tensor.
        sizes: the sizes of the picture.
    """
    each = (1, *shape[1:]) if leaf.roles[0] == "batch" else shape
    found = np.empty(len(numbers), dtype=object)
    found[:] = [
        symbolic_side(role, sizes) if role and role != "frames" else number
        for role, number in zip(leaf.sides, numbers, strict=True)
    ]
    return np.broadcast_to(found.reshape(each), shape)


def symbolic_side(role: str, sizes: Mapping[str, Any]) -> Any:
    """Return the size that a number of this role is."""
    if role.startswith("tokens/"):
        return sizes.get("frames", 1) * sizes["y"] * sizes["x"] // int(role[7:])
    if role[:2] in ("y/", "x/"):
        return sizes[role[0]] // int(role[2:])
    return role_size(role, sizes)


def with_numbers(leaf: Argument, value: Tensor, sizes: Mapping[str, int]) -> Tensor:
    """Return a tensor whose numbers are the sides of a picture of other sizes."""
    numbers = numbers_at(leaf, numbers_of(leaf, value), value.shape, sizes)
    found = torch.tensor(numbers.tolist(), dtype=value.dtype, device=value.device)
    return found.reshape(value.shape)


def filled(leaf: Argument, value: Tensor, numbers: Numbers, sizes: Mapping[str, Any]) -> Tensor:
    """Return a tensor of these numbers, like one of the call."""
    each = numbers[:1] if leaf.roles[0] == "batch" else numbers
    kind, device = value.dtype, value.device
    flat = each.flatten().tolist()
    parts = [torch.scalar_tensor(n, dtype=kind, device=device) for n in flat]
    found = torch.stack(parts).reshape(each.shape)
    rows = sizes["batch"] if leaf.roles[0] == "batch" else value.shape[0]
    return found.expand(rows, *value.shape[1:])


def close(
    module: fx.GraphModule,
    leaves: Sequence[Argument],
    values: Sequence[Any],
    spec: pytree.TreeSpec,
) -> None:
    """Let a graph over opened arguments read the sides from the tensor, and take them in pixels.

    Args:
        module: the graph.
        leaves, values, spec: the arguments before they were opened.
    """
    take_pixels(module.graph, opened(leaves, values, spec)[0])
    number = opened_argument(leaves)
    if number is None:
        return
    graph, leaf, value = module.graph, leaves[number], values[number]
    places = list(graph.find_nodes(op="placeholder"))
    found = sides_of(leaf, value).values()
    sides = places[number : number + len(found)]
    with graph.inserting_before(sides[0]):
        tensor = graph.placeholder("_".join(leaf.path.split(".")))
    inside = opened(leaves, values, spec)[0]
    sizes = shown_sizes(inside, [node.meta["val"] for node in places])
    batch = [sizes["batch"]] if leaf.roles[0] == "batch" else value.shape[:1]
    shape = (*batch, *value.shape[1:])
    like = next(v for n in places if isinstance(v := n.meta["val"], Tensor))
    tensor.meta["val"] = like.new_empty(shape, dtype=value.dtype)
    with graph.inserting_after(places[-1]):
        reads = [
            graph.call_function(number_at, (tensor, place, width)) for place, _, width in found
        ]
    for node, read in zip(sides, reads, strict=True):
        read.meta["val"] = node.meta["val"]
        node.replace_all_uses_with(read)
        graph.erase_node(node)
    codegen = graph._codegen
    assert isinstance(codegen, _PyTreeCodeGen)
    whole = pytree.tree_structure(((), pytree.tree_unflatten([0] * spec.num_leaves, spec)))
    codegen.pytree_info = codegen.pytree_info._replace(in_spec=whole)
    module.recompile()


def take_pixels(graph: fx.Graph, leaves: Sequence[Argument]) -> None:
    """Let a graph that was exported with sides in sites take them in pixels."""
    places = list(graph.find_nodes(op="placeholder"))
    for node, leaf in zip(places, leaves, strict=True):
        width = axis_of(leaf.roles[0])[1] if leaf.roles and not leaf.tensor else 1
        sites = node.meta["val"]
        if width == 1:
            continue
        with graph.inserting_after(places[-1]):
            found = graph.call_function(operator.floordiv, (node, width))
        found.meta["val"], node.meta["val"] = sites, sites * width
        node.replace_all_uses_with(found, delete_user_cb=lambda user, own=found: user is not own)
