"""How a request waits for what another one makes: a template, or an adapter that loads.

An engine supplies a `Wait` that ends when the request is cancelled.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

LOOK = 0.05  # seconds between two checks whether a waiting request was cancelled

# blocks until a condition holds, at most this number of seconds if given; True if it holds
Waiting = Callable[[float | None], bool]
Wait = Callable[[Waiting], None]  # returns when the condition holds, or raises


def wait_uninterrupted(waiting: Waiting) -> None:
    """Block until the condition holds; this wait can't be cancelled."""
    waiting(None)


def wait_for_lock(lock: threading.Lock, seconds: float | None) -> bool:
    """Wait until the lock is free, by acquiring it briefly; return False after `seconds`."""
    if not lock.acquire(timeout=-1 if seconds is None else seconds):
        return False
    lock.release()
    return True
