"""FetchAhead: what a graph reads later is picked while it waits for a value computed elsewhere.

Without it, the thread is idle during the wait, and picks the same rows after it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from maskfx.runtime.backends.graph_function import Fetch

HELD = 256 << 20  # bytes of inputs that are picked early


class FetchAhead:
    """Gives the inputs of one run of a graph by their names.

    Args:
        fetch: Returns an input, and waits for it if it is late.
        order: The names of all inputs in the order in which the graph reads them.
        waits: Returns True while an input is late.
        most: Limit of the bytes that are picked before the graph reads them.
    """

    def __init__(
        self,
        fetch: Fetch,
        order: Sequence[str],
        waits: Callable[[str], bool],
        most: int = HELD,
    ) -> None:
        self._fetch, self._waits, self._most = fetch, waits, most
        self._order = iter(order)
        self._read: set[str] = set()
        self._held: dict[str, Tensor] = {}

    def __call__(self, name: str) -> Tensor:
        self._read.add(name)
        if name in self._held:
            return self._held.pop(name)
        room = self._most - sum(value.nbytes for value in self._held.values())
        while room > 0 and self._waits(name):
            other = next(self._order, None)
            if other is None:
                break
            if other not in self._read and not self._waits(other):
                self._held[other] = self._fetch(other)
                room -= self._held[other].nbytes
        return self._fetch(name)
