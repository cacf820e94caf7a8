"""A graph as JSON and back: operators by name, weights and whole modules by path in the denoiser.

Tensors that a graph holds beside the module's weights are constants: they are stored. Of what the
capture knew of a value, only shape and dtype are kept, which explanations and cost models read.
"""

from __future__ import annotations

import importlib
import operator
from collections.abc import Hashable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import Tensor, fx, nn

from maskfx.compiler.artifact.documents import (
    AttributeDocument,
    GraphDocument,
    NodeDocument,
    WholeDocument,
)
from maskfx.compiler.artifact.plain import Unsavable, decoded, encoded
from maskfx.compiler.artifact.specs import read_spec, spec_document
from maskfx.ir.geometry.lanes import NotLaned, int_hint, shape_hint
from maskfx.ir.json_values import Json
from maskfx.ir.modules.lazy_module import over_same
from maskfx.ir.values import is_wrapped, parts_of
from maskfx.ops.number_at import number_at
from maskfx.ops.whole_modules import Whole, run_whole

ARITHMETIC = """
    abs add and_ eq floordiv ge getitem gt index inv invert le lshift lt mod mul ne neg not_ or_ pos
    pow rshift sub truediv truth xor
"""
SYMBOLIC = "sym_float sym_int sym_ite sym_max sym_min sym_not sym_sqrt sym_sum"
# the functions that a graph may call beside operators, by module: a file can't name any other
FUNCTIONS = {
    "_operator": frozenset(ARITHMETIC.split()),
    "math": frozenset({"ceil", "floor", "gcd", "isqrt", "log2", "pow", "sqrt", "trunc"}),
    "builtins": frozenset({"abs", "bool", "float", "int", "max", "min", "pow", "round"}),
    "torch": frozenset(SYMBOLIC.split()),
    run_whole.__module__: frozenset({run_whole.__name__}),
    number_at.__module__: frozenset({number_at.__name__}),
}


@dataclass
class Tensors:
    """The tensors of one artifact: weights of the module by name, constants by number.

    Args:
        weights: the denoiser's weights by path.
        module: the denoiser.
        constants: the other tensors.
    """

    weights: Mapping[str, Tensor]
    module: nn.Module
    constants: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._named: dict[Hashable, AttributeDocument] = {}
        for name, weight in self.weights.items():
            for key in (id(weight), place_of(weight)):
                self._named.setdefault(key, {"weight": name})
        places = (weight.device for weight in self.weights.values() if not weight.is_meta)
        self.devices = list(dict.fromkeys(places)) or [torch.device("cpu")]

    def name_of(self, value: Tensor) -> AttributeDocument:
        """Return where a tensor is found again; a tensor that is no weight becomes a constant."""
        known = self._named.get(id(value)) or self._named.get(place_of(value))
        if known is None:
            if type(value) not in (Tensor, nn.Parameter) or value.is_meta:
                raise Unsavable(f"a graph holds a {type(value).__name__} without data")
            name = str(len(self.constants))
            self.constants[name] = value
            known = self._named[id(value)] = {"constant": name}
        return known

    def place(self, value: object) -> Json:
        """Return where a tensor or a device among plain values is found again."""
        if isinstance(value, torch.device):
            return self.place_of_device(value)
        if not isinstance(value, Tensor):
            raise Unsavable(f"a {type(value).__name__} can't be saved: {value!r:.80}")
        return {"tensor": [str(part) for pair in self.name_of(value).items() for part in pair]}

    def place_of_device(self, device: torch.device) -> Json:
        """Return a device by its number among those of the weights, which may lie on others later.

        One that holds no weights stays what it is.
        """
        if device in self.devices:
            return {"own_device": self.devices.index(device)}
        return {"device": str(device)}

    def node(self, value: object) -> Json:
        """Return a node, or a device, among an operator's arguments."""
        return self.place_of_device(value) if isinstance(value, torch.device) else node_name(value)

    def at(self, kind: str, place: Any) -> Tensor | torch.device:
        """Return the tensor or device that `place` wrote the place of."""
        if kind == "own_device":
            found: torch.device = self.devices[min(place, len(self.devices) - 1)]
            return found
        if kind != "tensor":
            raise Unsavable(f"an artifact holds a {kind!r}, which this version doesn't know")
        return self.of({place[0]: place[1]})  # type: ignore[misc]

    def of(self, place: AttributeDocument) -> Tensor:
        """Return the tensor at a place."""
        ((kind, name),) = place.items()
        source = self.weights if kind == "weight" else self.constants
        assert isinstance(name, str)
        if name not in source:
            raise Unsavable(f"the module has no {kind} {name!r}")
        return source[name]


