"""A terminal as standard error, whose text a test reads."""

import io
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@contextmanager
def on_terminal() -> Iterator[Terminal]:
    with redirect_stderr(Terminal()) as made:
        yield made
