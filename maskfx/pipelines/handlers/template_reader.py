"""TemplateReader: reads a template's recorded steps and latents for one run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from torch import Tensor
from torch.utils import _pytree as pytree

from maskfx.errors import CacheError
from maskfx.pipelines.call_policy import CallPosition, sample_branch
from maskfx.pipelines.handlers.call_handler import CallPart
from maskfx.pipelines.schedules.schedule import Schedule
from maskfx.pipelines.templates.batches import batch_of, fit_batch, select_source
from maskfx.pipelines.templates.template_library import (
    ScheduleMismatch,
    TemplateIncomplete,
    TemplateLibrary,
    TemplateSource,
)
from maskfx.runtime.cache.step_cache import StepCache
from maskfx.runtime.steps import EditStep
from maskfx.runtime.templates.templates import Templates


@dataclass
class TemplateReader:
    """Reads one template for one run.

    If it is `renewable`, a missing entry ends the run, so that the template is recorded again.
    Otherwise a missing entry is None, and the run continues without it.
    """

    library: TemplateLibrary
    source: TemplateSource
    renewable: bool = False
    _same_times: bool = False  # whether the run's times are known to be those of the recording
    _weights: dict[str, str] = field(default_factory=dict)  # constant during a run
    _fetched: dict[CallPosition, StepCache] = field(default_factory=dict)  # for upcoming steps

    @property
    def name(self) -> str:
        return self.source.name

    @cached_property
    def calls(self) -> frozenset[CallPosition]:
        """The recorded calls, and the latents after steps."""
        return self.library.recorded_calls(self.name)

    @cached_property
    def recorded_steps(self) -> frozenset[int]:
        return frozenset(position.step for position in self.calls)

    @property
    def steps(self) -> int:
        """The number of steps that were recorded."""
        return 1 + max(self.recorded_steps, default=-1)

    @cached_property
    def start(self) -> list[Tensor]:
        """The initial latents that were recorded; empty if they are missing."""
        return self.library.start(self.name)

    def initial_latents(self) -> list[Tensor]:
        """Return the initial latents that the template was recorded from."""
        if self.renewable and not self.start:
            raise TemplateIncomplete("the start of a template is gone")
        return self.start

    def check_schedule(self, own: Schedule) -> None:
        """Raise ScheduleMismatch if the template was recorded with another schedule."""
        recorded = self.library.schedule(self.name)
        difference = None if recorded is None else recorded.difference(own)
        if difference is not None:
            raise ScheduleMismatch(difference)
        self._same_times = recorded is not None and bool(own.times)

    def edit(self, part: CallPart, mask: Tensor) -> EditStep | None:
        """Return an edit of the template's recording of this call; None if it has none."""
        found = self._edit(part, mask)
        if found is None and self.renewable and self._recorded(part.position) in self.calls:
            raise TemplateIncomplete(f"{part.position.name}: a recorded step is gone")
        return found

    def coded(self, part: CallPart) -> StepCache | None:
        """Return the template's recording of an autoencoder's call; None if it has none."""
        return self._cache(part) if part.position in self.calls else None

    def upcoming(self, part: CallPart, step: int, now: EditStep) -> EditStep | None:
        """Return the edit of this call's successor at `step`, if its entries are in memory.

        Reading them from disk would delay the step that computes meanwhile.
        """
        if not self.library.in_memory(self.name, step, part.position.name):
            return None
        after = replace(part, position=part.position._replace(step=step), inputs=now.inputs)
        found = self._edit(after, now.mask)
        if found is None:
            return None
        self._fetched[after.position] = found.cache
        return replace(found, plan=now.plan, wide=now.wide)

    def latents_after(self, step: int) -> Tensor | None:
        """Return the recorded latents after a step."""
        found = self.library.after(self.name, step)
        if self.renewable and not found and step in self.recorded_steps:
            raise TemplateIncomplete("the latents of a recorded step are gone")
        return found[0] if found else None

    def unfit(self, position: CallPosition, why: CacheError) -> TemplateIncomplete | None:
        """Have the template recorded again, once: a second mismatch is no accident."""
        if not self.renewable or self.name in self.library.attempts.renewed:
            return None
        self.library.attempts.renewed[self.name] = str(why)
        return TemplateIncomplete(f"{position.name}: a recorded step doesn't fit: {why}")

    def _edit(self, part: CallPart, mask: Tensor) -> EditStep | None:
        position, batch = part.position, batch_of(part.inputs)
        cache = self._fetched.pop(position, None)
        if cache is None or cache.sizes.get("batch") != batch:  # guidance ended
            cache = self._cache(part, tuple(mask.shape))
        if cache is None:
            return None
        wanted = self._templates(part, tuple(mask.shape)).wants(position.step)
        # to compare the step's own time would make the host wait for a device
        known = self._same_times and is_on_device(part.inputs)
        return EditStep(part.inputs, mask, cache, any_step=known or not wanted)

    def _cache(self, part: CallPart, shape: tuple[int, ...] = ()) -> StepCache | None:
        """Return the template's recording of this call, for the call's batch."""
        position = part.position
        if position.name not in self._weights:
            self._weights[position.name] = part.denoiser.fingerprint()
        branch, weights = self._recorded(position).branch, self._weights[position.name]
        found = self._templates(part, shape).get(self.name, position.step, branch, weights)
        if found is None:
            return None
        return fit_batch(select_source(found, self.source), batch_of(part.inputs))

    def _templates(self, part: CallPart, shape: tuple[int, ...]) -> Templates:
        name = part.position.name
        return self.library.templates_of(name, part.denoiser, shape, self.start, self.name)

    def _recorded(self, position: CallPosition) -> CallPosition:
        """Return the recorded call that serves this one.

        If the call lists samples, each recorded sample serves an equal number of adjacent ones.
        """
        branch, _, sample = position.branch.partition(".")
        if not sample:
            return position
        index, count = map(int, sample.split("/"))
        for name, step, other in self.calls:
            call, _, recorded = other.partition(".")
            if (name, step, call) == (position.name, position.step, branch) and recorded:
                of = int(recorded.split("/")[1])
                own = self.source.elements(of)
                return position._replace(
                    branch=sample_branch(branch, own[index * len(own) // count], of)
                )
        return position


def is_on_device(inputs: Mapping[str, object]) -> bool:
    """Return True if a tensor among a call's arguments isn't in host memory."""
    leaves = pytree.tree_leaves(dict(inputs))
    return any(isinstance(leaf, Tensor) and leaf.device.type != "cpu" for leaf in leaves)
