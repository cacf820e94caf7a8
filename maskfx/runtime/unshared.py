"""Runs the members of a batch one by one if the model has one value for all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from maskfx.runtime.batch.frame import MembersDiffer
from maskfx.runtime.batch.member import Member
from maskfx.runtime.steps import ValidatedCall

Run = Callable[[Sequence[ValidatedCall], Sequence[Member]], list[Any]]


class UnsharedPrograms:
    """Remembers the programs whose members have differed in a value of the whole batch."""

    def __init__(self) -> None:
        self._codes: set[str] = set()

    def run(
        self, code: str, calls: Sequence[ValidatedCall], members: Sequence[Member], run: Run
    ) -> list[Any]:
        """Return one result per call; `run` runs calls as one batch of a program with this code."""
        if code not in self._codes:
            try:
                return run(calls, members)
            except MembersDiffer:
                if len(members) == 1:
                    raise
                self._codes.add(code)
        return [run([call], [own])[0] for call, own in zip(calls, members, strict=True)]
