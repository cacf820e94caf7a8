"""HeldPrograms: which compilations that hold values of arguments were used last."""

from __future__ import annotations

from maskfx.compiler.compile import Compilation
from maskfx.runtime.programs.attempts import holds_values

MOST = 8  # compilations that hold values, of one denoiser


class HeldPrograms:
    """Keeps at most `MOST` compilations that serve certain values of arguments only."""

    def __init__(self) -> None:
        self._used: list[Compilation] = []  # the last one was used last

    def use(self, one: Compilation) -> Compilation | None:
        """Note that a compilation is used; return the one to drop for it, or None."""
        if not holds_values(one):
            return None
        self._used = [other for other in self._used if other.capture is not one.capture] + [one]
        return self._used.pop(0) if len(self._used) > MOST else None

    def clear(self) -> None:
        """Forget all of them."""
        self._used.clear()
