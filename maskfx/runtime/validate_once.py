"""What of a step's arguments was checked already, so that each is checked once: where it enters.

The same arguments come several times: to the planner, to `ahead()`, as those from which the next
step's sizes are known, and to the step. What is remembered holds only while it is the same objects,
unchanged: tensors count their changes in place. Knows not what is checked.
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

FITS = 256  # recordings and masks that were found to fit
PLANS = 2  # of each: the planner asks about the edit without one

Mark = tuple[tuple[int, object], ...]


@dataclass(frozen=True)
class ValidatedInputs:
    """Inputs that fit the module: what a call is made of."""

    values: list[Any]
    spec: pytree.TreeSpec
    sizes: dict[str, int]
    compilation: Compilation


@dataclass
class ValidatedEdit:
    """A recording that fits a mask and inputs like these, and what its last plans came down to."""

    cache: weakref.ref[StepCache]
    mask: weakref.ref[Tensor]
    facts: tuple[Any, ...]
    sites: Tensor
    regions: list[tuple[Mark, list[Any], dict[int, Tensor]]] = field(default_factory=list)


class ValidationCache:
    """One denoiser's checks; `forget` them when its weights or its captures change."""

    def __init__(self) -> None:
        self._inputs: dict[int, tuple[Any, list[Any], Mark, ValidatedInputs]] = {}
        self._fits: OrderedDict[tuple[int, int], ValidatedEdit] = OrderedDict()
        self._masks: OrderedDict[int, tuple[weakref.ref[Tensor], Mark, Tensor]] = OrderedDict()

    def inputs(
        self, inputs: Mapping[str, Any], check: Callable[[Mapping[str, Any]], ValidatedInputs]
    ) -> ValidatedInputs:
        """What these inputs come down to."""
        leaves = pytree.tree_leaves(dict(inputs)) if isinstance(inputs, Mapping) else []
        mark, known = marked(leaves), self._inputs.get(id(inputs))
        if known is not None and known[2] == mark:
            return known[3]
        found = check(inputs)
        self._inputs[id(inputs)] = (inputs, leaves, mark, found)  # held, or a number means another
        return found

    def let_go(self) -> None:
        """The step ran: its inputs don't come again."""
        self._inputs.clear()

    def on_host(self, mask: Tensor) -> Tensor:
        """A copy of a mask in host memory: one for all the recordings that it comes with."""
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
        """Give an edit its mask and its regions; `facts` are what the check depends on beside its
        recording and its mask."""
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
    """What changes when one of these does; they must be held for as long as it is compared."""
    return tuple((id(leaf), version(leaf)) for leaf in leaves)


def version(value: Any) -> object:
    """How often a tensor was changed in place; nobody counts for tensors of inference mode."""
    if not isinstance(value, Tensor):
        return None
    return object() if torch.is_inference(value) else value._version
