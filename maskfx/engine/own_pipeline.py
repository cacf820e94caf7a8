"""OwnPipelines: the pipeline of each request of an engine, a copy over the same modules."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import TypeVar

from torch import nn

from maskfx.engine.admission.admission import Admission
from maskfx.engine.idle_recordings import Run, wait_apart
from maskfx.engine.processes.placement import Placement, RemoteModule, parts_around
from maskfx.engine.step_runner import StepRunner
from maskfx.engine.ticket import Ticket
from maskfx.engine.tokenizers import OneAtATime, is_tokenizer
from maskfx.engine.turns import Turns
from maskfx.pipelines.compile import KEPT, pipeline_state_of
from maskfx.pipelines.encoder_cache import EncoderCache
from maskfx.pipelines.parts.alterations import alters_modules
from maskfx.pipelines.parts.guiders import is_guider
from maskfx.pipelines.parts.pipeline import is_inner
from maskfx.pipelines.runs.run import DenoiserCall
from maskfx.pipelines.schedules.schedule import is_scheduler
from maskfx.pipelines.templates.later import LaterRecordings
from maskfx.pipelines.waiting import Wait, Waiting
from maskfx.runtime.reuse.patch_calls import PatchCounts

T = TypeVar("T")  # a pipeline


class OwnPipelines:
    """Makes the pipelines of requests, and runs a request's code over its own one.

    Args:
        requests: The requests of the engine.
        runner: Computes the steps of their denoisers.
        outside: Where the encoders, VAE and image codecs run.
        remember: Bytes of encoder outputs to cache.
        park: Hands the denoiser calls of a request's pipeline to the engine's loop, and returns
            when a step has computed them.
        later: Returns a request's view of the idle recordings, if there may be any: of a pipeline,
            whose code `run` runs for a ticket.
    """

    def __init__(
        self,
        requests: Admission,
        runner: StepRunner,
        outside: Placement,
        remember: int,
        park: Callable[[object, Ticket, list[DenoiserCall]], None],
        later: Callable[[Ticket, object, Run], LaterRecordings | None],
    ) -> None:
        self._requests, self._runner, self._outside = requests, runner, outside
        self._remembered = EncoderCache(remember)
        self._park, self._later = park, later
        self._tokenizing = threading.RLock()
        self._turns = Turns()

    def run(self, pipe: T, ticket: Ticket, work: Callable[[T], object]) -> object:
        """Run a request's code, alone if it changes settings of the denoisers meanwhile."""
        state = pipeline_state_of(pipe)
        modules = [denoiser.module for denoiser in state.denoisers.values()]
        with self._turns.of(modules, alters_modules(pipe), self._wait_of(ticket)):
            return work(self.own(pipe, ticket))

    def own(self, pipe: T, ticket: Ticket) -> T:
        """Return the pipeline of one request, whose calls wait for the engine's steps."""
        own = copy_over(pipe, self._tokenizing)
        state = pipeline_state_of(pipe)
        ticket.patches = PatchCounts(whole=state.patches)
        own.__dict__[KEPT] = replace(
            state,
            patches=ticket.patches,
            execute=lambda calls: self._park(own, ticket, calls),
            alone=False,
            wait=self._wait_of(ticket),
            later=None if alters_modules(pipe) else self._later(ticket, pipe, self.run),
            encoders=None,  # the engine has a cache of its own
            turn=threading.RLock(),  # nothing that a run observes is shared with other requests
        )
        self._runner.adopt(ticket, state.denoisers)
        self._outside.adopt(own, state.denoisers)
        remember_encoders(own, state.denoisers, self._remembered)
        return own

    def _wait_of(self, ticket: Ticket) -> Wait:
        def wait(waiting: Waiting) -> None:
            if ticket.idle:
                wait_apart(ticket, waiting)
            else:
                self._requests.step_aside(ticket, waiting)

        return wait


def remember_encoders(pipe: object, denoisers: Mapping[str, object], cache: EncoderCache) -> None:
    """Route the encoder calls of a request's pipeline copy through a cache."""
    for name, part in parts_around(pipe, denoisers).items():
        if cache.most and isinstance(part, nn.Module):
            run = getattr(part, "maskfx_run", run_here)
            own = getattr(part, "maskfx_part", part)
            pipe.__dict__[name] = RemoteModule(own, partial(cache.ask, run))


def run_here(
    part: nn.Module, method: str, args: tuple[object, ...], kwargs: Mapping[str, object]
) -> object:
    return getattr(part, method)(*args, **kwargs)


def copy_over(pipe: T, tokenizing: threading.RLock, copied: dict[int, object] | None = None) -> T:
    """Return a copy over the same modules, with schedulers, guiders and processors of its own.

    Pipelines that it runs are copied too.

    Args:
        pipe: The pipeline.
        tokenizing: Held while a tokenizer runs, which no two threads may use at once.
        copied: Memo of `deepcopy`: a scheduler under two names, or in two pipelines, stays one.
    """
    copied = {} if copied is None else copied
    own = copied[id(pipe)] = object.__new__(type(pipe))
    own.__dict__.update(pipe.__dict__)
    for name, part in pipe.__dict__.items():
        if is_scheduler(part) or is_guider(part):
            own.__dict__[name] = copy.deepcopy(part, copied)
        elif is_inner(part):
            known = copied.get(id(part))
            own.__dict__[name] = copy_over(part, tokenizing, copied) if known is None else known
        elif is_tokenizer(part):
            own.__dict__[name] = OneAtATime(part, tokenizing)
        elif name.endswith("_processor"):
            own.__dict__[name] = copy.copy(part)
    return own
