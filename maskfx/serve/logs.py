"""Logging of the server's processes: to standard error, coloured on a terminal, else as JSON."""

from __future__ import annotations

import contextlib
import json
import logging
import sys
from collections.abc import Callable
from typing import TextIO

import structlog

LEVELS = logging.getLevelNamesMapping()
LONGEST = 16_384  # characters of a line that is copied


def configure_logs(level: str, *, copy: Callable[[str], None] | None = None, **bound: str) -> None:
    """Configure logging; call it before the first log line.

    Args:
        level: The least level that is logged.
        copy: Gets each line too, as JSON.
        bound: Fields that are added to every line of this process.
    """
    if copy is not None:
        last: list[structlog.typing.Processor] = [
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(),
            copied_to(copy),
        ]
    elif sys.stderr.isatty():
        last = [structlog.dev.ConsoleRenderer()]
    else:
        last = [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
    if copy is not None or not sys.stderr.isatty():
        add_library_lines()
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


def copied_to(copy: Callable[[str], None]) -> structlog.typing.Processor:
    """Return a last processor that copies each line."""

    def pass_on(logger: structlog.typing.WrappedLogger, name: str, line: str) -> str:
        copy(line if len(line) <= LONGEST else json.dumps(shortened(json.loads(line))))
        return line

    return pass_on  # type: ignore[return-value]


def shortened(event: dict[str, object]) -> dict[str, object]:
    """Keep the fields of a line that is too long, each up to its share of the characters."""
    share = LONGEST // (2 * max(1, len(event)))
    return {
        key: value[-share:] if isinstance(value, str) else str(value)[:share]
        for key, value in event.items()
    }


class LibraryLines(logging.Handler):
    """Logs warnings and errors of libraries like the lines of this package."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            logger = structlog.get_logger()
            say = logger.error if record.levelno >= logging.ERROR else logger.warning
            say(record.getMessage(), library=record.name, exc_info=record.exc_info)
        except Exception:
            self.handleError(record)


def add_library_lines() -> None:
    """Log the warnings of libraries, and of this package's `logging` loggers, like other lines."""
    root = logging.getLogger()
    if not any(isinstance(handler, LibraryLines) for handler in root.handlers):
        root.addHandler(LibraryLines())


def log_again(line: str) -> None:
    """Log a line that another process logged and copied, with its fields."""
    try:
        event = json.loads(line)
        name = str(event.pop("event"))
        level = event.pop("level")
        event.pop("timestamp", None)
        structlog.get_logger().log(LEVELS[str(level).upper()], name, **event)
    except (ValueError, KeyError, TypeError, AttributeError):
        structlog.get_logger().warning("line_dropped", line=line[:200])
