"""Runs calls that have no program: the module, or for edits the captured graph in full.

Edits that run the graph return what the rows would have given: at each operator, sites outside the
mask have the values that they had when the step was recorded, whatever is computed for them now.
For this the recorded inputs run again beside those of the edit, so an edit costs two runs of the
graph. Parts that no rule narrows see the edit's inputs, as they do in a program.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from maskfx.compiler.annotate import MarkedGraph, mark_graph
from maskfx.compiler.capture.arguments.roles import Roles, observed_sizes
from maskfx.compiler.capture.capture import capture
from maskfx.compiler.capture.captured import groups_of, joined
from maskfx.compiler.compile import Compilation
from maskfx.ir.geometry.lanes import SITES, Batch, Lane, is_image, lane_of, lanes_of, site_order
from maskfx.ir.objects import copied_tree
from maskfx.ir.values import copies, same_values
from maskfx.runtime.backends.graph_function import find
from maskfx.runtime.batch.rows import atom_size, is_spread
from maskfx.runtime.hardware.devices import copied, moved
from maskfx.runtime.lora.calls import adapted
from maskfx.runtime.lora.layers import AdapterSet, SetCache
from maskfx.runtime.sites.active import ActiveSites
from maskfx.runtime.sites.mask import Mask
from maskfx.runtime.steps import EditStep, RecordStep, ValidatedCall
from maskfx.runtime.weights import Weights

log = logging.getLogger(__name__)

Values = dict[fx.Node, object]
AdapterPair = tuple[AdapterSet | None, AdapterSet | None]


def run_in_full(call: ValidatedCall, module: nn.Module, weights: Weights) -> object:
    """Run a call that has no program; an edit keeps the recording outside the mask."""
    step, inputs, graph = call.step, call.inputs, call.inputs.compilation.marked
    if isinstance(step, EditStep) and graph is not None and step.cache.given:
        device, cache = inputs.latent.device, step.cache
        given = [moved(v, device) if isinstance(v, Tensor) else v for v in cache.given]
        pair = call.adapters, recorded_adapters(call, module)
        flat = edit_in_full(graph, inputs.values, given, mask_of(call), cache.output, pair)
        return inputs.unflatten(blended(flat, call))
    with adapted([(1, call.adapters)]):
        output = module(**pytree.tree_unflatten(inputs.values, inputs.spec))
    weights.settle(ran=True)
    flat, spec = pytree.tree_flatten(output)
    if isinstance(step, EditStep):
        return pytree.tree_unflatten(blended(flat, call), spec)
    if isinstance(step, RecordStep):
        given = [] if graph is None else copies(inputs.values)
        return output, call.recording(copies(flat), weights.recorded(), given)
    return output


def recorded_adapters(call: ValidatedCall, module: nn.Module) -> AdapterSet | None:
    """Return those of an edit's adapters that its recording was made with."""
    assert isinstance(call.step, EditStep)
    kept = call.step.cache.adapters
    if call.adapters is None or call.adapters.digests == kept:
        return call.adapters
    return SetCache(module).of([u for u in call.step.adapters if (u.digest, u.weight) in kept])


def recorded_output(call: ValidatedCall) -> object:
    """Return the result of an edit without active sites."""
    assert isinstance(call.step, EditStep)
    device, recorded = call.inputs.latent.device, call.step.cache.output
    kept = [copied(t, device) if isinstance(t, Tensor) else t for t in recorded]
    return call.inputs.unflatten(kept)


def blended(flat: Sequence[object], call: ValidatedCall) -> list[object]:
    """Return an edit's results where masked and the recorded ones elsewhere."""
    assert isinstance(call.step, EditStep)
    pictures, whole = call.inputs.pictures, mask_of(call).sites
    masks = [whole] * len(flat)
    if len(pictures) == len(flat):
        parts = zip(whole.split(list(map(prod, pictures))), pictures, strict=True)
        masks = [part.view(shape) for part, shape in parts]
    triples = zip(flat, call.step.cache.output, masks, strict=True)
    return [masked(*own) for own in triples]


def mask_of(call: ValidatedCall) -> Mask:
    assert call.mask is not None, "only edits have a mask"
    return call.mask


def masked(new: object, old: object, mask: Tensor) -> object:
    """Return new values where masked and recorded ones elsewhere.

    Values whose shape doesn't match the mask are returned new.
    """
    if not isinstance(new, Tensor) or not isinstance(old, Tensor):
        return new
    mask, old = moved(mask, new.device), moved(old, new.device)
    if mask.dim() == 2 and new.dim() >= 3 and new.shape[-2:] == mask.shape:
        return torch.where(mask, new, old)
    if mask.dim() == 1 and new.dim() == 3 and new.shape[1] == mask.shape[0]:
        return torch.where(mask[:, None], new, old)
    return new


def edit_in_full(
    graph: MarkedGraph,
    values: Sequence[object],
    recorded: Sequence[object],
    mask: Mask,
    wanted: Sequence[object],
    adapters: AdapterPair = (None, None),
) -> list[object]:
    """Run an edit in full and return the leaves of its result.

    Args:
        graph: The captured graph with its lanes.
        values: The flattened inputs of the edit.
        recorded: The flattened inputs of the recording.
        mask: The edit's mask.
        wanted: Values of the shapes of the result's leaves.
        adapters: Those of the edit, and those of the recording.
    """
    leaves, fixed = graph.capture.leaves, graph.capture.fixed_batch
    batch = observed_sizes(leaves, values)["batch"]
    if fixed is None or fixed == batch:
        return run_both(graph, values, recorded, mask, adapters)
    groups = zip(groups_of(leaves, values, fixed), groups_of(leaves, recorded, fixed), strict=True)
    runs = [run_both(graph, own, old, mask, adapters) for own, old in groups]
    return [
        joined(parts, leaf) for parts, leaf in zip(zip(*runs, strict=True), wanted, strict=True)
    ]


