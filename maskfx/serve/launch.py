"""`serve`: starts a server from settings, and ends it on a signal.

Settings that can't work are refused before any large import. The first SIGTERM, SIGINT or SIGHUP
drains: requests in flight finish. The second one ends all processes immediately.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

import structlog

from maskfx.errors import InputError
from maskfx.runtime.cache.stores.bounded_calls import open_remote
from maskfx.serve.config import ServeSettings, is_loopback
from maskfx.serve.conflicts import conflict
from maskfx.serve.logs import configure_logs
from maskfx.serve.model_folder import found
from maskfx.serve.workers.executor import LOCAL, Executor

if TYPE_CHECKING:
    import uvicorn

    from maskfx.scheduling.cost_model import LearnedCosts
    from maskfx.serve.frontend.frontend import Front
    from maskfx.serve.frontend.tracing import Tracing

ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
REFUSED = 2  # exit codes
FAILED = 1
BACKLOG = 2048
OWN_DESCRIPTORS = 96  # for the event loop, ZeroMQ, codecs and open files
PER_WORKER = 8
ABORT_SECONDS = 2.0

log = structlog.get_logger(__name__)


class LaunchRefusal(Exception):
    """Raised if a server can't be started; the message has the reason and the remedy."""


def serve(settings: ServeSettings) -> int:
    """Serve until a signal arrives, and return the process's exit code."""
    configure_logs(settings.log_level)
    try:
        check_key(settings)
        check_conflicts(settings)
        check_cache(settings)
        check_model(settings)
        listener = listen(settings)
        check_descriptors(settings)
        costs = costs_of(settings)
        tracing = tracing_of(settings)
        executor = executor_of(settings)
    except LaunchRefusal as why:
        print(f"maskfx serve: {why}", file=sys.stderr)
        return REFUSED
    with listener, contextlib.closing(executor):
        return asyncio.run(run(settings, listener, costs, tracing, executor))


# Checks before the start.


def check_key(settings: ServeSettings) -> None:
    """Refuse to listen beyond loopback without an API key."""
    if settings.api_key is None and not is_loopback(settings.host):
        raise LaunchRefusal(
            f"host {settings.host} can be reached from other machines and there is no key: "
            "set --api-key or MASKFX_API_KEY, or bind to 127.0.0.1"
        )


def check_conflicts(settings: ServeSettings) -> None:
    """Refuse settings that exclude each other, rather than ignore one of them."""
    if (why := conflict(settings)) is not None:
        raise LaunchRefusal(why)


def check_cache(settings: ServeSettings) -> None:
    """Refuse a URL that can't be opened; whether the object store answers isn't tried."""
    if isinstance(settings.cache_dir, str):
        try:
            open_remote(settings.cache_dir)
        except InputError as error:
            raise LaunchRefusal(f"cache_dir: {error}") from None


def check_model(settings: ServeSettings) -> None:
    """Refuse a model that isn't there; other machines may have folders that this one lacks."""
    if settings.fake or settings.executor != "processes":
        return
    try:
        found(settings.model)
    except InputError as error:
        raise LaunchRefusal(str(error)) from None


