"""Writes operators into a captured graph, each with its value at capture."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher

from maskfx.passes.context import aten, node_value

OPERATORS = {  # of expressions of sizes, by the name of their class
    "Add": operator.add,
    "Mul": operator.mul,
    "FloorDiv": operator.floordiv,
    "CleanDiv": operator.floordiv,
    "Mod": operator.mod,
    "PythonMod": operator.mod,
}
KEPT = ("nn_module_stack", "stack_trace")


class Speller:
    """Inserts operators before a node, and replaces the node by the last of them."""

    def __init__(self, graph: fx.Graph, node: fx.Node) -> None:
        self.graph, self.node = graph, node
        self._own: dict[fx.Node, None] = {}
        modes = (getattr(n.meta.get("val"), "fake_mode", None) for n in graph.nodes)
        self._mode = next((mode for mode in modes if mode is not None), None)

    def emit(self, target: Callable[..., object], *args: Any, **kwargs: Any) -> fx.Node:
        """Insert an operator; its value follows from those of its arguments."""
        with self.graph.inserting_before(self.node):
            new = self.graph.call_function(target, args, kwargs)
        new.meta = {key: self.node.meta[key] for key in KEPT if key in self.node.meta}
        with self._mode or contextlib.nullcontext(), enable_python_dispatcher():
            values: Any = fx.map_arg((args, kwargs), self._value)
            new.meta["val"] = target(*values[0], **values[1])
        self._own[new] = None
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

    def number(self, expr: Any) -> object:
        """Return the value of an expression of sizes: a number or a node; None if it has others."""
        if isinstance(expr, int) or expr.is_Integer:
            return int(expr)
        if expr.is_Symbol:
            return self._symbol(expr)
        name = type(expr).__name__
        function = OPERATORS.get(name)
        parts = [self.number(part) for part in expr.args]
        if function is None or any(part is None for part in parts):
            return None
        total = parts[0]
        for part in parts[1:]:
            both = isinstance(total, int) and isinstance(part, int)
            total = function(total, part) if both else self.emit(function, total, part)
        return total

    def _symbol(self, symbol: object) -> fx.Node | None:
        """Return a size of the graph's inputs that is this symbol."""
        for node in self.graph.find_nodes(op="placeholder"):
            value = node.meta.get("val")
            if isinstance(value, torch.SymInt) and value.node.expr == symbol:
                return cast("fx.Node", node)
            for axis, size in enumerate(getattr(value, "shape", ())):
                if isinstance(size, torch.SymInt) and size.node.expr == symbol:
                    return self.emit(aten.sym_size.int, node, axis)
        return None

    def permute(self, value: fx.Node, order: list[int]) -> fx.Node:
        """Reorder the axes, if they aren't in order."""
        return value if order == sorted(order) else self.emit(aten.permute.default, value, order)

    def drop(self) -> None:
        """Remove what was inserted, which nothing uses."""
        for new in reversed(self._own):
            self.graph.erase_node(new)
        self._own.clear()

    def replace(self, new: fx.Node) -> None:
        """Replace the node; the new one gets its name, by which reasons are reported."""
        name = self.node.name
        self.node.replace_all_uses_with(new)
        self.graph.erase_node(self.node)
        if new in self._own:
            new.name = name
