"""RankWork: the FLOPs of a batch's members, and the seconds that ranks take for one."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from maskfx.distributed.partition import Partition
from maskfx.ir.lanes import is_text
from maskfx.ir.lru import LruCache
from maskfx.ir.program import Program
from maskfx.runtime.batch.flops import row_flops
from maskfx.runtime.batch.member import Member


@dataclass(frozen=True)
class Work:
    """The predicted FLOPs of a member.

    Args:
        once: Those that each rank with a share computes, such as the modulations of a request.
        text: Those of the rows of its text.
        sites: Those of its active sites.
    """

    once: float
    text: float
    sites: float

    @property
    def total(self) -> float:
        return self.once + self.text + self.sites

    def on(self, share: float, shares_text: bool) -> float:
        """Return the FLOPs of a rank with this share of the member."""
        if share == 0:
            return 0.0
        return self.once + self.text * (share if shares_text else 1.0) + self.sites * share


class RankWork:
    """Predicts the work of members, and measures how long ranks take.

    Args:
        flop: The seconds that a FLOP takes, until a step was measured.
    """

    def __init__(self, flop: float) -> None:
        self._assumed, self._least = flop, float("inf")
        self._known: LruCache[Hashable, Work] = LruCache(256)

    @property
    def flop(self) -> float:
        """The seconds that a FLOP takes on a rank, in its quickest step."""
        return self._assumed if self._least == float("inf") else self._least

    def of(self, program: Program, member: Member) -> Work:
        key = program.code, member.sites, member.batch
        return self._known.find(key, lambda: work_of(program, member))

    def note(self, work: Sequence[Work], partition: Partition, seconds: Sequence[float]) -> None:
        """Note the seconds that each rank took for a batch; 0 for a rank without a share."""
        for rank, took in enumerate(seconds):
            flops = 0.0
            for member, (one, shares) in enumerate(zip(work, partition.shares, strict=True)):
                flops += one.on(shares[rank] / sum(shares), partition.texts[member])
            if took and flops:
                self._least = min(self._least, took / flops)


def work_of(program: Program, member: Member) -> Work:
    """Return the FLOPs of a member; those of a row set with text and sites by their rows."""
    once = text = sites = 0.0
    for segments, flops in row_flops(program, member.sites, member.batch).items():
        counts = {segment: member.sites.active_count(segment) for segment in segments}
        rows = sum(counts.values())
        if not rows:
            once += flops
            continue
        own = flops * sum(n for segment, n in counts.items() if is_text(segment)) / rows
        text, sites = text + own, sites + flops - own
    return Work(once, text, sites)
