"""`torch.compile(module, backend="maskfx")`: wraps Dynamo's graphs as denoisers.

Calls run the graph unchanged; inside `with maskfx.editing(...)` they record or edit. A module with
graph breaks gives several graphs, which record separate caches: pass all of them as a list, and
each graph edits with the one that it recorded; a graph that has none runs dense.
"""

from __future__ import annotations

import logging
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from maskfx.config import Settings
from maskfx.ir.values import same_values
from maskfx.runtime.denoiser import CompiledDenoiser
from maskfx.runtime.editing import Editing, current_editing
from maskfx.runtime.validation.validate import expand_timesteps

log = logging.getLogger(__name__)

PICTURES = ("sample", "hidden_states", "latents", "x")
STEPS = ("timestep", "sigma")  # arguments with a number for each request
CASTS = ("to", "float", "half", "bfloat16", "type")
RESIZES = ("view", "reshape", "expand", "new_zeros", "new_ones", "new_empty", "new_full")


def maskfx_backend(gm: fx.GraphModule, example_inputs: Sequence[object]) -> Callable[..., object]:
    """Wrap a graph for torch.compile; the entry point `maskfx` of torch_dynamo_backends."""
    return GraphDenoiser(gm)


class GraphDenoiser:
    """Runs one graph of Dynamo, called with the values of its placeholders in order."""

    def __init__(self, gm: fx.GraphModule) -> None:
        self.gm = gm
        self.signature = read_signature(gm.graph)
        self.denoiser: CompiledDenoiser | None = None
        self.weights: dict[int, object] = {}
        self.numbers: dict[int, float] = {}
        self.recorded: set[str] = set()

    def __call__(self, *values: object) -> object:
        active = current_editing()
        if active is None or not self.signature.arguments:
            return self.gm(*values)
        inputs = {name: values[i] for i, name in self.signature.arguments.items()}
        if not any(isinstance(v, Tensor) and v.dim() >= 3 for v in inputs.values()):
            return self.gm(*values)  # no picture: code between two graph breaks
        if active.mask is not None and not self._edits(active):
            return self.gm(*values)
        denoiser = self._denoiser(values)
        before = len(active.recorded)
        output = active.run(denoiser, inputs, self.recorded)
        self.recorded.update(c.program for c in active.recorded[before:])
        return output

    def _edits(self, active: Editing) -> bool:
        """Return True if one of the caches was recorded by this graph; a single one has to fit."""
        if len(active.caches) == 1:
            return True
        found = any(c.program in self.recorded for c in active.caches)
        if not found:
            log.info("no cache was recorded by this graph of %s; it runs dense", self.signature)
        return found

    def _denoiser(self, values: Sequence[Any]) -> CompiledDenoiser:
        """Compile a denoiser over the weights and numbers that Dynamo passes, if one changed."""
        weights = {i: values[i] for i in self.signature.weights}
        numbers = {i: float(values[i]) for i in self.signature.numbers}
        same = all(self.weights.get(i) is w for i, w in weights.items())
        if self.denoiser is None or not same or numbers != self.numbers:
            self.weights, self.numbers = weights, numbers
            module = as_module(self.gm, self.signature, weights | numbers, free_batch=True)
            if not same_call(module, self.gm, self.signature, values):
                module = as_module(self.gm, self.signature, weights | numbers, free_batch=False)
            self.denoiser = CompiledDenoiser(module, Settings())
        return self.denoiser


@dataclass(frozen=True)
class GraphSignature:
    """The role of each placeholder of a graph."""

    arguments: dict[int, str]
    weights: dict[int, str]
    numbers: list[int]  # floats of the module that Dynamo passes as tensors
    sizes: dict[int, tuple[int, int]]  # a size: a placeholder and its dimension of this size


