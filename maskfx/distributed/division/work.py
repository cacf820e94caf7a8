"""RankWork: the FLOPs and row sizes of a batch's members, and the seconds of a FLOP on a rank."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor, fx
from torch.utils.flop_counter import FlopCounterMode

from maskfx import ops
from maskfx.distributed.division.partition import Partition
from maskfx.ir.geometry.lanes import is_text
from maskfx.ir.lru import LruCache
from maskfx.ir.programs.program import Program
from maskfx.ir.programs.sources import Rest
from maskfx.runtime.batch.flops import RowCounter, RowSet, count_rows, meta_inputs
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
        self._whole: LruCache[Hashable, WholeWork] = LruCache(256)  # by program and sizes
        self._widths: dict[str, dict[str, int]] = {}

    def flop(self, assumed: float) -> float:
        """Return the seconds that a FLOP takes on a rank: the fewest that were measured.

        In small steps most of the time isn't that of FLOPs, and remains if a step is cut.

        Args:
            assumed: What it takes in a product alone.
        """
        return min(assumed, self._least)

    def of(self, program: Program, member: Member) -> Work:
        sizes, batch = member.sites.sizes, member.batch
        kind = program.code, tuple(sizes.items()), batch
        whole = self._whole.find(kind, lambda: whole_work(program, sizes, batch))
        key = program.code, member.sites, batch
        return self._known.find(key, lambda: work_of(whole, member.sites))

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


@dataclass(frozen=True)
class WholeWork:
    """The FLOPs of a member that computes all sites.

    Args:
        sites: All sites of its sizes.
        flops: By row set.
        fixed: By row set, those that masks don't change: sums over all sites, fresh or cached.
        heads: Of attentions to cached keys, by their number of heads and the queries' row set.
    """

    sites: ActiveSites
    flops: Mapping[RowSet, int]
    fixed: Mapping[RowSet, int]
    heads: Mapping[tuple[int, RowSet], int]

    def share(self, sites: ActiveSites, rowset: RowSet) -> float:
        """Return the share of a row set that other sites compute; 1 if it has no rows."""
        every = sum(map(self.sites.active_count, rowset))
        return sum(map(sites.active_count, rowset)) / every if every else 1.0


def whole_work(program: Program, sizes: dict[str, int], batch: int) -> WholeWork:
    sites = ActiveSites(program.interface.pyramid, sizes, None)
    counter = count_rows(program, sites, batch)
    heads: Counter[tuple[int, RowSet]] = Counter()
    fixed: Counter[RowSet] = Counter()
    for node, (rowset, flops) in counter.by_node.items():
        if node.target is ops.site_product:
            fixed[rowset] += flops
        if node.target is not ops.attend or not isinstance(node.args[3], fx.Node):
            continue
        source = program.interface.inputs.get(str(node.args[3].target))
        if isinstance(source, Rest) and node.args[8] is None:
            heads[program.interface.taps[source.tap].shape[0], rowset] += flops
    return WholeWork(sites, counter.flops, fixed, heads)


def work_of(whole: WholeWork, sites: ActiveSites) -> Work:
    """Return the FLOPs of a member; those of a row set with text and sites by their rows.

    Each row costs the same whatever is masked: attention reads the keys of all sites, fresh or
    cached. So masks that were never seen before need no new count.
    """
    once = in_text = in_sites = 0.0
    for rowset, all_flops in whole.flops.items():
        fixed = whole.fixed.get(rowset, 0)
        flops = fixed + (all_flops - fixed) * whole.share(sites, rowset)
        counts = {segment: sites.active_count(segment) for segment in rowset}
        rows = sum(counts.values())
        if not rows:
            once += 0.0 if any(map(whole.sites.active_count, rowset)) else flops
            continue
        text = flops * sum(n for segment, n in counts.items() if is_text(segment)) / rows
        in_text, in_sites = in_text + text, in_sites + flops - text
    heads: dict[int, float] = {}
    for (number, rowset), all_flops in whole.heads.items():
        heads[number] = heads.get(number, 0.0) + all_flops * whole.share(sites, rowset)
    return Work(once, in_text, in_sites, tuple(sorted(heads.items())))
