"""The sizes at which a capture is attempted: distinct ones first, so that roles aren't confused."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count

import torch
from torch import fx
from torch.types import IntLikeType

from maskfx.compiler.capture.arguments.roles import Argument, Sizes, role_size
from maskfx.ir.geometry.lanes import has_no_hint, int_hint


def has_batch(leaves: Sequence[Argument]) -> bool:
    return any("batch" in leaf.roles for leaf in leaves)


def is_of_request(role: str) -> bool:
    """Return True for a dimension whose size has nothing to do with the picture's."""
    return role == "batch" or role.startswith("text:")


def candidates(
    sizes: Sizes, leaves: Sequence[Argument], one: bool = False, fixed: bool = False
) -> Iterator[tuple[Sizes, bool]]:
    """Yield sizes to capture at, the most general first, and whether they are symbolic."""
    held = {role for leaf in leaves if leaf.held for role in leaf.roles}
    texts = [r for r in sizes if r.startswith("text:") and r not in held]
    several, two = max(3, sizes["batch"]), max(2, sizes["batch"])
    if one or not has_batch(leaves):
        several = two = 1
    seen = []
    for text in () if fixed else (True, False):
        apart = any(leaf.sides for leaf in leaves)
        for grid in [dict[str, int]()] if leaves[0].held_sizes else grids(sizes, apart):
            wanted = {**sizes, **grid, "batch": several}
            if overflows(wanted, leaves):
                continue
            used = {wanted["batch"], *grid.values()}
            for role in texts if text else ():
                length = max(5, sizes[role])
                while length in used or any(length == s for s in sizes.values()):
                    length += 2
                wanted[role] = length
                used.add(length)
            if wanted not in seen:
                seen.append(wanted)
                yield wanted, True
    if not fixed:
        yield {**sizes, "batch": two}, True
    yield {**sizes, "batch": two}, False


def overflows(sizes: Sizes, leaves: Sequence[Argument]) -> bool:
    """Return True if a picture of these sizes leaves no padding where an argument has some."""
    roles = {role for leaf in leaves for role in leaf.roles if role.startswith("tokens/1:")}
    sites = sizes.get("frames", 1) * sizes.get("y", 1) * sizes.get("x", 1)
    return any(sites >= role_size(role, sizes) for role in roles)


def uneven(sizes: Sizes) -> Sizes:
    """Return larger sizes of the sequences, of which small multiples lack several tokens.

    A size of 0 or 1, such as that of a padding, has another meaning in a graph.
    """
    found = dict(sizes)
    for role, size in sizes.items():
        if role == "tokens" or role.startswith("text:"):
            taken = {s for r, s in found.items() if r != role}
            found[role] = next(n for n in count(size) if lacks_several(n) and n not in taken)
    return found


def lacks_several(size: int) -> bool:
    """Return True if a size lacks two tokens at least to a multiple of small numbers."""
    return all(-size % multiple > 1 for multiple in (3, 4, 5, 7, 8, 16, 32, 64))


def is_thin(module: fx.GraphModule) -> bool:
    """Return True if a size that follows from others is 0 or 1 at capture."""
    for node in module.graph.nodes:
        value, sizes = node.meta.get("val"), list[IntLikeType]()
        if isinstance(value, torch.Tensor):
            sizes += value.shape
        elif isinstance(value, torch.SymInt) and any("pad" in str(u.target) for u in node.users):
            sizes.append(value)
        for size in sizes:
            if not isinstance(size, torch.SymInt) or has_no_hint(size):
                continue
            if not size.node.expr.is_Symbol and int_hint(size) < 2:
                return True
    return False


def grids(sizes: Sizes, apart: bool = False) -> Iterator[Sizes]:
    """Yield image sizes near the example's with height and width distinct at every level.

    With `apart` none is square before the last one, so that a size shows which side it is.
    """
    if "tokens" in sizes:
        yield {"tokens": sizes["tokens"] + 6 + sizes["tokens"] % 2}
        yield {"tokens": sizes["tokens"]}
    if "y" in sizes and "x" in sizes:
        h, w = sizes["y"], sizes["x"]
        unit = 1
        while unit < 16 and h % (2 * unit) == 0 and w % (2 * unit) == 0:
            unit *= 2
        if unit >= 4:
            yield {"y": 3 * unit, "x": 5 * unit}
            if h > unit:
                yield {"y": h, "x": w - unit if h != w - unit and w > unit else w + unit}
                yield {"y": max(h // 2, unit), "x": w}
        others = [{"y": h, "x": w + unit}] if h == w else []
        yield from [*others, {"y": h, "x": w}] if apart else [{"y": h, "x": w}, *others]
