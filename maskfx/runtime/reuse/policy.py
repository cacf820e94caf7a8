"""Reuse policy: which calls of a request are computed in full, and which edit which recording.

Maps call numbers to kinds of calls: no tensors, no denoiser. `session.py` executes the policy.
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
    """How one denoiser call is executed."""

    DENSE = "dense"  # in full; no later call reads it
    RECORD = "record"  # in full, and recorded
    TEMPLATE = "template"  # an edit of the template's recording of the same call
    EARLIER = "earlier"  # an edit of the recording that was used last


@dataclass(frozen=True)
class Past:
    """The state of a policy after earlier calls, as call numbers."""

    base: int | None = None  # call whose recording was used last in this branch
    edited: int | None = None  # the request's first masked call, in any branch

    def after(self, ordinal: int, kind: CallKind) -> Past:
        """Return the state for the following call."""
        if kind is CallKind.DENSE:
            return replace(self, base=None)
        masked = kind in (CallKind.TEMPLATE, CallKind.EARLIER)
        edited = ordinal if masked and self.edited is None else self.edited
        return Past(self.base if kind is CallKind.EARLIER else ordinal, edited)


@dataclass(frozen=True)
class PlannedCall:
    """One call of a schedule; `source` is the call whose recording it reads."""

    ordinal: int
    kind: CallKind
    source: int | None


@dataclass(frozen=True)
class ReusePolicy:
    """Configures how a request reuses recordings of the template and of its earlier calls.

    Args:
        reuse: "template" reads the template's recording of each call; calls that it lacks are
            computed in full and recorded. "steps" reads only the request's earlier calls. "auto"
            reads the template's recording where it has the call, else the recording used last,
            the template's or the request's. The image depends on what the template holds with
            "auto" only.
        refresh: a recording serves the `refresh - 1` calls after it; 1 computes all in full.
        first: number of calls at the start computed in full (unless the template has them): they
            decide the layout of the image, and extrapolation needs two.
        last: number of calls at the end computed in full, so that inactive sites get computed
            final predictions; needs `calls`.
        calls: number of denoiser calls per branch. Not the number of steps for every scheduler:
            Heun calls twice in all steps but one, PNDM once more.
        outside: output of an edit of an earlier call at inactive sites: "hold" repeats the
            recording, "extrapolate" continues the line through the last two (see `EditSession`).
        keep: which recordings `EditSession.recordings` holds after the request: "dense" those of
            calls up to the first masked one, "all", or "none", which needs the least memory.
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
        """Return the kind of call number `ordinal`."""
        if not self._ends(ordinal):
            if in_template and self.reuse != "steps":
                return CallKind.TEMPLATE
            if self._fresh(ordinal, past):
                return CallKind.EARLIER
        kept = self.keeps(ordinal, past.edited)
        return CallKind.RECORD if kept or self._read_later(ordinal) else CallKind.DENSE

    def keeps(self, ordinal: int, edited: int | None) -> bool:
        """Whether to keep a recording of this call for other requests.

        `edited` is the first masked call, if any yet.
        """
        if self.keep == "dense":
            return edited is None or ordinal <= edited
        return self.keep == "all"

    def schedule(self, calls: int, template: Collection[int] = ()) -> list[PlannedCall]:
        """Plan the calls of one branch, given the calls that the template has."""
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
        """Whether an earlier recording may serve this call under `first` and `refresh`."""
        return (
            self.reuse != "template"
            and past.base is not None
            and ordinal >= self.first
            and ordinal - past.base < self.refresh
        )

    def _read_later(self, ordinal: int) -> bool:
        """Whether the next call may be an edit of this one's recording."""
        following = ordinal + 1
        full = following < self.first or self.refresh == 1 or self._ends(following)
        return self.reuse != "template" and not full


def check_count(name: str, value: object, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise InputError(
            f"ReusePolicy: {name}={value!r}: expected a whole number, {least} or greater"
        )
