"""LazyModule: a graph module whose Python code is written at its first call.

fx writes code whenever a graph module is made, which for a graph of a thousand operators takes
longer than to copy the graph. Most graph modules of a compile are steps on the way to another one
and are never called.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx, nn


class LazyModule(fx.GraphModule):
    """A graph module that has no code until it is called or its code is asked for."""

    def recompile(self) -> Any:
        """Drop the code; the next call writes it."""
        own = type(self)  # fx makes a class for each graph module, and sets its `forward`
        if "forward" in vars(own):
            del own.forward

    def _real_recompile(self) -> Any:
        """Write the code and return it, as fx's own `recompile` does; Inductor's cache asks."""
        return super().recompile()

    @property
    def forward(self) -> Callable[..., object]:  # type: ignore[override]
        self._real_recompile()
        written: Callable[..., object] = vars(type(self))["forward"].__get__(self)
        return written

    @property
    def code(self) -> str:
        assert self.forward is not None  # writes the code, unless it is written
        return super().code

    def __str__(self) -> str:
        assert self.forward is not None
        return super().__str__()

    def __reduce__(self) -> Any:
        return fx.GraphModule(self, self.graph).__reduce__()


TABLES = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")


def over_same(module: nn.Module, graph: fx.Graph) -> LazyModule:
    """Return the module of another graph that reads the same weights, and no others.

    Both have the same tables of parameters, buffers and parts, which fx would copy.
    """
    made = LazyModule(nn.Module(), fx.Graph())
    vars(made).update({name: vars(module)[name] for name in TABLES}, training=module.training)
    for node in graph.find_nodes(op="get_attr"):
        name = str(node.target).split(".")[0]
        if name in vars(module):  # neither a tensor that is registered nor a part
            setattr(made, name, vars(module)[name])
    made.graph = graph
    return made
