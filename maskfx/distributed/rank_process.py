"""A rank: a process that holds one denoiser and computes its part of batches.

`rank_group.py` starts it. It holds recordings, adapters, and rows of other ranks between steps that
read these late; of rows that steps replace it has a map. It ends when its channel closes.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from maskfx.compiler.capture.arguments.roles import Roles
from maskfx.config import Settings
from maskfx.distributed.division.links import LinkCosts
from maskfx.distributed.division.measure import measure_links
from maskfx.distributed.exchanges.connect import connect
from maskfx.distributed.exchanges.late_group import HeldRows, LateGroup
from maskfx.distributed.exchanges.process_group import Link, ProcessGroup
from maskfx.distributed.exchanges.world import RINGS, World
from maskfx.distributed.heartbeat import HeartbeatWriter
from maskfx.distributed.messages import (
    PartRequest,
    PartResult,
    RankRequest,
    SentRolling,
    WholeRequest,
    WholeResult,
    WriteRequest,
    WriteResult,
)
from maskfx.distributed.rank_code import RankCode, compile_code
from maskfx.distributed.rank_step import RankPrograms
from maskfx.distributed.read_ahead import ReadBatch
from maskfx.ir.many_objects import many_objects
from maskfx.ir.programs.program import Program
from maskfx.runtime.batch.frame import Frame
from maskfx.runtime.cache.movers import wait
from maskfx.runtime.cache.rolling.rolling_cache import RollingCache, RowBlock
from maskfx.runtime.cache.rolling.shared_block import MappedBuffers, SharedBuffers
from maskfx.runtime.cache.step_cache import StepCache, has_unread
from maskfx.runtime.denoiser import CompiledDenoiser
from maskfx.runtime.hardware.devices import CPU, compute_on, moved
from maskfx.runtime.hardware.freed_memory import keep_freed_memory
from maskfx.runtime.lora.adapter import Layers
from maskfx.runtime.lora.sent import received_layers
from maskfx.runtime.processes.channel import Channel, connect_to_parent
from maskfx.runtime.step_executor import compute_steps
from maskfx.runtime.steps import AnyStep, EditStep
from maskfx.runtime.transport.device_transport import pack_from, unpack_module, unpack_on
from maskfx.runtime.transport.sent_cache import SentCache, received
from maskfx.runtime.transport.shared_tensors import PackedMessage
from maskfx.runtime.transport.shared_value import received_value
from maskfx.runtime.transport.tensor_transport import BYTES, Unsendable, pack


@dataclass
class RankState:
    """The state of this process.

    Args:
        heartbeat: What shows that it isn't stopped and doesn't hang.
    """

    heartbeat: HeartbeatWriter
    device: torch.device = CPU
    denoiser: CompiledDenoiser | None = None
    programs: RankPrograms | None = None
    world: World | None = None
    link: Link | None = None
    caches: dict[int, StepCache] = field(default_factory=dict)
    adapters: dict[int, Layers] = field(default_factory=dict)
    buffers: dict[int, MappedBuffers] = field(default_factory=dict)  # of blocks of rolling rows
    blocks: dict[int, RowBlock] = field(default_factory=dict)
    held: HeldRows = field(default_factory=lambda: HeldRows(0))
    late: LateGroup | None = None  # of the last step, until what it sends and receives is there
    code: RankCode = field(default_factory=RankCode)

    def answer(self, what: str, *rest: Any) -> object:
        if what != "world":  # a new group is formed after failures; then nothing else arrives
            self.settle()
        match what:
            case "hello":
                self.begin(torch.device(rest[0]))
                return None
            case "module":
                with many_objects():  # of the libraries that it is the first to need
                    given = unpack_module(self.device, rest[0])
                self.take(*given)
                return None
            case "world":
                self.join(*rest)
                return None
            case "measure":
                return self.measure()
            case "part":
                return self.compute(*rest)
            case "whole":
                return self.compute_whole(*rest)
            case "write":
                return self.write(*rest)
            case "compile":
                assert self.denoiser is not None
                assert self.programs is not None
                return compile_code(self.denoiser, self.programs, *rest)
            case "ended":
                self.held.drop(rest[0])
                return self.held.nbytes
        raise AssertionError(what)

    def begin(self, device: torch.device) -> None:
        """Compute on a device from now on."""
        self.device = device
        compute_on(device)

    def take(
        self,
        module: torch.nn.Module,
        settings: Settings,
        roles: Mapping[str, Roles] | None,
        threads: int,
    ) -> None:
        torch.set_num_threads(threads)
        self.denoiser = CompiledDenoiser(module, settings, roles)
        self.programs = RankPrograms(settings, self.code if settings.inductor else None)
        self.denoiser.code.use(self.code)
        self.denoiser.in_place.private = self.device == CPU  # elsewhere it has its own weights
        self.denoiser.in_place.followers.append(self.programs.follow_weights)

    def join(self, world: World, memory: int | None = None) -> None:
        """Leave the group that there is, and join another one."""
        self.leave()
        self.link, self.world = connect(world, memory, self.device), world

    def leave(self) -> None:
        """Close the connections to other ranks; those that wait for this one fail at once."""
        self.late = None
        if self.link is not None:
            self.link.close()
            self.link = None

    def measure(self) -> LinkCosts:
        """Measure exchanges with all other ranks."""
        assert self.world is not None
        count = self.world.ranks
        group = self._group(range(count), self._number)
        assert self.link is not None
        return measure_links(group, count, self.device, self.link.finish)

    def _group(self, ranks: Sequence[int], place: int) -> ProcessGroup:
        if self.link is None:
            raise TimeoutError(f"rank {self._number} has left the group")
        return ProcessGroup(ranks, place, self.link, self.heartbeat.waiting)

    def compute(self, request: PartRequest) -> PartResult:
        with self._weights(request.written):
            return self._computed(request, self._steps(request))

    def _computed(self, request: PartRequest, steps: Sequence[AnyStep]) -> PartResult:
        assert self.denoiser is not None
        assert self.programs is not None
        start, cpu = time.perf_counter(), time.process_time()
        batches = self.denoiser.prepared(steps, request.changed, request.single)
        codes = [program.code for program, *_ in batches]
        if codes != [request.code]:
            raise RuntimeError(f"this rank has the programs {codes}, not {request.code}")
        ((program, frame, members),) = batches
        group = self._group(request.ranks, request.place)
        self.late = self._late_group(request, program, frame, group)
        part = self.programs.run(
            program,
            request.recording,
            frame,
            members,
            request.partition,
            group if self.late is None else self.late,
            request.attention,
            request.joined,
            later(steps),
        )
        self._await_device()
        if request.emits is not None:  # rows that lie in host memory
            wanted = request.emits
            emitted = (v if n in wanted else None for n, v in enumerate(part.emitted))
            part = replace(part, emitted=tuple(v if v is None else moved(v, CPU) for v in emitted))
        kept = () if self.late is None else self.late.kept()
        seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
        return PartResult(part, group.sent, seconds, kept, cpu, self.code.use(self.denoiser))

    def _await_device(self) -> None:
        """Wait until the device has computed what is queued; TimeoutError if an exchange fails."""
        if self.link is not None:
            self.link.finish()
        wait(self.device)

    def _late_group(
        self, request: PartRequest, program: Program, frame: Frame, group: ProcessGroup
    ) -> LateGroup | None:
        """Return the group of a step with members that are late; None without any."""
        self.held.limit = request.late_bytes
        self.held.drop(request.ended)
        members = [one for one in request.late if one is not None]
        if not {one.run for one in members if one.reads} <= self.held.runs:
            raise TimeoutError(f"rank {self._number} lacks rows of the step before")
        if not members:
            return None
        assert self.programs is not None
        origins = self.programs.origins(
            program, request.recording, frame, request.partition, request.place
        )
        return LateGroup(group, request.late, origins, self.held)

    @property
    def _number(self) -> int:
        assert self.world is not None
        return self.world.rank

    def settle(self) -> None:
        """Wait for what the other ranks sent in the last step; raise TimeoutError if it fails."""
        if self.late is not None:
            self.late.finish()
            self.late = None

    def compute_whole(self, request: WholeRequest) -> WholeResult:
        assert self.denoiser is not None
        start, cpu = time.perf_counter(), time.process_time()
        with self._weights(request.written):
            steps = self._steps(request)
            self._read_ahead(steps)
            results = compute_steps(self.denoiser, steps)
            self._await_device()
        seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
        return WholeResult(results, seconds, cpu, code=self.code.use(self.denoiser))

    def _read_ahead(self, steps: Sequence[AnyStep]) -> None:
        """Begin to read the rows in a store that the steps read, and then their next ones."""
        assert self.denoiser is not None
        assert self.programs is not None
        stored = [s for s in steps if isinstance(s, EditStep) and has_unread(s.cache)]
        batches = [ReadBatch(*batch) for batch in self.denoiser.batches(stored)] if stored else []
        self.programs.reads.begin(batches, later(steps))

    def write(self, request: WriteRequest) -> WriteResult:
        """Write adapters into the weights, of which this process has its own copy then."""
        assert self.denoiser is not None
        (step,) = self._steps(request)
        return WriteResult(self.denoiser.in_place.write(step.adapters))

    def _weights(self, written: bool) -> AbstractContextManager[None]:
        """Keep adapters in the weights for a step that has them there, or take them out."""
        assert self.denoiser is not None
        if written:
            return self.denoiser.in_place.held()
        self.denoiser.in_place.leave()
        return nullcontext()

    def _steps(self, request: RankRequest) -> list[AnyStep]:
        """Return the steps with their recordings and adapters; drop what isn't needed any more."""
        assert self.denoiser is not None
        assert self.programs is not None
        if not isinstance(request, WriteRequest):
            self.code.begin(request.compiled)
        for number in request.dropped.recordings:
            self.caches.pop(number, None)
        for number in request.dropped.blocks:
            self.buffers.pop(number, None)
            self.blocks.pop(number, None)
        gone = [self.adapters.pop(n) for n in request.dropped.adapters if n in self.adapters]
        if gone:
            ids = set(map(id, gone))
            self.denoiser.adapters.drop(ids)
            self.programs.drop_adapters(ids)
        if request.reload:
            self.denoiser.forget()
        single = isinstance(request, PartRequest) and request.single
        return [self._received(step, single) for step in request.steps]

    def _received(self, step: AnyStep, single: bool) -> AnyStep:
        sent: object = step.cache if isinstance(step, EditStep) else None
        if isinstance(step, EditStep) and isinstance(sent, SentRolling):
            step = replace(step, cache=self._rolling(step, sent, single))
        else:
            then: object = step.then if isinstance(step, EditStep) else None
            step = received(step, self.caches)
            if isinstance(step, EditStep):
                found = self.caches.get(then.number) if isinstance(then, SentCache) else None
                step = replace(step, then=found)
        return replace(step, adapters=received_layers(step.adapters, self.adapters))

    def _rolling(self, step: AnyStep, sent: SentRolling, single: bool) -> RollingCache:
        """Return a rolling cache over the buffers of its block."""
        assert self.denoiser is not None
        if sent.contents is not None:
            code = sent.contents.named["program"]
            if code not in self.denoiser.programs:
                self.denoiser.compile_for([step], single)
            if sent.block not in self.blocks:
                interface = self.denoiser.programs[code].interface
                self.blocks[sent.block] = self.buffers[sent.block].block(interface)
            self.caches[sent.number] = sent.contents.cache(self.blocks[sent.block])
        found = self.caches[sent.number]
        assert isinstance(found, RollingCache)
        sent.state.put(found)
        return found

    def map_recording(self, number: int, sent: PackedMessage, nbytes: int, file: int) -> None:
        """Hold a recording whose rows lie in a memory file; if that fails, steps with it do."""
        try:
            with suppress(Unsendable):
                self.caches[number] = received_value(sent.parts, nbytes, file, self.device)
        finally:
            os.close(file)

    def maps(self, buffers: SharedBuffers, descriptor: int) -> bool:
        """Map the buffers of a block; return False if that fails."""
        try:
            self.buffers[buffers.number] = buffers.mapped(descriptor)
        except (OSError, RuntimeError):
            return False
        finally:
            os.close(descriptor)
        return True


