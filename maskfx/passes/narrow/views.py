"""Narrows views and permutes: most vanish, since rows and features keep their places."""

from __future__ import annotations

from math import prod

from torch import fx

from maskfx.ir.geometry.lanes import Feature, Lane, X, Y
from maskfx.ir.geometry.pyramid import Window
from maskfx.ir.programs.sources import Subsites
from maskfx.passes.context import Editor, PassContext, argument, aten, need_lane, op_name
from maskfx.passes.operators import VIEWS
from maskfx.passes.row_form import aligned, full_rows, is_rows, pick_up, spread_to

MOVES = frozenset({"permute", "transpose", "swapaxes"})


def narrow_views(graph: fx.Graph, ctx: PassContext) -> int:
    """Regroup the features behind the rows.

    Before  y = view(x, [b, h * w, heads, d])      (x is [b, h * w, heads * d])
    After   y = unflatten(rows, 1, [heads, d])
    Keeps   views of values without sites.
    """
    count = 0
    for node in list(graph.nodes):
        name = op_name(node)
        if node.op != "call_function" or not is_rows(node):
            continue
        edit = Editor(graph, ctx, node)
        if name in VIEWS:
            view(edit, node)
        elif name in MOVES:
            permute(edit, node)
        elif name in ("expand", "expand_as", "broadcast_to"):
            expand(edit, node)
        elif name == "repeat_interleave":
            lane, axis = need_lane(node.args[0]), argument(node, 2, "dim")
            rows = edit.rows(node.args[0])
            if lane.features(axis) == 1:
                rows = edit.emit(aten.unsqueeze.default, rows, lane.row_dim(axis))
            times = argument(node, 1, "repeats")
            edit.replace(
                edit.emit(aten.repeat_interleave.self_int, rows, times, lane.row_dim(axis))
            )
        elif name == "repeat" and need_lane(node.args[0]).kind == "rows":
            repeat(edit, node)
        elif name in ("view_as_complex", "view_as_real"):
            edit.replace(edit.emit(node.target, edit.rows(node.args[0])))
        else:
            continue
        count += 1
    return count


def expand(edit: Editor, node: fx.Node) -> None:
    """Repeat a value at every site; feature axes of size one are expanded."""
    source, out = need_lane(node.args[0]), need_lane(node)
    spread = aligned(source, out) != out.row_shape()
    edit.replace((full_rows if spread else spread_to)(edit, node.args[0], out))  # type: ignore[arg-type]


def repeat(edit: Editor, node: fx.Node) -> None:
    """Repeat features, or an axis of size one."""
    lane, out = need_lane(node.args[0]), need_lane(node)
    have = aligned(lane, out)
    rows = edit.reshape(edit.rows(node.args[0]), lane.row_shape(), have)  # type: ignore[arg-type]
    times = [n // m for n, m in zip(out.row_shape(), have, strict=True)]
    edit.replace(edit.emit(aten.repeat.default, rows, [1, *times]))


def permute(edit: Editor, node: fx.Node) -> None:
    lane = need_lane(node.args[0])
    order = list(range(len(lane.dims)))
    if op_name(node) == "permute":
        order = [d % len(order) for d in argument(node, 1, "dims")]
    else:
        a, b = argument(node, 1, "dim0"), argument(node, 2, "dim1")
        order[a], order[b] = order[b], order[a]
    rows = edit.rows(node.args[0])  # type: ignore[arg-type]
    edit.replace(permute_features(edit, rows, lane, order))


def permute_features(edit: Editor, rows: fx.Node, lane: Lane, order: list[int]) -> fx.Node:
    moved = [lane.row_dim(d) for d in order if lane.features(d) > 1]
    if moved == sorted(moved):
        return rows
    return edit.emit(aten.permute.default, rows, [0, *moved])


def view(edit: Editor, node: fx.Node) -> None:
    before, after = need_lane(node.args[0]), need_lane(node)
    rows = edit.rows(node.args[0])  # type: ignore[arg-type]
    if before.segments == after.segments:
        edit.replace(edit.reshape(rows, before.row_shape(), after.row_shape()))
        return
    edit.replace(
        patchify(edit, rows, before, after)
        if is_finer(edit, before, after)
        else unpatchify(edit, rows, before, after)
    )


def is_finer(edit: Editor, before: Lane, after: Lane) -> bool:
    return edit.ctx.pyramid.hints[y_level(before)] > edit.ctx.pyramid.hints[y_level(after)]


def y_level(lane: Lane) -> int:
    return next(a.level for a in lane.atoms() if isinstance(a, Y))


def patchify(edit: Editor, rows: fx.Node, before: Lane, after: Lane) -> fx.Node:
    """Concatenate p x p rows of the finer level into one row of the coarser level."""
    fine, coarse = y_level(before), y_level(after)
    hints = edit.ctx.pyramid.hints
    patch = hints[fine][0] // hints[coarse][0]
    window = Window(fine, coarse, (patch, patch), (patch, patch), (0, 0))
    shape = before.row_shape()
    channels = prod(shape)
    flat = edit.reshape(rows, shape, [channels])
    picked = pick_up(edit, flat, channels, window)
    labels = ["py", "px", *[f"f{i}" for i in range(len(shape))]]
    wide = edit.emit(aten.unflatten.int, picked, 1, [patch, patch, *shape])
    return arrange(edit, wide, labels, [patch, patch, *shape], after)


def arrange(
    edit: Editor, wide: fx.Node, labels: list[str], sizes: list[int], lane: Lane
) -> fx.Node:
    """Permute the features of a patch into the lane's order."""
    order, features = [], iter(range(2, len(labels)))
    left = 1
    atoms = lane.atoms()
    for i, atom in enumerate(atoms):
        if not isinstance(atom, Feature):
            continue
        if i > 0 and isinstance(atoms[i - 1], Y):
            order.append(0)
        elif i > 0 and isinstance(atoms[i - 1], X):
            order.append(1)
        elif left > 1:
            left //= atom.size
        else:
            index = next(features)
            order.append(index)
            left = sizes[index] // atom.size
    moved = edit.emit(aten.permute.default, wide, [0, *[1 + i for i in order]])
    return edit.reshape(moved, [sizes[i] for i in order], lane.row_shape())


def unpatchify(edit: Editor, rows: fx.Node, before: Lane, after: Lane) -> fx.Node:
    """Split each row of the coarser level into rows of the finer level."""
    coarse, fine = y_level(before), y_level(after)
    hints = edit.ctx.pyramid.hints
    patch = hints[fine][0] // hints[coarse][0]
    atoms = before.atoms()
    parts: list[tuple[str, int]] = []
    for i, atom in enumerate(atoms):
        if isinstance(atom, Feature):
            previous = atoms[i - 1] if i else None
            label = "y" if isinstance(previous, Y) else "x" if isinstance(previous, X) else "f"
            parts.append((label, atom.size))
    sizes = [s for _, s in parts]
    wide = edit.reshape(rows, before.row_shape(), sizes)
    first = [next(i for i, (p, s) in enumerate(parts) if p == axis and s == patch) for axis in "yx"]
    order = [*first, *[i for i in range(len(parts)) if i not in first]]
    moved = edit.emit(aten.permute.default, wide, [0, *[1 + i for i in order]])
    flat = edit.emit(aten.flatten.using_ints, moved, 0, 2)
    table = edit.input(f"subsites_{coarse}_{fine}", Subsites(coarse, fine, patch))
    picked = edit.emit(aten.index_select.default, flat, 0, table)
    rest = [sizes[i] for i in order[2:]]
    return edit.reshape(picked, rest, after.row_shape())
