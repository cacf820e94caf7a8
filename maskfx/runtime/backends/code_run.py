"""CodeRun: runs a graph by code that another process compiles, and by its operators until then."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from torch import nn

from maskfx.ir.programs.head_sources import AttentionWays
from maskfx.runtime.backends.graph_function import Fetch, Run

log = logging.getLogger(__name__)


class CodeKey(NamedTuple):
    """What compiled code is known by; it serves every mask, size, batch and number of ranks.

    Args:
        program: The code of the program (`Program.code`).
        attention: How the ranks attend, in a graph with exchanges; None: it has none.
        joined: Whether border rows travel with moments, see `split_program`.
    """

    program: str
    attention: AttentionWays | None = None
    joined: bool = True


class CodeSource(Protocol):
    """Knows which code there is."""

    def place(self, key: CodeKey) -> Path | None:
        """Return the folder with this code; None, and note that it is wanted, without it."""
        ...

    def ran(self, key: CodeKey) -> None:
        """Note that this code runs."""
        ...

    def fail(self, key: CodeKey, why: str) -> None:
        """Note that this code can't be loaded, or fails; it isn't run again."""
        ...

    def lines(self) -> list[str]:
        """Return what is compiled, and what runs operator by operator and why."""
        ...


class CodeElsewhere:
    """Where the code of a denoiser's graphs comes from, if another process compiles them.

    Args:
        forget: Drops what runs the graphs.
    """

    def __init__(self, forget: Callable[[], None]) -> None:
        self.source: CodeSource | None = None
        self._forget = forget

    def use(self, source: CodeSource | None) -> None:
        """Take code from here; from None on, this process compiles."""
        self.source = source
        self._forget()

    def lines(self) -> list[str]:
        return [] if self.source is None else self.source.lines()


class CodeRun:
    """Runs one graph. Code is loaded in a thread, so that no step waits for it.

    Args:
        source: Knows which code there is.
        key: That of the graph.
        module: The graph's module, with its weights.
        operators: Runs the graph until the code is loaded.
        load: Loads the code of a folder, see `load_code`.
    """

    def __init__(
        self,
        source: CodeSource,
        key: CodeKey,
        module: nn.Module,
        operators: Run,
        load: Callable[[Path, nn.Module], Run],
    ) -> None:
        self._source, self._key, self._module = source, key, module
        self._operators, self._load = operators, load
        self._code: Run | None = None
        self._loads = False

    def __call__(self, fetch: Fetch) -> Any:
        code = self._code
        if code is None:
            if not self._loads and (folder := self._source.place(self._key)) is not None:
                self._loads = True
                name = "maskfx loads code"
                threading.Thread(target=self._bring, args=(folder,), name=name, daemon=True).start()
            return self._operators(fetch)
        try:
            found = code(fetch)
        except TimeoutError:  # of an exchange
            raise
        except Exception as error:
            self._code = None
            self._fail(error)
            raise
        self._source.ran(self._key)
        return found

    def _bring(self, folder: Path) -> None:
        try:
            self._code = self._load(folder, self._module)
        except Exception as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        why = f"{type(error).__name__}: {error}"
        log.warning("a graph runs operator by operator, because its code fails: %s", why)
        self._source.fail(self._key, why)
