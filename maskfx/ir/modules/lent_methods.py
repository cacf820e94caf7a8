"""Methods that a module's parts have for a while: a step's own, no part of the module's settings.

One thread gives a part such a method while it computes. Others may read the module's settings in
the meantime, and read the part as it is without it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import nn

BEFORE = "maskfx_before"  # of a lent method: what the part's `__dict__` had in its place
ABSENT = object()


@contextmanager
def lent(
    part: nn.Module, function: Callable[..., object], method: str = "forward"
) -> Iterator[None]:
    """Give a part a method within the context."""
    own = vars(part)
    before = own.get(method, ABSENT)
    function.__dict__[BEFORE] = before
    own[method] = function
    try:
        yield
    finally:
        if before is ABSENT:
            own.pop(method, None)
        else:
            own[method] = before


def own_value(value: object) -> object:
    """Return a part's own value in place of a lent method; `ABSENT` where it has none."""
    while callable(value) and BEFORE in getattr(value, "__dict__", ()):
        value = vars(value)[BEFORE]
    return value


def own_items(values: dict[str, object]) -> list[tuple[str, object]]:
    """Return the attributes without lent methods; other threads may lend some meanwhile."""
    held = list(values.items())
    return [(key, own) for key, value in held if (own := own_value(value)) is not ABSENT]


def own_item(values: dict[str, object], key: str) -> object:
    """Return what `dict.get` does of the attributes without lent methods."""
    own = own_value(values.get(key))
    return None if own is ABSENT else own


def own_count(values: dict[str, object]) -> int:
    """Return the number of attributes without lent methods."""
    return sum(own_value(value) is not ABSENT for value in list(values.values()))
