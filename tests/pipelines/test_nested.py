"""Pipelines that run others in turn: what maskfx observes, copies and compares of both."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from maskfx.engine.own_pipeline import copy_over
from maskfx.pipelines.handlers.call_handler import DenseHandler
from maskfx.pipelines.parts.pipeline import nested_pipelines
from maskfx.pipelines.runs.interception import watched
from maskfx.pipelines.runs.probe import FirstStepHandler, ProbeFinished, encodings_of
from maskfx.pipelines.runs.run import PipelineRun
from maskfx.pipelines.schedules.schedule import RunSchedule, Schedule
from tests.factories.pipelines import ddim


class Coder(nn.Module):
    config: dict[str, Any] = {}

    def encode(self, picture: Tensor) -> Tensor:
        return picture

    def decode(self, latents: Tensor) -> Tensor:
        return latents


class Stage:
    """A pipeline that steps from its own latents."""

    def __init__(self, scheduler: Any, coder: Any, side: int) -> None:
        self.scheduler, self.vae, self.side = scheduler, coder, side

    @property
    def components(self) -> dict[str, Any]:
        return {"scheduler": self.scheduler, "vae": self.vae}

    def prepare_latents(self, height: int, width: int) -> Tensor:
        return torch.ones(1, 4, height, width)

    def __call__(self, steps: int) -> Tensor:
        self.scheduler.set_timesteps(steps)
        latents = self.prepare_latents(self.side, self.side)
        for time in self.scheduler.timesteps:
            latents = self.scheduler.step(latents, time, latents).prev_sample
        return self.vae.encode(latents)


class Combined:
    """A pipeline that runs a prior, then a decoder."""

    def __init__(self) -> None:
        self.scheduler, self.prior_scheduler, self.vae = ddim(), ddim(), Coder()
        self.prior_pipe = Stage(self.prior_scheduler, self.vae, 2)
        self.decoder_pipe = Stage(self.scheduler, self.vae, 8)

    @property
    def components(self) -> dict[str, Any]:
        own = {"scheduler": self.scheduler, "prior_scheduler": self.prior_scheduler}
        return {**own, "vae": self.vae}

    def __call__(self, prior_steps: int = 2, steps: int = 3) -> Tensor:
        self.prior_pipe(prior_steps)
        return self.decoder_pipe(steps)


class Watching(DenseHandler):
    def __init__(self) -> None:
        self.seen: list[Any] = []
        self.schedules: list[Schedule] = []

    def begin(self, schedule: Callable[[], Schedule]) -> None:
        self.schedules.append(schedule())

    def prepare(self, outputs: Any, height: Any, width: Any, box: Any) -> Any:
        self.seen.append((height, width))
        return outputs

    def after_step(self, step: int, latents: Tensor) -> Tensor:
        self.seen.append(step)
        return latents


def run(pipe: Any, **given: int) -> Watching:
    handler = Watching()
    with watched(PipelineRun(pipe, {}, handler, lambda calls: None)):
        pipe(**given)
    return handler


def test_latents_and_steps_of_both_stages_are_observed():
    pipe = Combined()
    assert nested_pipelines(pipe) == [pipe, pipe.prior_pipe, pipe.decoder_pipe]
    assert run(pipe).seen == [(2, 2), 0, 1, (8, 8), 2, 3, 4]
    for stage in (pipe.prior_pipe, pipe.decoder_pipe):
        assert "prepare_latents" not in vars(stage), "restored"


def test_encodings_of_a_stage_are_noticed():
    pipe = Combined()
    with encodings_of(pipe) as encodings:
        pipe()
    assert encodings
    assert all(type(one.vae) is Coder for one in (pipe, pipe.prior_pipe, pipe.decoder_pipe))


def test_a_probe_ends_with_the_first_step_of_a_picture():
    handler, embedding = FirstStepHandler(), torch.ones(2, 16)
    assert handler.after_step(0, embedding) is embedding
    with pytest.raises(ProbeFinished):
        handler.after_step(1, torch.ones(1, 4, 8, 8))


def test_times_of_a_stage_that_has_not_begun_are_of_no_run():
    pipe = Combined()
    pipe(steps=7)
    recorded = run(pipe).schedules[-1]
    assert recorded.lengths == [3, 2]
    pipe(prior_steps=5, steps=6)  # leaves its times to the next run
    assert [recorded.difference(now) for now in run(pipe).schedules] == [None, None]
    first, second = (recorded.difference(now) for now in run(pipe, steps=4).schedules)
    assert first is None
    assert second == "in 3 steps, not 4"
    assert recorded.difference(run(pipe, prior_steps=1).schedules[0]) == "in 2 steps, not 1"


def test_the_times_of_an_only_scheduler_are_its_runs():
    stage = Stage(ddim(), Coder(), 2)
    stage.scheduler.set_timesteps(3)
    assert RunSchedule(stage).schedule().lengths == [3]


@pytest.mark.parametrize("again", [False, True])
def test_requests_have_schedulers_of_their_own_in_every_stage(again: bool):
    pipe = Combined()
    if again:
        pipe.decoder_pipe.outer = pipe  # type: ignore[attr-defined]  # a circle
    own = copy_over(pipe, threading.RLock())
    assert own.decoder_pipe.scheduler is own.scheduler
    assert own.prior_pipe.scheduler is own.prior_scheduler
    assert own.scheduler is not pipe.scheduler
    assert own.prior_scheduler is not pipe.prior_scheduler
    assert own.decoder_pipe.vae is pipe.vae
    assert pipe.decoder_pipe.scheduler is pipe.scheduler
    if again:
        assert vars(own.decoder_pipe)["outer"] is own


def test_the_steps_of_a_run_pipeline_begin_at_its_denoisers_first_call():
    pipe = Combined()
    prior, unet, net = nn.Linear(1, 1), nn.Linear(1, 1), nn.Linear(1, 1)
    nets = nn.Module()
    nets.nets = nn.ModuleList([net])
    pipe.prior_pipe.__dict__["prior"] = prior
    pipe.decoder_pipe.__dict__.update(unet=unet, controlnet=nets)
    schedule = RunSchedule(pipe)
    pipe.prior_scheduler.set_timesteps(4)
    assert [schedule.steps(prior, step) for step in range(4)] == [4] * 4
    pipe.scheduler.set_timesteps(7)
    assert [schedule.steps(part, step) for step in (4, 5, 10) for part in (net, unet)] == [11] * 6
    assert schedule.steps(nn.Linear(1, 1), 2) is None
    pipe.__dict__["_num_timesteps"] = 9
    assert schedule.steps(unet, 5) == 9