def later(steps: Sequence[AnyStep]) -> dict[int, StepCache]:
    """Return what the members of steps read next, by the id of what they read now."""
    edits = (step for step in steps if isinstance(step, EditStep))
    return {id(step.cache): step.then for step in edits if step.then is not None}


def serve(channel: Channel, heartbeat: HeartbeatWriter) -> None:
    """Answer messages until the channel closes."""
    rank = RankState(heartbeat)
    while True:
        message, what = channel.receive(), ""
        answered: tuple[object, Exception | None]
        try:
            what, *rest = unpack_on(rank.device, message)
            if what == "recording":
                rank.map_recording(rest[0], rest[1], rest[2], channel.receive_file())
                continue
            if what == "block":
                if not rank.maps(rest[0], channel.receive_file()):
                    return  # another process takes its place
                continue
            if what == "world" and rest[0].backend == RINGS:
                rest.append(channel.receive_file())
            with torch.no_grad():
                answered = rank.answer(what, *rest), None
        except TimeoutError as error:  # of an exchange
            answered = None, TimeoutError(str(error))
        except Exception as error:
            answered = None, RuntimeError(f"{type(error).__name__}: {error}")
        if isinstance(answered[1], TimeoutError) or (answered[1] and what == "part"):
            rank.leave()
        try:
            channel.send(*pack_from(rank.device, answered))
        except Unsendable as error:
            channel.send(*pack((None, error)))


def main() -> None:
    channel = connect_to_parent(BYTES)
    keep_freed_memory()
    # the key with which multiprocessing hands over the descriptors of shared weights
    multiprocessing.current_process().authkey = bytes(*channel.receive())
    heartbeat = HeartbeatWriter(channel.receive_file())
    with suppress(EOFError, ConnectionError):
        serve(channel, heartbeat)


if __name__ == "__main__":
    main()
