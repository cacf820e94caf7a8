"""LateGroup: exchanges that return the rows which ranks sent in the step before.

The rows of this step are sent and received while the operators after the exchange compute; the next
step of the request reads them. Rows that a rank computes itself are always those of this step.
Members that wait for this step's rows may share the batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from maskfx.compiler.rank_twins import Sent
from maskfx.distributed.division.layout import RankLayout
from maskfx.distributed.division.tables import owners_of, received_rows, scale_of
from maskfx.distributed.exchanges.process_group import Transfer
from maskfx.ir.programs.sources import Exchanged
from maskfx.ops.exchange import Group
from maskfx.runtime.hardware.devices import CPU, moved

Place = tuple[int, int]  # the number of an exchange, and the rank that sends


class StartingGroup(Group, Protocol):
    """A group whose exchanges needn't be waited for."""

    def start(
        self, outgoing: dict[int, Tensor], incoming: dict[int, Tensor], number: int
    ) -> Transfer:
        """Begin an exchange; its tensors must not change until it has ended."""
        ...


@dataclass(frozen=True)
class LateMember:
    """A member whose rows ranks keep for its next step.

    Args:
        run: The number of its `SplitRun`.
        reads: Whether its exchanges return the rows of the step before.
    """

    run: int
    reads: bool


class HeldRows:
    """The rows that a rank received of others in the last step of each request.

    Args:
        limit: The bytes that they may take together.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._rows: dict[int, dict[Place, Tensor]] = {}

    @property
    def nbytes(self) -> int:
        return sum(rows.nbytes for own in self._rows.values() for rows in own.values())

    @property
    def runs(self) -> set[int]:
        """The requests of which it has rows."""
        return set(self._rows)

    def take(self, run: int) -> dict[Place, Tensor]:
        """Remove and return the rows of a request."""
        return self._rows.pop(run, {})

    def keep(self, run: int, rows: dict[Place, Tensor]) -> None:
        self._rows[run] = rows

    def drop(self, runs: Iterable[int]) -> None:
        for run in runs:
            self._rows.pop(run, None)


@dataclass
class ExchangeOrigins:
    """The members of what a rank receives in the exchanges of one batch.

    Args:
        layout: The rank's rows.
        sent: By number, what the exchanges send.
        device: The device of the rows.
    """

    layout: RankLayout
    sent: Mapping[int, Sent]
    device: torch.device = CPU
    _known: dict[object, list[dict[int, Tensor | None]]] = field(default_factory=dict)

    def of(self, number: int, source: int) -> dict[int, Tensor | None]:
        """Return, by member, the places of its rows among those of a rank; None for all places.

        Where each request has a value, those of members that the rank has no part of are left out.
        """
        sent = self.sent[number]
        if sent not in self._known:
            self._known[sent] = [
                {m: p if p is None else moved(p, self.device) for m, p in places.items()}
                for places in self._found(sent)
            ]
        return self._known[sent][source]

    def _found(self, sent: Sent) -> list[dict[int, Tensor | None]]:
        layout = self.layout
        if isinstance(sent, Exchanged):
            return [places_of(rows) for rows in senders(layout, sent)]
        assert isinstance(sent, str), "partial attentions are of one step"
        owners = torch.tensor([member for member, _ in layout.owners()])
        every, partition = places_of(owners), layout.partition
        return [
            {member: places for member, places in every.items() if partition.has_part(member, rank)}
            for rank in range(partition.ranks)
        ]


def senders(layout: RankLayout, sent: Exchanged) -> list[Tensor]:
    """Return, by rank, the member of each row that the layout's rank receives of it."""
    members = torch.tensor([member for member, _ in layout.owners()])
    received = received_rows(*layout.exchanged(sent.segments, sent.reader))[layout.rank]
    scale = scale_of(sent.reader)
    return [members[owners_of(layout, sent.segments, rows // scale)] for rows in received]


def places_of(members: Tensor) -> dict[int, Tensor | None]:
    """Return the places of each member in a list of members; None for all places."""
    found = torch.unique(members).tolist()
    if len(found) == 1:
        return {found[0]: None}
    return {member: torch.nonzero(members == member).flatten() for member in found}


@dataclass
class Started:
    """An exchange of this step; `rows` are the incoming ones by rank."""

    number: int
    transfer: Transfer
    rows: dict[int, Tensor]


class LateGroup:
    """The ranks of one step in which members read rows of the step before.

    Args:
        group: The ranks.
        members: How the exchanges of each member are late; None for one that waits.
        origins: Which member a row belongs to.
        held: The rows of the step before; those of this step's members are taken from it.
    """

    def __init__(
        self,
        group: StartingGroup,
        members: Sequence[LateMember | None],
        origins: ExchangeOrigins,
        held: HeldRows,
    ) -> None:
        self.rank, self.members = group.rank, members
        self._group, self._origins, self._held = group, origins, held
        self._before = {one.run: held.take(one.run) for one in members if one is not None}
        self._started: list[Started] = []
        self._kept: list[int] = []

    def exchange(
        self, outgoing: dict[int, Tensor], incoming: dict[int, Tensor], number: int
    ) -> None:
        """Begin an exchange, and fill `incoming` with earlier rows where a member reads those."""
        fresh = {rank: torch.empty_like(value) for rank, value in incoming.items()}
        transfer = self._group.start(outgoing, fresh, number)
        self._started.append(Started(number, transfer, fresh))
        waits: list[tuple[int, Tensor | None]] = []
        for rank, value in incoming.items():
            origins = self._origins.of(number, rank)
            if None not in origins.values():
                value.zero_()  # values of requests that the other rank has no part of
            for member, places in origins.items():
                late = self.members[member]
                if late is None or not late.reads:
                    waits.append((rank, places))
                else:
                    put(value, places, self._before[late.run].pop((number, rank)))
        if waits:
            transfer.wait()
        for rank, places in waits:
            put(incoming[rank], places, fresh[rank] if places is None else fresh[rank][places])

    def kept(self) -> tuple[int, ...]:
        """Choose the requests whose rows stay within the limit of bytes; return their numbers."""
        sizes = {one.run: 0 for one in self.members if one is not None}
        for run, _, rows, places in self._parts():
            count = len(rows) if places is None else len(places)
            sizes[run] += count * rows[:1].nbytes
        room = self._held.limit - self._held.nbytes
        for run, nbytes in sizes.items():
            if nbytes <= room:
                self._kept.append(run)
                room -= nbytes
        return tuple(self._kept)

    def finish(self) -> None:
        """Wait for the rows of this step, and keep those of the chosen requests.

        Raises TimeoutError if rows don't arrive; then nothing is kept.
        """
        for one in self._started:
            one.transfer.wait()
        found: dict[int, dict[Place, Tensor]] = {run: {} for run in self._kept}
        for run, place, rows, places in self._parts():
            if run in found:
                found[run][place] = rows if places is None else rows[places]
        self._started.clear()
        for run, own in found.items():
            self._held.keep(run, own)

    def _parts(self) -> Iterator[tuple[int, Place, Tensor, Tensor | None]]:
        """Yield run, place, rows and the places of its own among these, of each late member."""
        for one in self._started:
            for rank, rows in one.rows.items():
                for member, places in self._origins.of(one.number, rank).items():
                    late = self.members[member]
                    if late is not None:
                        yield late.run, (one.number, rank), rows, places


def put(value: Tensor, places: Tensor | None, rows: Tensor) -> None:
    """Write rows into some places of a value; None for all."""
    if places is None:
        value.copy_(rows)
    else:
        value[places] = rows
