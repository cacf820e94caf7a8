"""Which calls of a request are computed in full, and which are edits of which recording.

Call numbers in, kinds of calls out: no tensors, no denoiser. `session.py` carries it out.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from enum import Enum

from maskfx.errors import InputError

REUSES = ("template", "steps", "auto")
OUTSIDES = ("hold", "extrapolate")
KEEPS = ("dense", "all", "none")


class CallKind(Enum):
    """What becomes of one call."""

    DENSE = "dense"  # in full; no later call reads it
    RECORD = "record"  # in full, and kept
    TEMPLATE = "template"  # an edit of the template's recording of this very call
    EARLIER = "earlier"  # an edit of the recording that was used last


@dataclass(frozen=True)
class Past:
    """What a policy knows of the calls before: all of it are call numbers."""

    base: int | None = None  # whose recording was used last in this branch
    edited: int | None = None  # the request's first masked call, in any branch

    def after(self, ordinal: int, kind: CallKind) -> Past:
        """The past of the call that follows."""
        if kind is CallKind.DENSE:
            return replace(self, base=None)
        masked = kind in (CallKind.TEMPLATE, CallKind.EARLIER)
        edited = ordinal if masked and self.edited is None else self.edited
        return Past(self.base if kind is CallKind.EARLIER else ordinal, edited)


@dataclass(frozen=True)
class PlannedCall:
    """One call of a schedule, and the call whose recording it reads."""

    ordinal: int
    kind: CallKind
    source: int | None


@dataclass(frozen=True)
class ReusePolicy:
    """How a request reuses what was computed before.

    reuse: "template": the template's recording of each call; a call that it lacks is computed in
    full and recorded. "steps": only the request's own earlier calls. "auto": the template's where
    it has the call, else the recording that was used last, be it the template's or the request's.
    With "auto" the picture depends on what the template holds; with the others it doesn't.
    refresh: a recording serves the `refresh - 1` calls after its own; 1 computes all in full.
    first: how many calls at the start are computed in full (unless the template has them): the
    picture's layout is decided there, and extrapolating needs two.
    last: how many calls at the end are computed in full, so that the inactive sites' last
    predictions are their own; needs `calls`, how often each branch calls the denoiser. That isn't
    the number of steps for every scheduler: Heun calls twice in all but one, PNDM once more.
    outside: what an edit of an earlier call says at inactive sites: "hold" repeats the recording,
    "extrapolate" continues the line through the last two (see `EditSession`).
    keep: which recordings `EditSession.recordings` holds when the request has ended: "dense" those
    of calls before the first masked one, "all", or "none", which needs the least memory.
    """

    reuse: str = "auto"
    refresh: int = 4
    first: int = 2
    last: int = 0
    calls: int | None = None
    outside: str = "extrapolate"
    keep: str = "dense"

    def __post_init__(self) -> None:
        chosen = (("reuse", REUSES), ("outside", OUTSIDES), ("keep", KEEPS))
        for name, known in chosen:
            if getattr(self, name) not in known:
                raise InputError(
                    f"ReusePolicy: {name}={getattr(self, name)!r}: choose one of {', '.join(known)}"
                )
        least = (("refresh", 1), ("first", 1), ("last", 0))
        for name, bound in least:
            check_count(name, getattr(self, name), bound)
        if self.calls is not None:
            check_count("calls", self.calls, 1)
        elif self.last:
            raise InputError(
                f"ReusePolicy: last={self.last} needs calls=, how often each branch will call the "
                "denoiser; pass len(scheduler.timesteps)"
            )

    def kind(self, ordinal: int, past: Past, in_template: bool) -> CallKind:
        """What becomes of call number `ordinal`."""
        if not self._ends(ordinal):
            if in_template and self.reuse != "steps":
                return CallKind.TEMPLATE
            if self._fresh(ordinal, past):
                return CallKind.EARLIER
        kept = self.keeps(ordinal, past.edited)
        return CallKind.RECORD if kept or self._read_later(ordinal) else CallKind.DENSE

    def keeps(self, ordinal: int, edited: int | None) -> bool:
        """May a recording of this call serve another request? `edited`: the first masked call."""
        if self.keep == "dense":
            return edited is None or ordinal <= edited
        return self.keep == "all"

    def schedule(self, calls: int, template: Collection[int] = ()) -> list[PlannedCall]:
        """What becomes of each call of one branch, if the template has these."""
        past, planned = Past(), []
        for ordinal in range(calls):
            kind = self.kind(ordinal, past, ordinal in template)
            sources = {CallKind.TEMPLATE: ordinal, CallKind.EARLIER: past.base}
            planned.append(PlannedCall(ordinal, kind, sources.get(kind)))
            past = past.after(ordinal, kind)
        return planned

    def _ends(self, ordinal: int) -> bool:
        return self.calls is not None and ordinal >= self.calls - self.last

    def _fresh(self, ordinal: int, past: Past) -> bool:
        """Is there a recording, and young enough?"""
        return (
            self.reuse != "template"
            and past.base is not None
            and ordinal >= self.first
            and ordinal - past.base < self.refresh
        )

    def _read_later(self, ordinal: int) -> bool:
        """May the next call be an edit of this one?"""
        following = ordinal + 1
        full = following < self.first or self.refresh == 1 or self._ends(following)
        return self.reuse != "template" and not full


def check_count(name: str, value: object, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise InputError(
            f"ReusePolicy: {name}={value!r}: expected a whole number, {least} or greater"
        )
