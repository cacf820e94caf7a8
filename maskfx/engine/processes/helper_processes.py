"""Helper processes for the work around the denoiser, each with the pipelines' components.

Weights lie in shared memory, once for all processes. A component that can't be pickled, is on
another device or has adapters runs in the request's thread. So does a call whose helper process
died; a new process replaces it.
"""

from __future__ import annotations

import logging
import multiprocessing
import pickle
import queue
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
import torch.multiprocessing  # registers how weights are shared
from torch import nn

from maskfx.engine.processes.helper import Key
from maskfx.engine.processes.placement import (
    InRequestThreads,
    RemoteModule,
    StepLoop,
    parts_around,
    spared,
)
from maskfx.errors import Closed, InputError
from maskfx.pipelines.adapters.lora import adapters_of
from maskfx.pipelines.parts.stand_in import is_coded
from maskfx.runtime.hardware.cpu_threads import beside
from maskfx.runtime.hardware.devices import CPU, registrar
from maskfx.runtime.processes.child_process import ChildProcess
from maskfx.runtime.transport.device_transport import pack_from
from maskfx.runtime.transport.sendable import bare, can_be_sent
from maskfx.runtime.transport.shared_tensors import PackedMessage
from maskfx.runtime.transport.tensor_transport import BYTES, Unsendable, pack, unpack
from maskfx.runtime.weights import WeightChange, Weights

log = logging.getLogger(__name__)

STOPPED = "the helper processes are stopped, and this call with them; make another engine"


@dataclass
class Component:
    """A pipeline component as the helpers know it.

    It is kept while its key, which may be its identity, is in use.
    """

    part: object
    sendable: bool
    watch: Weights | None = None


class HelperProcess:
    """One helper process and the keys of the components sent to it."""

    def __init__(self) -> None:
        self.parts: set[Key] = set()
        self.usable = True  # no answer is outstanding
        self.sent = self.received = 0  # bytes
        self.child = ChildProcess("maskfx.engine.processes.helper", most=BYTES)
        try:
            self.child.channel.send(bytes(multiprocessing.current_process().authkey))
        except BaseException:
            self.stop()
            raise

    def give(
        self, key: Key, part: object, home: torch.device = CPU, device: torch.device = CPU
    ) -> None:
        """Send a component, unless the process has it already.

        Args:
            key: The number or name by which calls refer to it.
            part: The component.
            home: Where its weights are. On the CPU they are shared, elsewhere copied.
            device: Where they are copied to.
        """
        if key in self.parts:
            return
        if home == CPU:
            self._ask("part", key, shared(part))
        else:
            packed = PackedMessage(pack_from(home, part))
            self._ask("part", key, packed, str(device), registrar(device))
        self.parts.add(key)

    def run(
        self,
        key: Key,
        method: str,
        args: tuple[object, ...],
        kwargs: Mapping[str, object],
        threads: int,
    ) -> object:
        return self._ask("call", key, method, threads, args, kwargs)

    def _ask(self, *question: object) -> object:
        """Return the answer of the process, or raise its error.

        After any other error it isn't usable: the next caller would get this one's answer.
        """
        message = pack(question)
        self.usable = False
        self.child.channel.send(*message)
        self.sent += sum(memoryview(part).nbytes for part in message)
        answered = self.child.channel.receive()
        self.received += sum(map(len, answered))
        self.usable = True
        value, error = unpack(answered)
        if error is not None:
            raise error
        return value

    def stop(self) -> None:
        self.child.end()


def shared(part: object) -> PackedMessage:
    """Return a component as a message, its weights in memory that processes share."""
    try:
        return PackedMessage([ForkingPickler.dumps(bare(part))])
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise Unsendable(f"{type(part).__name__}: {error}") from error


