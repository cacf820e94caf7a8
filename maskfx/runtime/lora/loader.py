"""AdapterLoader: loads LoRA files in child processes, and receives their weights as shared memory.

A process loads one file at a time. One that dies is replaced, and its file loaded once more; one
that hasn't answered at its load's deadline is killed.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict

from maskfx.errors import AdapterError, Closed, InputError
from maskfx.runtime.lora.adapter import Adapter
from maskfx.runtime.lora.files import AdapterFile, FileLimits
from maskfx.runtime.lora.transfer import receive_block
from maskfx.runtime.processes.child_process import ChildProcess

log = logging.getLogger(__name__)

READ = "maskfx.runtime.lora.files:read_bytes"
TRIES = 2
STALL = 60.0  # seconds in which a started answer must arrive
STOPPED = "the adapters are closed, and this load with them; make others"


class AdapterLoader:
    """Loads files in child processes, which are started when they are needed.

    Args:
        module: The module that the processes run (`maskfx.pipelines.adapters.lora_process`).
        deadline: Seconds for one file, all tries included.
        read: `module:function` that returns a file's content by its path, for stores that aren't
            mounted.
        limits: Limits of a file.
    """

    def __init__(
        self,
        module: str,
        *,
        deadline: float = 60.0,
        read: str = READ,
        limits: FileLimits | None = None,
    ) -> None:
        self.deadline, self.restarts = deadline, 0
        self._module, self._read, self._limits = module, read, limits or FileLimits()
        self._idle: list[ChildProcess] = []
        self._busy: set[ChildProcess] = set()
        self._lock = threading.Lock()
        self._closed = False

    def load(self, file: AdapterFile, target: Mapping[str, object]) -> Adapter:
        """Load one file; InputError if it can't be used, with the reason.

        Args:
            file: The file, as it was registered.
            target: The fields of `LoraTarget`: what the file is checked against.
        """
        due = time.monotonic() + self.deadline
        what = {
            "file": asdict(file),
            "limits": asdict(self._limits),
            "read": self._read,
            "target": target,
        }
        request = json.dumps(what).encode()
        for left in reversed(range(TRIES)):
            try:
                return self._ask(file, request, due)
            except (EOFError, ConnectionError) as error:
                if self._closed:
                    raise Closed(STOPPED) from None
                self.restarts += 1
                log.warning("a process that loads %s ended; %d tries left", file.name, left)
                last = error
        raise AdapterError(
            f"{file.name}: the process that loads it ended {TRIES} times "
            f"({type(last).__name__}); is the file too large for the memory?"
        )

    def start(self) -> None:
        """Start a process, so that the first load needn't wait for its imports."""
        self._put_back(self._take())

    def close(self) -> None:
        """End the processes; loads in flight raise `Closed`."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
            for child in self._busy:
                child.kill()  # the thread that waits for it gets EOFError and cleans up
        for child in idle:
            child.end()

    def _ask(self, file: AdapterFile, request: bytes, due: float) -> Adapter:
        child, usable = self._take(), False
        try:
            child.channel.send(request)
            if not child.channel.waits(due - time.monotonic()):
                raise AdapterError(
                    f"{file.name}: not loaded within {self.deadline:g} s; is its store reachable?"
                )
            (answer,) = child.channel.receive()
            head = json.loads(bytes(answer))
            if "unfit" not in head and "failed" not in head:
                adapter = receive_block(child.channel, head)
                usable = True
                return adapter
            usable = True
        except TimeoutError as error:
            raise AdapterError(f"{file.name}: {error}") from error
        finally:
            if usable:
                self._put_back(child)
            else:
                with self._lock:
                    self._busy.discard(child)
                child.end()
        if "unfit" in head:
            unfit = InputError(head["unfit"])
            unfit.argument = "lora"
            raise unfit
        raise AdapterError(f"{file.name}: {head['failed']}")

    def _take(self) -> ChildProcess:
        with self._lock:
            if self._closed:
                raise Closed(STOPPED)
            while self._idle:
                child = self._idle.pop()
                if not child.exited():
                    break
                child.end()
                self.restarts += 1
            else:
                child = ChildProcess(self._module, seconds=STALL)
            self._busy.add(child)
            return child

    def _put_back(self, child: ChildProcess) -> None:
        with self._lock:
            self._busy.discard(child)
            if not self._closed:
                self._idle.append(child)
                return
        child.end()
