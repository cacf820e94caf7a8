"""Predicates on nodes of a captured graph, and what they are computed from."""

from __future__ import annotations

import operator
from collections.abc import Iterable

import torch
from torch import fx


def is_write(node: fx.Node) -> bool:
    """Return True if the operator writes into one of its inputs."""
    target = node.target
    return isinstance(target, torch._ops.OpOverload) and bool(target._schema.is_mutable)


def is_symbol_arithmetic(node: fx.Node) -> bool:
    """Return True for sizes and arithmetic on them, which carry no data of a request."""
    return node.op == "call_function" and (
        node.target is torch.ops.aten.sym_size.int
        or (getattr(node.target, "__module__", "") in ("_operator", "math", "torch"))
        and node.target is not operator.getitem
        and not isinstance(node.meta.get("val"), (torch.Tensor, list, tuple))
    )


def ancestors(nodes: Iterable[fx.Node], sizes: bool = True) -> set[fx.Node]:
    """Return the nodes that these depend on; without `sizes`, not through a tensor's size alone."""
    found: set[fx.Node] = set()
    stack = list(nodes)
    while stack:
        node = stack.pop()
        if node not in found:
            found.add(node)
            if sizes or node.target is not torch.ops.aten.sym_size.int:
                stack.extend(node.all_input_nodes)
    return found


def module_path(node: fx.Node) -> str:
    """Return the path of the module that a node was captured from."""
    stack = node.meta.get("nn_module_stack") or {}
    paths = [str(v[0]) for v in stack.values() if v and v[0]]
    paths = [p for p in paths if not p.startswith("_empty")]
    return paths[-1] if paths else ""
