"""Workers as actors of a Ray cluster.

Ray decides on which node a worker runs, reports its end and kills it. The supervisor restarts it,
so Ray doesn't. Messages and pixels go by the link, encrypted over TCP between machines, and not by
calls of actors: a job sends progress and previews while it runs and may be cancelled, for which the
link is made, and messages can be lost in one way instead of two. Workers on the front end's node
use its Unix socket. Calls of Ray may wait for the cluster's head, so a thread makes them, in order.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from queue import SimpleQueue
from typing import Any

import ray
import structlog
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

import maskfx
from maskfx.serve.config import ServeSettings
from maskfx.serve.workers.executor import WorkerAddress
from maskfx.serve.workers.process import REFUSED
from maskfx.serve.workers.ray_actor import actor_class, label_of
from maskfx.serve.workers.ray_cluster import Cluster, brief, needs, shutdown, too_few

REPORT_SECONDS = 30.0  # between two reports of a worker that waits for a node
CLOSE_SECONDS = 10.0  # for Ray to end

log = structlog.get_logger(__name__)


class RayCalls:
    """A thread that makes calls one after another; it doesn't keep the process from ending."""

    def __init__(self) -> None:
        self._calls: SimpleQueue[tuple[Callable[[], None], Future[None]] | None] = SimpleQueue()
        threading.Thread(target=self._run, name="ray", daemon=True).start()

    def add(self, call: Callable[[], None]) -> Future[None]:
        done: Future[None] = Future()
        self._calls.put((call, done))
        return done

    def close(self) -> None:
        self._calls.put(None)

    def _run(self) -> None:
        while (one := self._calls.get()) is not None:
            call, done = one
            try:
                call()
            except BaseException as error:  # Ray may raise SystemExit if its processes are gone
                log.warning("ray_call_failed", error=brief(error))
            done.set_result(None)


@dataclass(eq=False)
class RayWorker:
    """A worker that is an actor; the fields are set by the executor's thread and by Ray's."""

    name: str
    began: float
    end_actor: Callable[[RayWorker], None]
    reported: float = 0.0  # when the wait for a node was last reported
    placed: bool = False
    ending: bool = False  # the front end ends it
    pid: int | None = None
    code: int | None = None  # exit code, once it has ended
    actor: Any = None
    group: PlacementGroup | None = None
    check: Callable[[RayWorker], None] = lambda _: None

    def waiting(self) -> bool:
        return not self.placed and self.code is None

    def exited(self) -> bool:
        if self.waiting():
            self.check(self)
        return self.code is not None

    def end(self) -> int:
        self.ending = True
        self.end_actor(self)
        return -signal.SIGKILL if self.code is None else self.code

    def found(self, place: Future[dict[str, Any]]) -> None:
        """Note where it runs."""
        if place.exception() is None:
            where = place.result()
            self.placed, self.pid = True, where["pid"]
            log.info(
                "worker_placed",
                worker=self.name,
                node=label_of(where["node"]),
                address=where["address"],
                host=where["host"],
                pid=self.pid,
            )

    def ended(self, run: Future[int]) -> None:
        """Note its exit code; report why there is none."""
        error = run.exception()
        if error is not None and not self.ending:
            log.warning("worker_actor_ended", worker=self.name, error=brief(error))
        self.code = run.result() if error is None else 1


