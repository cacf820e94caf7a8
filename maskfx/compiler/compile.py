"""Compiles a capture to a program by running the passes; parts of it may stay dense."""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any

import torch
import xxhash
from torch import Tensor, fx

from maskfx.compiler.capture.captured import Capture
from maskfx.compiler.marked import MarkedGraph, fresh_copy
from maskfx.ir import progress
from maskfx.ir.lanes import Batch, lane_of
from maskfx.ir.program import Interface, Product, Program, SideGraph
from maskfx.ir.pyramid import Pyramid
from maskfx.passes.context import (
    ROWS,
    NoRows,
    PassContext,
    Unsupported,
    aten,
    get_attribute,
)
from maskfx.passes.inline_regions import inline_regions
from maskfx.passes.pipeline import PIPELINE, Pass, PassRecord, run_passes

log = logging.getLogger(__name__)

ROUNDS = 64  # runs of the passes, each with one more node that runs dense


@dataclass
class Compilation:
    """The result of compiling one capture: a program on rows, or the reasons why there is none.

    Args:
        request, dense: side graphs that run in full, once per request and in every step.
        reasons: by node name, why a node runs dense.
        records: what each pass did.
        seconds: duration of the compilation.
    """

    capture: Capture
    program: Program | None
    request: SideGraph | None
    dense: SideGraph | None
    reasons: dict[str, str] = field(default_factory=dict)
    records: list[PassRecord] = field(default_factory=list)
    seconds: float = 0.0
    marked: MarkedGraph | None = None  # run by edits if the program was wrong


def compile_capture(
    capture: Capture,
    passes: tuple[Pass, ...] = PIPELINE,
    keep: Callable[[str, fx.Graph], None] | None = None,
    plans: bool = False,
    stretches: bool = False,
) -> Compilation:
    """Run the passes; mark each node that no rule narrows to run dense, and run them again.

    Args:
        capture: the captured graph; it is copied.
        passes: the passes in order.
        keep: called with name and graph after each pass that rewrote something.
        plans, stretches: see `maskfx.config.Settings`.
    """
    start = time.perf_counter()
    if capture.module is None:
        return Compilation(capture, None, None, None, {"capture": "; ".join(capture.notes[-3:])})
    reasons: dict[str, str] = {}
    progress.stage(1, "passes")
    for _ in range(ROUNDS):
        module = fresh_copy(capture.module)
        ctx = PassContext(
            interface=Interface(pyramid=copy.deepcopy(capture.pyramid)),
            symbols=capture.symbols,
            dense=dict(reasons),
            plans=plans,
            stretches=stretches,
        )
        try:
            records = run_passes(module.graph, ctx, passes, keep)
        except Unsupported as refused:
            name, reason = origin(refused.node), refused.reason
            reasons.update(ctx.dense)
            if isinstance(refused, NoRows):
                reasons.setdefault(name, reason)
                break
            if reasons.get(name) == reason:
                break
            reasons[name] = reason
            log.debug("runs dense: %s: %s", name, reason)
            continue
        except Exception as error:
            log.exception("the compiler failed; the denoiser runs dense")
            reasons["compiler"] = f"{type(error).__name__}: {error}"
            break
        program = build(module, ctx, capture.module)
        progress.stage(2, "comparison with the module")
        return Compilation(
            capture,
            program,
            ctx.sides["request"],
            ctx.sides["dense"],
            dict(ctx.dense),
            records,
            time.perf_counter() - start,
        )
    else:
        reasons["compiler"] = (
            f"stopped after {ROUNDS} runs of the passes: each refused one more node; a rule for "
            "one of these nodes may let the others follow"
        )
    return Compilation(capture, None, None, None, reasons, [], time.perf_counter() - start)


def origin(node: fx.Node) -> str:
    """Return the name of the captured node that a node was made for."""
    return str(node.meta.get("origin", node.name))


def flat_graph(module: fx.GraphModule) -> fx.Graph:
    """Return the captured graph with the regions that torch.export wraps inlined."""
    flat = fresh_copy(module)
    inline_regions(flat.graph, PassContext(Interface(pyramid=Pyramid(1)), {}))
    return flat.graph


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
    main = fx.GraphModule(module, graph)
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
    return fx.GraphModule(module, graph)


def digest(module: fx.GraphModule, interface: Interface) -> str:
    """Return a hash of what the program computes, independent of node names.

    Other captures of the same computation have the same hash.
    """
    graph = module.graph
    number = {node: i for i, node in enumerate(graph.nodes)}
    origins = {item.name: item.origin for item in interface.derived}
    taps = {name: i for i, name in enumerate(interface.taps)}
    lines = [repr(interface.pyramid.levels), repr(interface.outputs)]
    for tap in interface.taps.values():
        lines.append(repr(dataclasses.replace(tap, name="")))
    for node in graph.nodes:
        if node.op == "placeholder":
            source = interface.inputs[str(node.target)]
            tap_name = getattr(source, "tap", None)
            if tap_name is not None:
                changed: Any = {"tap": str(taps[tap_name])}
                source = dataclasses.replace(source, **changed)
            lines.append(repr(source))
            continue
        args = fx.map_arg((node.args, dict(node.kwargs)), lambda n: f"%{number[n]}")
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
    held = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return f" {value.dtype} {tuple(value.shape)} {xxhash.xxh3_128_hexdigest(held.numpy().data)}"


__all__ = ["Compilation", "compile_capture"]
