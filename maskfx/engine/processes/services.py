"""NetServices: the nets of an engine with processes of their own, shared by its pipelines.

Pipelines with the same net, or nets of equal code and weights, have one `NetService`. A limit in
bytes keeps the processes of the popular nets; a net in use by a running request is never evicted.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from maskfx.engine.processes.net_devices import check_device, spread
from maskfx.engine.processes.net_service import NetService
from maskfx.errors import InputError
from maskfx.ir.argument_checks import check_number, check_whole, refuse
from maskfx.runtime.denoiser import CompiledDenoiser
from maskfx.runtime.hardware.devices import device_named
from maskfx.runtime.hardware.offload import device_of
from maskfx.runtime.identity import identity_of, is_plain, same_weights
from maskfx.runtime.popularity import LeastFrequentlyUsed, ResidentSet
from maskfx.runtime.programs.program_files import compiled_as
from maskfx.runtime.transport.sendable import kept_by
from maskfx.runtime.weights import Weights

log = logging.getLogger(__name__)

HALF_LIFE = 256.0  # uses; `bench/adapters/popularity.py` compares policies


@dataclass(frozen=True)
class OwnProcesses:
    """Which denoisers are computed in processes of their own, and how.

    Args:
        names: Names of denoisers, such as "controlnet"; those of a list have numbers,
            "controlnet.0".
        replicas: Number of processes of each.
        nbytes: Limit of the bytes of the weights that running processes compute with, each process
            counted, of all devices together; the processes of less popular nets end beyond it, and
            start again when a request needs them. None sets no limit. Steps of a net for which the
            nets in use leave no room are computed in the engine's process.
        threads: Number of threads of each process.
        seconds: Time in which a process must answer a step, or it is replaced; a process has
            longer for its first step, because it starts and compiles. None sets no limit.
        half_life: Number of requests' uses of nets after which a use counts half in a net's
            popularity.
        devices: The device of the processes of each name, in the order of `names`, such as
            ("cuda:1",). By default those of a net on a GPU are on the other devices of its type,
            on the one with the fewest processes first, or on the net's own if it is the only one.
    """

    names: tuple[str, ...] = ()
    replicas: int = 1
    nbytes: int | None = None
    threads: int = 1
    seconds: float | None = 120.0
    half_life: float = HALF_LIFE
    devices: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        names = self.names
        if not isinstance(names, (tuple, list)) or not all(isinstance(n, str) for n in names):
            raise InputError(f"own_process={names!r:.60}: give a list of names of denoisers")
        check_whole("OwnProcesses", "replicas", self.replicas, 1)
        check_whole("OwnProcesses", "threads", self.threads, 1)
        check_number("OwnProcesses", "nbytes", self.nbytes, "bytes", above=True, or_none=True)
        check_number("OwnProcesses", "seconds", self.seconds, "seconds", above=True, or_none=True)
        check_number("OwnProcesses", "half_life", self.half_life, above=True)
        devices = self.devices
        if not isinstance(devices, (tuple, list)) or not all(isinstance(d, str) for d in devices):
            refuse("OwnProcesses", "devices", devices, 'a list of devices, such as ["cuda:1"]')
        if devices and len(devices) != len(names):
            raise InputError(
                f"OwnProcesses: {len(devices)} devices for {len(names)} names; give one for "
                "each, or none"
            )
        for device in devices:
            device_named("OwnProcesses", device)

    @classmethod
    def of(cls, given: Collection[str] | OwnProcesses) -> OwnProcesses:
        """Return settings that may be given as names alone."""
        if isinstance(given, OwnProcesses):
            return given
        listed = isinstance(given, Collection) and not isinstance(given, (str, bytes))
        return cls(tuple(given) if listed else given)  # type: ignore[arg-type]

    def has(self, name: str) -> bool:
        """Return True for a denoiser that is computed in processes of its own."""
        return name in self.names or name.split(".")[0] in self.names

    def device(self, name: str, home: torch.device) -> torch.device | None:
        """Return the device that is given for a denoiser; None if none is.

        Raises InputError for one that its processes can't be on, if its weights are on `home`.
        """
        given = dict(zip(self.names, self.devices, strict=False))
        asked = given.get(name, given.get(name.split(".")[0]))
        if asked is None:
            return None
        found = device_named("OwnProcesses", asked)
        check_device(found, home, name)
        return found


@dataclass(frozen=True)
class NetCounts:
    """Statistics of nets since the start.

    Args:
        hits: Nets that a request found with their processes running.
        starts: Processes started.
        evictions: Nets whose processes ended for room.
        restarts: Processes that were replaced after their death or a missed deadline.
        computed_here: Steps of nets that were computed in the engine's process.
        steps: Batch steps of nets.
        sent: Bytes sent to the processes.
        received: Bytes received from them.
        processes: Number of processes now.
        nbytes: Bytes of the weights that they compute with.
    """

    hits: int = 0
    starts: int = 0
    evictions: int = 0
    restarts: int = 0
    computed_here: int = 0
    steps: int = 0
    sent: int = 0
    received: int = 0
    processes: int = 0
    nbytes: int = 0


@dataclass
class Seat:
    """A module's place in a service; None if it can't be sent to a process."""

    service: NetService | None
    watch: Weights


class NetServices:
    """The services of the nets that settings name."""

    def __init__(self, settings: OwnProcesses) -> None:
        self.settings = settings
        # by module, and by how it is compiled
        self._seats: MutableMapping[nn.Module, dict[str, Seat]] = WeakIdKeyDictionary()
        self._services: list[NetService] = []
        self._resident = ResidentSet(settings.nbytes, LeastFrequentlyUsed(settings.half_life))
        self._leases: dict[int, list[NetService]] = {}  # by their requests' ids
        self._warned: set[tuple[str, str]] = set()  # nets without processes, and the reasons
        self._hits = self._evictions = 0
        self._ended = NetCounts()  # of services that ended
        self._lock = threading.RLock()
        self._closed = False
        # the devices that settings give for modules
        self._devices: MutableMapping[nn.Module, torch.device | None] = WeakIdKeyDictionary()

    def lease(self, holder: object, denoisers: Mapping[str, CompiledDenoiser]) -> None:
        """Note that a request uses its pipeline's nets until `release`, and start them.

        Args:
            holder: The request.
            denoisers: The denoisers of its pipeline by name.
        """
        chosen = {name: d for name, d in denoisers.items() if self.settings.has(name)}
        with self._lock:
            for name, denoiser in chosen.items():
                home = device_of(denoiser.module)
                self._devices[denoiser.module] = self.settings.device(name, home)
            found = [] if self._closed else list(map(self._service, chosen.values()))
            leased = list(dict.fromkeys(one for one in found if one is not None))
            self._leases[id(holder)] = leased
            for service in leased:
                self._hits += self._resident.use(service)
                self._resident.pin(service)
            for service in leased:
                if self._admitted(service):
                    service.begin()

    def release(self, holder: object) -> None:
        """End the use of a request's nets; ignore a request without any."""
        with self._lock:
            for service in self._leases.pop(id(holder), ()):
                self._resident.unpin(service)

    def has(self, denoiser: CompiledDenoiser) -> bool:
        """Return True for a denoiser that the settings name."""
        return denoiser.module in self._seats

    def of(self, denoiser: CompiledDenoiser) -> NetService | None:
        """Return the service of a denoiser; None if it has none, or can't be sent to a process."""
        with self._lock:
            return self._service(denoiser) if self.has(denoiser) else None

    def counts(self) -> NetCounts:
        with self._lock:
            found = [self._ended, *map(counts_of, self._services)]
            return NetCounts(
                hits=self._hits,
                evictions=self._evictions,
                processes=sum(one.processes for one in found),
                nbytes=self._resident.nbytes,
                **{name: sum(getattr(one, name) for one in found) for name in SUMMED},
            )

    def close(self) -> None:
        """End all processes; steps in flight are computed in this one."""
        with self._lock:
            self._closed = True
            services = list(self._services)
        for service in services:
            service.stop()

    # Which service a denoiser has.

    def _service(self, denoiser: CompiledDenoiser) -> NetService | None:
        """Return the service of a denoiser with its weights as they are now."""
        seats = self._seats.setdefault(denoiser.module, {})
        how = compiled_as(denoiser.settings, denoiser.roles)
        seat = seats.get(how)
        if seat is not None:
            if seat.watch.change().same_numbers:
                return seat.service
            del seats[how]
            self._leave(denoiser.module, seat.service)
        return self._join(denoiser, seats, how)

    def _join(
        self, denoiser: CompiledDenoiser, seats: dict[str, Seat], how: str
    ) -> NetService | None:
        """Return the service of an equal net, or a new one."""
        module, service = denoiser.module, None
        if type(denoiser) is not CompiledDenoiser:
            self._warn(denoiser, "it runs exported files")
        elif not self._closed:
            service = self._alike(denoiser)
            if service is None and (reason := kept_by(module, copied=True)) is not None:
                self._warn(denoiser, reason)
            elif service is None:
                service = self._new(denoiser)
        seats[how] = Seat(service, Weights(module))
        return service

    def _warn(self, denoiser: CompiledDenoiser, reason: str) -> None:
        """Log once why a net that the settings name gets no process."""
        name = type(denoiser.module).__name__
        if (name, reason) not in self._warned:
            self._warned.add((name, reason))
            log.warning(
                "own_process: %s has no process of its own, and the engine's process computes its "
                "steps: %s",
                name,
                reason,
            )

    def _alike(self, denoiser: CompiledDenoiser) -> NetService | None:
        if not self._services or not is_plain(denoiser.module):
            return None
        identity, device = identity_of(denoiser), self._devices.get(denoiser.module)
        for service in list(self._services):
            alike = service.identity == identity and self._is_current(service)
            alike = alike and device in (None, *service.devices)
            if alike and same_weights(service.denoiser.module, denoiser.module):
                return service
        return None

    def _is_current(self, service: NetService) -> bool:
        """Return True if the weights that a service's processes hold haven't changed."""
        module = service.denoiser.module
        found = self._seats.get(module, {}).get(
            compiled_as(service.denoiser.settings, service.denoiser.roles)
        )
        if found is None or found.service is not service:
            return False
        if found.watch.change().same_numbers:
            return True
        self._seats[module].pop(compiled_as(service.denoiser.settings, service.denoiser.roles))
        self._leave(module, service)
        return False

    def _new(self, denoiser: CompiledDenoiser) -> NetService:
        settings = self.settings
        denoiser.share_memory()
        service = NetService(
            denoiser,
            identity_of(denoiser),
            self._room,
            self._placed(denoiser.module),
            settings.threads,
            settings.seconds,
        )
        if settings.nbytes is not None and service.nbytes > settings.nbytes:
            log.warning(
                "%s has no process of its own: %d of them compute with %d bytes of weights, and "
                "the limit is %d",
                type(denoiser.module).__name__,
                settings.replicas,
                service.nbytes,
                settings.nbytes,
            )
        self._services.append(service)
        return service

    def _placed(self, module: nn.Module) -> list[torch.device]:
        """Return the device of each process of a net."""
        given, count = self._devices.get(module), self.settings.replicas
        if given is not None:
            return [given] * count
        used = Counter(device for service in self._services for device in service.devices)
        return spread(device_of(module), count, used)

    def _leave(self, module: nn.Module, service: NetService | None) -> None:
        """End the service whose processes hold a module's earlier weights."""
        if service is None or service.denoiser.module is not module:
            return
        for seats in self._seats.values():
            for how in [how for how, seat in seats.items() if seat.service is service]:
                del seats[how]  # its next step joins another service
        service.stop()
        self._resident.remove(service)
        self._services.remove(service)
        now = counts_of(service)
        self._ended = NetCounts(
            **{name: getattr(self._ended, name) + getattr(now, name) for name in SUMMED}
        )

    # Which services have processes.

    @contextmanager
    def _room(self, service: NetService) -> Iterator[bool]:
        """Keep a service's processes for the time of a step, if there is room for them."""
        with self._lock:
            self._resident.pin(service)
            admitted = service in self._services and self._admitted(service)
        try:
            yield admitted
        finally:
            with self._lock:
                self._resident.unpin(service)

    def _admitted(self, service: NetService) -> bool:
        evicted = self._resident.admit(service, service.nbytes)
        if evicted is None:
            return False
        for other in self._services:
            if other in evicted:
                other.sleep()
        self._evictions += len(evicted)
        return True


SUMMED = ("starts", "restarts", "computed_here", "steps", "sent", "received")


def counts_of(service: NetService) -> NetCounts:
    """Return the statistics of one service."""
    sent, received = service.traffic
    return NetCounts(
        starts=service.starts,
        restarts=service.restarts,
        computed_here=service.computed_here,
        steps=service.steps,
        sent=sent,
        received=received,
        processes=len(service.pids),
    )