def place_of(value: Tensor) -> Hashable:
    """Return what is equal for tensors that are the same numbers in the same place."""
    if value.is_meta or not value.numel() or is_wrapped(value):
        return id(value)
    return value.data_ptr(), value.shape, value.stride(), value.dtype, value.device


def weights_of(module: nn.Module) -> dict[str, Tensor]:
    """Return parameters and buffers by their path; a shared one stands under each of its paths.

    Of a quantized weight its parts are there too: the integers, the scales.
    """
    named = chain(
        module.named_parameters(remove_duplicate=False),
        module.named_buffers(remove_duplicate=False),
    )
    found = dict(named)
    wrapped = [(path, parts_of(weight)) for path, weight in found.items() if is_wrapped(weight)]
    return found | {
        path + name: nn.Parameter(part, requires_grad=False)  # as graphs hold them
        for path, parts in wrapped
        for name, part in parts.items()
    }


# Writing.


def graph_document(module: fx.GraphModule, tensors: Tensors, skip: frozenset[str]) -> GraphDocument:
    """Return a graph module as JSON; attributes in `skip` are made again by the reader."""
    attributes: dict[str, AttributeDocument] = {}
    nodes: list[NodeDocument] = []
    for node in module.graph.nodes:
        if node.op == "get_attr":
            name = str(node.target)
            value = operator.attrgetter(name)(module)
            if name in skip:
                attributes[name] = {"made": True}
            elif isinstance(value, fx.GraphModule):
                attributes[name] = {"graph": graph_document(value, tensors, frozenset())}
            elif isinstance(value, Whole):
                attributes[name] = {"whole": whole_document(value, tensors)}
            elif isinstance(value, Tensor):
                attributes[name] = tensors.name_of(value)
            else:
                raise Unsavable(f"a graph holds a {type(value).__name__} ({name})")
        nodes.append(
            {
                "op": node.op,
                "name": node.name,
                "target": target_name(node),
                "args": encoded(node.args, tensors.node),
                "kwargs": encoded(dict(node.kwargs), tensors.node),
                "val": value_document(node.meta.get("val")),
                "origin": str(node.meta.get("origin", "")),
            }
        )
    return {"nodes": nodes, "attributes": attributes}


def whole_document(whole: Whole, tensors: Tensors) -> WholeDocument:
    named = tensors.module.named_modules()
    path = next((path for path, part in named if part is whole.inner), None)
    if path is None:
        raise Unsavable(f"a graph runs a {type(whole.inner).__name__} that the module doesn't hold")
    return {
        "path": path,
        "spec": spec_document(whole.spec),
        "constants": encoded(whole.constants, tensors.place),
        "axes": whole.axes,
        "widths": whole.widths,
        "width": whole.width,
        "flops": whole.flops,
    }


def node_name(value: object) -> Json:
    if isinstance(value, fx.Node):
        return {"node": value.name}
    raise Unsavable(f"an operator's argument is a {type(value).__name__}: {value!r:.80}")


