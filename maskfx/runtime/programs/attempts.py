"""What compilations of one module show: which are of use to a call, and which are worth a try."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from torch.utils import _pytree as pytree

from maskfx.compiler.capture.arguments import roles as roles_
from maskfx.compiler.capture.arguments.attempt_sizes import has_batch
from maskfx.compiler.capture.arguments.grid_numbers import grid_numbers
from maskfx.compiler.capture.arguments.tensor_sides import small_wholes
from maskfx.compiler.compile import Compilation, flat_graph
from maskfx.runtime.batch.flops import graph_flops


@dataclass(frozen=True)
class Attempt:
    """A way to capture a module; see `capture`."""

    attempt: bool = True
    single: bool = False
    fixed: bool = False
    one: bool = False
    grid: bool = False
    turned: bool = False
    held: bool = False
    still: bool = False


def narrowest(
    compiled: Callable[[dict[str, object], Attempt], Compilation],
    every: Sequence[Compilation],
    inputs: dict[str, object],
    dense: bool,
    single: bool,
) -> Compilation:
    """Compile a module for these arguments in several ways; return what narrows most.

    Args:
        compiled: compiles the module in one way.
        every: what was compiled before.
        inputs: the arguments.
        dense: whether the module runs dense, whatever it is.
        single: whether the arguments are of one sample, and what is compiled.
    """
    alike = [one for one in every if one.capture.single == single and serves_form(one, inputs)]
    for one in (one for one in alike if holds_values(one) or holds_sizes(one)):
        alone = not single and one.capture.pyramid.batch == 1
        new = compiled(inputs, replace(like(one), single=single, one=alone))
        if new.program is not None:
            return new
        break
    for one in (one for one in every if is_frozen_program(one, inputs, single)):
        new = compiled(inputs, replace(like(one), single=single, fixed=True))
        if new.program is not None:
            return new
        break
    new = compiled(inputs, Attempt(not dense, single))
    if dense:
        return new
    sides = False
    for grid, turned in ((False, False), (True, False), (True, True)):
        if grid and not lies_on_grid(new, inputs) or turned and not sides:
            break
        way = Attempt(grid=grid, turned=turned)
        if grid:
            found = compiled(inputs, replace(way, single=single))
            sides, new = has_sides(found), better(new, found)
        if not single and treats_alone(new):
            new = better(new, compiled(inputs, replace(way, one=True)))
        if asks_for_size(new):
            new = better(new, compiled(inputs, replace(way, single=single, fixed=True)))
    holds = False
    if new.reasons and new.capture.reads:
        found = with_values(compiled, inputs, single, sides)
        holds, new = holds_values(found) and found.program is not None, better(new, found)
    if runs_mostly_in_full(new):
        new = better(new, compiled(inputs, Attempt(single=single, held=holds, still=True)))
        if not single and new.reasons:
            new = better(new, compiled(inputs, Attempt(one=True, held=holds, still=True)))
    return new


def with_values(
    compiled: Callable[[dict[str, object], Attempt], Compilation],
    inputs: dict[str, object],
    single: bool,
    sides: bool,
) -> Compilation:
    """Compile a module for what its arguments hold now, and for one picture size if need be.

    Args:
        compiled: compiles the module in one way.
        inputs: the arguments.
        single: whether they are of one sample, and what is compiled.
        sides: whether tensors have sides of the picture.
    """
    ways = [Attempt(single=single, held=True)]
    if sides:
        both = [replace(ways[0], grid=True), replace(ways[0], grid=True, turned=True)]
        ways = [*both, *(replace(way, still=True) for way in both), *ways]
    best = compiled(inputs, ways[0])
    for way in ways:
        found = best if way is ways[0] else compiled(inputs, way)
        if not single and holds_values(found) and treats_alone(found):
            found = better(found, compiled(inputs, replace(way, one=True)))
        best = better(best, found)
        if best.program is not None:
            break
    return best


def like(found: Compilation) -> Attempt:
    """Return the way in which another picture size, or other values, may be captured alike."""
    orders = (leaf.sides for leaf in found.capture.leaves if leaf.sides)
    return Attempt(
        grid=has_sides(found),
        turned=any(
            [role[0] for role in order if role[:1] in ("y", "x")][:1] == ["x"] for order in orders
        ),
        held=holds_values(found),
        still=holds_sizes(found),
    )


def tried_in_vain(one: Compilation) -> bool:
    """Return True for a compilation of one sample without a program: such calls stay whole."""
    return one.capture.single and one.program is None


def is_frozen_program(found: Compilation, inputs: Mapping[str, object], single: bool) -> bool:
    """Return True for a program of one size that stands for calls with arguments like these."""
    frozen = found.capture.frozen is not None and found.capture.single == single
    return frozen and serves_form(found, inputs)


def has_sides(found: Compilation) -> bool:
    """Return True for a compilation that takes numbers in tensors for sides of the picture."""
    return any(leaf.sides for leaf in found.capture.leaves)


def holds_sizes(found: Compilation) -> bool:
    """Return True for a compilation of one picture size, as symbolic ones run mostly in full."""
    return found.capture.leaves[0].held_sizes


def runs_mostly_in_full(found: Compilation) -> bool:
    """Return True if a program for pictures of any size computes most of each step in full."""
    if found.program is None:
        return False
    graph, sizes = found.capture.module, found.capture.symbols
    pictures = [sizes[role] for role in ("y", "x", "tokens") if role in sizes]
    if graph is None or found.dense is None or all(isinstance(n, int) for n in pictures):
        return False
    whole = sum(graph_flops(flat_graph(graph)).values())
    return 2 * sum(graph_flops(found.dense.module.graph, graph.graph).values()) > whole


def serves_form(found: Compilation, inputs: Mapping[str, object]) -> bool:
    """Return True for a program of calls with arguments of the same structure."""
    same = found.capture.in_spec == pytree.tree_structure(dict(inputs))
    return same and found.program is not None


def holds_values(found: Compilation) -> bool:
    """Return True for a compilation that serves certain values of arguments only."""
    return any(leaf.held for leaf in found.capture.leaves)


def treats_alone(found: Compilation) -> bool:
    """Return True if the module may treat its samples one by one, which a batch of one shows."""
    fixed = found.capture.fixed_batch not in (None, 1)
    whole = found.program is None or fixed and bool(found.reasons)
    return has_batch(found.capture.leaves) and whole


def asks_for_size(found: Compilation) -> bool:
    """Return True if experts run dense because the number that they choose is symbolic."""
    symbolic = found.capture.module is not None and found.capture.frozen is None
    return symbolic and any(r.startswith("how many it picks") for r in found.reasons.values())


def lies_on_grid(found: Compilation, inputs: Mapping[str, object]) -> bool:
    """Return True if numbers among the arguments, or in tensors that are read, may be sides.

    Each of several samples has sides of its own if these are in lists of a list.
    """
    paths, values, _ = roles_.flatten(inputs)
    sizes = roles_.observed_sizes(found.capture.leaves, values)
    if not found.reasons:
        return False
    sides = grid_numbers(paths, values, sizes["tokens"]) if "tokens" in sizes else {}
    if sides:
        return sizes["batch"] == 1 or all(path.count(".") < 2 for path in sides)
    return found.capture.reads and any(small_wholes(v, sizes["batch"]) for v in values)


def better(one: Compilation, other: Compilation) -> Compilation:
    """Return the compilation of which less runs dense; the first, if neither has a program.

    Where the picture stands among padded tokens is certain only if all of them have rows, and so
    is the order of the sides of packed tokens in a tensor.
    """
    unsure = presumes_padding(other) or presumes_order(other)
    if other.program is None or other.reasons and unsure:
        return one
    return min(one, other, key=lambda found: (found.program is None, len(found.reasons)))


def presumes_padding(found: Compilation) -> bool:
    """Return True if the tokens behind the first ones of an argument are taken for padding."""
    return any(r.startswith("tokens/1:") for leaf in found.capture.leaves for r in leaf.roles)


def presumes_order(found: Compilation) -> bool:
    """Return True if the sides of packed tokens are numbers in a tensor, in an order presumed."""
    shown = any(role[:1] in ("y", "x") for leaf in found.capture.leaves for role in leaf.roles)
    return not shown and any("y" in role for leaf in found.capture.leaves for role in leaf.sides)
