"""Where the steps of a denoiser are computed, if not in the thread that executes its calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from maskfx.runtime.denoiser import CompiledDenoiser
from maskfx.runtime.lora.adapter import Updates
from maskfx.runtime.steps import AnyStep, DenseStep


@dataclass(frozen=True)
class SharedAdapters:
    """Adapters that all members of a step have, and their recordings too.

    Args:
        updates: The adapters.
        sites: The number of sites that the members compute.
        left: Steps in which these adapters will act, this one included.
    """

    updates: Updates
    sites: int
    left: int


class StepExecutor(Protocol):
    """Computes the steps of one denoiser elsewhere, such as in another process.

    `maskfx.pipelines.runs.execute` calls it in a thread, beside the steps of other denoisers. If
    it is `joint`, it serves several denoisers that compute the same, and steps of all of them form
    one batch.
    """

    joint: bool

    def run(
        self,
        denoiser: CompiledDenoiser,
        steps: Sequence[AnyStep],
        shared: SharedAdapters | None = None,
    ) -> list[object]:
        """Return what `CompiledDenoiser.step` would, when the results are there.

        Args:
            denoiser: The denoiser.
            steps: The members.
            shared: Adapters that may be written into the weights for the step.
        """
        ...


@torch.no_grad()
def compute_steps(denoiser: CompiledDenoiser, steps: Sequence[AnyStep]) -> list[object]:
    """Run steps where no other requests' steps may join: dense ones by the module on a CPU."""
    results: list[object] = [None] * len(steps)
    dense = [i for i, step in enumerate(steps) if isinstance(step, DenseStep)]
    weights = next(denoiser.module.parameters(), None)
    if denoiser.settings.inductor or weights is None or weights.device.type != "cpu":
        dense = []
    if dense:
        inputs = [steps[i].inputs for i in dense]
        for group in denoiser.alike(inputs, [steps[i].adapters for i in dense]):
            outputs = denoiser.plain_together(group) if len(group.numbers) > 1 else None
            for place, number in enumerate(group.numbers):
                index = dense[number]
                results[index] = outputs[place] if outputs else denoiser.plain_step(steps[index])
    others = [i for i in range(len(steps)) if i not in dense]
    if others:
        for i, result in zip(others, denoiser.step([steps[i] for i in others]), strict=True):
            results[i] = result
    return results
