"""Capture: exports a denoiser as a graph with symbolic sizes.

Capture makes batch, height, width and text length distinct, so that no two of them are confused. A
module that can't be exported with symbolic sizes is captured at the example's sizes; such a capture
serves only calls of these sizes.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from threading import RLock
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx
from torch.types import IntLikeType
from torch.utils import _pytree as pytree

from maskfx.compiler.capture.arguments import roles as roles_
from maskfx.compiler.capture.arguments.argument_lanes import placeholder_lane, pyramid_of
from maskfx.compiler.capture.arguments.attempt_sizes import (
    candidates,
    has_batch,
    is_of_request,
    is_thin,
    uneven,
)
from maskfx.compiler.capture.arguments.grid_numbers import axis_of
from maskfx.compiler.capture.arguments.infer_roles import infer
from maskfx.compiler.capture.arguments.roles import Argument, Sizes
from maskfx.compiler.capture.arguments.value_reads import (
    depends_on_values,
    held_value,
    read_numbers,
    with_held,
)
from maskfx.compiler.capture.captured import Capture
from maskfx.compiler.capture.export import drop_refills, export_as_answered, spell_views
from maskfx.compiler.capture.exported_twin import twin_of
from maskfx.compiler.capture.number_inputs import as_inputs, read_by
from maskfx.compiler.capture.obstacles import obstacle
from maskfx.compiler.capture.tracing.branches import BranchesOnSteps, Unexportable, split_off
from maskfx.compiler.capture.tracing.opened_sides import close, opened, with_numbers
from maskfx.compiler.capture.tracing.plain_attention import plain_attention
from maskfx.compiler.capture.tracing.quiet import quiet
from maskfx.compiler.capture.tracing.recurrent_layers import RecurrentLayers
from maskfx.compiler.capture.tracing.routings import presumed, with_experts
from maskfx.compiler.capture.whole import WholeModules, has_unknown_size
from maskfx.ir import progress
from maskfx.ir.geometry.lanes import set_lane
from maskfx.ir.geometry.other_sizes import SizeExpr, other_bases
from maskfx.ir.geometry.pyramid import Pyramid
from maskfx.ir.listed import count_listed
from maskfx.ir.modules.number_settings import Place
from maskfx.ir.objects import new_objects

if TYPE_CHECKING:
    import sympy

log = logging.getLogger(__name__)

SINGLE_ATTEMPTS = 4  # sizes that are tried for one sample, after others were for a batch
DENSE = 'mode="dense" leaves the module as it is'
CAPTURING = RLock()  # an export changes what the whole process shares, such as functions of torch


def capture(
    module: torch.nn.Module,
    inputs: Mapping[str, object],
    roles: Mapping[str, roles_.Roles] | None = None,
    attempt: bool = True,
    single: bool = False,
    fixed: bool = False,
    one: bool = False,
    compare: bool = True,
    grid: bool = False,
    turned: bool = False,
    held: bool = False,
    still: bool = False,
    kept: str = "",
    numbers: Mapping[Place, Tensor] | None = None,
) -> Capture:
    """Export `module` as it would run on `inputs`, with symbolic sizes where it allows them.

    A module that can't be exported at all, and any module if not `attempt`, returns a capture
    without a graph; its notes state the reason. An export puts fake weights into what it exports,
    which is the module's twin, so that other threads may run the module meanwhile; a module with
    hooks has no twin and is exported itself. Captures in several threads take turns.

    Args:
        module: the module.
        inputs: its arguments.
        roles: overrides of roles, by argument.
        attempt: whether to export at all.
        single: capture a batch of one sample, for calls of one sample only.
        fixed: whether no size is symbolic.
        one: capture a batch of one sample, whose operators may run on batches of any size.
        compare: compare the graph with the module at the sizes of the inputs.
        grid: tokens are the sites of a picture whose sides are numbers among the arguments, or in
            tensors that Python reads.
        turned: in tensors, the picture's width stands before its height.
        held, still: constants are values that sizes depend on; the picture's sizes.
        kept: the attribute in which the module keeps tensors of each call; "" if in none.
        numbers: tensors that the graph reads in place of numbers of the module's settings.
    """
    _, values, spec = roles_.flatten(inputs)
    read = read_numbers(module, inputs) if grid else set[str]()
    found = infer(module, inputs, roles, grid, read, turned)
    leaves = [replace(leaf, held_sizes=still) for leaf in found]
    if held:
        leaves = with_held(module, leaves, values, spec, sides=still)
        attempt = any(leaf.held for leaf in leaves)
    if grid and not held:
        attempt = any(leaf.sides or leaf.roles and not leaf.tensor for leaf in leaves)
    if turned:
        attempt = attempt and found != infer(module, inputs, roles, grid, read)
    notes, interrupted, reads = list[str](), False, False
    listed = 0 if has_batch(leaves) else count_listed(inputs)
    if listed > 1:
        leaves = list(map(roles_.without_texts, leaves))  # each sample has texts of its own
    call = ExampleCall(leaves, values, spec, roles_.observed_sizes(leaves, values))
    if listed > 1:
        notes.append(f"{listed} samples in a list: a capture is of one sample")
    if not attempt and not kept:
        idle = "no values to hold" if held else "no sides among its numbers" if grid else DENSE
        notes.append(idle)
    elif why := obstacle(module, kept):
        notes.append(why)
        attempt = False
    one = one or single
    tries = candidates(call.sizes, leaves, one, fixed) if listed < 2 and attempt else iter(())
    attempts = islice(tries, SINGLE_ATTEMPTS) if one else tries
    whole, in_vain = WholeModules(twin_of(module), module), set[object]()
    for number, (wanted, symbolic) in enumerate(attempts, 1):
        request = symbolic, *((r, s) for r, s in wanted.items() if is_of_request(r))
        if request in in_vain:  # a size that data decides is as unknown at other picture sizes
            continue
        progress.stage(0, "export" if number == 1 else f"export, attempt {number}")
        kind = "symbolic" if symbolic else "fixed"
        with new_objects():
            example = pytree.tree_unflatten(resize(leaves, values, call.sizes, wanted), spec)
        try:
            result = captured_at(whole, call, example, wanted, symbolic, notes, numbers or {})
            result.compared = compare
            result.reads = any(map(has_unknown_size, result.nodes))
        except Unexportable as error:
            notes.append(f"not exported: {error}")
            break
        except (torch.OutOfMemoryError, MemoryError):
            raise  # not a verdict on the module
        except Exception as error:
            first = (str(error).strip().splitlines() or [""])[0][:200]
            notes.append(f"export with {kind} sizes {wanted}: {type(error).__name__}: {first}")
            interrupted |= isinstance(error, OSError)
            if depends_on_values(error):
                reads = True
                in_vain.add(request)
            log.debug("capture attempt failed", exc_info=True)
            continue
        result.single = single
        if result.serves(module, spec, values, call.sizes):
            return unless_thin(result, whole, call, wanted, notes, numbers or {})
        notes.append(f"export with {kind} sizes {wanted}: not valid for the call's {call.sizes}")
    return Capture(
        module=None,
        leaves=leaves,
        in_spec=spec,
        out_spec=spec,
        pyramid=Pyramid(batch=call.sizes["batch"]),
        constants={},
        features=roles_.shapes_of(leaves, values),
        notes=notes,
        single=single,
        interrupted=interrupted,
        reads=reads,
        lists=listed > 1,
    )


def unless_thin(
    found: Capture,
    whole: WholeModules,
    call: ExampleCall,
    sizes: Sizes,
    notes: Sequence[str],
    numbers: Mapping[Place, Tensor],
) -> Capture:
    """Return a capture at sizes at which no size that is computed is 0 or 1, or the one found."""
    assert found.module is not None
    wanted = uneven(sizes)
    if found.frozen is not None or wanted == sizes or not is_thin(found.module):
        return found
    values = resize(call.leaves, call.values, call.sizes, wanted)
    try:
        with new_objects():
            example = pytree.tree_unflatten(values, call.spec)
        other = captured_at(whole, call, example, wanted, True, notes, numbers)
    except (torch.OutOfMemoryError, MemoryError):
        raise
    except Exception:
        log.debug("capture at uneven sizes failed", exc_info=True)
        return found
    assert other.module is not None
    other.single, other.compared = found.single, found.compared
    serves = other.serves(whole.own, call.spec, call.values, call.sizes)
    return other if serves and not is_thin(other.module) else found


@dataclass(frozen=True)
class ExampleCall:
    """The call that a module is captured for: its arguments, flattened, and their sizes."""

    leaves: list[Argument]
    values: Sequence[object]
    spec: pytree.TreeSpec
    sizes: Sizes


def captured_at(
    whole: WholeModules,
    call: ExampleCall,
    example: Mapping[str, object],
    sizes: Sizes,
    symbolic: bool,
    notes: Sequence[str],
    numbers: Mapping[Place, Tensor],
) -> Capture:
    """Export the module as it runs on arguments of these sizes; raise if that fails."""

    def attempt() -> Capture:
        with as_inputs(whole.module, whole.own, numbers) as facts:
            exported, answers = exported_with(whole, example, call.leaves, symbolic)
        made = finish(exported, call, sizes, symbolic, notes, answers)
        made.facts, made.numbers = facts, read_by(made.module, numbers)
        return made

    with CAPTURING, quiet(), plain_attention(), RecurrentLayers():
        try:
            result = with_experts(attempt)
        except BranchesOnSteps:  # perhaps on whether an expert has rows
            with presumed():
                result = with_experts(attempt)
        assert result.module is not None
        whole.put_back(result.module)
    return result


def exported_with(
    whole: WholeModules, example: Mapping[str, object], leaves: Sequence[Argument], symbolic: bool
) -> tuple[torch.export.ExportedProgram, list[bool]]:
    """Export the module; keep the submodules whole that can't be exported but may stay so."""
    while True:
        try:
            with whole.standing_in():
                found = export_as_answered(whole.module, example, leaves, symbolic)
            if not whole.add_opaque(found[0].graph_module, example):
                return found
        except (Unexportable, torch.OutOfMemoryError, MemoryError):
            raise
        except Exception as error:
            if not whole.add(error, example):
                raise


