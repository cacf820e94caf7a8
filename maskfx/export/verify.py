"""Compares exported graphs with the denoiser that they were made from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from maskfx.compiler.capture.arguments.grid_numbers import axis_of
from maskfx.compiler.capture.arguments.roles import Argument, observed_sizes
from maskfx.compiler.capture.captured import Capture
from maskfx.compiler.capture.tracing.opened_sides import symbolic_side
from maskfx.errors import CompileError, MaskfxError
from maskfx.export.denoiser import ExportedDenoiser
from maskfx.export.describe import hint
from maskfx.ir.geometry.lanes import shape_hint
from maskfx.ir.objects import copied_tree
from maskfx.ir.values import ROUNDED
from maskfx.ops.number_at import number_at
from maskfx.runtime.programs.proof import uneven_mask
from maskfx.runtime.steps import EditStep

BOUNDS = {torch.float32: 1e-4, torch.float64: 1e-4}


@dataclass(frozen=True)
class Verdict:
    """How far the results of a graph are from the denoiser's, at one size."""

    graph: str
    sizes: Mapping[str, int]
    error: float
    bound: float

    def __str__(self) -> str:
        sizes = ", ".join(f"{role} {size}" for role, size in self.sizes.items())
        return f"{self.graph:8} {sizes}: error {self.error:.1e}, at most {self.bound:.0e}"


def verify(
    module: nn.Module, directory: Path, inputs: Sequence[Mapping[str, object]]
) -> list[Verdict]:
    """Run each graph on each set of arguments; raise CompileError if one is wrong.

    An edit of a recording made from the same arguments computes what the denoiser does.
    """
    denoiser = ExportedDenoiser(module, directory, compares=False)
    found: list[Verdict] = []
    for given in inputs:
        for verdict in ran(verdicts(denoiser, module, given), type(module).__name__):
            found.append(verdict)
            if not verdict.error <= verdict.bound:
                raise CompileError(
                    f"export: the graph {verdict.graph!r} of {type(module).__name__} computes "
                    f"something else than the denoiser: {verdict}; nothing was written. A pipeline "
                    "that replaces parts of it during a call, such as attention processors, leaves "
                    "another denoiser than was captured; else another format, or verify=False, "
                    "exports it all the same"
                )
    return found


def ran(verdicts: Iterator[Verdict], name: str) -> Iterator[Verdict]:
    """Yield the verdicts; raise CompileError if the runtime of the format can't run a graph."""
    try:
        yield from verdicts
    except MaskfxError:
        raise
    except Exception as error:  # each runtime has its own
        text = f"{type(error).__name__}: {str(error).strip()[:400]}"
        raise CompileError(
            f"export: a graph of {name} can't be run: {text}; nothing was written. Another format, "
            "or verify=False, exports it all the same"
        ) from error


@torch.no_grad()
def verdicts(
    denoiser: ExportedDenoiser, module: nn.Module, inputs: Mapping[str, object]
) -> Iterator[Verdict]:
    capture = denoiser.compilation.capture
    values, spec = pytree.tree_flatten(dict(inputs))
    sizes = observed_sizes(capture.leaves, values)

    def given() -> Any:
        return copied_tree(values, spec)

    wanted = pytree.tree_leaves(module(**given()))

    def verdict(graph: str, found: object) -> Verdict:
        apart = [difference(a, b) for a, b in zip(pytree.tree_leaves(found), wanted, strict=True)]
        bound = max(capture.rounding, *(BOUNDS.get(t.dtype, ROUNDED) for t in wanted))
        return Verdict(graph, sizes, max(apart), bound)

    if denoiser.graphs.has("dense"):
        yield verdict("dense", denoiser.dense(given()))
    if not denoiser.graphs.has("record"):
        return
    output, cache = denoiser.record(**given())
    yield verdict("record", output)
    if denoiser.graphs.has("edit"):
        mask = uneven_mask(denoiser.mask_shape(given()))
        steps = [EditStep(given(), one, cache) for one in (mask, mask.flip(0))]
        for edited in denoiser.edit(steps):
            yield verdict("edit", edited)


