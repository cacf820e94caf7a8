"""A pause of Python's search for unreachable cycles while many objects are made.

The search goes through all objects of the process, again and again as their number grows.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def many_objects() -> Iterator[None]:
    """Pause the search; use it where cycles hold little memory until its end."""
    pauses = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if pauses:
            gc.enable()