@torch.no_grad()
def graph_in_full(
    module: nn.Module,
    roles: Mapping[str, Roles] | None,
    compilation: Compilation,
    values: Sequence[object],
    spec: pytree.TreeSpec,
) -> MarkedGraph | None:
    """Return the captured graph for edits that run in full, if it gives the module's result.

    Args:
        module: The denoiser's module.
        roles: What its arguments mean.
        compilation: What was captured.
        values: The flattened inputs of a call, whose structure is `spec`.
    """
    inputs, found = copied_tree(values, spec), compilation.capture
    try:
        if found.was_read:  # without the symbols that the lanes are found by
            found = capture(module, inputs, roles, True, found.single)
        marked = mark_graph(found, compilation.reasons)
        wanted = module(**copied_tree(values, spec))
        sizes = observed_sizes(found.leaves, values)
        shape = (sizes["y"], sizes["x"]) if "y" in sizes else (sizes["tokens"],)
        nothing, leaves = Mask(torch.zeros(shape, dtype=torch.bool)), pytree.tree_leaves(wanted)
        flat = edit_in_full(marked, copies(values), copies(values), nothing, leaves)
        return marked if same_values(flat, wanted, found.rounding) else None
    except torch.OutOfMemoryError:
        raise  # the caller may retry with smaller inputs
    except Exception as error:  # fall back to the module's own result
        log.debug("a graph doesn't run in full: %s", error)
        return None


def run_both(
    graph: MarkedGraph,
    values: Sequence[object],
    recorded: Sequence[object],
    mask: Mask,
    adapters: AdapterPair = (None, None),
) -> list[object]:
    """Run the graph on an edit's inputs and on the recorded ones, operator by operator."""
    sizes = [observed_sizes(graph.capture.leaves, v) for v in (values, recorded)]
    both = SitePair(*(ActiveSites(graph.pyramid, own, mask) for own in sizes))
    given = iter(zip(values, recorded, strict=True))
    now: Values = {}
    then: Values = {}
    own, old = (adapted([(1, one)]) for one in adapters)
    seen: Values = {}  # what rows would read of values computed in full

    def read(node: fx.Node) -> Any:
        if node in graph.rows:
            return now[node]
        if node not in seen:
            seen[node] = both.at(node, now[node], then[node])
        return seen[node]

    for node in graph.module.graph.nodes:
        if node.op == "placeholder":
            now[node], then[node] = next(given)
        elif node.op == "get_attr":
            now[node] = then[node] = find(graph.module, str(node.target))
        elif node.op == "output":
            return pytree.tree_leaves(fx.map_arg(node.args[0], read))
        else:
            with old:
                then[node] = called(node, then.__getitem__)
            if node in graph.constant and adapters[0] is adapters[1]:
                now[node] = then[node]
            elif node in graph.rows:
                with own:
                    found = called(node, read)
                now[node] = both.at(node, found, then[node])
            else:
                with own:
                    now[node] = called(node, now.__getitem__)
        for done in graph.last.get(node, ()):
            for kept in (now, then, seen):
                kept.pop(done, None)
    raise AssertionError("a graph has an output")


class SitePair:
    """The active sites of an edit and of its recording; their texts may differ in length."""

    def __init__(self, own: ActiveSites, old: ActiveSites) -> None:
        self.own, self.old = own, old

    def at(self, node: fx.Node, now: object, then: Any) -> object:
        """Return the edit's value at active sites and the recorded one elsewhere."""
        several = lanes_of(node)
        if several is not None and isinstance(now, (tuple, list)):
            return type(now)(map(self._chosen, several, now, then))
        return self._chosen(lane_of(node), now, then)

    def _chosen(self, lane: Lane | None, now: object, then: Any) -> object:
        if lane is None or not lane.has_sites or lane.is_half or not isinstance(now, Tensor):
            return now
        if not any(map(is_image, lane.segments)):
            return now
        new, old = by_atoms(now, lane, self.own), by_atoms(then, lane, self.old)
        new = new.clone()
        axes = [i for i, a in enumerate(lane.atoms()) if isinstance(a, SITES)]
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
        """Lay a mask out as a value: sites are counted row by row, a value may be column-major."""
        if len(axes) < 2:
            return active
        kinds = [site_order(lane.atoms()[axis]) for axis in axes]
        order = sorted(range(len(kinds)), key=kinds.__getitem__)
        laid = active.view([sizes[i] for i in order])
        return laid.permute([order.index(i) for i in range(len(order))])


def by_atoms(value: Tensor, lane: Lane, sites: ActiveSites) -> Tensor:
    """Reshape a value to one axis per atom of its lane."""
    atoms = lane.atoms()
    sizes = [1 if isinstance(a, Batch) or is_spread(a) else atom_size(a, sites) for a in atoms]
    rest = value.numel() // max(1, torch.Size(sizes).numel())
    sizes = [rest if isinstance(a, Batch) else n for a, n in zip(atoms, sizes, strict=True)]
    return value.reshape(sizes)


def called(node: fx.Node, read: Callable[[fx.Node], Any]) -> Any:
    args: Any = fx.map_arg(node.args, read)
    kwargs: Any = fx.map_arg(dict(node.kwargs), read)
    assert callable(node.target), "graphs are flat"
    return node.target(*args, **kwargs)
