"""Runs the members of a batch one by one if they differ in a value that the model has once."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from maskfx.runtime.batch.frame import MembersDiffer
from maskfx.runtime.batch.member import Member
from maskfx.runtime.steps import ValidatedCall

Run = Callable[[Sequence[ValidatedCall], Sequence[Member]], list[object]]


def run_shared(calls: Sequence[ValidatedCall], members: Sequence[Member], run: Run) -> list[object]:
    """Return one result per call; `run` runs calls as one batch."""
    try:
        return run(calls, members)
    except MembersDiffer:
        if len(members) == 1:
            raise
    return [run([call], [own])[0] for call, own in zip(calls, members, strict=True)]
