"""Unnarrowed: edits by the captured graph, in full, where its rows can't be used.

They give what the rows would have given: at each operator, sites outside the mask have the values
that they had when the step was recorded, whatever is computed for them now. For that the recorded
inputs run again beside those of the edit, so an edit costs two runs of the graph. Parts that no
rule narrows see the edit's own inputs, as they do beside rows.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from maskfx.compiler.capture.captured import Capture, groups_of, joined
from maskfx.compiler.capture.roles import observed_sizes
from maskfx.compiler.compile import fresh_copy
from maskfx.ir.lanes import Batch, Lane, Tokens, X, Y, is_image, lane_of, lanes_of
from maskfx.ir.program import Interface
from maskfx.passes.context import PassContext, get_attribute
from maskfx.passes.lift_side_graphs import dense_closure
from maskfx.passes.mark_lanes import mark_lanes
from maskfx.passes.mark_stages import CONST, STEP, stage_of
from maskfx.passes.pipeline import PIPELINE, run_passes
from maskfx.runtime.batch.rows import atom_size, is_spread
from maskfx.runtime.devices import moved
from maskfx.runtime.sites.active import Sites

Values = dict[fx.Node, Any]


class Unnarrowed:
    """One capture's graph, with the axes of its values known, and nothing rewritten to rows."""

    def __init__(self, capture: Capture, dense: Mapping[str, str]) -> None:
        assert capture.module is not None, "there is a graph"
        self.capture, self.module = capture, fresh_copy(capture.module)
        interface = Interface(pyramid=copy.deepcopy(capture.pyramid))
        ctx = PassContext(interface=interface, symbols=capture.symbols, dense=dict(dense))
        last = next(i for i, step in enumerate(PIPELINE) if step.run is mark_lanes)
        self.graph = self.module.graph
        run_passes(self.graph, ctx, PIPELINE[: last + 1])
        self.pyramid = interface.pyramid
        self._dense = dense_closure(self.graph, ctx)
        self._last = last_uses(self.graph)

    def edit(
        self, values: Sequence[Any], recorded: Sequence[Any], mask: Tensor, wanted: Sequence[Any]
    ) -> list[Any]:
        """The leaves of an edit's result; `wanted` are values of their shapes."""
        leaves, fixed = self.capture.leaves, self.capture.fixed_batch
        batch = observed_sizes(leaves, values)["batch"]
        if fixed is None or fixed == batch:
            return self._run(values, recorded, mask)
        groups = zip(
            groups_of(leaves, values, fixed), groups_of(leaves, recorded, fixed), strict=True
        )
        runs = [self._run(own, old, mask) for own, old in groups]
        return [
            joined(parts, leaf) for parts, leaf in zip(zip(*runs, strict=True), wanted, strict=True)
        ]

    def _run(self, values: Sequence[Any], recorded: Sequence[Any], mask: Tensor) -> list[Any]:
        sizes = [observed_sizes(self.capture.leaves, v) for v in (values, recorded)]
        both = Both(*(Sites(self.pyramid, own, mask) for own in sizes))
        given = iter(zip(values, recorded, strict=True))
        now: Values = {}
        then: Values = {}
        seen: Values = {}  # what rows would have read of values that run in full

        def read(node: fx.Node) -> Any:
            if self._has_rows(node):
                return now[node]
            if node not in seen:
                seen[node] = both.at(node, now[node], then[node])
            return seen[node]

        for node in self.graph.nodes:
            if node.op == "placeholder":
                now[node], then[node] = next(given)
            elif node.op == "get_attr":
                now[node] = then[node] = get_attribute(self.module, str(node.target))
            elif node.op == "output":
                return pytree.tree_leaves(fx.map_arg(node.args[0], read))
            else:
                rows = self._has_rows(node)
                then[node] = called(node, then.__getitem__)
                if stage_of(node) == CONST:
                    now[node] = then[node]
                else:
                    found = called(node, read if rows else now.__getitem__)
                    now[node] = both.at(node, found, then[node]) if rows else found
            for done in self._last.get(node, ()):
                for kept in (now, then, seen):
                    kept.pop(done, None)
        raise AssertionError("a graph has an output")

    def _has_rows(self, node: fx.Node) -> bool:
        """Would it be computed on rows, or from what is? All else runs in full."""
        return node.op == "call_function" and stage_of(node) == STEP and node not in self._dense


