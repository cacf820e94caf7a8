"""No reports of torch in the thread that exports: an attempt that fails prints its whole graph."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator
from importlib import import_module
from typing import Any

TRACES = "torch.__trace"  # a logger that passes nothing on to others


class QuietThread(logging.Filter):
    """Refuses the records of torch's loggers in the thread that makes this filter."""

    def __init__(self) -> None:
        super().__init__("torch")
        self.thread = threading.get_ident()

    def filter(self, record: logging.LogRecord) -> bool:
        return self.thread != threading.get_ident() or not super().filter(record)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence torch's reports, in this thread, of an attempt that fails: the notes keep the reason.

    Filters are on handlers, because a logger's filters don't see the records of its children.
    """
    filter = QuietThread()

    def print_elsewhere(*values: Any, **how: Any) -> None:
        if threading.get_ident() != filter.thread:
            print(*values, **how)

    # a failed export prints its whole graph, by the built-in `print`
    trace = vars(import_module("torch.export._trace"))
    handlers, before = log_handlers(), trace.get("print")
    for handler in handlers:
        handler.addFilter(filter)
    trace["print"] = print_elsewhere
    try:
        yield
    finally:
        if before is None:
            trace.pop("print", None)
        else:
            trace["print"] = before
        for handler in handlers:
            handler.removeFilter(filter)


def log_handlers() -> list[logging.Handler]:
    """Return the handlers that records of torch's loggers reach, other than of its traces.

    The handler of traces removes itself at the first record, if it writes none. As long as it is
    there, each condition on a size is described with its Python stack.
    """
    loggers = list(logging.root.manager.loggerDict)
    names = [name for name in loggers if name.startswith("torch") and name != TRACES]
    found = [h for log in (logging.root, *map(logging.getLogger, names)) for h in log.handlers]
    return [*found, logging.lastResort] if logging.lastResort is not None else found
