"""RankWork: the FLOPs and row sizes of a batch's members, and the seconds of a FLOP on a rank."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor, fx
from torch.utils.flop_counter import FlopCounterMode

from maskfx import ops
from maskfx.distributed.partition import Partition
from maskfx.ir.lanes import is_text
from maskfx.ir.lru import LruCache
from maskfx.ir.program import Program
from maskfx.ir.sources import Rest
from maskfx.runtime.batch.flops import RowCounter, count_rows, meta_inputs
from maskfx.runtime.batch.member import Member
from maskfx.runtime.sites.active import ActiveSites


@dataclass(frozen=True)
class Work:
    """The predicted FLOPs of a member.

    Args:
        once: Those that each rank with a share computes, such as the modulations of a request.
        text: Those of the rows of its text.
        sites: Those of its active sites.
        heads: Those of attentions whose heads ranks may divide, by the number of heads of keys;
            they are among the FLOPs of text and sites.
    """

    once: float
    text: float
    sites: float
    heads: tuple[tuple[int, float], ...] = ()

    @property
    def total(self) -> float:
        return self.once + self.text + self.sites

    def on(self, share: float, shares_text: bool) -> float:
        """Return the FLOPs of a rank with this share of the member."""
        if share == 0:
            return 0.0
        return self.once + self.text * (share if shares_text else 1.0) + self.sites * share


class RankWork:
    """Predicts the work of members, and measures how long ranks take."""

    def __init__(self) -> None:
        self._least = float("inf")
        self._known: LruCache[Hashable, Work] = LruCache(256)
        self._widths: dict[str, dict[str, int]] = {}

    def flop(self, assumed: float) -> float:
        """Return the seconds that a FLOP takes on a rank: the fewest that were measured.

        In small steps most of the time isn't that of FLOPs, and remains if a step is cut.

        Args:
            assumed: What it takes in a product alone.
        """
        return min(assumed, self._least)

    def of(self, program: Program, member: Member) -> Work:
        key = program.code, member.sites, member.batch
        return self._known.find(key, lambda: work_of(program, member))

    def widths(self, program: Program, member: Member) -> dict[str, int]:
        """Return the bytes of a row of each value of a program's graph, by the node's name."""
        if program.code not in self._widths:
            counter = WidthCounter(program, member.sites, member.batch)
            with torch.no_grad(), FlopCounterMode(display=False) as counter.mode:
                counter.run(*meta_inputs(program, member.sites, member.batch))
            self._widths[program.code] = counter.widths
        return self._widths[program.code]

    def note(self, work: Sequence[Work], partition: Partition, seconds: Sequence[float]) -> None:
        """Note the seconds that each rank took for a batch; 0 for a rank without a share."""
        for rank, took in enumerate(seconds):
            flops = rank_flops(work, partition, rank)
            if took and flops:
                self._least = min(self._least, took / flops)


def rank_flops(work: Sequence[Work], partition: Partition, rank: int) -> float:
    """Return the FLOPs of a rank's part of a batch."""
    found = 0.0
    for member, (one, shares) in enumerate(zip(work, partition.shares, strict=True)):
        found += one.on(shares[rank] / sum(shares), partition.texts[member])
    return found


class WidthCounter(RowCounter):
    """Notes the bytes of a row of each value."""

    def __init__(self, program: Program, sites: ActiveSites, batch: int) -> None:
        super().__init__(program, sites, batch)
        self.widths: dict[str, int] = {}

    def run_node(self, n: fx.Node) -> object:
        value = super().run_node(n)
        if isinstance(value, Tensor):
            self.widths[n.name] = prod(value.shape[1:]) * value.dtype.itemsize
        return value


def work_of(program: Program, member: Member) -> Work:
    """Return the FLOPs of a member; those of a row set with text and sites by their rows."""
    once = text = sites = 0.0
    counter = count_rows(program, member.sites, member.batch)
    for rowset, flops in counter.flops.items():
        segments = program.interface.pyramid.base_segments(rowset)
        counts = {segment: member.sites.active_count(segment) for segment in segments}
        rows = sum(counts.values())
        if not rows:
            once += flops
            continue
        own = flops * sum(n for segment, n in counts.items() if is_text(segment)) / rows
        text, sites = text + own, sites + flops - own
    return Work(once, text, sites, head_flops(program, counter))


def head_flops(program: Program, counter: RowCounter) -> tuple[tuple[int, float], ...]:
    """Return the FLOPs of attentions to cached keys, by their number of heads."""
    found: Counter[int] = Counter()
    for node, (_, flops) in counter.by_node.items():
        if node.target is not ops.attend or not isinstance(node.args[3], fx.Node):
            continue
        source = program.interface.inputs.get(str(node.args[3].target))
        if isinstance(source, Rest) and node.args[8] is None:
            found[program.interface.taps[source.tap].shape[0]] += flops
    return tuple(sorted(found.items()))
