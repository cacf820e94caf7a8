"""LinkCosts: which way of splitting attention to cached keys costs less time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from maskfx.distributed.partition import Partition
from maskfx.ir.program import Program
from maskfx.ir.sources import Rest
from maskfx.runtime.batch.frame import Frame
from maskfx.runtime.batch.member import Member


@dataclass(frozen=True)
class LinkCosts:
    """Seconds that exchanges and loads take.

    The defaults are those of gloo between processes of one machine.

    Args:
        exchange: Seconds of an exchange without data.
        load: Seconds per byte of cached rows that a rank reads.
    """

    exchange: float = 3e-4
    load: float = 2.5e-10


def prefers_keys_by_rank(
    program: Program,
    frame: Frame,
    members: Sequence[Member],
    partition: Partition,
    costs: LinkCosts,
) -> bool:
    """Return True if attentions to cached keys cost less with each rank's share of the keys.

    Gathering keys and values sends as many bytes as gathering queries and returning partial
    results. The latter takes one exchange more per attention, and a rank then reads its share of
    the cached keys and values, not all of them.
    """
    split = [
        sum(partition.has_part(m, r) for r in range(partition.ranks)) for m in range(len(members))
    ]
    if max(split) == 1:
        return False
    names = [n for n, s in program.interface.inputs.items() if isinstance(s, Rest)]
    most = max(split)
    nbytes = sum(frame.loaded_bytes(members, names).values())
    saved = costs.load * nbytes * (1 - 1 / most)
    attentions = len(names) / 2  # keys and values
    return saved > costs.exchange * attentions