class HelperProcesses:
    """Runs components in `count` helper processes; dispatches each call to an idle one.

    Args:
        count: number of helper processes.
        threads: threads per call; defaults to what `spared` returns. Steps use the remaining
            cores.
    """

    def __init__(self, count: int = 1, threads: int | None = None) -> None:
        if type(count) is not int or count < 1:
            raise InputError(f"HelperProcesses: count={count!r}: give 1 process or more")
        if threads is not None and (type(threads) is not int or threads < 1):
            raise InputError(
                f"HelperProcesses: threads={threads!r}: give 1 thread or more, or None"
            )
        self.count, self.threads = count, threads
        self.restarts = 0
        self._engine: StepLoop | None = None
        self._here = InRequestThreads()  # for components that no helper can run
        self._free: queue.Queue[HelperProcess | None] = (
            queue.Queue()
        )  # None: the slot of a process that died
        self._busy: set[HelperProcess] = set()
        self._stopped = True
        self._components: dict[Key, Component] = {}
        self._lock = threading.Lock()

    def start(self, engine: StepLoop) -> None:
        self._engine, self._free, self._stopped = engine, queue.Queue(), False
        self._here.start(engine)
        try:
            for _ in range(self.count):
                self._free.put(HelperProcess())
        except BaseException:
            self.stop()
            raise

    def adopt(self, pipe: object, denoisers: Mapping[str, object]) -> None:
        for name, part in parts_around(pipe, denoisers).items():
            if self.register(part) is not None:
                pipe.__dict__[name] = RemoteModule(part, self.run)
            else:
                self._here.take(pipe, name, part)

    def stop(self) -> None:
        """End the helpers; in-flight and later calls raise `Closed`."""
        with self._lock:
            self._stopped = True
            for helper in self._busy:
                helper.child.kill()  # the thread that uses it gets EOFError and cleans up
            with suppress(queue.Empty):
                while True:
                    idle = self._free.get_nowait()
                    if idle is not None:
                        idle.stop()
            self._free.put(None)  # wakes a thread that waits for a helper

    def register(self, part: object) -> Key | None:
        """Return the key of a component, equal for all copies of a processor.

        Return None if helpers can't run it.
        """
        key = part_key(part)
        with self._lock:
            found = self._components.get(key)
            if found is None:
                found = self._components[key] = Component(part, can_be_sent(part))
                if isinstance(part, nn.Module) and found.sendable:
                    part.share_memory()
                    found.watch = Weights(part)
            elif found.watch is not None and found.watch.change() is WeightChange.TENSORS:
                log.info(
                    "%s has other weights than its copies in helpers; it runs in this process",
                    type(part),
                )
                found.sendable = False
            return key if found.sendable else None

    def run(
        self, part: object, method: str, args: tuple[object, ...], kwargs: Mapping[str, object]
    ) -> Any:
        # again: its weights may have been replaced since
        stays = is_coded(part, method) or adapters_of(part) is not None
        key = None if stays else self.register(part)
        helper = None if key is None else self._taken()
        if key is None or helper is None:
            return self._run_here(part, method, args, kwargs)
        try:
            self._give(helper, key)
            threads = self.threads or spared(self._engine)
            with beside(threads):
                return helper.run(key, method, args, kwargs, threads)
        except Unsendable as error:
            log.info(
                "%s.%s runs in this process, because it can't be sent: %s",
                type(part),
                method,
                error,
            )
        except (EOFError, ConnectionError) as error:
            if helper.usable:
                raise  # an error of the component
            if self._stopped:
                raise Closed(STOPPED) from error
            log.warning(
                "a helper process ended (%s); its call runs in this process", type(error).__name__
            )
            self.restarts += 1
        finally:
            self._give_back(helper)
        return self._run_here(part, method, args, kwargs)

    def _give(self, helper: HelperProcess, key: Key) -> None:
        component = self._components[key]
        try:
            helper.give(key, component.part)
        except Unsendable:
            component.sendable = False  # it would be packed again for each call
            raise

    def _run_here(
        self, part: Any, method: str, args: tuple[object, ...], kwargs: Mapping[str, object]
    ) -> object:
        with torch.no_grad():
            return self._here.run(part, method, args, kwargs)

    def _taken(self) -> HelperProcess | None:
        """Wait for an idle helper; replace one that died, or return None if that fails."""
        helper = self._free.get()
        with self._lock:
            if self._stopped:
                self._free.put(None)  # wakes the next waiting thread
                if helper is not None:
                    helper.stop()
                raise Closed(STOPPED)
            if helper is None:
                try:
                    helper = HelperProcess()
                except OSError as error:
                    log.warning("no helper can be started (%s); a call runs in this process", error)
                    self._free.put(None)
                    return None
            self._busy.add(helper)
            return helper

    def _give_back(self, helper: HelperProcess) -> None:
        """Return a helper to the queue, or an empty slot in which one is started on use."""
        with self._lock:
            self._busy.remove(helper)
            if helper.usable and not self._stopped:
                self._free.put(helper)
                return
        helper.stop()
        with self._lock:
            self._free.put(None)


def part_key(part: object) -> Key:
    """Key modules by identity, processors by class and settings: requests copy processors."""
    if isinstance(part, nn.Module):
        return id(part)
    settings = dict(getattr(part, "config", None) or vars(part))
    return f"{type(part)} {sorted((name, repr(value)) for name, value in settings.items())}"
