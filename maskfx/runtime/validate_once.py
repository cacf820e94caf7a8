"""ValidationCache: memoises the checks of a step's arguments, so that each is checked once.

The same arguments are passed several times: to the planner, to `ahead()`, as those from which the
next step's sizes are known, and to the step. An entry is valid only for the same, unchanged
objects: tensors count their changes in place. Knows nothing of the checks themselves.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from maskfx.compiler.compile import Compilation
from maskfx.runtime.cache.step_cache import StepCache
from maskfx.runtime.steps import CheckedCall, EditStep

FITS = 256  # entries kept: pairs of a recording and a mask that passed the checks
PLANS = 2  # kept per entry: the planner also checks the edit without a plan

Mark = tuple[tuple[int, object], ...]


@dataclass(frozen=True)
class ValidatedInputs:
    """Inputs that fit the module, flattened, and the compilation that serves them."""

    values: list[Any]
    spec: pytree.TreeSpec
    sizes: dict[str, int]
    compilation: Compilation


@dataclass
class ValidatedEdit:
    """A recording that fits a mask and inputs, and the regions of its last plans."""

    cache: weakref.ref[StepCache]
    mask: weakref.ref[Tensor]
    facts: tuple[Any, ...]
    sites: Tensor
    regions: list[tuple[Mark, list[Any], dict[int, Tensor]]] = field(default_factory=list)


class ValidationCache:
    """Memoises one denoiser's checks; call `forget` when its weights or captures change."""

    def __init__(self) -> None:
        self._inputs: dict[int, tuple[Any, list[Any], Mark, ValidatedInputs]] = {}
        self._fits: OrderedDict[tuple[int, int], ValidatedEdit] = OrderedDict()
        self._masks: OrderedDict[int, tuple[weakref.ref[Tensor], Mark, Tensor]] = OrderedDict()

    def inputs(
        self, inputs: Mapping[str, Any], check: Callable[[Mapping[str, Any]], ValidatedInputs]
    ) -> ValidatedInputs:
        """Return the validated inputs; call `check` on a miss."""
        leaves = pytree.tree_leaves(dict(inputs)) if isinstance(inputs, Mapping) else []
        mark, known = marked(leaves), self._inputs.get(id(inputs))
        if known is not None and known[2] == mark:
            return known[3]
        found = check(inputs)
        self._inputs[id(inputs)] = (inputs, leaves, mark, found)  # held: an id may be reused
        return found

    def let_go(self) -> None:
        """Drop the inputs of a step that has run: they are not passed again."""
        self._inputs.clear()

    def on_host(self, mask: Tensor) -> Tensor:
        """Return a copy of a mask in host memory, shared by all recordings it is used with."""
        known, mark = self._masks.get(id(mask)), marked([mask])
        if known is None or known[0]() is not mask or known[1] != mark:
            known = self._masks[id(mask)] = weakref.ref(mask), mark, mask.detach().cpu().clone()
            while len(self._masks) > FITS:
                self._masks.popitem(last=False)
        return known[2]

    def edit(
        self,
        call: CheckedCall,
        facts: tuple[Any, ...],
        check: Callable[[], Tensor],
        regions: Callable[[], dict[int, Tensor]],
    ) -> None:
        """Set the mask and the regions of an edit; call the checks on a miss.

        Args:
            call: The edit.
            facts: What `check` depends on besides the recording and the mask.
            check: Checks the edit and returns its mask in host memory.
            regions: Checks the plan and `wide` and returns the sites of each region.
        """
        step = call.step
        assert isinstance(step, EditStep), "only edits have a mask"
        fit = self._fit(step, facts)
        call.mask = check() if fit is None else fit.sites
        fit = self._keep(step, facts, call.mask) if fit is None else fit
        chosen = [(n, sites) for of in (step.plan, step.wide) for n, sites in of.items()]
        leaves = [len(step.plan), *(value for pair in chosen for value in pair)]
        mark = marked(leaves)
        known = next((found for of, _, found in fit.regions if of == mark), None)
        call.regions = regions() if known is None else known
        if known is None:
            fit.regions = [*fit.regions[1 - PLANS :], (mark, leaves, call.regions)]

    def forget(self) -> None:
        self._inputs.clear()
        self._fits.clear()

    def _fit(self, step: EditStep, facts: tuple[Any, ...]) -> ValidatedEdit | None:
        fit = self._fits.get((id(step.cache), id(step.mask)))
        if fit is None or fit.cache() is not step.cache or fit.mask() is not step.mask:
            return None
        return fit if fit.facts == (marked([step.mask]), *facts) else None

    def _keep(self, step: EditStep, facts: tuple[Any, ...], sites: Tensor) -> ValidatedEdit:
        fit = ValidatedEdit(
            weakref.ref(step.cache), weakref.ref(step.mask), (marked([step.mask]), *facts), sites
        )
        self._fits[id(step.cache), id(step.mask)] = fit
        while len(self._fits) > FITS:
            self._fits.popitem(last=False)
        return fit


def marked(leaves: list[Any]) -> Mark:
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