def listen(settings: ServeSettings) -> socket.socket:
    """Open the listening socket, so that the port stays reserved while the model loads."""
    try:
        found = socket.getaddrinfo(settings.host, settings.port, type=socket.SOCK_STREAM)
        family, kind, protocol, _, address = found[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise LaunchRefusal(f"host {settings.host}: {error.strerror}") from None
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        why = f"port {settings.port} on {settings.host}: {(error.strerror or '').lower()}"
        raise LaunchRefusal(f"{why}; choose another with --port, or 0 for any") from None
    return listener


def check_descriptors(settings: ServeSettings) -> None:
    """Raise the soft limit of file descriptors if it is too low for the settings.

    If it stays too low, log a warning, or refuse to start if not even idle workers fit.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    workers = settings.workers
    if settings.executor == "ray":
        workers = max(workers, settings.ray.max_workers or 0)
    callers = settings.queue + workers * settings.max_num_seqs
    least = OWN_DESCRIPTORS + PER_WORKER * workers
    if soft != resource.RLIM_INFINITY and soft < least + 2 * callers:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            soft = hard
    if soft == resource.RLIM_INFINITY or soft >= least + callers:
        return
    if soft < least:
        raise LaunchRefusal(
            f"this process may open {soft} files and sockets, the server needs {least} before "
            "the first request: raise the limit, for example with ulimit -n 4096"
        )
    log.warning("few_descriptors", limit=soft, wanted=least + callers, do="raise ulimit -n")


def costs_of(settings: ServeSettings) -> LearnedCosts:
    """Return fitted costs from the settings' file, or a guess low enough not to drop any request.

    Both are refitted while serving.
    """
    from maskfx.scheduling.cost_model import START, FittedCosts, LearnedCosts

    if settings.costs is None:
        return LearnedCosts(START)
    try:
        return LearnedCosts(FittedCosts.from_json(settings.costs.read_bytes()))
    except OSError as error:
        raise LaunchRefusal(f"costs {settings.costs}: {error.strerror}") from None
    except InputError as error:
        raise LaunchRefusal(f"costs {settings.costs}: {error}") from None


def tracing_of(settings: ServeSettings) -> Tracing | None:
    """Return the tracing of the settings' endpoint, which needs the `otel` extra; None without."""
    if settings.otlp_endpoint is None:
        return None
    try:
        from maskfx.serve.frontend.tracing import Tracing, exporter_to
    except ImportError as missing:
        raise LaunchRefusal(
            f"otlp_endpoint is set and {missing.name} isn't installed: "
            "pip install 'maskfx[otel]', or leave otlp_endpoint out"
        ) from None
    return Tracing(exporter_to(settings.otlp_endpoint))


def executor_of(settings: ServeSettings) -> Executor:
    """Return what starts the workers: child processes, or Ray, which needs the `ray` extra."""
    told = settings.ray
    if settings.executor == "processes":
        for name, value in told.model_dump(exclude_defaults=True).items():
            raise LaunchRefusal(f"ray.{name} is {value}: add --executor ray, or leave it out")
        return LOCAL
    if told.max_workers is not None and told.max_workers < settings.workers:
        raise LaunchRefusal(
            f"ray.max_workers is {told.max_workers}, less than workers, {settings.workers}: "
            "raise it, or leave it out"
        )
    try:
        from maskfx.serve.workers.ray_cluster import join
        from maskfx.serve.workers.ray_executor import RayExecutor
    except ModuleNotFoundError as missing:
        if (missing.name or "").partition(".")[0] != "ray":
            raise
        raise LaunchRefusal(
            "executor is ray and the package ray isn't installed: pip install 'maskfx[ray]', "
            "or use --executor processes"
        ) from None
    try:
        return RayExecutor(join(settings), settings)
    except InputError as error:
        raise LaunchRefusal(str(error)) from None


# The server.


async def run(
    settings: ServeSettings,
    listener: socket.socket,
    costs: LearnedCosts,
    tracing: Tracing | None = None,
    executor: Executor = LOCAL,
) -> int:
    """Run the workers and the HTTP server, which already answers while the model loads."""
    from maskfx.scheduling.scheduler import make_scheduler
    from maskfx.serve.frontend.frontend import Front
    from maskfx.serve.http import create_app, make_server
    from maskfx.serve.metrics import Metrics

    metrics = Metrics()
    scheduler = make_scheduler(settings.scheduler, settings.router, costs)
    front = Front(settings, scheduler, costs, metrics, tracing=tracing, executor=executor)
    server = make_server(create_app(front, settings, metrics), settings)
    signals = Signals()
    front.start()
    with signals.caught():
        server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign, assignment]
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        host, port = listener.getsockname()[:2]
        log.info("listening", host=host, port=port, pid=os.getpid())
        ending = asyncio.create_task(end(settings, front, server, serving, signals))
        aborted = asyncio.create_task(signals.second.wait())
        await asyncio.wait({ending, aborted}, return_when=asyncio.FIRST_COMPLETED)
        if not ending.done():
            return await abort(front, server, serving, ending)
        aborted.cancel()
        if tracing is not None:
            await asyncio.to_thread(tracing.close)
        return ending.result()


class Signals:
    """Events that are set by the first and the second of the signals that end a server."""

    def __init__(self) -> None:
        self.first, self.second = asyncio.Event(), asyncio.Event()

    @contextlib.contextmanager
    def caught(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        # nohup has SIGHUP ignored
        numbers = [n for n in ENDING if signal.getsignal(n) is not signal.SIG_IGN]
        for number in numbers:
            loop.add_signal_handler(number, self._heard)
        try:
            yield
        finally:
            for number in numbers:
                loop.remove_signal_handler(number)

    def _heard(self) -> None:
        (self.second if self.first.is_set() else self.first).set()


async def end(
    settings: ServeSettings,
    front: Front,
    server: uvicorn.Server,
    serving: asyncio.Task[None],
    signals: Signals,
) -> int:
    """Wait for a signal or a failure, then drain the server; return the exit code."""
    asked = asyncio.create_task(signals.first.wait())
    refused = asyncio.create_task(until_refused(front))
    await asyncio.wait({asked, refused, serving}, return_when=asyncio.FIRST_COMPLETED)
    began, reason = time.monotonic(), asked.done()
    for task in (asked, refused):
        task.cancel()
    if not reason:
        what = "the HTTP server ended" if serving.done() else "the model can't be loaded"
        print(f"maskfx serve: {what}; the log has the reason", file=sys.stderr)
    log.info("draining", asked=reason)
    drained = await front.drain(settings.shutdown_timeout)
    await front.close()
    left = settings.shutdown_timeout - (time.monotonic() - began)
    server.config.timeout_graceful_shutdown = max(1, math.ceil(left))
    server.should_exit = True
    await asyncio.gather(serving, return_exceptions=True)
    log.info("ended", drained=drained)
    return 0 if reason and drained else FAILED


async def until_refused(front: Front) -> None:
    """Wait until all workers are given up because the model can't be loaded."""
    while not front.refused():
        await asyncio.sleep(0.1)


async def abort(
    front: Front, server: uvicorn.Server, serving: asyncio.Task[None], ending: asyncio.Task[int]
) -> int:
    """End immediately: cancel the drain and kill the child processes."""
    log.warning("aborted")
    ending.cancel()
    front.abort()
    server.force_exit = server.should_exit = True
    await asyncio.wait({serving}, timeout=ABORT_SECONDS)
    kill_children()
    return FAILED


def kill_children() -> None:
    """Kill all remaining child processes, recursively."""
    import psutil  # type: ignore[import-untyped]

    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
