"""What a group of ranks and its processes send each other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

from maskfx.distributed.division.partition import Partition
from maskfx.distributed.exchanges.late_group import LateMember
from maskfx.distributed.rank_step import RankPart
from maskfx.ir.programs.head_sources import AttentionWays
from maskfx.runtime.backends.code_run import CodeKey
from maskfx.runtime.cache.rolling.shared_block import RollingContents, RollingState
from maskfx.runtime.execution.twins import Changed
from maskfx.runtime.steps import AnyStep


@dataclass(frozen=True)
class Unneeded:
    """Numbers of what a rank no longer needs.

    Args:
        recordings: Recordings that no longer exist.
        adapters: Adapters that no longer exist, or take too much memory.
        blocks: Blocks of rolling rows that no longer exist.
    """

    recordings: tuple[int, ...] = ()
    adapters: tuple[int, ...] = ()
    blocks: tuple[int, ...] = ()


class WantedCode(NamedTuple):
    """Code that a step lacked.

    Args:
        key: That of the graph.
        changed: The parameters with low-rank terms, if its program has these; else None.
    """

    key: CodeKey
    changed: Changed | None


@dataclass(frozen=True)
class CodeUse:
    """What a step of a rank ran by compiled code, and what it ran by operators.

    Args:
        ran: Whether compiled code ran.
        wanted: What ran by operators for lack of code.
        failed: Code that fails on this rank, with the reason.
    """

    ran: bool = False
    wanted: tuple[WantedCode, ...] = ()
    failed: Mapping[CodeKey, str] = field(default_factory=dict)


@dataclass(frozen=True)
class CompileRequest:
    """A graph that a process without steps compiles.

    Args:
        wanted: What is compiled.
        steps: Dense steps, one of which the program computes.
        single: See `PartRequest`.
        folder: Where the code is written.
    """

    wanted: WantedCode
    steps: list[AnyStep]
    single: bool
    folder: str


@dataclass(frozen=True)
class CompileResult:
    """The seconds that a compile took, and the most bytes that its process used."""

    seconds: float
    nbytes: int


@dataclass(frozen=True)
class SentRolling:
    """A rolling cache, whose rows lie in buffers that the rank has mapped.

    Args:
        number: Its number.
        block: That of its block.
        contents: What the rank needs of it once, when it is sent first.
        state: What steps change of it beside its rows.
    """

    number: int
    block: int
    contents: RollingContents | None
    state: RollingState


@dataclass(frozen=True)
class PartRequest:
    """What a rank computes in one step.

    Args:
        steps: The members of one batch; edits have a `SentCache` or `SentRolling`, and adapters
            `SentLayers`.
        code: The code of the program.
        changed: The parameters that adapters change; None without adapters.
        single: Whether the members are samples of calls that run sample by sample.
        recording: Whether to emit what a recording keeps.
        emits: The places of the taps that are wanted of it; None: all.
        partition: The ranks' shares.
        ranks: Their numbers in the world group.
        place: The place of this rank among them.
        attention: See `maskfx.compiler.rank_twins.split_program`.
        joined: See `maskfx.compiler.rank_twins.split_program`.
        late: How the exchanges of each member are late; empty if all members wait.
        late_bytes: The bytes of others' rows that a rank may hold between steps.
        ended: Requests whose rows are no longer needed.
        dropped: What the rank no longer needs.
        reload: Whether programs were saved since the last step.
        written: Whether the members' adapters are in the weights, as a `WriteRequest` has put them;
            if not, what is there is taken out.
        compiled: The code of graphs that there is, and where.
    """

    what: ClassVar[str] = "part"
    steps: list[AnyStep]
    code: str
    changed: Changed | None
    single: bool
    recording: bool
    emits: frozenset[int] | None
    partition: Partition
    ranks: tuple[int, ...]
    place: int
    attention: AttentionWays
    joined: bool
    late: tuple[LateMember | None, ...] = ()
    late_bytes: int = 0
    ended: tuple[int, ...] = ()
    dropped: Unneeded = Unneeded()
    reload: bool = False
    written: bool = False
    compiled: Mapping[CodeKey, str] = field(default_factory=dict)


@dataclass(frozen=True)
class PartResult:
    """A rank's part of a step.

    Args:
        part: What it computed.
        sent: The bytes that it sent to other ranks.
        seconds: The time that it took.
        kept: The requests whose rows of this step it holds for the next one.
        cpu: The CPU time that its process took.
        code: What ran by compiled code.
    """

    part: RankPart
    sent: int
    seconds: float
    kept: tuple[int, ...] = ()
    cpu: float = 0.0
    code: CodeUse = CodeUse()


@dataclass(frozen=True)
class WholeRequest:
    """Steps that a rank computes alone, as `maskfx.runtime.step_executor.compute_steps` does.

    Args:
        steps: The members; edits have a `SentCache`, and adapters `SentLayers`.
        dropped: What the rank no longer needs.
        reload: Whether programs were saved since the last step.
        written, compiled: See `PartRequest`.
    """

    what: ClassVar[str] = "whole"
    steps: list[AnyStep]
    dropped: Unneeded = Unneeded()
    reload: bool = False
    written: bool = False
    compiled: Mapping[CodeKey, str] = field(default_factory=dict)


@dataclass(frozen=True)
class WholeResult:
    """What a rank computed alone.

    Args:
        results: The results of the members.
        seconds: The time that it took.
        cpu: The CPU time that its process took.
        sent: The bytes that it sent to other ranks: none.
        code: What ran by compiled code.
    """

    results: list[object]
    seconds: float
    cpu: float = 0.0
    sent: int = 0
    code: CodeUse = CodeUse()


@dataclass(frozen=True)
class WriteRequest:
    """Adapters that a rank writes into its weights, for the steps that follow.

    Args:
        steps: A step that has them, as `SentLayers`.
        dropped: What the rank no longer needs.
        reload: Whether programs were saved since the last step.
    """

    what: ClassVar[str] = "write"
    steps: list[AnyStep]
    dropped: Unneeded = Unneeded()
    reload: bool = False
    written: bool = False  # until it is answered


@dataclass(frozen=True)
class WriteResult:
    """Why adapters aren't in a rank's weights; "" if they are."""

    refused: str


RankRequest = PartRequest | WholeRequest | WriteRequest
