"""How the server's processes log: to standard error, for people at a terminal, else as JSON."""

from __future__ import annotations

import contextlib
import logging
import sys
from typing import TextIO

import structlog

LEVELS = logging.getLevelNamesMapping()


def configure_logs(level: str, **bound: str) -> None:
    """Before the first line. What is bound stands in every line of this process."""
    if sys.stderr.isatty():
        last: list[structlog.typing.Processor] = [structlog.dev.ConsoleRenderer()]
    else:
        last = [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            with_fields(bound),
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso"),
            *last,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(LEVELS[level.upper()]),
        logger_factory=structlog.PrintLoggerFactory(Lasting(sys.stderr)),  # type: ignore[arg-type]
    )


class Lasting:
    """A stream whose reader may leave and whose disk may be full: lines are lost then, no more."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            self._stream.flush()


def with_fields(bound: dict[str, str]) -> structlog.typing.Processor:
    """Every thread's lines bear these, unlike context variables."""

    def add(
        logger: structlog.typing.WrappedLogger, name: str, event: structlog.typing.EventDict
    ) -> structlog.typing.EventDict:
        return {**bound, **event}

    return add
