"""Processes for the work around the denoiser, each with the parts of the pipelines it serves.

Weights lie in shared memory, once for all. A part that can't be sent, sits on another device or
carries adapters stays in the request's thread, and so does a call that a process can't answer
because it died; a new one takes its place.
"""

from __future__ import annotations

import logging
import pickle
import queue
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing.reduction import ForkingPickler
from multiprocessing.shared_memory import SharedMemory
from typing import Any

import torch
import torch.multiprocessing as torch_multiprocessing
from torch import nn

from maskfx.engine.placement import InRequestThreads, RemoteModule, on_cpu, parts_around, spared
from maskfx.engine.tensor_transport import TensorChannel, Unsendable, block_bytes
from maskfx.errors import Closed, InputError
from maskfx.runtime.cpu_threads import beside, give_back
from maskfx.runtime.weights import WeightChange, Weights

log = logging.getLogger(__name__)

STOPPED = "the helper processes are stopped, and this call with them; make another engine"

SPAWN = torch_multiprocessing.get_context("spawn")

Key = int | str  # of a part


class HelperProcess:
    """One process and the parts that it has."""

    def __init__(self) -> None:
        self.parts: set[Key] = set()
        with ExitStack() as undo:
            blocks = [undo.enter_context(shared_block()) for _ in range(2)]
            mine, its = SPAWN.Pipe()
            names = [block.name for block in blocks]
            self.process = SPAWN.Process(target=serve, args=(its, names), daemon=True)
            self.process.start()
            its.close()
            self.blocks, self._undo = blocks, undo.pop_all()
        self.line = TensorChannel(mine, *blocks)

    def give(self, key: Key, part: Any) -> None:
        """Send a part, once."""
        if key not in self.parts:
            try:
                packed = bytes(ForkingPickler.dumps(bare(part)))
            except (pickle.PicklingError, TypeError, AttributeError) as error:
                raise Unsendable(f"{type(part).__name__}: {error}") from error
            self.line.send(("part", key, packed))
            self._answer()
            self.parts.add(key)

    def run(self, key: Key, method: str, args: Any, kwargs: Any, threads: int) -> Any:
        self.line.send(("call", key, method, threads, args, kwargs))
        return self._answer()

    def _answer(self) -> Any:
        value, error = self.line.receive()
        if error is not None:
            raise error
        return value

    def stop(self) -> None:
        if self.process.is_alive():
            self.process.kill()
        self.process.join()
        self.line.pipe.close()
        self._undo.close()


@contextmanager
def shared_block() -> Iterator[SharedMemory]:
    block = SharedMemory(create=True, size=block_bytes())
    try:
        yield block
    finally:
        block.close()
        block.unlink()


