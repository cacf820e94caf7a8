"""BudgetShares: divides a template's budget between the denoisers of a pipeline.

A share is known after the first step that calls the denoiser: then all denoisers of this step are
captured, and what each would store whole is counted. Those that take turns, such as two that serve
early and late steps, get the same bytes for a step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor

from maskfx.errors import BudgetError
from maskfx.pipelines.call_policy import CallPosition
from maskfx.runtime.cache.quantize import LOSSLESS
from maskfx.runtime.cache.step_cache import StepCache
from maskfx.runtime.cache.tier_entry import FoundStep
from maskfx.runtime.denoiser import CompiledDenoiser
from maskfx.runtime.explain import amount
from maskfx.runtime.reuse.step_selection import StepSelection
from maskfx.runtime.sites.masks import Masks
from maskfx.runtime.templates.budget import Budget
from maskfx.runtime.templates.footprint import Footprint


@dataclass(frozen=True)
class RecordedPart:
    """A denoiser that a run records, the shape of its masks, and the run's initial latents."""

    denoiser: CompiledDenoiser
    shape: tuple[int, ...]
    start: Sequence[Tensor]


@dataclass
class BudgetShares:
    """The share of a budget of each denoiser, by its name."""

    known: dict[str, float] = field(default_factory=dict)
    _expected: dict[str, tuple[CompiledDenoiser, tuple[int, ...]]] = field(default_factory=dict)

    def expect(self, name: str, denoiser: CompiledDenoiser, shape: tuple[int, ...]) -> None:
        """Note a denoiser without a share that the running step calls, and its masks' shape."""
        if name not in self.known:
            self._expected[name] = denoiser, shape

    def decide(self, called: Collection[str]) -> None:
        """Give the denoisers without a share what the others of their step leave."""
        expected, self._expected = self._expected, {}
        if not expected:
            return
        left = 1.0 - sum(share for name, share in self.known.items() if name in called)
        if left <= 0:
            raise BudgetError(
                f"budget: {sorted(expected)} are called beside denoisers that have all of it; "
                "compile without a budget"
            )
        whole = {
            name: Footprint.of(denoiser, Masks.anywhere(*shape)).together(LOSSLESS)
            for name, (denoiser, shape) in expected.items()
        }
        total = sum(whole.values())
        self.known |= {name: left * nbytes / total for name, nbytes in whole.items()}

    def recall(self, start: FoundStep | None) -> None:
        """Use the shares that a template was recorded with, which its start holds."""
        facts = [] if start is None else start.cache.constants
        self.known = {**(facts[2] if len(facts) > 2 else {}), **self.known}

    def of(
        self, name: str, budget: Budget, start: Sequence[Tensor], selection: StepSelection
    ) -> Budget:
        """Return a denoiser's part of a budget, for the steps of a selection.

        The latents that a run starts with, and those stored after each step, are subtracted.
        """
        latents = sum(t.nbytes for t in start) + budget.steps * sum(t.nbytes for t in start[:1])
        if latents >= budget.nbytes:
            raise BudgetError(
                f"budget: {budget.steps} steps' latents alone take {amount(latents)}B, the budget "
                f"is {amount(budget.nbytes)}B; give more"
            )
        stored = selection.left(0, budget.steps) if selection.skips else None
        # templates of earlier versions have one denoiser, and hold no shares
        nbytes = (budget.nbytes - latents) * self.known.get(name, 1.0)
        return replace(budget, nbytes=nbytes, stored=stored)


def check_branches(
    elements: Counter[tuple[str, int]], position: CallPosition, cache: StepCache, budget: Budget
) -> None:
    """Count the batch elements of a recorded call, by denoiser and step.

    Raises BudgetError if a step's calls have more of them than the budget is for.
    """
    key = position.name, position.step
    elements[key] += cache.sizes.get("batch", 1)
    if elements[key] > budget.branches:
        raise BudgetError(
            f"step {position.step} has {elements[key]} branches of guidance times pictures, the "
            f"budget is for {budget.branches}; give Budget(branches={elements[key]}), or more if "
            "calls follow"
        )
