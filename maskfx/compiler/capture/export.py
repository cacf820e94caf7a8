"""torch.export of a module, without its warnings, in the form that the passes expect.

Numbers stay symbolic while the module runs (`symbolic_numbers.py`), and reading a tensor's values
is limited to small tensors.
"""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.export import Dim
from torch.types import IntLikeType
from torch.utils import _pytree as pytree
from torch.utils._sympy.value_ranges import ValueRanges

from maskfx.compiler.capture.arguments.attempt_sizes import is_of_request
from maskfx.compiler.capture.arguments.grid_numbers import axis_of, side_of
from maskfx.compiler.capture.arguments.roles import EACH_FRAME, Argument, is_fixed
from maskfx.compiler.capture.held_values import holding
from maskfx.compiler.capture.tracing.branches import (
    PlainRun,
    Unexportable,
    full_run,
    going_by,
    plain_run,
)
from maskfx.compiler.capture.tracing.data_attributes import DataAttributes
from maskfx.compiler.capture.tracing.grouped_products import GroupedProducts
from maskfx.compiler.capture.tracing.keyword_names import allow_keyword_names
from maskfx.compiler.capture.tracing.known_numbers import KnownNumbers
from maskfx.compiler.capture.tracing.norm_shapes import norm_shapes
from maskfx.compiler.capture.tracing.opened_sides import known_sides, opened
from maskfx.compiler.capture.tracing.packings import Packings
from maskfx.compiler.capture.tracing.routings import Routings
from maskfx.compiler.capture.tracing.selections import Selections
from maskfx.compiler.capture.tracing.size_arithmetic import size_arithmetic
from maskfx.compiler.capture.tracing.symbolic_numbers import symbolic_numbers
from maskfx.compiler.capture.tracing.unread_records import without_records
from maskfx.errors import CaptureError
from maskfx.ir.geometry.lanes import shape_hint
from maskfx.ir.many_objects import many_objects
from maskfx.ir.nodes import is_write
from maskfx.ir.objects import OPENED, copy_tree
from maskfx.ir.values import has_meta

allow_keyword_names()

READ = 64  # the largest tensor that a forward may list during a capture, in numbers


@contextlib.contextmanager
def few_numbers() -> Iterator[None]:
    """Refuse to list large tensors: export makes a symbol of each number, which takes minutes."""
    before = FakeTensor.tolist

    def listed(self: FakeTensor) -> object:
        shape = shape_hint(self)
        if math.prod(shape) > READ:
            raise CaptureError(f"Python reads all values of a tensor of {shape}, more than {READ}")
        return before(self)

    FakeTensor.tolist = listed  # type: ignore[method-assign]
    try:
        yield
    finally:
        FakeTensor.tolist = before  # type: ignore[method-assign]


def export_as_answered(
    module: torch.nn.Module,
    inputs: Mapping[str, object],
    leaves: Sequence[Argument],
    symbolic: bool,
) -> tuple[torch.export.ExportedProgram, list[bool]]:
    """Export the module; where Python branches on a tensor, follow the answers of an eager run.

    A module that reads a number per sample isn't tried at other sizes if the export fails.
    """
    if has_meta(module, pytree.tree_leaves(inputs)):
        return export(module, inputs, leaves, symbolic), []
    plain = plain_run(module, copy_tree(inputs), leaves)
    try:
        return export_following(plain, module, inputs, leaves, symbolic)
    except (torch.OutOfMemoryError, MemoryError):
        raise
    except Exception as error:
        if plain.light:
            plain = full_run(module, copy_tree(inputs), leaves)
            if plain.answers or plain.counts:
                return export_following(plain, module, inputs, leaves, symbolic)
        if not plain.reads_samples:
            raise
        first = (str(error).strip().splitlines() or [""])[0][:200]
        raise Unexportable(f"Python reads a number for each sample of a batch: {first}") from error


def export_following(
    plain: PlainRun,
    module: torch.nn.Module,
    inputs: Mapping[str, object],
    leaves: Sequence[Argument],
    symbolic: bool,
) -> tuple[torch.export.ExportedProgram, list[bool]]:
    """Export the module as it ran; return the answers of the conditions that were followed."""
    if plain.answers or plain.reads_lengths:
        with going_by(module, plain, leaves) as followed:
            found = export(module, inputs, leaves, symbolic)
        asked = found.call_spec.out_spec.children()[1].num_leaves
        if asked and asked == len(plain.answers) + followed.lengths:
            return found, followed.answers
    return export(module, inputs, leaves, symbolic), []  # under export Python branches on nothing