class Both:
    """An edit's sites, and those of what was recorded: texts may differ in length."""

    def __init__(self, own: Sites, old: Sites) -> None:
        self.own, self.old = own, old
        self._masks: dict[tuple[str, ...], Tensor] = {}

    def at(self, node: fx.Node, now: Any, then: Any) -> Any:
        """The value of now at active sites, and that of then elsewhere."""
        several = lanes_of(node)
        if several is not None and isinstance(now, (tuple, list)):
            return type(now)(map(self._chosen, several, now, then))
        return self._chosen(lane_of(node), now, then)

    def _chosen(self, lane: Lane | None, now: Any, then: Any) -> Any:
        if lane is None or not lane.has_sites or lane.is_half or not isinstance(now, Tensor):
            return now
        if not any(map(is_image, lane.segments)):
            return now
        new, old = by_atoms(now, lane, self.own), by_atoms(then, lane, self.old)
        new = new.clone()
        axes = [i for i, a in enumerate(lane.atoms()) if isinstance(a, (Y, X, Tokens))]
        starts = [0, 0]
        for segment in lane.segments:
            counts = [sites.count(segment) for sites in (self.own, self.old)]
            if is_image(segment):
                active = torch.zeros(counts[0], dtype=torch.bool)
                active[self.own.active(segment)] = True
                sizes = [new.shape[axis] if len(axes) > 1 else counts[0] for axis in axes]
                shape = [1] * new.dim()
                for axis, size in zip(axes, sizes, strict=True):
                    shape[axis] = size
                laid = self._laid(active, lane, axes, sizes).reshape(shape)
                here = moved(laid, new.device)
                part, kept = (
                    v if len(axes) > 1 else v.narrow(axes[0], start, counts[0])
                    for v, start in zip((new, old), starts, strict=True)
                )
                part.copy_(torch.where(here, part, kept))
            starts = [start + count for start, count in zip(starts, counts, strict=True)]
        return new.reshape(now.shape)

    def _laid(
        self, active: Tensor, lane: Lane, axes: Sequence[int], sizes: Sequence[int]
    ) -> Tensor:
        """Sites are counted row by row; a value may have its columns first."""
        if len(axes) < 2 or isinstance(lane.atoms()[axes[0]], Y):
            return active
        return active.view(sizes[1], sizes[0]).t()


def by_atoms(value: Tensor, lane: Lane, sites: Sites) -> Tensor:
    """A value with an axis for each atom of its lane."""
    atoms = lane.atoms()
    sizes = [1 if isinstance(a, Batch) or is_spread(a) else atom_size(a, sites) for a in atoms]
    rest = value.numel() // max(1, torch.Size(sizes).numel())
    sizes = [rest if isinstance(a, Batch) else n for a, n in zip(atoms, sizes, strict=True)]
    return value.reshape(sizes)


def called(node: fx.Node, read: Any) -> Any:
    args: Any = fx.map_arg(node.args, read)
    kwargs: Any = fx.map_arg(dict(node.kwargs), read)
    assert callable(node.target), "graphs are flat"
    return node.target(*args, **kwargs)


def last_uses(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    """For each node, the values that nothing behind it reads."""
    found: dict[fx.Node, list[fx.Node]] = {}
    seen: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        for source in (node, *node.all_input_nodes):
            if source not in seen:
                seen.add(source)
                found.setdefault(node, []).append(source)
    return found