def read_signature(graph: fx.Graph) -> GraphSignature:
    """Classify Dynamo's placeholders as arguments, weights, numbers and sizes."""
    arguments: dict[int, str] = {}
    weights: dict[int, str] = {}
    numbers: list[int] = []
    sizes: dict[int, tuple[int, int]] = {}
    placeholders = [n for n in graph.nodes if n.op == "placeholder"]
    for index, node in enumerate(placeholders):
        value = node.meta.get("example_value")
        shown = shown_by(value, placeholders) if isinstance(value, torch.SymInt) else None
        if shown is not None:
            sizes[index] = shown
        elif is_weight(node):
            weights[index] = f"weight_{index}"
        elif is_number(node):
            numbers.append(index)
        else:
            name = clean_name(str(node.target))
            arguments[index] = name if name not in arguments.values() else f"{name}_{index}"
    first = sorted(arguments, key=lambda i: (picture_rank(arguments[i]), i))
    return GraphSignature({i: arguments[i] for i in first}, weights, numbers, sizes)


def shown_by(size: torch.SymInt, placeholders: Sequence[fx.Node]) -> tuple[int, int] | None:
    """Return the first placeholder and dimension of this size, or None."""
    for index, node in enumerate(placeholders):
        value = node.meta.get("example_value")
        for axis, other in enumerate(value.shape if isinstance(value, Tensor) else ()):
            if isinstance(other, torch.SymInt) and other.node.expr == size.node.expr:
                return index, axis
    return None


def is_weight(node: fx.Node) -> bool:
    """Return True for a parameter or buffer that Dynamo lifted, as its name shows."""
    if isinstance(node.meta.get("example_value"), nn.Parameter):
        return True
    return bool(re.search(r"_(parameters|buffers)_", str(node.target)))


def is_number(node: fx.Node) -> bool:
    """Return True for a float of the module or its file, such as an epsilon.

    `dynamic=True` turns them into inputs.
    """
    value = node.meta.get("example_value")
    if not isinstance(value, Tensor) or value.dim() or value.dtype != torch.float64:
        return False
    of_module = re.search(r"^([Gg]|[Ll]_self)_|_modules_", str(node.target))
    return bool(of_module) and all(is_item(user) for user in node.users)


def is_item(node: fx.Node) -> bool:
    return node.op == "call_method" and node.target == "item"


def clean_name(target: str) -> str:
    """Return `sample` for L_sample_ or L_kwargs_sample_."""
    name = re.sub(r"^[Ll]_(kwargs_)?(.*?)_?$", r"\2", target)
    return name if name.isidentifier() else f"value_{re.sub(r'[^0-9a-zA-Z_]', '_', name)}"


def picture_rank(name: str) -> int:
    """Return a sort key that puts the picture first, as in the signatures of denoisers."""
    return PICTURES.index(name) if name in PICTURES else len(PICTURES)


def as_module(
    gm: fx.GraphModule, signature: GraphSignature, state: Mapping[int, object], free_batch: bool
) -> fx.GraphModule:
    """Return the graph as a module over its weights and numbers, with named arguments.

    Args:
        gm: Dynamo's graph.
        signature: The roles of its placeholders.
        state: The weights and numbers by placeholder.
        free_batch: Let a size that only repeats the batch of a reshaped tensor follow that batch.
    """
    root = nn.Module()
    for name, child in gm.named_children():
        root.add_module(name, child)
    for name, value in [*gm.named_parameters(recurse=False), *gm.named_buffers(recurse=False)]:
        setattr(root, name, value)
    graph = fx.Graph()
    env: dict[fx.Node, Any] = {}
    old = [n for n in gm.graph.nodes if n.op == "placeholder"]
    for index, name in signature.arguments.items():
        env[old[index]] = graph.placeholder(name)
    for index, name in signature.weights.items():
        keep_weight(root, name, state[index])
        env[old[index]] = graph.get_attr(name)
    for index, (source, axis) in signature.sizes.items():
        env[old[index]] = graph.call_method("size", (env[old[source]], axis))
    numbers = {old[i]: state[i] for i in signature.numbers}
    steps, single = scalar_steps(gm.graph)
    for step in single:
        env[step] = graph.call_function(operator.getitem, (env[step], 0))
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            continue
        if is_item(node) and node.args[0] in numbers:
            env[node] = numbers[node.args[0]]
            continue
        if node in steps:
            env[node] = env[steps[node]]
            continue
        env[node] = graph.node_copy(node, lambda n: env[n])
        if free_batch and repeats_batch(node):
            follow_batch(graph, env[node])
    return fx.GraphModule(root, graph)


