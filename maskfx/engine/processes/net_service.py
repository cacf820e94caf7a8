"""NetService: computes the steps of one net for every pipeline that has it.

A *net* is a denoiser with processes of its own, such as a ControlNet. Its processes, the replicas,
hold the same weights; a batch step is divided over them by work.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path

import torch

from maskfx.engine.processes.step_process import StepProcess
from maskfx.pipelines.runs.computed_sites import sites_of
from maskfx.runtime.denoiser import CompiledDenoiser
from maskfx.runtime.hardware.devices import CPU
from maskfx.runtime.hardware.queued_work import QueuedWork
from maskfx.runtime.identity import weight_bytes
from maskfx.runtime.step_executor import SharedAdapters, compute_steps
from maskfx.runtime.steps import AnyStep

# Makes room for a net's processes while a step uses them; gives False if there is none.
Room = Callable[["NetService"], AbstractContextManager[bool]]


class NetService:
    """Runs the steps of one net in its replicas.

    Args:
        denoiser: The denoiser that the replicas hold; weights on the CPU are in shared memory.
        identity: Its digest (`maskfx.runtime.identity`).
        room: Makes room for the replicas for the time of a step.
        devices: The device of each replica.
        threads: Number of threads of each.
        seconds: Time in which a process must answer a step; None sets no limit.
    """

    joint = True  # steps of all denoisers that compute the same form one batch

    def __init__(
        self,
        denoiser: CompiledDenoiser,
        identity: str,
        room: Room,
        devices: Sequence[torch.device] = (CPU,),
        threads: int = 1,
        seconds: float | None = None,
    ) -> None:
        self.denoiser, self.identity, self.devices = denoiser, identity, tuple(devices)
        self.nbytes = weight_bytes(denoiser.module) * len(devices)
        self._room = room
        self._folder = tempfile.TemporaryDirectory(prefix="maskfx-programs-")
        programs = Path(self._folder.name)
        self.replicas = [
            StepProcess(denoiser, programs, threads, seconds, name, device)
            for device, name in zip(devices, names_of(devices), strict=True)
        ]
        self.without_room = 0  # steps computed in this process because there was no room
        self.steps = 0  # batch steps

    @property
    def pids(self) -> list[int]:
        return [replica.pid for replica in self.replicas if replica.pid is not None]

    @property
    def computed_here(self) -> int:
        """Return the number of steps that were computed in this process instead."""
        return self.without_room + sum(replica.computed_here for replica in self.replicas)

    @property
    def restarts(self) -> int:
        return sum(replica.restarts for replica in self.replicas)

    @property
    def starts(self) -> int:
        return sum(replica.starts for replica in self.replicas)

    @property
    def traffic(self) -> tuple[int, int]:
        """Return the bytes sent to the processes so far, and those received."""
        pairs = [replica.traffic for replica in self.replicas]
        return sum(sent for sent, _ in pairs), sum(received for _, received in pairs)

    def run(
        self,
        denoiser: CompiledDenoiser,
        steps: Sequence[AnyStep],
        shared: SharedAdapters | None = None,
    ) -> list[object]:
        """Compute steps of denoisers that compute the same as `denoiser`."""
        self.steps += 1
        with self._room(self) as resident:
            if not resident:
                self.without_room += len(steps)
                return compute_steps(denoiser, steps)
            return self._run(denoiser, steps, shared)

    def begin(self) -> None:
        """Start the replicas without waiting for them."""
        for replica in self.replicas:
            replica.begin()

    def sleep(self) -> None:
        """End the replicas; the next step starts them again."""
        for replica in self.replicas:
            replica.sleep()

    def stop(self) -> None:
        """End the replicas; later steps are computed in this process."""
        for replica in self.replicas:
            replica.stop()
        self._folder.cleanup()

    def _run(
        self, denoiser: CompiledDenoiser, steps: Sequence[AnyStep], shared: SharedAdapters | None
    ) -> list[object]:
        if len(self.replicas) == 1:
            return self.replicas[0].run(denoiser, steps, shared)
        costs = [float(sites_of(step, lambda mask: int(mask.sum()))[0]) for step in steps]
        held = [[replica.holds(step) for replica in self.replicas] for step in steps]
        return self._divided(denoiser, steps, least_loaded(costs, held), costs, shared)

    def _divided(
        self,
        denoiser: CompiledDenoiser,
        steps: Sequence[AnyStep],
        chosen: Sequence[int],
        costs: Sequence[float],
        shared: SharedAdapters | None,
    ) -> list[object]:
        """Compute each step in the replica chosen for it, the replicas at the same time."""
        parts = {r: [i for i, one in enumerate(chosen) if one == r] for r in sorted(set(chosen))}
        if len(parts) == 1:
            return self.replicas[chosen[0]].run(denoiser, steps, shared)

        work = QueuedWork.of_thread()

        def part(replica: int) -> list[object]:
            own = parts[replica]
            sites = int(sum(costs[i] for i in own))
            few = None if shared is None else replace(shared, sites=sites)
            with nullcontext() if work is None else work.current():
                return self.replicas[replica].run(denoiser, [steps[i] for i in own], few)

        results: list[object] = [None] * len(steps)
        with ThreadPoolExecutor(len(parts), thread_name_prefix="maskfx-step") as threads:
            begun = {replica: threads.submit(part, replica) for replica in parts}
        for r, own in parts.items():
            for i, result in zip(own, begun[r].result(), strict=True):
                results[i] = result
        return results


def names_of(devices: Sequence[torch.device]) -> list[str]:
    """Return what replicas are called in explanations."""
    names = [f"process {n + 1} of {len(devices)}" for n in range(len(devices))]
    pairs = zip(names, devices, strict=True)
    return [name if device == CPU else f"{name} on {device}" for name, device in pairs]


def least_loaded(costs: Sequence[float], held: Sequence[Sequence[bool]]) -> list[int]:
    """Return the replica of each step: the one with the least work so far, large steps first.

    Args:
        costs: The work of each step.
        held: For each step, whether each replica holds its recording; decides between equal ones.
    """
    work, chosen = [0.0] * len(held[0]), [0] * len(costs)
    for step in sorted(range(len(costs)), key=lambda i: -costs[i]):
        own = held[step]
        replica = min(range(len(work)), key=lambda r: (work[r], not own[r], r))
        work[replica] += costs[step]
        chosen[step] = replica
    return chosen
