"""Recordings for later edits, which an engine makes while it runs no request."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

Record = Callable[[Any, Any], object]  # records a template over a pipeline's copy, of this state


class LaterRecordings(Protocol):
    """The idle recordings of an engine, as one of its requests sees them."""

    def begin(self, template: str) -> None:
        """Note that this request records a template, or waits for one that is being recorded."""
        ...

    def waits(self, template: str, record: Record, n: int) -> bool:
        """Return True if an edit should wait for its template, which is missing.

        If not, the engine records it while it is idle, and the edit goes by its own steps.

        Args:
            template: The name of the template.
            record: Records it.
            n: The number of requests for the template so far, this one included.
        """
        ...
