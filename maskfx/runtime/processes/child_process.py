"""The one way in which maskfx starts a child process, watches and ends it.

Helper processes of the engine, codec processes and workers are all a `ChildProcess`. When to start
another one is decided by their owners.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from maskfx.runtime.processes.channel import BYTES, Channel

REAP_SECONDS = 1.0


class ChildProcess:
    """A process that runs a module in a separate session, and the channel to it.

    It imports from the same places as this process, and ends with it or with the channel
    (`channel.connect_to_parent`).

    Args:
        module: The module, run as with `python -m`.
        arguments: Arguments of its command line.
        environment: Its environment; defaults to that of this process.
        seconds: Time limit of the channel, see `Channel`.
        most: Limit of the bytes of a message that it sends.
    """

    def __init__(
        self,
        module: str,
        arguments: Sequence[str] = (),
        *,
        environment: Mapping[str, str] | None = None,
        seconds: float | None = None,
        most: int = BYTES,
    ) -> None:
        line, theirs = socket.socketpair()
        with theirs, contextlib.ExitStack() as undo:
            undo.callback(line.close)
            # a separate session, so that Ctrl-C in a terminal doesn't signal it
            self._process = (
                starter()
                .submit(
                    subprocess.Popen,
                    [sys.executable, "-P", "-m", module, *arguments],
                    stdin=theirs.fileno(),
                    env={**(os.environ if environment is None else environment), **import_paths()},
                    start_new_session=True,
                )
                .result()
            )
            undo.pop_all()
        self.channel = Channel(line, seconds, most)

    @property
    def pid(self) -> int:
        return self._process.pid

    def exited(self) -> bool:
        """Return True if the process has ended, without reaping it: id and group stay reserved."""
        if self._process.returncode is not None:
            return True
        try:
            flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
            return os.waitid(os.P_PID, self._process.pid, flags) is not None
        except ChildProcessError:
            return True

    def kill(self) -> None:
        """Kill the process and what it started; a thread that waits for it gets EOFError."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def end(self) -> int:
        """Kill the process and what it started, close the channel, and return the exit code."""
        self.kill()
        self.channel.close()
        try:
            return self._process.wait(REAP_SECONDS)
        except subprocess.TimeoutExpired:
            return -signal.SIGKILL  # blocked in the kernel, e.g. in a driver; it will end later

    def close(self, seconds: float) -> int:
        """Close the channel, so that the process ends; kill it after `seconds`."""
        self.channel.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)
        return self.end()


def import_paths() -> dict[str, str]:
    """Return the environment variable by which a child imports from the same places."""
    places = [os.path.abspath(place) for place in sys.path]
    return {"PYTHONPATH": os.pathsep.join(dict.fromkeys(places))}


_starters: dict[int, ThreadPoolExecutor] = {}  # by process: a fork has no threads


def starter() -> ThreadPoolExecutor:
    """Return a thread that lives as long as this process, to start others from.

    The system ends a child, even one that is stopped, with the thread that started it
    (`channel.end_with_parent`), and other threads may end before the child's work does.
    """
    own = os.getpid()
    if own not in _starters:
        _starters.clear()
        _starters[own] = ThreadPoolExecutor(1, "maskfx starts processes")
    return _starters[own]