class HelperProcesses:
    """So many helpers; each call goes to one that is free.

    threads: of a call; without it, as many as `spared` says. Steps compute with what these leave.
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
        self._engine: Any = None
        self._here = InRequestThreads()  # what no helper can run
        self._free: queue.Queue[HelperProcess | None] = (
            queue.Queue()
        )  # None: the place of one that died
        self._busy: set[HelperProcess] = set()
        self._stopped = True
        self._parts: dict[Key, Any] = {}
        self._watches: dict[Key, Weights] = {}
        self._lock = threading.Lock()

    def start(self, engine: Any) -> None:
        self._engine, self._free, self._stopped = engine, queue.Queue(), False
        self._here.start(engine)
        try:
            for _ in range(self.count):
                self._free.put(HelperProcess())
        except BaseException:
            self.stop()
            raise

    def adopt(self, pipe: Any, denoisers: Mapping[str, Any]) -> None:
        for name, part in parts_around(pipe, denoisers).items():
            if self.register(part) is not None:
                pipe.__dict__[name] = RemoteModule(part, self.run)
            else:
                self._here.take(pipe, name, part)

    def stop(self) -> None:
        """End the helpers; calls under way, and those that come later, are refused."""
        with self._lock:
            self._stopped = True
            for helper in self._busy:
                helper.process.kill()  # whoever has it hears of that, and clears it away
            with suppress(queue.Empty):
                while True:
                    idle = self._free.get_nowait()
                    if idle is not None:
                        idle.stop()
            self._free.put(None)  # who waits hears of it

    def register(self, part: Any) -> Key | None:
        """The key of a part, if helpers can run it; the same for all copies of a processor."""
        key = part_key(part)
        with self._lock:
            if key not in self._parts:
                self._parts[key] = part if can_be_sent(part) else None
                if isinstance(part, nn.Module) and self._parts[key] is not None:
                    part.share_memory()
                    self._watches[key] = Weights(part)
            kept = self._parts[key]
            watch = self._watches.get(key)
            if watch is not None and watch.change() is WeightChange.TENSORS:
                log.info("%s has other weights than its helpers; it stays here", type(part))
                self._parts[key] = kept = None
        return None if kept is None else key

    def run(self, part: Any, method: str, args: tuple[Any, ...], kwargs: Any) -> Any:
        key, helper = part_key(part), self._taken()
        if helper is None:
            return self._run_here(part, method, args, kwargs)
        died = False
        try:
            helper.give(key, self._parts[key])
            threads = self.threads or spared(self._engine)
            with beside(threads):
                return helper.run(key, method, args, kwargs, threads)
        except Unsendable as error:
            log.info("%s.%s runs here, for it can't be sent: %s", type(part), method, error)
        except (EOFError, BrokenPipeError, ConnectionError) as error:
            died = True
            if self._stopped:
                raise Closed(STOPPED) from error
            log.warning("a helper died (%s); its call runs here", type(error).__name__)
            self.restarts += 1
        finally:
            self._give_back(helper, died)
        return self._run_here(part, method, args, kwargs)

    def _run_here(self, part: Any, method: str, args: tuple[Any, ...], kwargs: Any) -> Any:
        with torch.no_grad():
            return self._here.run(part, method, args, kwargs)

    def _taken(self) -> HelperProcess | None:
        """A helper that is free, as soon as there is one; None if none can be started now."""
        helper = self._free.get()
        with self._lock:
            if self._stopped:
                self._free.put(None)  # for the next one who asks
                if helper is not None:
                    helper.stop()
                raise Closed(STOPPED)
            if helper is None:
                try:
                    helper = HelperProcess()
                except OSError as error:
                    log.warning("no helper can be started (%s); a call runs here", error)
                    self._free.put(None)
                    return None
            self._busy.add(helper)
            return helper

    def _give_back(self, helper: HelperProcess, died: bool) -> None:
        """If it died, its place: who has that next starts another one."""
        with self._lock:
            self._busy.remove(helper)
            if not died and not self._stopped:
                self._free.put(helper)
                return
        helper.stop()
        with self._lock:
            self._free.put(None)


def part_key(part: Any) -> Key:
    """Modules by identity; processors by class and settings, for requests have copies of them."""
    if isinstance(part, nn.Module):
        return id(part)
    settings = dict(getattr(part, "config", None) or vars(part))
    return f"{type(part)} {sorted((name, repr(value)) for name, value in settings.items())}"


def can_be_sent(part: Any) -> bool:
    if isinstance(part, nn.Module) and (not on_cpu(part) or getattr(part, "peft_config", None)):
        return False
    try:
        pickle.dumps(type(part))
        return True
    except Exception:
        log.info("%s can't be sent to another process; it stays here", type(part))
        return False


def bare(part: Any) -> Any:
    """The part without what was hung on the object itself."""
    own = object.__new__(type(part))
    hung = {k for k, v in part.__dict__.items() if callable(v) and hasattr(type(part), k)}
    own.__dict__.update({k: v for k, v in part.__dict__.items() if k not in hung})
    return own


# In the helper.


def serve(pipe: Any, names: list[str]) -> None:
    """A helper's life: parts come, calls are answered, until the pipe closes."""
    theirs, own = map(SharedMemory, names)
    line = TensorChannel(pipe, own, theirs)
    parts: dict[Key, Any] = {}
    while True:
        try:
            what, key, *rest = line.receive()
        except EOFError:
            return
        try:
            if what == "part":
                line.send((None, unpacked(parts, key, *rest)))
            else:
                line.send((answer(parts[key], *rest), None))
        except Unsendable as error:
            line.send((None, error))
        except Exception as error:
            line.send((None, plain(error)))


def unpacked(parts: dict[Key, Any], key: Key, packed: bytes) -> Exception | None:
    """Take a part; what can't be made here stays where it is."""
    try:
        parts[key] = pickle.loads(packed)
        return None
    except Exception as error:
        return Unsendable(f"a helper can't make it: {type(error).__name__}: {error}")


def answer(part: Any, method: str, threads: int, args: Any, kwargs: Any) -> Any:
    torch.set_num_threads(threads)
    try:
        with torch.no_grad():
            return getattr(part, method)(*args, **kwargs)
    finally:
        if threads > 1:
            give_back()  # before the step that needs the cores can begin


def plain(error: Exception) -> Exception:
    """The error itself if it can be sent, else its text."""
    try:
        pickle.loads(pickle.dumps(error))
        return error
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
