"""Partition: which ranks compute which part of each member of a batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

Stretch = tuple[int, int]


@dataclass(frozen=True)
class Partition:
    """The ranks' shares of each member.

    A rank computes a contiguous stretch of the member's active sites at every level, in proportion
    to its share. The rows of the member's text are shared in the same way, or whole: then each rank
    with a share has all of them. A rank without a share has nothing of the member.

    Args:
        shares: By member, a number for each rank; only their ratios count.
        texts: By member, whether ranks share the rows of its text. Without it, all are whole.
    """

    shares: tuple[tuple[float, ...], ...]
    texts: tuple[bool, ...] = ()

    def __post_init__(self) -> None:
        ranks = {len(own) for own in self.shares}
        assert len(ranks) == 1, f"every member has a share of every rank, not of {ranks}"
        for own in self.shares:
            assert min(own) >= 0 < sum(own), f"no rank computes a member: {own}"
        texts = self.texts or (False,) * len(self.shares)
        assert len(texts) == len(self.shares), f"every member's text is shared or whole: {texts}"
        object.__setattr__(self, "texts", texts)

    @property
    def ranks(self) -> int:
        return len(self.shares[0])

    def has_part(self, member: int, rank: int) -> bool:
        return self.shares[member][rank] > 0

    def stretch(self, member: int, rank: int, count: int) -> Stretch:
        """Return where a rank's part of `count` rows that ranks share starts and stops."""
        own = self.shares[member]
        total = sum(own)
        start, stop = (int(count * sum(own[:n]) / total + 0.5) for n in (rank, rank + 1))
        return start, stop

    def text(self, member: int, rank: int, count: int) -> Stretch:
        """Return where a rank's part of `count` rows of the text starts and stops."""
        if self.texts[member]:
            return self.stretch(member, rank, count)
        return 0, count if self.has_part(member, rank) else 0

    def holder(self, member: int) -> int:
        """Return the rank whose rows count where each rank has the same ones."""
        return next(rank for rank in range(self.ranks) if self.has_part(member, rank))

    def peers(self, rank: int) -> list[int]:
        """Return the other ranks that have a part of one of this rank's members."""
        own = [m for m in range(len(self.shares)) if self.has_part(m, rank)]
        return [
            other
            for other in range(self.ranks)
            if other != rank and any(self.has_part(m, other) for m in own)
        ]


def by_member(costs: Sequence[float], ranks: int, most: float = 1.15) -> Partition:
    """Split a batch between its members first, and a member between ranks where that is faster.

    Members are assigned whole, the most expensive first, to the rank with the least work. If the
    longest work of a rank then exceeds the mean by the factor `most`, the members are laid out one
    after another and cut into equal parts, so that at most `ranks - 1` members are split.

    Args:
        costs: The predicted cost of each member.
        ranks: The number of ranks.
        most: The greatest imbalance that needs no exchange: what an exchange costs, as a share of
            the step.
    """
    work = [0.0] * ranks
    chosen: dict[int, int] = {}
    for member in sorted(range(len(costs)), key=lambda m: -costs[m]):
        rank = min(range(ranks), key=lambda r: work[r])
        chosen[member] = rank
        work[rank] += costs[member]
    mean = sum(costs) / ranks
    if mean <= 0 or max(work) <= most * mean:
        return Partition(
            tuple(
                tuple(float(rank == chosen[m]) for rank in range(ranks)) for m in range(len(costs))
            )
        )
    shares, at = [], 0.0
    for cost in costs:
        parts = [
            max(0.0, min(at + cost, (rank + 1) * mean) - max(at, rank * mean))
            for rank in range(ranks)
        ]
        # a sliver of a member costs its exchanges and saves nearly nothing
        parts = [part if part > SLIVER * max(parts) else 0.0 for part in parts]
        shares.append(tuple(parts) if any(parts) else (1.0, *[0.0] * (ranks - 1)))
        at += cost
    return Partition(tuple(shares))


SLIVER = 0.05
