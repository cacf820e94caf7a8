"""Other sizes of the picture than the captured one, at which symbolic sizes are compared.

Two sizes that agree at capture may differ elsewhere: 48 is a multiple of 8, and 50 isn't.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    import sympy

# Values of symbols. Neighbours are tried together, so the multiples stand together.
VALUES = (9, 10, 11, 13, 19, 23, 29, 34, 44, 57, 16, 24, 32, 40, 48, 56, 64, 72, 80, 96, 128)
Base = tuple[int, int]
SizeExpr: TypeAlias = "sympy.Expr | int"  # a size: a number, or an expression of symbols


def other_bases(symbols: Mapping[str, SizeExpr], guards: Iterable[sympy.Basic]) -> tuple[Base, ...]:
    """Return sizes of the picture at which the equations among a capture's guards hold."""
    found = list(assignments(symbols.get("y"), symbols.get("x")))
    named = {symbol for said, _ in found for symbol in said}
    equations = {g for g in guards if getattr(g, "rel_op", "") == "==" and g.free_symbols <= named}
    return tuple(base for said, base in found if all(holds(g, said) for g in equations))


def holds(equation: sympy.Basic, said: Mapping[sympy.Symbol, int]) -> bool:
    """Return True if an equation holds where its symbols have these values."""
    try:
        return bool(equation.subs(said))
    except ZeroDivisionError:  # it divides by a size, which is 0 there
        return False


def assignments(
    y: SizeExpr | None, x: SizeExpr | None
) -> Iterator[tuple[dict[sympy.Symbol, int], Base]]:
    """Yield values of the symbols of the picture's height and width, and these two sizes."""
    names = sorted({s for e in (y, x) for s in getattr(e, "free_symbols", ())}, key=str)
    for number in range(len(VALUES) if names else 0):
        said = {s: VALUES[(number + i) % len(VALUES)] for i, s in enumerate(names)}
        height, width = valued(y, said), valued(x, said)
        if height is not None and width is not None:
            yield said, (height, width)


def valued(expr: SizeExpr | None, said: Mapping[sympy.Symbol, int]) -> int | None:
    """Return a size where its symbols have these values; None if it has others too."""
    if expr is None or isinstance(expr, int):
        return expr
    value = expr.subs(said)
    return int(value) if value.is_Integer else None
