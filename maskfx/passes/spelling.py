"""Writes operators into a captured graph, each with its value at capture."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from maskfx.passes.context import aten, node_value

KEPT = ("nn_module_stack", "stack_trace")


class Speller:
    """Inserts operators before a node, and replaces the node by the last of them."""

    def __init__(self, graph: fx.Graph, node: fx.Node) -> None:
        self.graph, self.node = graph, node
        self._own: set[fx.Node] = set()
        modes = (getattr(n.meta.get("val"), "fake_mode", None) for n in graph.nodes)
        self._mode = next((mode for mode in modes if mode is not None), None)

    def emit(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        """Insert an operator; its value follows from those of its arguments."""
        with self.graph.inserting_before(self.node):
            new = self.graph.call_function(target, args, kwargs)
        new.meta = {key: self.node.meta[key] for key in KEPT if key in self.node.meta}
        with self._mode or contextlib.nullcontext():
            values: Any = fx.map_arg((args, kwargs), self._value)
            new.meta["val"] = target(*values[0], **values[1])
        self._own.add(new)
        return new

    def _value(self, node: fx.Node) -> Any:
        """Return a node's value at capture, of a weight an empty one of its shape."""
        value = node_value(node)
        if node.op != "get_attr" or self._mode is None or not isinstance(value, torch.Tensor):
            return value
        return self._mode.from_tensor(value, static_shapes=True)

    def size(self, value: fx.Node, axis: int) -> Any:
        """Return a size: a number, or the node of a symbolic one."""
        found = node_value(value).shape[axis]
        return found if isinstance(found, int) else self.emit(aten.sym_size.int, value, axis)

    def permute(self, value: fx.Node, order: list[int]) -> fx.Node:
        """Reorder the axes, if they aren't in order."""
        return value if order == sorted(order) else self.emit(aten.permute.default, value, order)

    def replace(self, new: fx.Node) -> None:
        """Replace the node; the new one gets its name, by which reasons are reported."""
        name = self.node.name
        self.node.replace_all_uses_with(new)
        self.graph.erase_node(self.node)
        if new in self._own:
            new.name = name
