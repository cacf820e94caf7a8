"""Logging of the server's processes: to standard error, coloured on a terminal, else as JSON."""

from __future__ import annotations

import contextlib
import logging
import sys
from typing import TextIO

import structlog

LEVELS = logging.getLevelNamesMapping()


def configure_logs(level: str, **bound: str) -> None:
    """Configure logging; call it before the first log line.

    The `bound` fields are added to every line of this process.
    """
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
    """A stream wrapper that drops lines on OSError, such as a closed pipe or a full disk."""

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
    """Return a processor that adds these fields in every thread, unlike context variables."""

    def add(
        logger: structlog.typing.WrappedLogger, name: str, event: structlog.typing.EventDict
    ) -> structlog.typing.EventDict:
        return {**bound, **event}

    return add
