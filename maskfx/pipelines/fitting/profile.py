"""Profile an adapter on a pipeline: the first step at which it changes the latents.

Each call runs twice with the same noise, with and without the adapter. Up to the step at which
their latents differ, a request may run without it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from maskfx.errors import InputError
from maskfx.pipelines.adapters.late_lora import LateLora
from maskfx.pipelines.adapters.lora import CallAdapters
from maskfx.pipelines.call import PipelineCall
from maskfx.pipelines.compile import call_of, pipeline_state_of
from maskfx.pipelines.handlers.call_handler import CallPart, DenseHandler
from maskfx.pipelines.parts.pipeline import Pipeline
from maskfx.runtime.lora.profile import COSINE, Profile, first_below
from maskfx.runtime.lora.registry import RegisteredAdapter
from maskfx.runtime.reuse.session import times_of
from maskfx.runtime.steps import AnyStep

Arguments = Mapping[str, object]


@dataclass(frozen=True)
class AdapterProfile:
    """A profile, and what it was made from.

    Args:
        profile: The profile.
        base: Name of the base model in profiles.
        cosines: Per call, the similarity of the latents after each step, where the last differ.
        early: Components that the adapter changes before the first step.
    """

    profile: Profile
    base: str
    cosines: Sequence[Sequence[float]]
    early: Sequence[str] = ()


class LatentTrace(DenseHandler):
    """Runs every call dense, and keeps the latents after each step and the scheduler's times."""

    title = ""

    def __init__(self) -> None:
        self.latents: list[Tensor] = []
        self.times: dict[int, float] = {}

    def choose(self, part: CallPart) -> AnyStep:
        step = part.position.step
        self.times[step] = times_of(part.inputs, step)[0]
        return super().choose(part)

    def after_step(self, step: int, latents: Tensor) -> Tensor:
        self.latents.append(latents.detach().float().cpu().clone())
        return latents


def profile_adapter(
    pipe: Pipeline,
    adapter: RegisteredAdapter,
    calls: Sequence[Callable[[], Arguments]],
    weight: float = 1.0,
    cosine: float = COSINE,
) -> AdapterProfile:
    """Return the profile of an adapter on a compiled pipeline.

    Args:
        pipe: The pipeline.
        adapter: The adapter's file.
        calls: Functions that return the arguments of a call, each time with the same noise.
        weight: Factor of the adapter's updates.
        cosine: Similarity below which latents count as changed.
    """
    state = pipeline_state_of(pipe)
    strict = CallAdapters((LateLora.registered(replace(adapter, start=0), weight, None),))
    cosines, times = [], dict[int, float]()
    early: set[str] = set()
    for arguments in calls:
        without = trace(call_of(pipe, (), arguments()))
        call = replace(call_of(pipe, (), arguments()), adapters=strict)
        with call.with_files() as holding:
            adapted = trace(holding)
            (one,) = holding.adapters.items
            assert isinstance(one, LateLora), "it is a file"
            early |= one.loaded(state.wait, 0).adapter.parts.keys() - state.denoisers.keys()
        cosines.append(similarities(without.latents, adapted.latents))
        times = adapted.times
    if not cosines or not all(cosines):
        raise InputError(
            f"profile of {adapter.name}: no latents after any step were seen; the scheduler of "
            f"{type(pipe).__name__} has no step that maskfx observes, so give start= by hand"
        )
    start = 0 if early else first_below(cosines, cosine)
    start = min(start, max(times))
    profile = Profile(
        start, len(cosines[0]), times[min(times)], times[start], cosine, adapter.file.size
    )
    return AdapterProfile(profile, state.base(), cosines, sorted(early))


def trace(call: PipelineCall) -> LatentTrace:
    handler = LatentTrace()
    with torch.no_grad():
        call.run(handler, **call.state.undecoded)
    return handler


def similarities(without: Sequence[Tensor], adapted: Sequence[Tensor]) -> list[float]:
    """Return the cosine of latents after each step, where the last ones differ.

    Each number counts by the square of its last difference, so that what lies outside of a mask, or
    isn't changed by the adapter, doesn't make latents look alike. Latents of another shape, as of a
    prior, are compared as a whole.
    """
    if not without:
        return []
    change = (adapted[-1] - without[-1]).abs().nan_to_num(0.0, 0.0, 0.0)
    if not change.any():
        return [1.0] * len(without)
    change /= change.max()

    def similarity(one: Tensor, other: Tensor) -> float:
        if one.shape == change.shape:
            one, other = change * one, change * other
        return float(cosine_similarity(one.flatten(), other.flatten(), dim=0))

    return list(map(similarity, without, adapted))
