"""What a group of ranks and its processes send each other."""

from __future__ import annotations

from dataclasses import dataclass

from maskfx.distributed.late_group import LateMember
from maskfx.distributed.partition import Partition
from maskfx.distributed.rank_step import RankPart
from maskfx.runtime.steps import AnyStep


@dataclass(frozen=True)
class World:
    """The group that all ranks join.

    Args:
        store: A file through which torch.distributed's ranks find each other.
        rank: The number of this rank.
        ranks: The number of all.
        backend: "rings" in shared memory, or "gloo" of torch.distributed.
        seconds: The time that joining or an exchange may take.
    """

    store: str
    rank: int
    ranks: int
    backend: str
    seconds: float


@dataclass(frozen=True)
class PartRequest:
    """What a rank computes in one step.

    Args:
        steps: The members of one batch; edits have a `SentCache`.
        code: The code of the program.
        recording: Whether to emit what a recording keeps.
        partition: The ranks' shares.
        ranks: Their numbers in the world group.
        place: The place of this rank among them.
        keys_by_rank: See `maskfx.compiler.rank_twins.split_program`.
        late: How the exchanges of each member are late; empty if all members wait.
        late_bytes: The bytes of others' rows that a rank may hold between steps.
        ended: Requests whose rows are no longer needed.
        dropped: Recordings that no longer exist.
        reload: Whether programs were saved since the last step.
    """

    steps: list[AnyStep]
    code: str
    recording: bool
    partition: Partition
    ranks: tuple[int, ...]
    place: int
    keys_by_rank: bool
    late: tuple[LateMember | None, ...] = ()
    late_bytes: int = 0
    ended: tuple[int, ...] = ()
    dropped: tuple[int, ...] = ()
    reload: bool = False


@dataclass(frozen=True)
class PartResult:
    """A rank's part of a step.

    Args:
        part: What it computed.
        sent: The bytes that it sent to other ranks.
        seconds: The time that it took.
        kept: The requests whose rows of this step it holds for the next one.
        cpu: The CPU time that its process took.
    """

    part: RankPart
    sent: int
    seconds: float
    kept: tuple[int, ...] = ()
    cpu: float = 0.0


@dataclass(frozen=True)
class WholeRequest:
    """Steps that a rank computes alone, as `maskfx.runtime.step_executor.compute_steps` does.

    Args:
        steps: The members; edits have a `SentCache`.
        dropped: Recordings that no longer exist.
        reload: Whether programs were saved since the last step.
    """

    steps: list[AnyStep]
    dropped: tuple[int, ...] = ()
    reload: bool = False


RankRequest = PartRequest | WholeRequest
