"""Fits the weights of forecasts on runs of the model: tensors and numbers, no pipeline.

Between two computed steps a run's latents follow from what is known when they begin: the latents,
the outputs so far, and the rule by which the scheduler steps, which is linear and is measured too.
So one gap after another is fitted: at each step the weights are those with which the next latents
come closest, in least squares, to the latents of the runs that compute all steps. An error of the
steps before is corrected by that, as far as the known outputs can. The errors of each run count
relative to its output, so that runs with large outputs don't decide for all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from maskfx.errors import InputError

EXACT = 1e-3  # relative error of a scheduler's measured rule, at most
RIDGE = 1e-5  # added to the squares of each term, relative: terms may nearly coincide


@dataclass
class RunLog:
    """What the scheduler of one run was given and returned, step by step; the request's rows.

    Args:
        times: The times of the denoiser's calls.
        before: The latents at each step.
        outputs: The output at each step, with guidance applied.
        after: The latents behind each step.
        scales: How much larger the latents are that the denoiser reads.
    """

    times: list[float] = field(default_factory=list)
    before: list[Tensor] = field(default_factory=list)
    outputs: list[Tensor] = field(default_factory=list)
    after: list[Tensor] = field(default_factory=list)
    scales: list[float] = field(default_factory=list)


def flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([one.double().flatten() for one in tensors])


def relative(made: Tensor, wanted: Tensor) -> float:
    """Return the relative difference of what was made from what was wanted."""
    return float((made - wanted).norm() / wanted.norm())


def solve(
    terms: Sequence[Tensor], wanted: Tensor, shares: Tensor | None = None, ridge: float = 0.0
) -> Tensor:
    """Return the weights with which the terms come closest to what is wanted.

    `shares` weighs the elements; None weighs them equally.
    """
    table = torch.stack(list(terms), 1)
    if shares is not None:
        table, wanted = table * shares[:, None], wanted * shares
    squares = table.T @ table
    squares += torch.diag(ridge * squares.diagonal())
    found: Tensor = torch.linalg.lstsq(squares, (table.T @ wanted)[:, None]).solution
    return found[:, 0]


@dataclass(frozen=True)
class StepRule:
    """One step of a scheduler: the next latents as a sum of latents and outputs.

    Args:
        weights: Of the latents and the output of this step, and of the step before if it counts.
    """

    weights: tuple[float, ...]

    @classmethod
    def measured(cls, logs: Sequence[RunLog], step: int) -> StepRule:
        """Return the rule that these runs follow at a step.

        Raises:
            InputError: They follow none, such as where the scheduler adds noise.
        """
        wanted = flat([log.after[step] for log in logs])
        worst = 0.0
        for reach in range(min(2, step + 1)):
            terms = [
                flat([kind[step - back] for kind in kinds])
                for back in range(reach + 1)
                for kinds in ([log.before for log in logs], [log.outputs for log in logs])
            ]
            weights = solve(terms, wanted)
            made = sum((w * t for w, t in zip(weights, terms, strict=True)), torch.zeros(1))
            worst = relative(made, wanted)
            if worst < EXACT:
                return cls(tuple(weights.tolist()))
        raise InputError(
            f"fit-forecast: step {step} of the scheduler isn't a sum of its latents and outputs "
            f"(relative error {worst:.1e}), as where it adds noise: forecasts can't be fitted for "
            "it; give the pipeline another scheduler, or use forecast='output'"
        )

    def rest(self, latents: Sequence[Tensor], outputs: Sequence[Tensor]) -> Tensor:
        """Return the next latents without this step's output.

        Args:
            latents: Those of this step, and of the step before if it counts.
            outputs: That of the step before, if it counts.
        """
        total = self.weights[0] * latents[-1]
        if len(self.weights) > 2:
            total = total + self.weights[2] * latents[-2] + self.weights[3] * outputs[-1]
        return total


def fit_gap(
    full: Sequence[RunLog], own: Sequence[RunLog], computed: Sequence[int], gap: range
) -> tuple[dict[int, tuple[float, ...]], dict[int, float]]:
    """Return the weights of the steps of a gap, and the relative error of the latents behind each.

    Args:
        full: Runs that compute every step.
        own: The same runs, which compute the selected steps, as far as the gap's beginning.
        computed: The computed steps before the gap.
        gap: The steps that aren't computed.
    """
    known = [flat([log.outputs[step] for log in own]) for step in computed]
    first = gap.start
    latents = [flat([log.before[step] for log in own]) for step in (first - 1, first)]
    outputs = [flat([log.outputs[first - 1] for log in own])]
    found, errors = {}, {}
    for step in gap:
        rule = StepRule.measured(full, step)
        wanted, rest = flat([log.after[step] for log in full]), rule.rest(latents, outputs)
        terms = [latents[-1], *known]
        shares = flat(
            [torch.ones_like(log.outputs[step]) / log.outputs[step].norm() for log in full]
        )
        weights = solve(terms, (wanted - rest) / rule.weights[1], shares, RIDGE)
        output = (torch.stack(terms, 1) @ weights[:, None])[:, 0]
        scale = sum(log.scales[step] for log in full) / len(full)
        found[step] = (float(weights[0]) / scale, *weights[1:].tolist())
        after = rest + rule.weights[1] * output
        latents, outputs = [latents[-1], after], [output]
        errors[step] = relative(after, wanted)
    return found, errors
