"""Step executors: where the steps of a denoiser are computed.

`Here` computes in the calling thread. An executor that computes elsewhere, such as another process
(`maskfx.engine.step_process`), returns before its results are there.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, Protocol

import torch

from maskfx.runtime.denoiser import CompiledDenoiser
from maskfx.runtime.steps import AnyStep, DenseStep


class StepExecutor(Protocol):
    """Runs the steps of one denoiser."""

    def run(self, denoiser: CompiledDenoiser, steps: Sequence[AnyStep]) -> Future[list[Any]]:
        """Return the steps' results, or the error that they end with, as soon as they are there.

        Results are those of `CompiledDenoiser.step`, in the order of the steps.
        """
        ...


class Here:
    """Runs steps in the calling thread."""

    def run(self, denoiser: CompiledDenoiser, steps: Sequence[AnyStep]) -> Future[list[Any]]:
        done: Future[list[Any]] = Future()
        try:
            done.set_result(denoiser.step(steps))
        except Exception as error:
            done.set_exception(error)
        return done


@torch.no_grad()
def compute_steps(denoiser: CompiledDenoiser, steps: Sequence[AnyStep]) -> list[Any]:
    """Run steps where no other requests' steps may join: dense ones by the module on a CPU."""
    results: list[Any] = [None] * len(steps)
    dense = [i for i, step in enumerate(steps) if isinstance(step, DenseStep)]
    weights = next(denoiser.module.parameters(), None)
    if denoiser.settings.inductor or weights is None or weights.device.type != "cpu":
        dense = []
    if dense:
        for group in denoiser.alike([steps[i].inputs for i in dense]):
            outputs = denoiser.plain_together(group) if len(group.numbers) > 1 else None
            for place, number in enumerate(group.numbers):
                index = dense[number]
                results[index] = (
                    outputs[place] if outputs else denoiser.plain(**steps[index].inputs)
                )
    others = [i for i in range(len(steps)) if i not in dense]
    if others:
        for i, result in zip(others, denoiser.step([steps[i] for i in others]), strict=True):
            results[i] = result
    return results
