"""CodeCompiler: has the graphs of ranks compiled in a process of its own, while these compute.

No step waits for a compile: ranks run a graph by its operators until they have loaded its code. All
run the same code, which serves every mask, size, batch and number of ranks.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from torch.utils import _pytree as pytree

from maskfx.distributed.heartbeat import Waits
from maskfx.distributed.messages import CodeUse, CompileRequest, CompileResult, WantedCode
from maskfx.distributed.processes import poll
from maskfx.distributed.rank_child import RankProcess
from maskfx.distributed.samples import shape_of
from maskfx.runtime.backends.code_run import CodeKey
from maskfx.runtime.hardware.devices import CPU
from maskfx.runtime.steps import AnyStep, DenseStep
from maskfx.runtime.transport.tensor_transport import Unsendable

log = logging.getLogger(__name__)

AFTER = 2  # steps that lacked code, after which it is compiled
MOST = 16  # graphs that are compiled
EXAMPLES = 4  # steps of different sizes that are sent to the process that compiles
GRACE = 5.0  # seconds in which it may end what it started


class CodeCompiler:
    """Knows which code of a denoiser's graphs there is, and has more compiled.

    Args:
        held: Returns what a rank holds: the module, its settings and roles, and the threads.
        folder: Where the code is written.
        waits: Time limits.
    """

    def __init__(self, held: Callable[[], tuple[object, ...]], folder: Path, waits: Waits) -> None:
        self._held, self._folder, self._waits = held, folder, waits
        self.places: dict[CodeKey, str] = {}
        self.results: dict[CodeKey, CompileResult] = {}
        self.failed: dict[CodeKey, str] = {}
        self._lacked: Counter[CodeKey] = Counter()
        self._again_once: set[CodeKey] = set()  # what a second process compiles
        self._queue: deque[CompileRequest] = deque()
        self._lock = threading.Lock()  # guards the queue and the process
        self._process: RankProcess | None = None
        self._thread: threading.Thread | None = None
        self._stopped = False

    # What a CodeSource does, for this process.

    def place(self, key: CodeKey) -> Path | None:
        found = self.places.get(key)
        return None if found is None else Path(found)

    def ran(self, key: CodeKey) -> None:
        pass

    def fail(self, key: CodeKey, why: str) -> None:
        self.places.pop(key, None)
        self.failed.setdefault(key, why)

    def lines(self) -> list[str]:
        """Return what is compiled for ranks, and what runs operator by operator and why."""
        if not self._lacked:
            return ["Ranks run operator by operator until a graph was computed twice."]
        lines = []
        for key in self._lacked:
            name = name_of(key)
            if (found := self.results.get(key)) is not None and key not in self.failed:
                lines.append(
                    f"Ranks run {name} by code that Inductor compiled in {found.seconds:.0f} s, in "
                    f"a process of {found.nbytes / (1 << 20):.0f} MiB at most."
                )
            else:
                why = self.failed.get(key, "its code is compiled meanwhile")
                lines.append(f"Ranks run {name} operator by operator: {why}.")
        return lines

    # What ranks lack.

    def note(self, uses: Iterable[CodeUse], steps: Sequence[AnyStep], single: bool = False) -> None:
        """Note what a step of ranks lacked; have it compiled if it isn't the first time.

        Args:
            uses: What each rank ran.
            steps: The members of the step.
            single: Whether they are samples of calls that run sample by sample.
        """
        lacked: dict[CodeKey, WantedCode] = {}
        for use in uses:
            lacked.update({wanted.key: wanted for wanted in use.wanted})
            for key, why in use.failed.items():
                self.fail(key, why)
        for key, wanted in lacked.items():
            self._lacked[key] += 1
            if self._lacked[key] != AFTER or key in self.places:
                continue
            if sum(count >= AFTER for count in self._lacked.values()) > MOST:
                self.failed[key] = f"{MOST} graphs are compiled, and no more"
                continue
            self._add(CompileRequest(wanted, examples(steps), single, self._new_folder()))

    def _add(self, request: CompileRequest) -> None:
        with self._lock:
            self._queue.append(request)
            if self._thread is None and not self._stopped:
                self._thread = threading.Thread(
                    target=self._run, name="maskfx has code compiled", daemon=True
                )
                self._thread.start()

    def _run(self) -> None:
        process: RankProcess | None = None
        try:
            while (request := self._next()) is not None:
                key = request.wanted.key
                try:
                    process = process or self._start()
                    process.send("compile", request)
                    found = answer_of(process, self._waits.compile)
                    assert isinstance(found, CompileResult), found
                    self.results[key], self.places[key] = found, request.folder
                except (RuntimeError, Unsendable) as error:
                    self._give_up(key, error)
                except (OSError, EOFError) as error:  # the process ended, or took too long
                    if process is not None:
                        process.child.end()
                        process = None
                    self._again(request, error)
        finally:
            if process is not None:
                process.child.close(GRACE)  # and its memory is free

    def _again(self, request: CompileRequest, error: Exception) -> None:
        """Have a graph compiled again, by another process, if its compile failed once."""
        key = request.wanted.key
        if key in self._again_once or self._stopped:
            self._give_up(key, error)
            return
        self._again_once.add(key)
        with self._lock:
            self._queue.append(replace(request, folder=self._new_folder()))

    def _give_up(self, key: CodeKey, error: Exception) -> None:
        why = str(error) or type(error).__name__
        self.failed[key] = f"its compile failed ({why})"
        if not self._stopped:
            log.warning("ranks run %s operator by operator: %s", name_of(key), why)

    def _new_folder(self) -> str:
        return str(self._folder / f"code-{secrets.token_hex(8)}")

    def _next(self) -> CompileRequest | None:
        """Return what is compiled next; None, and the thread ends, without anything."""
        with self._lock:
            if self._queue and not self._stopped:
                return self._queue.popleft()
            self._thread = self._process = None
            return None

    def _start(self) -> RankProcess:
        process = RankProcess(self._waits.start, 0, CPU, CPU)
        with self._lock:
            self._process = process
            if self._stopped:
                process.child.kill()
        try:
            answer_of(process, self._waits.start)  # to "hello"
            process.send("module", process.packed(self._held(), {}))
            answer_of(process, self._waits.start)
        except BaseException:
            process.child.end()
            raise
        return process

    def stop(self) -> None:
        """Compile no more."""
        with self._lock:
            self._stopped = True
            thread, process = self._thread, self._process
            if process is not None:
                process.child.kill()
        if thread is not None:
            thread.join()


def answer_of(process: RankProcess, seconds: float) -> object:
    """Return what a process answers; raise TimeoutError if it takes longer than this."""
    if not poll({process.child.channel.fileno(): 0}, time.monotonic() + seconds):
        raise TimeoutError(f"it took more than {seconds:g} s")
    found, wrong = process.receive()
    if wrong is not None:
        raise wrong
    return found


def examples(steps: Sequence[AnyStep]) -> list[AnyStep]:
    """Return dense steps with the arguments of members of different sizes."""
    found: dict[object, AnyStep] = {}
    for step in steps:
        values, spec = pytree.tree_flatten(dict(step.inputs))
        found.setdefault((spec, *map(shape_of, values)), DenseStep(step.inputs))
    return list(found.values())[:EXAMPLES]


def name_of(key: CodeKey) -> str:
    """Return the name of a graph in explanations."""
    if key.attention is None:
        return "whole members"
    how = key.attention if isinstance(key.attention, str) else "several ways of attention"
    return f"divided members ({how}{'' if key.joined else ', with late exchanges'})"