def keep_weight(root: nn.Module, name: str, value: object) -> None:
    if isinstance(value, nn.Parameter):
        root.register_parameter(name, value)
    elif isinstance(value, Tensor):
        root.register_buffer(name, value, persistent=False)
    else:
        setattr(root, name, value)


def repeats_batch(node: fx.Node) -> bool:
    """Return True if a resize spells out the size of its input's first dimension and keeps it."""
    if node.op != "call_method" or node.target not in RESIZES or len(node.args) < 2:
        return False
    source, size = node.args[0], node.args[1]
    size = size[0] if isinstance(size, (tuple, list)) and size else size
    before = source.meta.get("example_value") if isinstance(source, fx.Node) else None
    after = node.meta.get("example_value")
    if not isinstance(before, Tensor) or not isinstance(after, Tensor) or type(size) is not int:
        return False
    if not before.dim() or not after.dim():
        return False
    return before.shape[0] == size == after.shape[0]


def follow_batch(graph: fx.Graph, node: fx.Node) -> None:
    with graph.inserting_before(node):
        size = graph.call_method("size", (node.args[0], 0))
    sizes = node.args[1]
    if isinstance(sizes, (tuple, list)):
        node.args = (node.args[0], (size, *sizes[1:]), *node.args[2:])
    else:
        node.args = (node.args[0], size, *node.args[2:])


def is_scalar_step(node: fx.Node) -> bool:
    """Return True for a timestep or the like that is one number for the whole batch."""
    value = node.meta.get("example_value")
    name = clean_name(str(node.target))
    return isinstance(value, Tensor) and value.dim() == 0 and any(w in f"_{name}_" for w in STEPS)


def gives_axis(node: fx.Node) -> bool:
    """Return True if a node gives its input, which has no axes, the axis of the batch."""
    index = node.args[1] if len(node.args) > 1 else None
    if node.target is operator.getitem:
        return index in (None, (None,))
    return node.op == "call_method" and node.target == "unsqueeze" and index in (0, -1)


def scalar_steps(graph: fx.Graph) -> tuple[dict[fx.Node, fx.Node], set[fx.Node]]:
    """Find how a graph reads steps that are one number for the whole batch.

    A batch has a number for each request in their place. The nodes that give the number its batch
    axis are left out: they are returned with what stands for them. A step that is read as a
    number elsewhere too is returned in the set: the first request's is read.
    """
    dropped: dict[fx.Node, fx.Node] = {}
    numbers: set[fx.Node] = set()
    for step in filter(is_scalar_step, graph.find_nodes(op="placeholder")):
        ahead, found, elsewhere = [step], dict[fx.Node, fx.Node](), False
        while ahead:
            node = ahead.pop()
            for user in node.users:
                if gives_axis(user):
                    found[user] = node
                elif user.op == "call_method" and user.target in CASTS:
                    ahead.append(user)
                else:
                    elsewhere = True
        if elsewhere:
            numbers.add(step)
        else:
            dropped |= found
    return dropped, numbers


def same_call(
    module: fx.GraphModule, gm: fx.GraphModule, signature: GraphSignature, values: Sequence[object]
) -> bool:
    """Return True if the module's outputs equal the graph's."""
    with torch.no_grad():
        own = [v.clone() if isinstance(v, Tensor) else v for v in values]
        wanted = gm(*own)
        named = {name: own[i] for i, name in signature.arguments.items()}
        found = module(**expand_timesteps(named, module))
    return same_values(found, wanted)
