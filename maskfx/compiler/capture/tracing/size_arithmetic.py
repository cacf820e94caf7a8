"""Arithmetic on symbolic sizes during an export: each result is computed once.

An export asks the same few thousand questions about sizes hundreds of thousands of times, because
each tensor that it makes finds out whether it is contiguous, and sympy answers slowly. With
remembered answers it takes less time and gives the same graph.

Expressions are looked up by identity first: sympy computes their hashes in Python, and most equal
expressions are the same object.

This file depends on private names of torch. Where one is absent, the export takes its usual time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.fx.experimental.sym_node import SymNode

from maskfx.compiler.capture.tracing.unread_records import replaced

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
    """Remember results of symbolic arithmetic."""
    with contextlib.ExitStack() as stack:
        if is_known():
            for name in METHODS:
                stack.enter_context(replaced(SymNode, name, once(getattr(SymNode, name))))
            stack.enter_context(replaced(SymNode, "expr", property(current(SymNode.expr.fget))))  # type: ignore[attr-defined]
            stack.enter_context(replaced(SymNode, "maybe_as_int", number(SymNode.maybe_as_int)))
        yield


def is_known() -> bool:
    """Return True if torch's symbolic numbers have the parts that this file replaces and reads."""
    wanted = (*METHODS, "expr", "maybe_as_int")
    names = SymNode.__init__.__code__.co_names
    return all(name in vars(SymNode) for name in wanted) and all(n in names for n in READ)


def once(compute: Binary) -> Binary:
    """Return `compute`, which looks up what it computed for equal operands.

    A trace that records arithmetic needs each call. Every result is a number of its own, because
    a trace distinguishes them by identity.
    """
    remembered: dict[tuple[Any, ...], dict[str, Any]] = {}
    same: dict[tuple[Any, ...], tuple[dict[str, Any], Any, Any]] = {}  # holds what has the ids

    def wrapped(one: Any, other: Any) -> Any:
        env = one.shape_env
        if env is None or get_proxy_mode() or env._translation_validation_enabled:
            return compute(one, other)
        a, b = one._hint, other._hint
        if type(a) not in PLAIN or type(b) not in PLAIN:
            return compute(one, other)
        rest = (
            *(env, env._replacements_version_counter, a, one.pytype, b, other.pytype),
            *(one._optimized_summation, other._optimized_summation),
        )
        left, right = one._expr, other._expr
        place = (id(left), id(right), *rest)
        known = same.get(place)
        if known is None:
            key = (left, right, *rest)
            found = remembered.get(key)
            if found is None:
                found = remembered[key] = dict(vars(compute(one, other)))
            known = same[place] = found, left, right
        result = object.__new__(SymNode)
        vars(result).update(known[0])
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
    known: dict[int, tuple[int | None, Any]] = {}  # holds the expression that has the id

    def wrapped(node: Any) -> int | None:
        expression = node.expr
        found = known.get(id(expression))
        if found is None:
            found = known[id(expression)] = compute(node), expression
        return found[0]

    return wrapped


__all__ = ["size_arithmetic"]
