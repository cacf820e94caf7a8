"""Validator: validates the members of a denoiser's steps, and memoises what it found.

The same arguments are passed several times: to the planner, to `ahead()`, as those from which the
next step's sizes are known, and to the step. A result is valid only for the same, unchanged
objects: tensors count their changes in place. The checks themselves are in `validate.py`.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from maskfx.compiler.capture import roles as roles_
from maskfx.runtime.cache.step_cache import StepCache
from maskfx.runtime.program_cache import ProgramCache
from maskfx.runtime.steps import AnyStep, EditStep, ValidatedCall, ValidatedInputs
from maskfx.runtime.validate import (
    check_arguments,
    check_cache,
    check_mask,
    check_regions,
    expand_timesteps,
    signature_of,
)
from maskfx.runtime.weights import Weights

FITS = 256  # entries kept: pairs of a recording and a mask that passed the checks
PLANS = 2  # kept per entry: the planner also checks the edit without a plan

Mark = tuple[tuple[int, object], ...]


@dataclass
class Fit:
    """A recording that fits a mask and inputs, and the regions of its last plans."""

    cache: weakref.ref[StepCache]
    mask: weakref.ref[Tensor]
    facts: tuple[Any, ...]
    sites: Tensor
    regions: list[tuple[Mark, list[Any], dict[int, Tensor]]] = field(default_factory=list)


class Validator:
    """Validates the members of one denoiser's steps.

    Args:
        module: The denoiser's module.
        programs: Finds or makes the compilation that serves a member's inputs.
        weights: The module's weights.
    """

    def __init__(self, module: nn.Module, programs: ProgramCache, weights: Weights) -> None:
        self.module, self.programs, self.weights = module, programs, weights
        self._signature = signature_of(module)
        self._inputs: dict[int, tuple[Any, list[Any], Mark, ValidatedInputs]] = {}
        self._fits: OrderedDict[tuple[int, int], Fit] = OrderedDict()
        self._masks: OrderedDict[int, tuple[weakref.ref[Tensor], Mark, Tensor]] = OrderedDict()

    def calls(self, steps: Sequence[AnyStep]) -> list[ValidatedCall]:
        """Validate the members of a step, except for their timesteps (`check_timesteps`)."""
        return [self.call(step) for step in steps]

    def call(self, step: AnyStep) -> ValidatedCall:
        """Validate a member of a step, except for its timestep."""
        inputs = self.inputs(step.inputs)
        if not isinstance(step, EditStep):
            return ValidatedCall(step, inputs)
        fit = self._fit(step, inputs)
        return ValidatedCall(step, inputs, fit.sites, self._regions(step, inputs, fit))

    def inputs(self, given: Mapping[str, Any]) -> ValidatedInputs:
        """Validate a call's arguments; the compilation that serves them is found or made."""
        leaves = pytree.tree_leaves(dict(given)) if isinstance(given, Mapping) else []
        mark, known = marked(leaves), self._inputs.get(id(given))
        if known is not None and known[2] == mark:
            return known[3]
        inputs = expand_timesteps(given)
        check_arguments(self.module, self._signature, inputs)
        _, values, spec = roles_.flatten(inputs)
        compilation = self.programs.serving(inputs, values, spec)
        self.weights.settle()
        sizes = roles_.observed_sizes(compilation.capture.leaves, values)
        found = ValidatedInputs(values, spec, sizes, compilation)
        self._inputs[id(given)] = (given, leaves, mark, found)  # held: an id may be reused
        return found

    def end_step(self) -> None:
        """Drop the inputs of a step that has run: they are not passed again."""
        self._inputs.clear()

    def forget(self) -> None:
        """Drop all results; call it when weights or captures change."""
        self._inputs.clear()
        self._fits.clear()

    def _fit(self, step: EditStep, inputs: ValidatedInputs) -> Fit:
        """Return how an edit's recording and mask fit; check them unless they were checked."""
        mask, weights = check_mask(step, inputs.mask_shape), self.weights.fingerprint()
        mark, program = marked([mask]), inputs.compilation.program
        which = id(inputs.compilation) if program is None else program.code
        facts = (mark, which, inputs.sizes, inputs.latent.dtype, weights, inputs.constants)
        key = id(step.cache), id(mask)
        fit = self._fits.get(key)
        if fit is None or fit.cache() is not step.cache or fit.mask() is not mask:
            fit = None
        if fit is None or fit.facts != facts:
            sites = self._on_host(mask, mark)
            check_cache(step.cache, inputs, sites, weights)
            fit = Fit(weakref.ref(step.cache), weakref.ref(mask), facts, sites)
            self._fits[key] = fit
            while len(self._fits) > FITS:
                self._fits.popitem(last=False)
        return fit

    def _regions(self, step: EditStep, inputs: ValidatedInputs, fit: Fit) -> dict[int, Tensor]:
        """Return the sites of each region that has others than the mask's."""
        chosen = [(n, sites) for of in (step.plan, step.wide) for n, sites in of.items()]
        leaves = [len(step.plan), *(value for pair in chosen for value in pair)]
        mark = marked(leaves)
        known = next((found for of, _, found in fit.regions if of == mark), None)
        if known is None:
            program = inputs.compilation.program
            known = check_regions(step, fit.sites, program.interface if program else None)
            fit.regions = [*fit.regions[1 - PLANS :], (mark, leaves, known)]
        return known

    def _on_host(self, mask: Tensor, mark: Mark) -> Tensor:
        """Return a copy of a mask in host memory, shared by all recordings it is used with."""
        known = self._masks.get(id(mask))
        if known is None or known[0]() is not mask or known[1] != mark:
            known = self._masks[id(mask)] = weakref.ref(mask), mark, mask.detach().cpu().clone()
            while len(self._masks) > FITS:
                self._masks.popitem(last=False)
        return known[2]


def marked(leaves: Sequence[Any]) -> Mark:
    """Return a value that changes when one of these objects changes.

    The objects must be held for as long as the value is compared.
    """
    return tuple((id(leaf), version(leaf)) for leaf in leaves)


def version(value: Any) -> object:
    """Return a tensor's count of in-place changes.

    Tensors of inference mode have none; for them the result is unequal to any other.
    """
    if not isinstance(value, Tensor):
        return None
    return object() if torch.is_inference(value) else value._version
