"""Validator: validates the members of a denoiser's steps, and memoises what it found.

The same arguments are passed several times: to the planner, to `ahead()`, as those from which the
next step's sizes are known, and to the step. A result is valid only for the same, unchanged
objects: tensors count their changes in place. The checks themselves are in `validate.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.weak import WeakIdKeyDictionary

from maskfx.compiler.capture.arguments import roles as roles_
from maskfx.ir import progress
from maskfx.ir.lru import LruCache
from maskfx.ir.objects import open_objects
from maskfx.runtime.cache.computed_rows import recorded_step
from maskfx.runtime.cache.step_cache import StepCache
from maskfx.runtime.lora.layers import SetCache
from maskfx.runtime.programs.program_cache import ProgramCache
from maskfx.runtime.sites.mask import Mask, MaskCache
from maskfx.runtime.steps import AnyStep, EditStep, ValidatedCall, ValidatedInputs
from maskfx.runtime.validation.sample_calls import (
    PACKED,
    SampleCalls,
    picture_shapes,
    picture_sizes,
    steps_of_samples,
)
from maskfx.runtime.validation.validate import (
    RegionChoices,
    check_arguments,
    check_boolean,
    check_cache,
    check_choice,
    check_mask,
    check_recording,
    check_regions,
    expand_timesteps,
    signature_of,
)
from maskfx.runtime.weights import Weights

MASKS = 32  # kept per recording: masks that passed the checks
PLANS = 2  # kept per mask: the planner also checks the edit without a plan

Mark = tuple[tuple[int, object], ...]


@dataclass
class Fit:
    """What a recording and a mask were checked for, and the regions of the last plans."""

    facts: tuple[object, ...]
    regions: LruCache[RegionChoices, dict[int, Mask]] = field(
        default_factory=lambda: LruCache(PLANS)
    )


class Validator:
    """Validates the members of one denoiser's steps.

    Args:
        module: The denoiser's module.
        programs: Finds or makes the compilation that serves a member's inputs.
        samples: Splits calls that no program computes as a whole.
        weights: The module's weights.
    """

    def __init__(
        self, module: nn.Module, programs: ProgramCache, samples: SampleCalls, weights: Weights
    ) -> None:
        self.module, self.programs, self.samples = module, programs, samples
        self.weights = weights
        self._signature = signature_of(module)
        self._inputs: dict[int, tuple[object, list[object], Mark, ValidatedInputs]] = {}
        self._held: Counter[int] = Counter()  # ids of arguments that steps are still read of
        self._masks = MaskCache()
        self.adapters = SetCache(module)
        self._fits: MutableMapping[StepCache, LruCache[Mask, Fit]] = WeakIdKeyDictionary()

    def calls(self, steps: Sequence[AnyStep], single: bool = False) -> list[ValidatedCall]:
        """Validate the members of a step, except for their timesteps (`check_timesteps`).

        With `single` they are samples of calls that another process has divided.
        """
        return [self.call(step, single) for step in steps]

    def call(self, step: AnyStep, single: bool = False) -> ValidatedCall:
        """Validate a member of a step, except for its timestep."""
        return self._call(step, self.arguments(step.inputs, single))

    def _call(self, step: AnyStep, inputs: ValidatedInputs) -> ValidatedCall:
        """Validate a member of a step, given its arguments."""
        found = ValidatedCall(step, inputs, adapters=self.adapters.of(step.adapters))
        if isinstance(step, EditStep):
            check_recording(step.cache)
            mask = self._masks.of(check_mask(step.mask, inputs.mask_shape))
            check_choice(step)
            found = replace(found, mask=mask)
            if not inputs.differ:
                return replace(found, regions=self._regions(step, inputs, mask))
        if inputs.differ:
            steps = steps_of_samples(step, inputs, self._masks)
            own = zip(steps, inputs.samples, strict=True)
            found = replace(found, parts=tuple(self._call(*one) for one in own))
        return found

    def arguments(self, given: Mapping[str, object], single: bool) -> ValidatedInputs:
        """Validate the arguments of a call, or of a sample of one that was divided."""
        return self.samples.validated(given) if single else self.inputs(given)

    def inputs(self, given: Mapping[str, object]) -> ValidatedInputs:
        """Validate a call's arguments; the compilation that serves them is found or made."""
        open_objects(given)
        leaves = pytree.tree_leaves(dict(given)) if isinstance(given, Mapping) else []
        mark, known = marked(leaves), self._inputs.get(id(given))
        if known is not None and known[2] == mark:
            return known[3]
        inputs = expand_timesteps(given, self.module)
        check_arguments(self.module, self._signature, inputs)
        _, values, spec = roles_.flatten(inputs)
        with progress.work("capture", f"capture of {type(self.module).__name__}", 3):
            samples, join = self.samples.packed(inputs) if self.samples.packs else (), PACKED
            if samples:
                compilation = samples[0].compilation
            else:
                compilation = self.programs.serving(inputs, values, spec)
                samples, join = self.samples.split(inputs, values, compilation)
        self.weights.settle()
        pictures, sizes = picture_shapes(inputs, samples, join), dict[str, int]()
        if not samples or join != PACKED:
            sizes = roles_.observed_sizes(compilation.capture.leaves, values)
        if samples or pictures:
            sizes = picture_sizes({} if pictures else samples[0].sizes, sizes)
        if samples:
            sizes["batch"] = len(samples)
        found = ValidatedInputs(values, spec, sizes, compilation, samples, join, pictures)
        self._inputs[id(given)] = (given, leaves, mark, found)  # held: an id may be reused
        return found

    @contextmanager
    def held(
        self, steps: Sequence[AnyStep], lock: AbstractContextManager[object]
    ) -> Iterator[None]:
        """Keep what is found out about the arguments of steps that are validated again.

        Args:
            steps: The steps.
            lock: Held while this object changes.
        """
        numbers = [id(step.inputs) for step in steps]
        with lock:
            self._held.update(numbers)
        try:
            yield
        finally:
            with lock:
                self._held -= Counter(numbers)
                self.end_step()

    def end_step(self) -> None:
        """Drop the inputs of a step that has run: they are not passed again."""
        for number in self._inputs.keys() - self._held.keys():
            del self._inputs[number]

    def forget(self) -> None:
        """Drop all results; call it when weights or captures change."""
        self._inputs.clear()
        self._fits.clear()
        self.adapters.known.clear()

    def _regions(self, step: EditStep, inputs: ValidatedInputs, mask: Mask) -> dict[int, Mask]:
        """Check an edit; return the mask of each region that has another than the edit's."""
        fit, program = self._fit(step, inputs, mask), inputs.program
        if program is None:  # the whole graph runs, whatever the regions are
            return {}
        choices = RegionChoices(
            tuple(self._chosen("plan", step.plan)), tuple(self._chosen("wide", step.wide))
        )
        known = fit.regions.get(choices)
        if known is None:
            found = check_regions(choices, mask, step.cache, program.interface)
            known = fit.regions.put(choices, found)
        return known

    def _chosen(self, name: str, of: Mapping[int, Tensor]) -> Iterable[tuple[int, Mask]]:
        for region, sites in of.items():
            yield region, self._masks.of(check_boolean(f"{name}[{region}]", sites))

    def _fit(self, step: EditStep, inputs: ValidatedInputs, mask: Mask) -> Fit:
        """Check that an edit's recording fits its mask and inputs, unless that is known."""
        cache, weights = recorded_step(step.cache), self.weights.recorded()
        facts = (inputs.program_code, inputs.sizes, inputs.latent.dtype, weights, inputs.constants)
        fits = self._fits.get(cache)
        fit = None if fits is None else fits.get(mask)
        if fit is None or fit.facts != facts:
            check_cache(cache, inputs, mask, weights)
            fits = self._fits.setdefault(cache, LruCache(MASKS))
            fit = fits.put(mask, Fit(facts))
        return fit


def marked(leaves: Sequence[object]) -> Mark:
    """Return a value that changes when one of these objects changes.

    The objects must be held for as long as the value is compared.
    """
    return tuple((id(leaf), version(leaf)) for leaf in leaves)


def version(value: object) -> object:
    """Return a tensor's count of in-place changes.

    Tensors of inference mode have none; for them the result is unequal to any other.
    """
    if not isinstance(value, Tensor):
        return None
    return object() if torch.is_inference(value) else value._version
