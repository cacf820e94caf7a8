"""ActionQueue: writes and removals of entries in the background, one at a time for each entry."""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from threading import Condition
from typing import Any

from maskfx.runtime.cache.stores.bounded_calls import loop_of
from maskfx.runtime.cache.stores.store_entry import Buffer

WRITERS = 4  # actions at a time


@dataclass(frozen=True, eq=False)
class Write:
    """An entry that is to be written."""

    payload: Buffer


@dataclass(frozen=True, eq=False)
class Removal:
    """An entry that is to be removed; with `only`, if this is still its index."""

    only: bytes | None = None


Action = Write | Removal


class ActionQueue:
    """Runs actions in the order in which they are added; thread-safe.

    An action replaces the one of the same entry that waits or runs: the last one holds in the end.

    Args:
        act: Runs an action.
        empty: Is called when no action waits any more.
    """

    def __init__(
        self,
        act: Callable[[bytes, Action], Coroutine[Any, Any, None]],
        empty: Callable[[], None],
    ) -> None:
        self._act, self._empty = act, empty
        self._changed = Condition()
        self._pending: dict[bytes, Action] = {}  # those that run included
        self._order: deque[bytes] = deque()
        self._writers = self._bytes = 0

    @property
    def nbytes(self) -> int:
        """Return the bytes of the payloads that wait."""
        with self._changed:
            return self._bytes

    @property
    def idle(self) -> bool:
        with self._changed:
            return not self._writers

    def of(self, digest: bytes) -> Action | None:
        """Return the action of an entry that waits or runs."""
        with self._changed:
            return self._pending.get(digest)

    def add(self, digest: bytes, action: Action) -> None:
        with self._changed:
            replaced = self._pending.get(digest)
            self._bytes += size_of(action) - size_of(replaced)
            self._pending[digest] = action
            if replaced is None:
                self._order.append(digest)
            if self._order and self._writers < WRITERS:
                self._writers += 1
                start(self._run())

    def settle(self, seconds: float) -> bool:
        """Wait until no action waits or runs; return False if it takes longer than `seconds`."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._pending, seconds)

    async def _run(self) -> None:
        while True:
            with self._changed:
                if not self._order:
                    self._writers -= 1
                    break
                digest = self._order.popleft()
                action = self._pending[digest]
            try:
                await self._act(digest, action)
            finally:
                with self._changed:
                    if self._pending[digest] is action:
                        del self._pending[digest]
                        self._bytes -= size_of(action)
                    else:  # replaced meanwhile
                        self._order.append(digest)
                    self._changed.notify_all()
        self._empty()


def size_of(action: Action | None) -> int:
    """Return the bytes of an action's payload."""
    return len(action.payload) if isinstance(action, Write) else 0


def start(call: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine in the background."""
    asyncio.run_coroutine_threadsafe(call, loop_of(os.getpid()))
