"""LateRuns: which requests' rows the ranks hold, and which members of a step may read them.

The group of ranks decides for all of them, so that ranks agree on what they wait for.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass
from itertools import count
from weakref import WeakKeyDictionary

from maskfx.distributed.division.partition import Partition
from maskfx.distributed.exchanges.late_group import LateMember
from maskfx.distributed.messages import PartResult
from maskfx.runtime.batch.member import Member
from maskfx.runtime.steps import AnyStep, LateExchange, SplitRun, late_exchange

Members = tuple[LateMember | None, ...]


@dataclass(frozen=True)
class Division:
    """How a member was divided; rows of a step serve the next one only if it is divided alike.

    Args:
        ranks: The processes, in the order of the shares.
        sent: What the exchanges of the program send, by number.
        member: The sites, the batch and the shares of the member.
    """

    ranks: tuple[object, ...]
    sent: object
    member: tuple[object, ...]


class LateRuns:
    """Remembers, for each request with late exchanges, its last step on the ranks.

    Args:
        ended: Called after a request has ended whose rows ranks may hold.
    """

    def __init__(self, ended: Callable[[], None]) -> None:
        self._ended = ended
        self._numbers: MutableMapping[SplitRun, int] = WeakKeyDictionary()
        self._last: MutableMapping[SplitRun, tuple[int, Division]] = WeakKeyDictionary()
        self._count = count()
        self._lock = threading.Lock()  # steps run in several threads

    @property
    def alive(self) -> set[int]:
        """The numbers of the requests that haven't ended."""
        with self._lock:
            return set(self._numbers.values())

    def choose(
        self,
        steps: Sequence[AnyStep],
        members: Sequence[Member],
        partition: Partition,
        ranks: Sequence[object],
        sent: object,
    ) -> tuple[Members, list[Division]]:
        """Return how each member's exchanges are late, and how the members are divided.

        A member that one rank computes has no exchanges. The others may read rows of the step
        before if they were divided in the same way then.
        """
        found: list[LateMember | None] = []
        divisions = [
            Division(tuple(ranks), sent, (*sites_of(one), one.batch, shares, text))
            for one, shares, text in zip(members, partition.shares, partition.texts, strict=True)
        ]
        with self._lock:
            for step, division, shares in zip(steps, divisions, partition.shares, strict=True):
                late = late_exchange(step)
                if late is None or sum(share > 0 for share in shares) < 2:
                    found.append(None)
                    continue
                before = self._last.get(late.run) == (late.step - 1, division)
                found.append(LateMember(self._number(late.run), before and not late.waits))
        return tuple(found), divisions

    def _number(self, run: SplitRun) -> int:
        if run not in self._numbers:
            self._numbers[run] = next(self._count)
            run.watch(self._end)
        return self._numbers[run]

    def note(
        self,
        steps: Sequence[AnyStep],
        members: Members,
        divisions: Sequence[Division],
        parts: Sequence[PartResult],
    ) -> None:
        """Note a step that succeeded.

        Args:
            steps: Its members.
            members: How their exchanges were late.
            divisions: How they were divided.
            parts: The results of the ranks; `kept` has the requests whose rows a rank holds.
        """
        with self._lock:
            for step, member, division in zip(steps, members, divisions, strict=True):
                late = late_exchange(step)
                if late is None or member is None:
                    continue
                late.run.reads += member.reads
                if all(member.run in part.kept for part in parts):
                    self._last[late.run] = late.step, division
                else:
                    self._last.pop(late.run, None)

    def forget(self) -> None:
        """Let the next steps of all requests wait.

        A rank reports at its next question that rows didn't arrive, whosever question that is.
        """
        with self._lock:
            self._last.clear()

    def _end(self, run: SplitRun) -> None:
        with self._lock:
            self._last.pop(run, None)
            self._numbers.pop(run, None)
        self._ended()


def sites_of(member: Member) -> tuple[object, ...]:
    """Return what the active sites of a member follow from; tables may be made anew."""
    return member.sites.sizes, member.sites.mask, member.sites.regions


def cut_evenly(partition: Partition, late: Sequence[LateExchange | None]) -> Partition:
    """Return a partition that cuts the members that may be late without regard to the others.

    Late rows change the picture. So the division of such a member mustn't depend on the other
    members, nor on measured times: all ranks have equal shares of its sites, and the whole text.
    """
    even = (1.0,) * partition.ranks
    members = list(zip(partition.shares, partition.texts, late, strict=True))
    return Partition(
        tuple(shares if one is None else even for shares, _, one in members),
        tuple(text and one is None for _, text, one in members),
    )
