"""The worker process: loads a model, runs the jobs from the front end, ends with the front end.

`python -m maskfx.serve.workers.process ADDRESS NAME`, with the settings as JSON on its
channel. The front end handles signals from a terminal or a service manager; a worker ends when it
receives Stop, when the front end is silent for too long, or when its parent dies.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence

import msgspec
import structlog

from maskfx.errors import MaskfxError
from maskfx.runtime.processes.channel import connect_to_parent
from maskfx.serve.config import ServeSettings
from maskfx.serve.logs import configure_logs
from maskfx.serve.messages import (
    Alive,
    Cancel,
    Done,
    Failed,
    Forget,
    Job,
    JobSpan,
    Logged,
    Prefetch,
    PreviewSent,
    Ready,
    Register,
    Stop,
    Unregister,
)
from maskfx.serve.models.model import Lost, Made, Model, PreviewMade, Tell, Told
from maskfx.serve.request import Pictures
from maskfx.serve.workers.directory_id import directory_id
from maskfx.serve.workers.executor import WorkerAddress
from maskfx.serve.workers.latest_counts import LatestCounts
from maskfx.serve.workers.link import WorkerLink
from maskfx.serve.workers.pixels import Part, part_of, read

REFUSED = 78  # exit code: the model can't be loaded, and a retry won't help
DEVICE_LOST = 79  # exit code: the device failed while computing
CONNECT_SECONDS = 15.0  # to reach the front end

log = structlog.get_logger(__name__)


class Unreachable(Exception):
    """Raised if a worker of another machine can't connect to the front end."""


class WorkerProcess:
    """Connects the model to the link: dispatches messages to it and sends its events."""

    def __init__(self, place: WorkerAddress, settings: ServeSettings) -> None:
        self._settings = settings
        self._jobs: set[tuple[str, int]] = set()  # id and attempt
        self._lock = threading.Lock()
        self._model: Model | None = None
        self._counts = LatestCounts(lambda: {} if self._model is None else self._model.cache())
        self._place, heartbeat = place, settings.heartbeat_seconds
        self._link = WorkerLink(place.address, place.name, heartbeat, self._alive, place.remote)

    def run(self) -> None:
        """Load the model and handle messages until Stop."""
        self._link.start()
        if not self._link.connected.wait(CONNECT_SECONDS):
            raise unreachable(self._place)
        self._model = load_model(self._settings, self._tell)
        self._link.loading = False
        self._link.send(self._ready(self._model))
        while True:
            message, parts = self._link.inbox.get()
            match message:
                case Job():
                    self._start(self._model, message, parts)
                case Cancel():
                    self._model.cancel(message.id)
                    self._drop(message.id)
                case Forget():
                    self._forget(self._model, message.template)
                case Prefetch():
                    self._prefetch(self._model, message.template)
                case Register() | Unregister():
                    self._adapter(self._model, message)
                case Stop():
                    break
        self._model.close()
        self.close()

    def close(self) -> None:
        """Send what is queued, then disconnect."""
        self._link.close()

    def log(self, line: str) -> None:
        """Send a log line, as JSON, to the front end; may be called from any thread."""
        self._link.send(Logged(line))

    def _ready(self, model: Model) -> Ready:
        node, place = self._place.node, self._settings.cache_dir
        if not node and not isinstance(place, str):
            return model.ready()
        # workers of other nodes share the directory or object store only if it is the same one
        disk = "" if place is None else directory_id(place)
        return msgspec.structs.replace(model.ready(), node=node, disk=disk)

    def _start(self, model: Model, job: Job, parts: Sequence[Part]) -> None:
        with self._lock:
            self._jobs.add((job.id, job.attempt))
        try:
            model.start(job, pictures_of(job, iter(parts)))
        except MemoryError:
            self._tell(Failed(job.id, job.attempt, "out_of_memory", "no memory for its pictures"))
        except Exception:
            log.exception("job_refused", job=job.id)
            message = "the picture couldn't be made"
            self._tell(Failed(job.id, job.attempt, "generation_failed", message))

    def _forget(self, model: Model, template: str) -> None:
        try:
            model.forget(template)
        except Exception:  # must not end the jobs in flight
            log.exception("template_not_forgotten", template=template)

    def _prefetch(self, model: Model, template: str) -> None:
        try:
            model.prefetch(template)
        except Exception:  # the request that needs it reads it itself
            log.exception("template_not_prefetched", template=template)

    def _adapter(self, model: Model, message: Register | Unregister) -> None:
        try:
            if isinstance(message, Register):
                model.register_adapter(message.adapter)
            else:
                model.remove_adapter(message.adapter)
        except Exception:  # the request that names it fails
            log.exception("adapter_not_registered", adapter=message.adapter)

    def _tell(self, told: Told) -> None:
        """Send an event of the model; called from any of its threads."""
        match told:
            case Made():
                self._answer(told)
            case PreviewMade():
                preview = PreviewSent(told.id, told.attempt, told.index, told.pixels.shape)
                self._link.send(preview, [part_of(told.pixels)])
            case Lost():
                # the front end moves this worker's jobs to others and gives up a job that causes
                # this repeatedly
                log.critical("device_lost", error=told.why)
                sys.stderr.flush()
                os._exit(DEVICE_LOST)
            case Failed():
                self._leave(told.id, told.attempt)
                self._link.send(told)
            case JobSpan() if self._place.remote is not None:  # with a clock of its own
                self._link.send(told.shifted(-time.monotonic(), relative=True))
            case _:
                self._link.send(told)

    def _answer(self, made: Made) -> None:
        if not self._leave(made.id, made.attempt):
            return  # cancelled
        done = Done(
            id=made.id,
            attempt=made.attempt,
            pixels=None if made.pixels is None else made.pixels.shape,
            steps=made.steps,
            mask_ratio=made.mask_ratio,
            patch_share=made.patch_share,
            template=made.template,
            template_bytes=made.template_bytes or {},
        )
        self._link.send(done, [] if made.pixels is None else [part_of(made.pixels)])

    def _leave(self, id: str, attempt: int) -> bool:
        """Remove a job; return whether it was there."""
        with self._lock:
            there = (id, attempt) in self._jobs
            self._jobs.discard((id, attempt))
            return there

    def _drop(self, id: str) -> None:
        with self._lock:
            self._jobs = {job for job in self._jobs if job[0] != id}

    def _alive(self) -> Alive:
        """Return the heartbeat; called by the link's thread, also while the model is loading."""
        with self._lock:
            running = len(self._jobs)
        aside = [] if self._model is None else self._model.aside()
        return Alive(running, self._counts(), aside)