def resize(
    leaves: Sequence[Argument], values: Sequence[Any], sizes: Sizes, wanted: Sizes
) -> list[object]:
    """Resize the arguments; the contents of the tensors don't matter for capture."""
    out = []
    for leaf, value in zip(leaves, values, strict=True):
        if not leaf.tensor:
            out.append(roles_.role_size(leaf.roles[0], wanted) if leaf.roles else value)
            continue
        if leaf.sides:
            value = with_numbers(leaf, value, wanted)
        for axis, role in enumerate(leaf.roles):
            if role:
                size = roles_.role_size(role, wanted)
                if value.shape[axis] < size:
                    times = [1] * value.dim()
                    times[axis] = -(-size // max(1, value.shape[axis]))
                    value = value.repeat(times)
                value = value.narrow(axis, 0, size)
        out.append(value.detach().clone(memory_format=torch.contiguous_format))
    return out


def finish(
    exported: torch.export.ExportedProgram,
    call: ExampleCall,
    sizes: Sizes,
    symbolic: bool,
    notes: Sequence[str],
    answers: list[bool],
) -> Capture:
    """Convert the exported program to a plain graph with lanes on its placeholders."""
    leaves = call.leaves
    module = exported.module(check_guards=False)
    assert isinstance(module, fx.GraphModule)
    drop_refills(module.graph)
    spell_views(module)
    out_spec, decisions = exported.call_spec.out_spec, None
    inside, placeholders = opened(leaves, call.values, call.spec)[0], placeholders_of(module)
    assert len(placeholders) == len(inside), (len(placeholders), len(inside))
    symbols, guards = sizes_by_role(placeholders, inside), guards_on(placeholders)
    close(module, leaves, call.values, call.spec)
    if answers:
        decisions = split_off(module, answers, [leaf.step for leaf in leaves])
        out_spec = out_spec.children()[0]
    placeholders = placeholders_of(module)
    if not returns_batch(module.graph, symbols.get("batch")):
        symbols["batch"] = sizes["batch"]  # samples are counted otherwise, as by a list's length
    pyramid = pyramid_of(sizes, other_bases(symbols, guards) if "y" in sizes and symbolic else ())
    for node, leaf in zip(placeholders, leaves, strict=True):
        node.meta["leaf"] = leaf
        if leaf.tensor:
            set_lane(node, placeholder_lane(leaf, node.meta["val"], symbols, pyramid, symbolic))
    constants = {
        i: v
        for i, (leaf, v, node) in enumerate(zip(leaves, call.values, placeholders, strict=True))
        if not leaf.tensor and not isinstance(node.meta["val"], torch.SymInt)
    }
    for i, (leaf, v) in enumerate(zip(leaves, call.values, strict=True)):
        if leaf.held or leaf.sides:
            constants[i] = held_value(leaf, v)
    return Capture(
        module=module,
        leaves=list(leaves),
        in_spec=call.spec,
        out_spec=out_spec,
        pyramid=pyramid,
        constants=constants,
        symbols=symbols,
        guards=guards,
        frozen=None if symbolic else dict(sizes),
        fixed_batch=sizes["batch"] if isinstance(symbols.get("batch"), int) else None,
        features=roles_.shapes_of(leaves, call.values),
        decisions=decisions,
        notes=list(notes),
    )


def placeholders_of(module: fx.GraphModule) -> list[fx.Node]:
    """Return the nodes of a graph's arguments."""
    return list(module.graph.find_nodes(op="placeholder"))


def sizes_by_role(
    placeholders: Sequence[fx.Node], leaves: Sequence[Argument]
) -> dict[str, SizeExpr]:
    """Return the sizes of the batch, the picture and the texts, symbolic or as numbers."""
    found: dict[str, SizeExpr] = {}
    for node, leaf in zip(placeholders, leaves, strict=True):
        value = node.meta["val"]
        shape: Sequence[Any] = value.shape if leaf.tensor else (value,)
        roles = leaf.roles if leaf.tensor else [axis_of(role)[0] for role in leaf.roles]
        for role, size in zip(roles, shape, strict=leaf.tensor):
            expr = size.node.expr if isinstance(size, torch.SymInt) else int(size)
            if not isinstance(expr, int) and expr.is_Integer:  # tracing specialized it later
                expr = int(expr)
            if role in ("batch", "y", "x", "tokens") or role.startswith("text:"):
                found.setdefault(role, expr)
    return found


def returns_batch(graph: fx.Graph, batch: SizeExpr | None) -> bool:
    """Return True if the number of samples in a result follows from the batch, or is a number."""
    if batch is None or isinstance(batch, int):
        return True
    values = [node.meta.get("val") for node in graph.output_node().all_input_nodes]
    sizes: list[IntLikeType] = [n for v in values if isinstance(v, torch.Tensor) for n in v.shape]
    named = {s for n in sizes if isinstance(n, torch.SymInt) for s in n.node.expr.free_symbols}
    return not named.isdisjoint(batch.free_symbols)


def guards_on(placeholders: Sequence[fx.Node]) -> list[sympy.Basic]:
    """Return the conditions that the export found on the sizes of the arguments."""
    values = [node.meta["val"] for node in placeholders]
    sizes: list[IntLikeType] = [n for v in values if isinstance(v, torch.Tensor) for n in v.shape]
    shape_env = next((s.node.shape_env for s in sizes if isinstance(s, torch.SymInt)), None)
    return [] if shape_env is None else [guard.expr for guard in shape_env.guards]
