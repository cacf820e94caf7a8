"""Predicates on single nodes of a captured graph."""

from __future__ import annotations

import operator

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
