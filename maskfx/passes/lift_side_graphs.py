"""Moves the parts that aren't computed on rows into separate graphs.

Values of the request alone (text projections, rotary tables, position embeddings, a ControlNet's
image) are computed once per request, in full. Parts that no rule narrows are computed in every
step, in full. The results of both graphs become inputs of the main graph.
"""

from __future__ import annotations

import operator

import torch
from torch import fx

from maskfx.ir.geometry.lanes import Batch, Feature, Lane, Y, lane_of, set_lane, shape_hint
from maskfx.ir.modules.lazy_module import LazyModule
from maskfx.ir.nodes import ancestors, is_symbol_arithmetic
from maskfx.ir.programs.program import SideGraph
from maskfx.ir.programs.sources import Given
from maskfx.ir.values import is_wrapped
from maskfx.passes.context import NoRows, PassContext, argument, aten, node_value, op_name
from maskfx.passes.lane_rules.marker import ATTENTION
from maskfx.passes.lane_rules.mixing import is_within_rows
from maskfx.passes.mark_stages import CONST, STEP, stage_of


def lift_side_graphs(graph: fx.Graph, ctx: PassContext) -> int:
    """Split the graph by stage.

    Before  k = linear(text, w); y = attention(q, k, v)        (text belongs to the request)
    After   y = attention(q, request_0, v); a request graph returns linear(text, w)
    and     return y, sample, linear(text, w)
    becomes return y, clone(sample), clone(request_0)   (sample is an argument)
    Keeps   weights, and values that no side graph needs to compute.
    """
    if ctx.sides:
        return 0
    dense = dense_closure(graph, ctx)
    output = graph.output_node()
    for node in output.all_input_nodes:
        if node in dense:
            raise NoRows(node, "the output itself comes from a part that runs in full")
        if stage_of(node) != STEP or node.op == "placeholder":
            copy_for(output, node)
    main = [n for n in graph.nodes if is_main(n, dense)]
    request: list[fx.Node] = []
    stepwise: list[fx.Node] = []
    for node in main:
        for source in node.all_input_nodes:
            if is_main(source, dense) or source.op == "placeholder" or is_symbol_arithmetic(source):
                continue
            lane = lane_of(source)
            kept = (is_weight(source) or widens(source)) and not is_site_mask(source, node)
            if kept and lane is not None and lane.kind == "const":
                continue
            group = stepwise if source in dense else request
            if source not in group and isinstance(node_value(source), torch.Tensor):
                group.append(source)
    ctx.sides["request"] = extract(graph, ctx, request)
    ctx.sides["dense"] = extract(graph, ctx, stepwise)
    leaves = [n for n in graph.nodes if n.op == "placeholder"]
    for index, node in enumerate(leaves):
        lane = lane_of(node)
        if lane is not None and any(is_main(u, dense) for u in node.users):
            whole = lane.whole(level_at(node))
            set_lane(node, whole)
            ctx.interface.inputs[str(node.target)] = Given("step", index, whole)
    count = 0
    for origin, group in (("request", request), ("dense", stepwise)):
        for index, node in enumerate(group):
            replace_by_input(graph, ctx, node, origin, index, dense)
            count += 1
    remove_rest(graph, output)
    return count


def copy_for(output: fx.Node, node: fx.Node) -> None:
    """Return a copy of a value that no step computes."""
    lane = lane_of(node)
    if lane is None or lane.kind == "const":
        raise NoRows(node, "an output depends on no argument of the call, or only on its size")
    with output.graph.inserting_before(output):
        new = output.graph.call_function(aten.clone.default, (node,))
    new.meta.update(val=node_value(node), stage=STEP)
    set_lane(new, lane)
    output.replace_input_with(node, new)


def dense_closure(graph: fx.Graph, ctx: PassContext) -> set[fx.Node]:
    """Return the nodes that run in full: the refused ones and their ancestors of stage STEP."""
    dense: set[fx.Node] = set()
    stack = [n for n in graph.nodes if n.name in ctx.dense]
    while stack:
        node = stack.pop()
        if node in dense or stage_of(node) != STEP or node.op == "placeholder":
            continue
        dense.add(node)
        stack.extend(node.all_input_nodes)
    # the outputs of one node stay in one graph
    for node in graph.nodes:
        if node.target is operator.getitem and node.args[0] in dense:
            dense.add(node)
    return dense


def is_weight(node: fx.Node) -> bool:
    """Return True for a weight, or a part of one, such as the matrix of one expert."""
    while op_name(node) in ("select", "unbind", "getitem"):
        node = node.args[0]  # type: ignore[assignment]
    return node.op == "get_attr"