def export(
    module: torch.nn.Module,
    inputs: Mapping[str, object],
    leaves: Sequence[Argument],
    symbolic: bool,
    numbers: bool = True,
) -> torch.export.ExportedProgram:
    """Run torch.export with every dimension that has a role set to `Dim.AUTO`.

    So are integers among the arguments, such as image sizes from which a model makes positions,
    unless the module returns one of them. The export fixes those that Python branches on.
    """

    def dims(leaf: Argument, value: object) -> object:
        if not leaf.tensor:
            free = symbolic and numbers and type(value) is int and value > 1
            free = free and leaf.roles != ("frames",) and not leaf.held_sizes
            return Dim.AUTO if free else None
        if leaf.held:
            return {i: Dim.AUTO for i, r in enumerate(leaf.roles) if symbolic and r == "batch"}
        sizes = [i for i, r in enumerate(leaf.roles) if symbolic and not is_fixed(r)]
        return {i: Dim.AUTO for i in sizes if not leaf.held_sizes or is_of_request(leaf.roles[i])}

    own = (leaves, *pytree.tree_flatten(inputs))
    leaves, values, spec = opened(*own)
    shapes = nested([dims(*pair) for pair in zip(leaves, values, strict=True)], spec)
    known = KnownNumbers()
    with (
        torch.no_grad(),
        symbolic_numbers(module),
        few_numbers(),
        Selections(),
        known,
        GroupedProducts(known),
        DataAttributes(),
        Packings(),
        Routings() as routings,
        written_out_attention(),
        equal_sizes(module, leaves),
        sides_in_pixels(module, leaves),
        named_parameters(module, list(inputs)),
        size_arithmetic(),
        without_records(),
        norm_shapes(),
        many_objects(),
        holding(module, leaves, values),
        known_sides(module, *own, known),
    ):
        given = in_sites(leaves, values, spec)
        program = torch.export.export(module, (), given, dynamic_shapes=shapes, strict=False)
        routings.check()
        free_multiples(program)
        returned = pytree.tree_leaves(program.graph.output_node().args[0])
        fixes = numbers and any(is_number(node) for node in returned)
        nodes = [n for g in graphs(program.graph_module) for n in g.nodes]
        if any(is_write(n) or turns_on_autocast(n) for n in nodes):
            program = program.run_decompositions({})  # casts of autocast become operators
    return export(module, inputs, own[0], symbolic, numbers=False) if fixes else program


def is_number(node: object) -> bool:
    """Return True for a symbolic number among a graph's results."""
    return isinstance(node, fx.Node) and isinstance(node.meta.get("val"), torch.SymInt)


def turns_on_autocast(node: fx.Node) -> bool:
    """Return True for a region of a graph that runs with `torch.autocast` on."""
    return node.target is torch.ops.higher_order.wrap_with_autocast and node.args[2] is not False


def free_multiples(program: torch.export.ExportedProgram) -> None:
    """Let a size that is a multiple of another be as small as one of it makes it.

    A size counts as two or more while it is traced, which is checked for multiples of it alone.
    """
    ranges = program.range_constraints
    for size, own in ranges.items():
        if not size.is_Symbol:
            ranges[size] = ValueRanges(0, own.upper)


def nested(leaves: Sequence[object], spec: pytree.TreeSpec) -> Any:
    """Return leaves in the structure of a tree, with lists in place of its objects."""
    if spec.is_leaf():
        return leaves[0]
    parts, start = [], 0
    for child in spec.children():
        parts.append(nested(leaves[start : start + child.num_leaves], child))
        start += child.num_leaves
    if spec.type in OPENED:
        return parts
    return pytree.SUPPORTED_NODES[spec.type].unflatten_fn(parts, spec.context)


