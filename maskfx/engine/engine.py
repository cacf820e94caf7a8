"""Engine: requests submit denoiser calls and wait; one ragged step executes the waiting calls.

A ragged step batches calls with different numbers of active sites. Each request runs its
pipeline's code in a thread, on a copy of the pipeline with its own scheduler and shared modules.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection
from math import inf
from typing import TypeVar

from maskfx.distributed.ranks import Ranks
from maskfx.engine.admission.admission import Admission
from maskfx.engine.admission.batch_policy import BatchPolicy, WaitingRequest
from maskfx.engine.admission.default_admission import Default
from maskfx.engine.admission.step_admission import step_admission
from maskfx.engine.check_engine import check_engine, check_request
from maskfx.engine.idle_recordings import IdleRecordings
from maskfx.engine.own_pipeline import OwnPipelines
from maskfx.engine.parked import Parked
from maskfx.engine.processes.placement import InRequestThreads, Placement
from maskfx.engine.processes.services import NetServices, OwnProcesses
from maskfx.engine.round_runner import RoundRunner
from maskfx.engine.step_runner import Step, StepRunner
from maskfx.engine.template_read_ahead import TemplateReadAhead
from maskfx.engine.ticket import ParkedCalls, Ticket, TicketState, Told
from maskfx.errors import Closed
from maskfx.ir.argument_checks import check_number, check_whole
from maskfx.pipelines.adapters.late_lora import Loras
from maskfx.pipelines.compile import pipeline_state_of, template
from maskfx.pipelines.encoder_cache import REMEMBER
from maskfx.pipelines.parts.pipeline import Pipeline
from maskfx.pipelines.recording import recording_of
from maskfx.pipelines.runs.run import DenoiserCall
from maskfx.pipelines.waiting import LOOK
from maskfx.runtime.hardware.cpu_threads import give_back, settle, share_cores
from maskfx.scheduling.admission_policy import AdmissionPolicy
from maskfx.scheduling.rounds.round_policy import RoundPolicy

log = logging.getLogger(__name__)

T = TypeVar("T")  # a pipeline

ENDED = "the engine is closed; make another one"


class Engine:
    """Runs pipelines of many requests concurrently, batching their steps.

        with maskfx.Engine() as engine:
            tickets = [engine.submit(pipe, prompt, image=i, mask_image=m) for i, m in edits]
            pictures = [ticket.result().images[0] for ticket in tickets]

    Args:
        waiting: when a step starts and which calls it batches; defaults to `BatchPolicy()`.
        running: maximum number of requests running at once.
        queue: maximum number of requests waiting besides; `submit` raises `Busy` beyond it.
        recordings: maximum number of templates waiting to be recorded while no request runs
            (`record_idle`, `Quality(reuse="idle")`); beyond it, old ones are dropped.
        outside: where encoders, VAE and image codecs run (`engine/processes/placement.py`);
            defaults to the requests' threads.
        remember: bytes of encoder outputs to cache (`maskfx.pipelines.encoder_cache`); 0 disables
            the cache.
        own_process: names of denoisers, such as "controlnet", that are each computed in a process
            of their own, beside the steps of the others and shared by all pipelines that have it.
            The main denoiser waits for their results where it reads them. `OwnProcesses` sets the
            number of processes, their bytes and deadlines.
        ranks: number of processes over which the steps of each other denoiser are split; they
            start at its first step. `Ranks` also has the device of each; see `maskfx.distributed`.
        rank_timeout: seconds without progress after which a rank is replaced, and its step runs
            again on the others. No more than 8 processes are started in an hour to replace ranks.
        rounds: decides which requests step on which of these ranks; groups of requests on disjoint
            ranks step at the same time, and callbacks come from the groups' threads. By default
            all ranks compute each step.
        admission: decides when steps of prepared requests begin, and which requests can't meet
            their deadline and end. By default by slack if any has a deadline, else, and with None,
            at once; see `default_admission.py`.
        `told`: callback after each step, called in the engine's thread, so it should be quick.
    """

    def __init__(
        self,
        waiting: BatchPolicy | None = None,
        *,
        running: int = 16,
        queue: int = 256,
        recordings: int = 32,
        outside: Placement | None = None,
        remember: int = REMEMBER,
        own_process: Collection[str] | OwnProcesses = (),
        ranks: int | Ranks = 1,
        rank_timeout: float = 1.0,
        rounds: RoundPolicy | None = None,
        admission: AdmissionPolicy | Default | None = "default",
        told: Callable[[Step], None] | None = None,
    ) -> None:
        check_engine(waiting, running, queue, outside, remember, ranks, rank_timeout, rounds, told)
        check_whole("Engine", "recordings", recordings, 0)
        self.waiting = waiting or BatchPolicy()
        slots = min(running, self.waiting.batch)
        self.admission = step_admission(admission, slots, rounds is not None)
        self._outside = outside or InRequestThreads()
        split = OwnProcesses.of(own_process), Ranks.of(ranks)
        self.runner = StepRunner(*split, told, rank_timeout)
        self._changed = threading.Condition()
        self._requests = Admission(running, queue, self._changed)
        self.idle = IdleRecordings(recordings, self._requests, self._changed)
        self._pipelines = OwnPipelines(
            self._requests, self.runner, self._outside, remember, self._park, self.idle.of
        )
        self._parked = Parked(self._changed)
        self._read_ahead = TemplateReadAhead()
        self._errands: deque[Callable[[], None]] = deque()
        self._closing = False
        self._ended = False  # the loop runs no further step
        self.rounds = None if rounds is None else RoundRunner(rounds, self, self._notify)
        self._outside.start(self)
        self._loop = threading.Thread(target=self._run, name="maskfx-engine", daemon=True)
        self._loop.start()

    # Public interface.

    def submit(
        self,
        pipe: Pipeline,
        *args: object,
        deadline: float | None = None,
        user: str = "",
        told: Told | None = None,
        adapters: Loras = None,
        **given: object,
    ) -> Ticket:
        """Queue a call of a compiled pipeline and return its ticket.

        Args:
            deadline: seconds from now after which the request ends with `DeadlineMissed`;
                defaults to none.
            user: admission is fair by user: the next request admitted is one of the user with
                the fewest running requests.
            `told`: callback after each step that contains the request, called in the engine's
                thread.
            adapters: names of LoRAs, or (name, weight) pairs; the same as `lora=` of the call. A
                request waits for one where it acts, and other requests' steps don't.
        """
        if adapters is not None:
            given["lora"] = adapters
        ticket = self._queue(pipe, lambda own: own(*args, **given), deadline, user, told)
        if ticket.state is TicketState.QUEUED and self._requests.is_full:
            self._read_ahead.start(ticket, pipe, args, given)
        return ticket

    def record(
        self,
        pipe: Pipeline,
        *args: object,
        deadline: float | None = None,
        user: str = "",
        told: Told | None = None,
        lora: Loras = None,
        **given: object,
    ) -> Ticket:
        """Queue `maskfx.template(pipe, ...)`, whose steps are batched with other requests'."""
        return self._queue(
            pipe, lambda own: template(own, *args, lora=lora, **given), deadline, user, told
        )

    def record_idle(
        self, pipe: Pipeline, *args: object, user: str = "", lora: Loras = None, **given: object
    ) -> Ticket:
        """Queue the recording of a template for times in which no request runs.

        It isn't pinned, and evicts no template in use. One that is dropped ends with `Cancelled`.
        """
        record = recording_of(args, given, lora)
        return self.idle.queue(pipe, self._pipelines.run, record, user)

    def _queue(
        self,
        pipe: T,
        work: Callable[[T], object],
        deadline: float | None,
        user: str,
        told: Told | None,
    ) -> Ticket:
        pipeline_state_of(pipe)
        check_request(deadline, user, told)
        due = inf if deadline is None else time.perf_counter() + deadline
        ticket = Ticket(lambda: None, due, user, told)
        ticket.work = lambda: self._pipelines.run(pipe, ticket, work)
        with self._changed:
            if self._closing:
                raise Closed(ENDED)
            self._requests.add(ticket)
            self._changed.notify_all()
        return ticket

    def close(self, timeout: float | None = 60.0) -> None:
        """Refuse new requests, drain the submitted ones and stop.

        Requests that aren't finished within `timeout` seconds end with `Closed`.
        """
        check_number("close", "timeout", timeout, "seconds", or_none=True)
        with self._changed:
            self._closing = True
            self.idle.end()
            self._changed.notify_all()
        self._loop.join(timeout)
        self._end(f"the engine was closed and gave up what it hadn't finished in {timeout} s")
        self._read_ahead.close()
        self._outside.stop()
        self.runner.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def errand(self, work: Callable[[], None]) -> None:
        """Queue a function for the engine's loop to run between two steps."""
        with self._changed:
            if self._ended:
                raise Closed(ENDED)
            self._errands.append(work)
            self._changed.notify_all()

    def stepping(self) -> bool:
        """Whether any request is in its denoising loop, so that the steps need the cores."""
        return bool(self._requests.stepping())

    @property
    def steps(self) -> deque[Step]:
        """The latest steps."""
        return self.runner.steps

    @property
    def services(self) -> NetServices:
        """The nets in processes of their own."""
        return self.runner.services

    # What a runner of rounds uses.

    @property
    def rank_count(self) -> int:
        """The number of ranks that can compute now, of all denoisers."""
        return self.runner.rank_count

    def compute(self, parked: list[ParkedCalls], ranks: tuple[int, ...]) -> float:
        """Compute calls on these ranks and answer them; return the seconds, 0 if a rank failed."""
        return self.runner.run_on(parked, ranks)

    def take(self, tickets: Collection[Ticket], first: float, others: float) -> list[ParkedCalls]:
        """Wait for the next calls of these requests, and return them.

        Args:
            tickets: the requests; those that end or finish their steps aren't waited for.
            first: seconds to wait for any call.
            others: seconds to wait for further ones.
        """
        return self._parked.take(tickets, first, others, lambda: self._ended)

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify_all()

    # The loop.

    def _run(self) -> None:
        why = ENDED
        try:
            self._work()
        except BaseException as error:
            log.exception("the engine's loop failed")
            why = f"the engine's loop failed: {type(error).__name__}: {error}"
        finally:
            self._end(why)
            for work in self._errands:  # callers wait for these; no further ones are accepted
                work()

    def _work(self) -> None:
        share_cores()
        while True:
            with self._changed:
                while not (parked := self._gather()) and not self._errands:
                    if self._ended or self._closing and self._requests.are_over:
                        return
                errands, self._errands = self._errands, deque()
            settle()
            for work in errands:
                work()
            if parked and self.rounds is not None and not parked[0].ticket.idle:
                stay = self.rounds.start(parked)
                with self._changed:
                    self._parked.calls += stay
                    if len(stay) == len(parked):  # none is chosen until something changes
                        self._changed.wait(LOOK)
            elif parked:
                idle = parked[0].ticket.idle
                self.runner.run(parked)
                with self._changed:
                    self.idle.note(parked, self.steps[-1].seconds)
                if self.admission is not None and not idle:
                    self.admission.note(parked, self.steps[-1])

    def _end(self, why: str) -> None:
        """End the engine: finish all unfinished requests with `Closed`."""
        with self._changed:
            self._closing = self._ended = True
            self._requests.end(why)
            self.idle.end()
            self._parked.drop(time.perf_counter())
            self._changed.notify_all()

    def _gather(self) -> list[ParkedCalls]:
        """Admit requests, drop stopped ones, and return the calls of the next step.

        Wait briefly and return an empty list if the next step doesn't start yet.
        """
        now = time.perf_counter()
        self._admit(now)
        self._parked.drop(now)
        if recording := self.idle.select(now, self._parked.calls):
            self._parked.remove(recording)
            return recording
        held = frozenset[Ticket]() if self.rounds is None else self.rounds.held
        parked = [p for p in self._parked.calls if p.ticket not in held and not p.ticket.idle]
        if self.admission is not None:
            parked = self.admission.select(now, parked)
            self._parked.remove([p for p in self._parked.calls if p.error is not None])
        seats = [WaitingRequest(p.at, p.ticket.started, p.overtaken, p.ticket.due) for p in parked]
        waiting = {id(p.ticket) for p in self._parked.calls}
        stepping = [t for t in self._requests.stepping() if t not in held]
        coming = [t.started for t in stepping if id(t) not in waiting]
        ended = self.steps[-1].ended if self.steps else -inf
        if not seats and not coming:
            self.runner.take_adapters_out()
            give_back()  # release idle OpenMP threads to encoders, decoders and other work
        left = self.waiting.seconds(seats, coming, now, ended, self.runner.usual())
        if left > 0 or self.rounds is not None and not self.rounds.can_decide():
            self._changed.wait(min(left, LOOK) if left > 0 else LOOK)
            return []
        if self.rounds is not None:
            self._parked.remove(parked)
            return parked
        taken = [parked[i] for i in self.waiting.choose(seats)]
        latest = max(p.ticket.started for p in taken)
        self._parked.remove(taken)
        for left_over in parked:
            left_over.overtaken += left_over not in taken and left_over.ticket.started < latest
        return taken

    def _admit(self, now: float) -> None:
        """Start the threads of the requests that are admitted."""
        for ticket in [*self._requests.admit(now), *self.idle.due(now)]:
            try:
                threading.Thread(
                    target=self._serve, args=(ticket,), name="maskfx-request", daemon=True
                ).start()
            except RuntimeError as error:  # no further thread can start; the loop must continue
                ticket.finish(error=error)
                self._requests.leave(ticket)
                self.idle.leave(ticket)

    # A request's thread.

    def _serve(self, ticket: Ticket) -> None:
        """Run a request's pipeline code from prompt to image; the target of its thread."""
        try:
            ticket.finish(ticket.work())
        except BaseException as error:
            ticket.finish(error=error)
        finally:
            self.runner.release(ticket)
            with self._changed:
                self._requests.leave(ticket)
                self.idle.leave(ticket)
                self._changed.notify_all()

    def _park(self, pipe: object, ticket: Ticket, calls: list[DenoiserCall]) -> None:
        """Submit these calls and block until a step has executed them."""
        total = getattr(pipe, "_num_timesteps", None)
        last = total is not None and calls[-1].step + 1 >= total
        parked = ParkedCalls(ticket, calls, time.perf_counter(), last)
        if ticket.state is not TicketState.STEPPING:
            ticket.state = TicketState.STEPPING
            ticket.first_step = min(ticket.first_step, parked.at)
        give_back()  # release idle OpenMP threads before the step that needs the cores starts
        with self._changed:
            if self._ended:
                raise ticket.stopped(time.perf_counter()) or Closed(ENDED)
            self._parked.add(parked)
        parked.answered.wait()
        if parked.error is not None:
            raise parked.error
