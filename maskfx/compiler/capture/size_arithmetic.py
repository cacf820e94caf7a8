"""Arithmetic on symbolic sizes during an export: each result is computed once.

An export asks the same few thousand questions about sizes hundreds of thousands of times, because
each tensor that it makes finds out whether it is contiguous, and sympy answers slowly. It also
writes the Python stack of every node, which nothing here reads. Without both it takes less time
and gives the same graph.

This file depends on private names of torch. Where one is absent, the export takes its usual time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from torch.fx import proxy
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.fx.experimental.sym_node import SymNode

# not `mod`: its result depends on more than the expressions, such as the range of a size
METHODS = (
    *("_add", "_sub", "_mul", "_int_floordiv", "_sym_min", "_sym_max"),
    *("_eq", "_ne", "_lt", "_le", "_gt", "_ge", "_and_", "_or_"),
)
READ = (
    *("_expr", "_expr_cache", "_expr_ver", "_hint", "_optimized_summation"),
    *("shape_env", "pytype"),
)
PLAIN = (int, float, bool, type(None))
Binary = Callable[[Any, Any], Any]


@contextlib.contextmanager
def size_arithmetic() -> Iterator[None]:
    """Remember results of symbolic arithmetic, and write no stacks of nodes."""
    with contextlib.ExitStack() as stack:
        if is_known():
            remembered: dict[tuple[Any, ...], dict[str, Any]] = {}
            for name in METHODS:
                stack.enter_context(
                    replaced(SymNode, name, once(name, getattr(SymNode, name), remembered))
                )
            stack.enter_context(replaced(SymNode, "expr", property(current(SymNode.expr.fget))))  # type: ignore[attr-defined]
            stack.enter_context(replaced(SymNode, "maybe_as_int", number(SymNode.maybe_as_int)))
        if hasattr(proxy, "CapturedTraceback"):
            stack.enter_context(replaced(proxy, "CapturedTraceback", NoStack))
        yield


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: object) -> Iterator[None]:
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


def is_known() -> bool:
    """Return True if torch's symbolic numbers have the parts that this file replaces and reads."""
    wanted = (*METHODS, "expr", "maybe_as_int")
    names = SymNode.__init__.__code__.co_names
    return all(name in vars(SymNode) for name in wanted) and all(n in names for n in READ)


def once(name: str, compute: Binary, remembered: dict[tuple[Any, ...], dict[str, Any]]) -> Binary:
    """Return `compute`, which looks up what it computed for equal operands.

    A trace that records arithmetic needs each call. Every result is a number of its own, because
    a trace distinguishes them by identity.
    """

    def wrapped(one: Any, other: Any) -> Any:
        env = one.shape_env
        if get_proxy_mode() or env is None or env._translation_validation_enabled:
            return compute(one, other)
        if type(one._hint) not in PLAIN or type(other._hint) not in PLAIN:
            return compute(one, other)
        sides = [(n._expr, n.pytype, n._hint, n._optimized_summation) for n in (one, other)]
        key = (name, env, env._replacements_version_counter, *sides[0], *sides[1])
        found = remembered.get(key)
        if found is None:
            found = remembered[key] = dict(vars(compute(one, other)))
        result = object.__new__(SymNode)
        vars(result).update(found)
        return result

    return wrapped


def current(expression: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return the getter of a number's expression, which is computed once per set of equal sizes."""

    def wrapped(node: Any) -> Any:
        env = node.shape_env
        if env is None:
            return expression(node)
        version = env._replacements_version_counter
        if node._expr_cache is None or node._expr_ver != version:
            node._expr_cache, node._expr_ver = expression(node), version
        return node._expr_cache

    return wrapped


def number(compute: Callable[[Any], int | None]) -> Callable[[Any], int | None]:
    """Return the function that gives the integer which an expression is, if it is one."""
    known: dict[Any, int | None] = {}

    def wrapped(node: Any) -> int | None:
        expression = node.expr
        if expression not in known:
            known[expression] = compute(node)
        return known[expression]

    return wrapped


__all__ = ["size_arithmetic"]
