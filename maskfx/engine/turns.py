"""Turns: requests whose calls change settings of shared modules run alone over them."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import takewhile

from maskfx.pipelines.waiting import Wait


@dataclass(frozen=True, eq=False)
class TurnRequest:
    """A request that waits for its turn or has it, with the ids of its modules."""

    modules: frozenset[int]
    alone: bool

    def excludes(self, other: TurnRequest) -> bool:
        """Return True if the two must not run at once."""
        return (self.alone or other.alone) and not self.modules.isdisjoint(other.modules)


class Turns:
    """Admits requests to modules: any number at once, or one that runs alone over its modules.

    First come, first served: a request runs when no earlier one that excludes it is left. Later
    ones that run already exclude none of those before them.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._requests: list[TurnRequest] = []  # that run or wait, in the order in which they came

    @contextmanager
    def of(self, modules: Iterable[object], alone: bool, wait: Wait) -> Iterator[None]:
        """Hold a turn over these modules; `wait` blocks until it can be taken, or raises."""
        request = TurnRequest(frozenset(map(id, modules)), alone)
        with self._changed:
            self._requests.append(request)
        try:
            if not self._comes(request, 0.0):
                wait(lambda seconds: self._comes(request, seconds))
            yield
        finally:
            with self._changed:
                self._requests.remove(request)
                self._changed.notify_all()

    def _comes(self, request: TurnRequest, seconds: float | None) -> bool:
        """Wait until it is the request's turn; return False after `seconds`."""
        with self._changed:
            return self._changed.wait_for(lambda: self._is_free(request), seconds)

    def _is_free(self, request: TurnRequest) -> bool:
        earlier = takewhile(lambda one: one is not request, self._requests)
        return not any(map(request.excludes, earlier))
