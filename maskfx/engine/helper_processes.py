"""Helper processes for the work around the denoiser, each with the pipelines' components.

Weights lie in shared memory, once for all processes. A component that can't be pickled, is on
another device or has adapters runs in the request's thread. So does a call whose helper process
died; a new process replaces it.
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

Key = int | str  # of a pipeline component


class HelperProcess:
    """One helper process and the keys of the components sent to it."""

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
        """Send a component, unless the process has it already."""
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
        self._engine: Any = None
        self._here = InRequestThreads()  # for components that no helper can run
        self._free: queue.Queue[HelperProcess | None] = (
            queue.Queue()
        )  # None: the slot of a process that died
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
        """End the helpers; in-flight and later calls raise `Closed`."""
        with self._lock:
            self._stopped = True
            for helper in self._busy:
                helper.process.kill()  # the thread that uses it gets EOFError and cleans up
            with suppress(queue.Empty):
                while True:
                    idle = self._free.get_nowait()
                    if idle is not None:
                        idle.stop()
            self._free.put(None)  # wakes a thread that waits for a helper

    def register(self, part: Any) -> Key | None:
        """Return the key of a component, equal for all copies of a processor.

        Return None if helpers can't run it.
        """
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
                    log.warning("no helper can be started (%s); a call runs here", error)
                    self._free.put(None)
                    return None
            self._busy.add(helper)
            return helper

    def _give_back(self, helper: HelperProcess, died: bool) -> None:
        """Return a helper to the queue, or an empty slot if it died, to be restarted on use."""
        with self._lock:
            self._busy.remove(helper)
            if not died and not self._stopped:
                self._free.put(helper)
                return
        helper.stop()
        with self._lock:
            self._free.put(None)


def part_key(part: Any) -> Key:
    """Key modules by identity, processors by class and settings: requests copy processors."""
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
    """Return a copy of a component without methods that were replaced on the instance."""
    own = object.__new__(type(part))
    hung = {k for k, v in part.__dict__.items() if callable(v) and hasattr(type(part), k)}
    own.__dict__.update({k: v for k, v in part.__dict__.items() if k not in hung})
    return own


# In the helper process.


def serve(pipe: Any, names: list[str]) -> None:
    """Receive components and execute calls until the pipe closes; the main of a helper."""
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
    """Unpickle a component into `parts`; return the error if that fails, else None."""
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
            give_back()  # release idle OpenMP threads before the next step needs the cores


def plain(error: Exception) -> Exception:
    """Return the error if it can be pickled, else a `RuntimeError` with its text."""
    try:
        pickle.loads(pickle.dumps(error))
        return error
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