@contextlib.contextmanager
def equal_sizes(module: torch.nn.Module, leaves: Sequence[Argument]) -> Iterator[None]:
    """Give dimensions of one role one symbol, also where the module never compares them."""

    def compare(_: torch.nn.Module, args: object, kwargs: Mapping[str, object]) -> None:
        values = pytree.tree_leaves(dict(kwargs))
        if len(values) != len(leaves):
            return
        seen: dict[str, IntLikeType] = {}
        for leaf, value in zip(leaves, values, strict=True):
            shape = value.shape if isinstance(value, torch.Tensor) else (value,)
            roles = leaf.roles if leaf.tensor else tuple(axis_of(role)[0] for role in leaf.roles)
            for role, size in zip(roles, shape, strict=leaf.tensor) if shape else ():
                if role and isinstance(seen.setdefault(role, size), torch.SymInt):
                    torch._check(size == seen[role])
        if EACH_FRAME in seen and "batch" in seen and "frames" in seen:
            torch._check(seen[EACH_FRAME] == seen["batch"] * seen["frames"])
        if {"y", "x"} <= {role[:1] for leaf in leaves if not leaf.tensor for role in leaf.roles}:
            sites = seen.get("frames", 1) * seen["y"] * seen["x"]
            for role, size in seen.items():
                if role == "tokens/1":
                    torch._check(size == sites)
                elif role.startswith("tokens/1:"):
                    torch._check(sites < size)

    hook = module.register_forward_pre_hook(compare, with_kwargs=True)
    try:
        yield
    finally:
        hook.remove()


def in_sites(
    leaves: Sequence[Argument], values: Sequence[Any], spec: pytree.TreeSpec
) -> dict[str, Any]:
    """Return the arguments with sides that are given in pixels as numbers of sites."""
    found = [
        side_of(leaf.roles[0], value)[1] if leaf.roles and not leaf.tensor else value
        for leaf, value in zip(leaves, values, strict=True)
    ]
    return dict(pytree.tree_unflatten(found, spec))


@contextlib.contextmanager
def sides_in_pixels(module: torch.nn.Module, leaves: Sequence[Argument]) -> Iterator[None]:
    """Give the module in pixels the sides that the export counts in sites (`in_sites`).

    So a size in sites is one symbol, and no quotient of one.
    """
    widths = [1 if leaf.tensor or not leaf.roles else axis_of(*leaf.roles)[1] for leaf in leaves]

    def widen(
        _: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        values, spec = pytree.tree_flatten(dict(kwargs))
        if len(values) != len(leaves):
            return None
        pairs = zip(values, widths, strict=True)
        return args, pytree.tree_unflatten([v * n if n > 1 else v for v, n in pairs], spec)

    hook = module.register_forward_pre_hook(widen, with_kwargs=True) if max(widths) > 1 else None
    try:
        yield
    finally:
        if hook is not None:
            hook.remove()


@contextlib.contextmanager
def named_parameters(module: torch.nn.Module, names: Sequence[str]) -> Iterator[None]:
    """Let a forward that takes any names, as that of a wrapper does, show those of this call."""
    forward, before = module.forward, vars(module).get("forward")
    kinds = [parameter.kind for parameter in inspect.signature(forward).parameters.values()]
    if inspect.Parameter.VAR_KEYWORD not in kinds:
        yield
        return

    def named(*args: object, **kwargs: object) -> object:
        return forward(*args, **kwargs)

    shown = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in names]
    vars(named)["__signature__"] = inspect.Signature(shown)
    vars(module)["forward"] = named
    try:
        yield
    finally:
        if before is None:
            del vars(module)["forward"]
        else:
            vars(module)["forward"] = before


@contextlib.contextmanager
def written_out_attention() -> Iterator[None]:
    """Keep torch's attention layers from running as one operator, which no rule covers."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def graphs(module: torch.nn.Module) -> Iterator[fx.Graph]:
    """Yield the graphs of a module and of the regions it wraps."""
    for part in module.modules():
        if isinstance(part, fx.GraphModule):
            yield part.graph


def spell_views(module: torch.nn.Module) -> None:
    """Replace view by reshape: removing writes changes the strides that a view relies on.

    The graphs' code isn't written again.
    """
    aten = torch.ops.aten
    for part in module.modules():
        if isinstance(part, fx.GraphModule):
            for node in part.graph.nodes:
                if node.target in (aten.view.default, aten._unsafe_view.default):
                    node.target = aten.reshape.default


def drop_refills(graph: fx.Graph) -> None:
    """Remove writes to buffers that each forward refills and never reads before that."""
    for node in list(graph.nodes):
        if node.target is torch.ops.aten.copy_.default and not node.users:
            buffer = node.args[0]
            if buffer.op == "get_attr" and len(buffer.users) == 1:
                graph.erase_node(node)
                graph.erase_node(buffer)
