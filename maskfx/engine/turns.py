"""Turns: requests whose calls change settings of shared modules run alone over them."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from maskfx.pipelines.waiting import Wait


class Turns:
    """Admits requests to modules: any number at once, or one that runs alone over its modules.

    While one waits to run alone, others over these modules wait behind it.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._running: Counter[int] = Counter()  # requests by module
        self._alone: set[int] = set()  # modules of requests that run alone
        self._asked: Counter[int] = Counter()  # requests that wait to run alone, by module

    @contextmanager
    def of(self, modules: Iterable[object], alone: bool, wait: Wait) -> Iterator[None]:
        """Hold a turn over these modules; `wait` blocks until it can be taken, or raises."""
        keys = {id(module) for module in modules}
        with self._asking(keys, alone):
            taken = self._take(keys, alone, 0.0)

            def take(seconds: float | None) -> bool:
                nonlocal taken
                taken = taken or self._take(keys, alone, seconds)
                return taken

            try:
                if not taken:
                    wait(take)
            except BaseException:
                if taken:
                    self._leave(keys, alone)
                raise
        try:
            yield
        finally:
            self._leave(keys, alone)

    @contextmanager
    def _asking(self, keys: set[int], alone: bool) -> Iterator[None]:
        with self._changed:
            self._asked.update(keys if alone else ())
        try:
            yield
        finally:
            with self._changed:
                self._asked.subtract(keys if alone else ())
                self._changed.notify_all()

    def _take(self, keys: set[int], alone: bool, seconds: float | None) -> bool:
        with self._changed:
            if not self._changed.wait_for(lambda: self._is_free(keys, alone), seconds):
                return False
            self._running.update(keys)
            self._alone.update(keys if alone else ())
            return True

    def _is_free(self, keys: set[int], alone: bool) -> bool:
        taken = self._running if alone else self._asked
        return not self._alone & keys and not any(taken[key] for key in keys)

    def _leave(self, keys: set[int], alone: bool) -> None:
        with self._changed:
            self._running.subtract(keys)
            self._alone.difference_update(keys if alone else ())
            self._changed.notify_all()