def unreachable(place: WorkerAddress) -> Unreachable:
    where = place.address if place.remote is None else place.remote.address
    return Unreachable(
        f"{place.name} on node {place.node} can't connect to the front end at {where} within "
        f"{CONNECT_SECONDS:g} s: allow this connection, or set ray.link_host and ray.link_port to "
        "an address that the nodes reach"
    )


def pictures_of(job: Job, parts: Iterator[Part]) -> Pictures:
    """Read a job's pixels."""
    images = tuple(read(shape, parts) for shape in job.images)
    mask = None if job.mask is None else read(job.mask, parts).astype(bool)
    controls = tuple(read(shape, parts) for shape in job.controls)
    return Pictures(images, mask, controls, tuple(read(shape, parts) for shape in job.shown))


def load_model(settings: ServeSettings, tell: Tell) -> Model:
    if settings.fake:
        from maskfx.serve.models.fake_model import FakeModel

        return FakeModel(settings, tell)
    from maskfx.serve.models.pipeline_model import PipelineModel

    model: Model = PipelineModel(settings, tell)
    return model


def main() -> int:
    address, name = sys.argv[1:]
    place = WorkerAddress(address, name)
    # handlers instead of SIG_IGN, which subprocesses of a model would inherit
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: None)
    (text,) = connect_to_parent().receive()
    settings = ServeSettings.model_validate_json(text)
    configure_logs(settings.log_level, worker=place.name)
    return run_worker(WorkerProcess(place, settings))


def run_worker(worker: WorkerProcess) -> int:
    """Run a worker until it was asked to stop, and return the exit code of its process."""
    try:
        worker.run()
        return 0
    except Unreachable:
        raise
    except MaskfxError as error:
        log.error("model_refused", error=str(error))
        code = REFUSED
    except Exception:
        log.exception("worker_failed")
        code = 1
    worker.close()
    return code


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    os._exit(code)  # don't wait for threads of a failed model
