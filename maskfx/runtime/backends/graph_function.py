"""A graph of operators as a Python function that fetches each input when it reads it.

fx writes the code of graph modules for readers and for all kinds of nodes; this writes only what
the graphs of programs have, without a copy of the graph, in a small part of the time.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, fx

Fetch = Callable[[str], Tensor]
Run = Callable[[Fetch], Any]  # runs a graph: returns what its module would
Call = tuple[fx.node.Target, Sequence[object]]  # an operator and its arguments
SPELLED = (type(None), bool, int, str)  # types whose values are written as they are


def graph_function(
    module: fx.GraphModule, rewritten: Callable[[fx.Node], Call | None] = lambda node: None
) -> Run:
    """Return a function that takes `fetch` and returns what the graph's module would return.

    An input is fetched right before its first use. Values are freed after their last use. Weights
    are bound now.

    Args:
        module: the graph.
        rewritten: returns what is called in place of an operator; None for the operator itself.
    """
    return GraphWriter(module, rewritten).function()


class GraphWriter:
    """Writes a graph's function. Operators, weights and other constants are its globals."""

    def __init__(self, module: fx.GraphModule, rewritten: Callable[[fx.Node], Call | None]) -> None:
        self._module, self._rewritten = module, rewritten
        self._scope: dict[str, Any] = {}
        self._bound: dict[int, str] = {}  # constant's identity -> its name; the scope holds it
        self._names: dict[fx.Node, str] = {}
        self._lines = ["def run(fetch):"]
        ends = ends_of(module.graph)
        for node in module.graph.nodes:
            if node.op not in ("placeholder", "get_attr"):
                self._write(node, ends.get(node, ()))

    def function(self) -> Run:
        code = compile("\n".join(self._lines), "<graph>", "exec", dont_inherit=True)
        exec(code, self._scope)
        found: Run = self._scope["run"]
        return found

    def _write(self, node: fx.Node, last: tuple[fx.Node, ...] | list[fx.Node]) -> None:
        for read in node.all_input_nodes:
            if read.op == "placeholder" and read not in self._names:
                self._line(f"{self._name(read)} = fetch({str(read.target)!r})")
        if node.op == "output":
            self._line(f"return {self._text(node.args[0])}")
            return
        assert node.op in ("call_function", "call_method"), node.format_node()
        value = self._value(node)
        freed = [self._name(one) for one in last if one.op != "get_attr"]
        self._line(f"{self._name(node)} = {value}")
        if freed:
            self._line(f"{' = '.join(freed)} = None")

    def _value(self, node: fx.Node) -> str:
        """Return the expression that computes a node."""
        if node.target is operator.getitem:
            values, place = map(self._text, node.args)
            return f"{values}[{place}]"
        target, arguments = self._rewritten(node) or (node.target, node.args)
        texts = [*map(self._text, arguments)]
        texts += [f"{name}={self._text(value)}" for name, value in node.kwargs.items()]
        if node.op == "call_method":
            return f"{texts[0]}.{target}({', '.join(texts[1:])})"
        return f"{self._constant(target)}({', '.join(texts)})"

    def _text(self, value: object) -> str:
        """Return the expression of an argument."""
        kind = type(value)
        if isinstance(value, fx.Node):
            return self._name(value) if value.op != "get_attr" else self._weight(value)
        if kind in SPELLED or kind is float and math.isfinite(value):  # type: ignore[arg-type]
            return repr(value)
        if isinstance(value, slice):
            parts = (value.start, value.stop, value.step)
            return f"slice({', '.join(map(self._text, parts))})"
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return f"{self._constant(kind)}({', '.join(map(self._text, value))})"
        if isinstance(value, tuple):
            return f"({''.join(self._text(one) + ', ' for one in value)})"
        if isinstance(value, list):
            return f"[{', '.join(map(self._text, value))}]"
        if isinstance(value, Mapping):
            pairs = (f"{self._text(k)}: {self._text(v)}" for k, v in value.items())
            return f"{{{', '.join(pairs)}}}"
        return self._constant(value)

    def _name(self, node: fx.Node) -> str:
        if node not in self._names:
            self._names[node] = f"v{len(self._names)}"
        return self._names[node]

    def _weight(self, node: fx.Node) -> str:
        return self._constant(find(self._module, str(node.target)))

    def _constant(self, value: object) -> str:
        if id(value) not in self._bound:
            name = self._bound[id(value)] = f"c{len(self._bound)}"
            self._scope[name] = value
        return self._bound[id(value)]

    def _line(self, text: str) -> None:
        self._lines.append(f" {text}")


def ends_of(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    """Return, for each operator, the values that nothing reads after it, such as its own."""
    found: dict[fx.Node, list[fx.Node]] = {}
    seen: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        own = [node] if node.op.startswith("call_") and not node.users else []
        for read in (*node.all_input_nodes, *own):
            if read not in seen:
                seen.add(read)
                found.setdefault(node, []).append(read)
    return found


def find(module: object, target: str) -> Any:
    for part in target.split("."):
        module = getattr(module, part)
    return module
