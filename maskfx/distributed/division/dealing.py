"""Which members of a step ranks compute whole, and which they divide by sites. Pure numbers."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from maskfx.distributed.division.partition import whole_members

EVEN = 1.05  # times the mean: what the rank with the most work may have, to count as even


@dataclass(frozen=True)
class Dealing:
    """The members of a step, by their numbers.

    Args:
        whole: By rank, those that it computes whole.
        divided: Those that the ranks divide afterwards.
    """

    whole: tuple[tuple[int, ...], ...]
    divided: tuple[int, ...] = ()

    def most(self, costs: Sequence[float]) -> float:
        """Return what the rank with the most work has of whole members."""
        return max(sum(costs[number] for number in own) for own in self.whole)


def dealt(costs: Sequence[float], ranks: int, divided: Collection[int] = ()) -> Dealing:
    """Return each member, the most expensive first, on the rank with the least work.

    Args:
        costs: The predicted cost of each member.
        ranks: The number of ranks.
        divided: Members that the ranks divide.
    """
    left = [number for number in range(len(costs)) if number not in divided]
    if not left:
        return Dealing(((),) * ranks, tuple(divided))
    shares = whole_members([costs[number] for number in left], ranks).shares
    whole = tuple(
        tuple(n for n, own in zip(left, shares, strict=True) if own[rank]) for rank in range(ranks)
    )
    return Dealing(whole, tuple(divided))


def is_even(dealing: Dealing, costs: Sequence[float]) -> bool:
    """Return True if no division could make the step much shorter."""
    return dealing.most(costs) * len(dealing.whole) <= EVEN * sum(costs)


def dealings(costs: Sequence[float], modules: Collection[int], ranks: int) -> Iterator[Dealing]:
    """Yield ways to deal members: all of them whole, then fewer.

    A member that the module computes is whole where it can be, as its rows take longer. The most
    expensive ones are divided, at most one less than there are ranks, or all of them.

    Args:
        costs: The predicted cost of each member.
        modules: The members that the module computes where they are whole.
        ranks: The number of ranks.
    """
    yield dealt(costs, ranks)
    others = [number for number in range(len(costs)) if number not in modules]
    order = sorted(modules, key=lambda number: -costs[number])
    for count in sorted({*range(min(ranks, len(order) + 1)), len(order)}):
        divided = sorted([*others, *order[:count]])
        if divided:
            yield dealt(costs, ranks, divided)
