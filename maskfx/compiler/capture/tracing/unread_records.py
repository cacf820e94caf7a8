"""What an export records beside its graph, and nothing here reads, isn't recorded.

An export writes the Python stack of every node, a second description of every value, and code for
the graph of each of its stages. Without these it takes less time and gives the same graph.

This file depends on private names of torch. Where one is absent, the export takes its usual time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch.fx import _lazy_graph_module, proxy
from torch.fx.experimental import proxy_tensor

DESCRIBE = "_extract_tensor_metadata"  # of a value that the node has too


@contextlib.contextmanager
def without_records() -> Iterator[None]:
    """Write no stacks and no second descriptions, and code of graphs only where it is called."""
    unread = (proxy, "CapturedTraceback", NoStack), (proxy_tensor, DESCRIBE, described)
    with contextlib.ExitStack() as stack:
        for owner, name, value in unread:
            if name in vars(owner):
                stack.enter_context(replaced(owner, name, value))
        if hasattr(_lazy_graph_module, "_use_lazy_graph_module"):
            stack.enter_context(_lazy_graph_module._use_lazy_graph_module(True))
        yield


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: object) -> Iterator[None]:
    """Set an attribute of a class or module within the context."""
    before = vars(owner)[name]
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


class NoStack:
    """Stands in for the recorder of Python stacks; an empty summary is not written."""

    @classmethod
    def extract(cls, *args: object, **named: object) -> NoStack:
        return cls()

    def summary(self) -> None:
        return None


def described(value: object) -> None:
    """Stand in for the function that describes a value."""