def is_site_mask(source: fx.Node, node: fx.Node) -> bool:
    """Return True for the mask of an attention among sites, whose rows each request picks."""
    if op_name(node) != ATTENTION or argument(node, 3, "attn_mask") is not source:
        return False
    lanes = [lane_of(n) for n in node.args[:3]]
    known = [lane for lane in lanes if lane is not None]
    sites = any(lane.has_sites for lane in known)
    return sites and len(known) == len(lanes) and not is_within_rows(*known)


def widens(node: fx.Node) -> bool:
    """Return True for a matrix that is made from a quantized weight.

    It is made in every step, as its module does: kept, it would take the memory of a weight that
    isn't quantized.
    """
    value = node_value(node)
    if node.op != "call_function" or stage_of(node) != CONST:
        return False
    if not isinstance(value, torch.Tensor) or value.dim() < 2:
        return False
    return any(one.op == "get_attr" and is_quantized(node_value(one)) for one in ancestors([node]))


def is_quantized(value: object) -> bool:
    """Return True for numbers of one byte, and for a package's class around its own numbers."""
    return isinstance(value, torch.Tensor) and (
        is_wrapped(value) or value.dtype.itemsize == 1 and value.dtype != torch.bool
    )


def is_main(node: fx.Node, dense: set[fx.Node]) -> bool:
    if node.op == "output":
        return True
    return (
        node.op == "call_function"
        and stage_of(node) == STEP
        and node not in dense
        and not is_symbol_arithmetic(node)
    )


def extract(graph: fx.Graph, ctx: PassContext, outputs: list[fx.Node]) -> SideGraph:
    """Return a module that computes `outputs` from the graph's arguments."""
    needed = ancestors(outputs)
    side = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    used = []
    index = 0
    for node in graph.nodes:
        if node.op == "placeholder":
            if node in needed:
                used.append(index)
            index += 1
            env[node] = side.placeholder(str(node.target))
        elif node in needed:
            env[node] = side.node_copy(node, lambda n: env[n])
    side.output(tuple(env[n] for n in outputs))
    module = LazyModule(graph.owning_module, side)  # type: ignore[arg-type]
    lanes = [given_lane(ctx, n) or Lane(()) for n in outputs]
    return SideGraph(module, lanes, used, sum(n.op == "call_function" for n in needed))


def replace_by_input(
    graph: fx.Graph, ctx: PassContext, node: fx.Node, origin: str, index: int, dense: set[fx.Node]
) -> None:
    name = f"{origin}_{index}"
    last = [n for n in graph.nodes if n.op == "placeholder"][-1]
    with graph.inserting_after(last):
        new = graph.placeholder(name)
    new.meta["val"] = node_value(node)
    new.meta["stage"] = max(stage_of(node), CONST)
    lane = given_lane(ctx, node)
    whole = lane.whole(level_at(node)) if lane is not None else None
    set_lane(new, whole)
    ctx.interface.inputs[name] = Given(origin, index, whole or Lane(()))
    node.replace_all_uses_with(new, delete_user_cb=lambda user: is_main(user, dense))


def level_at(node: fx.Node) -> int:
    """Return the level of the sites at which a value is read."""
    lanes = [lane for user in node.users if (lane := lane_of(user)) is not None]
    return next((a.level for lane in lanes for a in lane.atoms() if isinstance(a, Y)), 0)


def given_lane(ctx: PassContext, node: fx.Node) -> Lane | None:
    """Return the lane of a side graph's result; for a batch of one it has a batch axis.

    The side graph runs for each sample then, and the results are joined. A batch of one may come
    before any other axis.
    """
    lane, value = lane_of(node), node_value(node)
    if not ctx.batch_of_one or stage_of(node) == CONST or not value.dim():
        return lane
    if lane is None:  # an attention mask, whose axes need no meaning
        lane = Lane(tuple((Feature(size),) for size in shape_hint(value)))
    return lane if lane.has_batch else Lane(((Batch(), *lane.dims[0]), *lane.dims[1:]))


def remove_rest(graph: fx.Graph, output: fx.Node) -> None:
    """Erase nodes that the main graph doesn't use; size arithmetic stays while it is used."""
    keep: set[fx.Node] = set()
    stack: list[fx.Node] = [output]
    while stack:
        node = stack.pop()
        if node not in keep:
            keep.add(node)
            stack.extend(node.all_input_nodes)
    for node in reversed(list(graph.nodes)):
        if node not in keep and node.op != "placeholder":
            graph.erase_node(node)
