"""RecordingAttempts: requests for templates, and which of them could not be recorded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

Known = TypeVar("Known")

KNOWN = 4096  # entries of each in-memory table of templates; the oldest are evicted
SELDOM = 64  # maximum number of requests between two attempts at a template that failed


@dataclass(frozen=True)
class RecordingFailure:
    """Why a template couldn't be recorded, the number of tries, and which request tries again."""

    why: str
    tries: int
    again: int


@dataclass
class RecordingAttempts:
    """Requests for templates, failures to record them, and why some are recorded again."""

    asked: Counter[str] = field(default_factory=Counter)
    failed: dict[str, RecordingFailure] = field(default_factory=dict)
    renewed: dict[str, str] = field(default_factory=dict)

    def count_request(self, template: str) -> int:
        """Count a request for a template; return the number of its requests, this one included."""
        self.asked[template] = asked = self.asked[template] + 1
        trim(self.asked)
        trim(self.failed)
        trim(self.renewed)
        return asked

    def fail(self, template: str, why: str) -> None:
        """Note a failure; later requests retry at doubling intervals up to SELDOM."""
        known = self.failed.get(template)
        tries = 1 if known is None else known.tries + 1
        again = self.asked[template] + min(2 ** (tries - 1), SELDOM)
        self.failed[template] = RecordingFailure(why, tries, again)

    def succeed(self, template: str) -> None:
        self.failed.pop(template, None)

    def refusal(self, template: str, asked: float) -> str | None:
        """Return why the request of this number runs without the template; None if it needn't."""
        known = self.failed.get(template)
        return known.why if known is not None and asked < known.again else None

    def forget(self, template: str) -> None:
        """Forget a removed template; any other may fit now."""
        self.asked.pop(template, None)
        self.renewed.pop(template, None)
        self.failed.clear()


def trim(known: dict[str, Known], may_go: Callable[[Known], bool] = lambda _: True) -> None:
    """Evict the oldest entries beyond KNOWN, and an eighth of KNOWN more."""
    if len(known) <= KNOWN:
        return
    for name in list(known)[: len(known) - KNOWN + KNOWN // 8]:
        value = known.get(name)
        if value is not None and may_go(value):
            known.pop(name, None)