def target_name(node: fx.Node) -> str:
    """Return the name under which an operator, a function, an input or an attribute is found."""
    target = node.target
    if node.op != "call_function":
        if node.op not in ("placeholder", "get_attr", "output"):
            raise Unsavable(f"{node.name}: a {node.op} node")
        return str(target)
    if isinstance(target, torch._ops.OpOverload):
        return f"op {target.namespace} {target._opname} {target._overloadname}"
    if isinstance(target, torch._ops.HigherOrderOperator):
        return f"op higher_order {target.name()}"
    module, name = getattr(target, "__module__", ""), getattr(target, "__name__", "")
    found = f"function {module} {name}"
    with suppress(Unsavable):
        if function_of(found) is target:
            return found
    raise Unsavable(f"{node.name}: the function {target!r:.80}")


def value_document(value: object) -> Json:
    """Return shape and dtype of a value at capture, with its sizes there as numbers."""
    try:
        if isinstance(value, Tensor):
            return {"shape": shape_hint(value), "dtype": str(value.dtype).removeprefix("torch.")}
        if isinstance(value, (torch.SymInt, int)) and not isinstance(value, bool):
            return int_hint(value)
    except NotLaned:  # its size depends on data
        return None
    if isinstance(value, (list, tuple)):
        return [value_document(item) for item in value]
    return None


# Reading.


def read_graph(
    document: GraphDocument, tensors: Tensors, made: Mapping[str, Tensor]
) -> fx.GraphModule:
    """Return the graph module of a document; `made` holds the attributes that weren't stored."""
    root, graph = nn.Module(), fx.Graph()
    for name, place in document["attributes"].items():
        if "made" in place:
            value: Tensor | nn.Module = made[name]
        elif "graph" in place:
            value = read_graph(place["graph"], tensors, {})
        elif "whole" in place:
            value = read_whole(place["whole"], tensors)
        else:
            value = tensors.of(place)
        attach(root, name, value)
    env: dict[str, fx.Node] = {}

    def node_of(kind: str, held: Any) -> object:
        return env[held] if kind == "node" else tensors.at(kind, held)

    for item in document["nodes"]:
        op, target = item["op"], item["target"]
        node = graph.create_node(
            op,
            function_of(target) if op == "call_function" else target,
            decoded(item["args"], node_of),
            decoded(item["kwargs"], node_of),
            name=item["name"],
        )
        if node.name != item["name"]:
            node.name = item["name"]
        if item["origin"]:
            node.meta["origin"] = item["origin"]
        value = read_value(item["val"])
        if value is not None:
            node.meta["val"] = value
        env[item["name"]] = node
    return over_same(root, graph)


def read_whole(document: WholeDocument, tensors: Tensors) -> Whole:
    return Whole(
        tensors.module.get_submodule(document["path"]),
        read_spec(document["spec"]),
        decoded(document["constants"], tensors.at),
        document["axes"],
        document["widths"],
        document["width"],
        document["flops"],
    )


def attach(root: nn.Module, name: str, value: object) -> None:
    """Set a dotted attribute, with modules in between as needed."""
    *path, last = name.split(".")
    for part in path:
        if not hasattr(root, part):
            root.add_module(part, nn.Module())
        root = getattr(root, part)
    if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
        root.register_buffer(last, value, persistent=False)
    else:
        setattr(root, last, value)


def function_of(target: str) -> Any:
    """Return the operator or function of this name."""
    kind, module, *names = target.split(" ")
    if kind == "op" and module == "higher_order":
        return getattr(torch.ops.higher_order, names[0])
    if kind == "op":
        packet = getattr(getattr(torch.ops, module), names[0])
        return getattr(packet, names[1] or "default")
    if kind == "function" and names[0] in FUNCTIONS.get(module, ()):
        return getattr(importlib.import_module(module), names[0])
    raise Unsavable(f"an artifact calls {target!r}, which this version doesn't know")


def read_value(document: object) -> Any:
    if isinstance(document, dict):
        dtype = getattr(torch, document["dtype"])
        return torch.empty(document["shape"], dtype=dtype, device="meta")
    if isinstance(document, list):
        return [read_value(item) for item in document]
    return document
