"""Progress of work that takes long: bars on a terminal's standard error, and the seconds spent.

Knows nothing of what is done. Without a terminal, or where a pipeline has its progress bar disabled
(`hidden`), nothing is drawn.
"""

from __future__ import annotations

import logging
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tqdm import tqdm

log = logging.getLogger(__name__)

FORMAT = "{desc}: {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} [{elapsed}{postfix}]"


class Progress:
    """The progress of one piece of work; its bar is drawn at the first `move`.

    Args:
        what: The work, as the bar names it.
        total: The number of its stages or steps, if known.
    """

    def __init__(self, what: str, total: int | None = None) -> None:
        self._what, self._total = what, total
        self._bar: tqdm | None = None
        self._inner = 0.0  # seconds of work inside this one

    def move(self, done: int, total: int | None = None, name: str = "") -> None:
        """Show that `done` stages or steps are done, and the name of the one that begins."""
        if self._bar is None and shows():
            from tqdm import tqdm

            self._bar = tqdm(
                desc=self._what,
                total=self._total,
                file=sys.stderr,
                leave=False,
                bar_format=FORMAT,
                dynamic_ncols=True,
            )
        if self._bar is not None:
            self._bar.n, self._bar.total = done, total or self._total
            self._bar.set_postfix_str(name)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()


_current: ContextVar[Progress | None] = ContextVar("current", default=None)
_hidden: ContextVar[bool] = ContextVar("hidden", default=False)
_spent: ContextVar[defaultdict[str, float] | None] = ContextVar("spent", default=None)


@contextmanager
def work(kind: str, what: str, total: int | None = None) -> Iterator[Progress]:
    """Time a piece of work, and show its progress if it has any.

    Args:
        kind: Under which `tally` adds up the seconds.
        what, total: See `Progress`.
    """
    outer, own = _current.get(), Progress(what, total)
    token, began = _current.set(own), time.perf_counter()
    try:
        yield own
    finally:
        _current.reset(token)
        own.close()
        seconds, spent = time.perf_counter() - began, _spent.get()
        if spent is not None:
            spent[kind] += seconds - own._inner
        if outer is not None:
            outer._inner += seconds


def stage(done: int, name: str) -> None:
    """Show that `done` stages of this thread's innermost work are done, and which one begins."""
    current = _current.get()
    if current is not None:
        current.move(done, name=name)


@contextmanager
def tally() -> Iterator[dict[str, float]]:
    """Yield the seconds of the work of this thread within the context, by kind.

    Seconds of work inside other work count for the inner one only.
    """
    spent: defaultdict[str, float] = defaultdict(float)
    token = _spent.set(spent)
    try:
        yield spent
    finally:
        _spent.reset(token)


@contextmanager
def hidden(hide: bool = True) -> Iterator[None]:
    """Draw nothing in this thread within the context, if `hide`."""
    token = _hidden.set(_hidden.get() or hide)
    try:
        yield
    finally:
        _hidden.reset(token)


def shows() -> bool:
    """Return True if bars are drawn: standard error is a terminal, and they aren't hidden."""
    return not _hidden.get() and sys.stderr is not None and sys.stderr.isatty()


def report(text: str) -> None:
    """Log a line at level INFO; without a logger of that level, print it where bars are drawn."""
    if log.isEnabledFor(logging.INFO):
        log.info(text)
    elif shows():
        from tqdm import tqdm

        tqdm.write(text, file=sys.stderr)
