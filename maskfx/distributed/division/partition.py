"""Partition: which ranks compute which part of each member of a batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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

    @property
    def cut(self) -> tuple[bool, ...]:
        """Return, by member, whether more ranks than one have a part of it."""
        return tuple(sum(share > 0 for share in own) > 1 for own in self.shares)

    def peers(self, rank: int) -> list[int]:
        """Return the other ranks that have a part of one of this rank's members."""
        own = [m for m in range(len(self.shares)) if self.has_part(m, rank)]
        return [
            other
            for other in range(self.ranks)
            if other != rank and any(self.has_part(m, other) for m in own)
        ]


def divisions(costs: Sequence[float], ranks: int) -> Iterator[Partition]:
    """Yield ways to divide a batch: whole members first, then cut over 2 and more of the ranks.

    Args:
        costs: The predicted cost of each member.
        ranks: The number of ranks.
    """
    yield whole_members(costs, ranks)
    if sum(costs) > 0:
        for degree in range(2, ranks + 1):
            yield cut_members(costs, ranks, degree)


def whole_members(costs: Sequence[float], ranks: int) -> Partition:
    """Give each member, the most expensive first, to the rank with the least work."""
    work = [0.0] * ranks
    chosen: dict[int, int] = {}
    for member in sorted(range(len(costs)), key=lambda m: -costs[m]):
        rank = min(range(ranks), key=lambda r: work[r])
        chosen[member] = rank
        work[rank] += costs[member]
    return Partition(
        tuple(tuple(float(rank == chosen[m]) for rank in range(ranks)) for m in range(len(costs)))
    )


def cut_members(costs: Sequence[float], ranks: int, degree: int) -> Partition:
    """Lay the members out one after another and cut them into equal parts.

    At most `degree - 1` members are cut.

    Args:
        costs: The predicted cost of each member.
        ranks: The number of ranks.
        degree: The number of those that get a part.
    """
    shares, at, mean = [], 0.0, sum(costs) / degree
    rest = (0.0,) * (ranks - degree)
    for cost in costs:
        parts = [
            max(0.0, min(at + cost, (rank + 1) * mean) - max(at, rank * mean))
            for rank in range(degree)
        ]
        # a sliver of a member costs its exchanges and saves nearly nothing
        parts = [part if part > SLIVER * max(parts) else 0.0 for part in parts]
        own = tuple(parts) if any(parts) else (1.0, *[0.0] * (degree - 1))
        shares.append(own + rest)
        at += cost
    return Partition(tuple(shares))


SLIVER = 0.05