class RayExecutor:
    """Starts workers as actors.

    Args:
        cluster: The cluster that this process has joined.
        settings: Settings of the server.
        clock: Monotonic clock.
    """

    def __init__(
        self,
        cluster: Cluster,
        settings: ServeSettings,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._cluster, self._settings, self._clock = cluster, settings, clock
        self._needs, self._ranks = needs(settings), settings.ranks
        self._actor: Any = ray.remote(actor_class())
        self._calls = RayCalls()
        self._workers: set[RayWorker] = set()
        self._groups: list[PlacementGroup] = []  # reserved, without a worker at the moment
        self._expected = settings.workers
        self._placed = False  # whether any worker ever was
        self._closed = False

    @property
    def listen(self) -> tuple[str, int] | None:
        return None if self._cluster.local else (self._cluster.host, self._settings.ray.link_port)

    def start(self, place: WorkerAddress, settings: ServeSettings) -> RayWorker:
        now = self._clock()
        worker = RayWorker(place.name, now, self._end, reported=now, check=self._check)
        self._workers.add(worker)
        self._calls.add(lambda: self._create(worker, place, settings))
        return worker

    def expect(self, workers: int) -> None:
        self._expected = workers
        if not self._cluster.local:
            self._calls.add(lambda: self._request(workers))

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        for worker in tuple(self._workers):
            worker.end()
        self.expect(0)
        self._calls.add(self._release_groups)
        closed = self._calls.add(shutdown)
        self._calls.close()
        try:
            closed.result(CLOSE_SECONDS)
        except TimeoutError:
            log.warning("ray_not_closed", seconds=CLOSE_SECONDS)

    # Called by the event loop, like the above.

    def _check(self, worker: RayWorker) -> None:
        """Report a worker that waits for a node; give the first one up after some time."""
        now, limit = self._clock(), self._settings.ray.place_seconds
        hopeless = not self._placed and now - worker.began > limit
        if now - worker.reported > (1.0 if hopeless else REPORT_SECONDS):
            worker.reported = now
            self._calls.add(lambda: self._report(worker, now, hopeless))

    def _end(self, worker: RayWorker) -> None:
        if worker in self._workers:
            self._workers.remove(worker)
            self._calls.add(lambda: self._kill(worker))

    # Called by the thread.

    def _create(self, worker: RayWorker, place: WorkerAddress, settings: ServeSettings) -> None:
        if worker.ending:
            return
        try:
            actor = self._actor.options(**self._options(worker)).remote(maskfx.__version__)
            worker.actor = actor
            told = {
                "address": place.address,
                "name": place.name,
                "remote": None if place.remote is None else asdict(place.remote),
                "node": self._cluster.node,
            }
            where = actor.place.remote().future()
            run = actor.run.remote(told, settings.model_dump_json(exclude={"api_key"})).future()
        except Exception as error:
            log.error("worker_not_created", worker=worker.name, error=brief(error))
            worker.code = 1
            return
        where.add_done_callback(lambda place: self._found(worker, place))
        run.add_done_callback(worker.ended)

    def _found(self, worker: RayWorker, place: Future[dict[str, Any]]) -> None:
        worker.found(place)
        self._placed = self._placed or worker.placed

    def _options(self, worker: RayWorker) -> dict[str, object]:
        """Return the options of a worker's actor: what it reserves, and where."""
        others = {name: x for name, x in self._needs.items() if name not in ("CPU", "GPU")}
        options = {
            "num_cpus": self._needs.get("CPU", 0),
            "num_gpus": self._needs.get("GPU", 0),
            "resources": others,
            "max_restarts": 0,
            "max_task_retries": 0,
            "scheduling_strategy": "SPREAD",
        }
        if self._ranks > 1:
            worker.group = self._reserved()
            options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(worker.group)
        return options

    def _reserved(self) -> PlacementGroup:
        """Return resources of one node for a worker of several ranks.

        They stay reserved when the worker is replaced: smaller actors can't take parts of them.
        """
        if self._groups:
            return self._groups.pop()
        group: PlacementGroup = placement_group([self._needs], strategy="STRICT_PACK")
        return group

    def _kill(self, worker: RayWorker) -> None:
        if worker.actor is not None:
            ray.kill(worker.actor)
            worker.actor = None
        if worker.group is not None:
            self._groups.append(worker.group)
            worker.group = None
            while self._groups and len(self._groups) + len(self._workers) > self._expected:
                remove_placement_group(self._groups.pop())

    def _release_groups(self) -> None:
        while self._groups:
            remove_placement_group(self._groups.pop())

    def _request(self, workers: int) -> None:
        """Ask the cluster's autoscaler, if it has one, for nodes for this number of workers."""
        bundles = [self._needs] * workers
        if self._cluster.node:
            request_nodes(bundles)
        else:  # Ray's client can't ask, a node can
            ray.get(ray.remote(num_cpus=0)(request_nodes).remote(bundles), timeout=CLOSE_SECONDS)

    def _report(self, worker: RayWorker, now: float, hopeless: bool) -> None:
        if not worker.waiting():
            return
        why, seconds = too_few(self._needs, self._expected), round(now - worker.began)
        if hopeless:
            log.error("worker_without_node", worker=worker.name, seconds=seconds, why=why)
            worker.code = REFUSED
        else:
            log.warning("worker_waits_for_node", worker=worker.name, seconds=seconds, why=why)


def request_nodes(bundles: list[dict[str, float]]) -> None:
    from ray.autoscaler.sdk import request_resources

    request_resources(bundles=bundles)
