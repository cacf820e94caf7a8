"""Builds a Program of a rewritten graph: its inputs, a twin that records, and a digest."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from types import FunctionType
from typing import Any

import torch
import xxhash
from torch import Tensor, fx

from maskfx.ir.geometry.lanes import Batch, lane_of
from maskfx.ir.modules.lazy_module import LazyModule, over_same
from maskfx.ir.programs.program import Interface, Product, Program
from maskfx.ir.programs.sources import Tapped
from maskfx.ir.values import autocast_dtypes, octets
from maskfx.passes.context import ROWS, PassContext, aten, get_attribute


def build(module: fx.GraphModule, ctx: PassContext, captured: fx.GraphModule) -> Program:
    """Build the program: the rewritten graph, and a copy that also outputs the recorded taps."""
    graph, interface = module.graph, ctx.interface
    for node in list(graph.nodes):
        if node.op == "placeholder" and not node.users and str(node.target) not in interface.inputs:
            graph.erase_node(node)
    used = {str(n.target) for n in graph.nodes if n.op == "placeholder" and n.users}
    for node in list(graph.nodes):
        if node.op == "placeholder" and str(node.target) not in used:
            graph.erase_node(node)
            interface.inputs.pop(str(node.target), None)
    order = [str(n.target) for n in graph.nodes if n.op == "placeholder"]
    interface.inputs = {name: interface.inputs[name] for name in order}
    taps = {}
    for node in graph.nodes:
        for key, name in node.meta.items():
            if str(key).startswith("tap") and name in interface.taps:
                taps[name] = node
    interface.taps = {name: tap for name, tap in interface.taps.items() if name in taps}
    interface.products = products_of(graph, ctx)
    recording = recording_twin(module, [taps[name] for name in interface.taps])
    main = LazyModule(module, graph)
    code = digest(module, interface)
    origins = {d.origin: get_attribute(captured, d.origin) for d in interface.derived}
    return Program(main, recording, interface, code, origins)


def products_of(graph: fx.Graph, ctx: PassContext) -> dict[str, Product]:
    """Return the linear layers to which low-rank terms can be added, by the name of their node.

    How many rows an expert chose isn't known on the host, so its layers aren't among them.
    """
    derived = {item.name: item for item in ctx.interface.derived}
    experts = {choice.node for choice in ctx.choices.values()}
    found = {}
    for node in graph.find_nodes(op="call_function", target=aten.linear.default):
        weight, lane = node.args[1], lane_of(node)
        segments = node.meta.get(ROWS, ())
        of_requests = lane is not None and lane.kind == "sample" and lane.dims[0] == (Batch(),)
        chosen = any(s in ctx.choices or s.split(":")[0] in experts for s in segments)
        if weight.op != "get_attr" or chosen or not (segments or of_requests):
            continue
        item = derived.get(str(weight.target))
        origin, order = (str(weight.target), ()) if item is None else (item.origin, item.order)
        found[node.name] = Product(origin, order, segments)
    return found


def recording_twin(module: fx.GraphModule, taps: Sequence[fx.Node]) -> fx.GraphModule:
    """Return a copy of a rewritten graph that also outputs these values."""
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    for node in module.graph.nodes:
        if node.op == "output":
            outputs = fx.map_arg(node.args[0], lambda n: env[n])
            graph.output((outputs, tuple(env[tap] for tap in taps)))
        else:
            env[node] = graph.node_copy(node, lambda n: env[n])
    return over_same(module, graph)


def taps_of(recording: fx.GraphModule) -> list[fx.Node]:
    """Return the values that a recording twin outputs besides the results."""
    results = recording.graph.output_node().args[0]
    assert isinstance(results, (list, tuple)), "a graph without taps"
    taps = results[1]
    assert isinstance(taps, (list, tuple)), "a graph without taps"
    return [tap for tap in taps if isinstance(tap, fx.Node)]


def digest(module: fx.GraphModule, interface: Interface) -> str:
    """Return a hash of what the program computes, independent of node names and device numbers.

    Other captures of the same computation have the same hash.
    """
    graph = module.graph
    number = {node: i for i, node in enumerate(graph.nodes)}
    origins = {item.name: item.origin for item in interface.derived}
    taps = {name: i for i, name in enumerate(interface.taps)}
    pyramid = interface.pyramid
    devices: dict[torch.device, torch.device] = {}

    def named(value: Any) -> Any:
        if isinstance(value, torch.device) and value.type != "cpu":
            return devices.setdefault(value, torch.device(value.type, len(devices)))
        return f"%{number[value]}" if isinstance(value, fx.Node) else value

    lines = [repr(pyramid.levels), repr(sorted(pyramid.cuts.places.items())), repr(pyramid.frames)]
    lines += [repr(interface.outputs), *autocast_dtypes()]
    for tap in interface.taps.values():
        lines.append(repr(dataclasses.replace(tap, name="")))
    for node in graph.nodes:
        if node.op == "placeholder":
            source = interface.inputs[str(node.target)]
            if isinstance(source, Tapped):
                source = dataclasses.replace(source, tap=str(taps[source.tap]))
            lines.append(repr(source))
            continue
        args = fx.node.map_aggregate((node.args, dict(node.kwargs)), named)
        target = node.target
        if isinstance(target, FunctionType):  # its repr has an address
            target = f"{target.__module__}.{target.__qualname__}"
        line = f"{node.op} {target} {args}"
        if node.op == "get_attr":
            name = str(node.target)
            line += content(get_attribute(module, origins.get(name, name)))
        lines.append(line)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def content(value: object) -> str:
    """Return dtype, shape and hash of a tensor beside the weights, such as a computed table."""
    if type(value) is not Tensor or value.is_meta:
        return ""
    held = octets(value.cpu())
    return f" {value.dtype} {tuple(value.shape)} {xxhash.xxh3_128_hexdigest(held.numpy().data)}"