def difference(found: Tensor, wanted: Tensor) -> float:
    """Return the error relative to the values wanted; infinite if the shapes differ."""
    if found.shape != wanted.shape:
        return float("inf")
    a, b = found.double(), wanted.double()
    return float((a - b).norm() / b.norm().clamp(min=1e-12))


def example_arguments(capture: Capture, shapes: Sequence[Sequence[int]]) -> dict[str, object]:
    """Return random arguments of these shapes, and the constants of the capture."""
    assert capture.module is not None
    draw = torch.Generator().manual_seed(0)
    values: list[object] = []
    for index, (leaf, node) in enumerate(
        zip(capture.leaves, capture.module.graph.find_nodes(op="placeholder"), strict=True)
    ):
        known = node.meta.get("val")
        if leaf.sides:
            shape, numbers = shapes[index][: len(leaf.roles)], shapes[index][len(leaf.roles) :]
            each = [1, *shape[1:]] if leaf.roles[0] == "batch" else list(shape)
            values.append(torch.tensor(numbers, dtype=known.dtype).view(each).expand(*shape))
        elif leaf.tensor:
            value = example_value(leaf, list(shapes[index]), known.dtype, draw)
            values.append(value * 0 if is_index(node) else value)
        else:
            values.append(capture.constants[index] if index in capture.constants else hint(known))
    found: dict[str, object] = pytree.tree_unflatten(values, capture.in_spec)
    return found


def is_index(node: fx.Node) -> bool:
    """Return True if rows of a table are chosen by an argument: the first is always there."""
    for user in node.users:
        name = getattr(user.target, "__name__", "").partition(".")[0]
        if name in ("embedding", "index_select", "index") and node is not user.args[0]:
            return True
        if len(user.all_input_nodes) == 1 and is_index(user):
            return not user.meta["val"].is_floating_point()
    return False


def example_value(
    leaf: Argument, shape: list[int], dtype: torch.dtype, draw: torch.Generator
) -> Tensor:
    """Return values that are valid for any argument: positive where few, ones for integers."""
    if not dtype.is_floating_point or "mask" in leaf.path:
        return torch.ones(shape, dtype=dtype)
    if len(shape) < 2:
        return torch.rand(shape, generator=draw).add_(0.1).to(dtype)
    return torch.randn(shape, generator=draw).to(dtype)


def example_shapes(capture: Capture) -> list[list[tuple[int, ...]]]:
    """Return the shapes of two sets of arguments: the call's that was captured, and others."""
    assert capture.module is not None
    nodes = capture.module.graph.find_nodes(op="placeholder")
    shapes = [
        tuple(shape_hint(node.meta["val"])) if leaf.tensor else ()
        for leaf, node in zip(capture.leaves, nodes, strict=True)
    ]
    called = list(capture.features)
    captured = with_sides(capture, shapes)
    if capture.frozen is not None or capture.fixed_batch is not None or captured == called:
        return [called]
    return [called, captured]


def with_sides(capture: Capture, shapes: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Return the shapes of arguments at capture, that of a tensor with sides before its numbers."""
    assert capture.module is not None
    read = capture.module.graph.find_nodes(op="call_function", target=number_at)
    places = list(capture.module.graph.find_nodes(op="placeholder"))
    sizes = {
        axis_of(capture.leaves[places.index(node.args[0])].sides[node.args[1]])[0]: hint(
            node.meta["val"]
        )
        for node in read
    }
    for leaf, shape in zip(capture.leaves, shapes, strict=True):
        sizes |= dict(zip(leaf.roles, shape, strict=False))
    found = []
    for leaf, shape, called in zip(capture.leaves, shapes, capture.features, strict=True):
        numbers = zip(leaf.sides, called[len(leaf.roles) :], strict=False)
        own = [symbolic_side(role, sizes) if role else number for role, number in numbers]
        found.append((*shape, *own))
    return found
