"""Clean latents: what a denoiser's input would be without noise, by its output; and back.

A denoiser of this kind reads `signal * clean + noise * eps`, with two numbers that follow from the
timestep, and predicts `eps`, or the velocity `signal * eps - noise * clean`. Its prediction of the
clean latents changes less from step to step than such an output does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from maskfx.ops import numbers, wide

EPSILON, VELOCITY = "epsilon", "v_prediction"
KINDS = (EPSILON, VELOCITY)
FAINTEST = 1e-4  # signal and noise, at least: a step without either divides by nothing


@dataclass(frozen=True)
class Mixture:
    """How the input of a call mixes clean latents and noise; one number per element, or one.

    Args:
        kind: what the denoiser predicts, one of `KINDS`.
        signal: the share of the clean latents.
        noise: the share of the noise.
    """

    kind: str
    signal: tuple[float, ...]
    noise: tuple[float, ...]

    def clean(self, latents: Tensor, output: Tensor) -> Tensor:
        """Return the clean latents that an output predicts."""
        x, f = widened(latents, output)
        signal, noise = self._shares(x)
        x0: Tensor = (x - noise * f) / signal if self.kind == EPSILON else signal * x - noise * f
        return x0.to(output.dtype)

    def output(self, latents: Tensor, clean: Tensor) -> Tensor:
        """Return the output that predicts these clean latents."""
        x, c = widened(latents, clean)
        signal, noise = self._shares(x)
        scaled: Tensor = x - signal * c if self.kind == EPSILON else signal * x - c
        found: Tensor = scaled / noise
        return found.to(clean.dtype)

    def _shares(self, x: Tensor) -> tuple[Tensor | float, Tensor | float]:
        shares = [[max(FAINTEST, v) for v in values] for values in (self.signal, self.noise)]
        if all(len(set(values)) == 1 for values in shares):
            return shares[0][0], shares[1][0]
        table = numbers(shares, x.dtype, x.device)
        signal, noise = table.view(2, -1, *[1] * (x.dim() - 1)).unbind(0)
        return signal, noise


def widened(*values: Tensor) -> Sequence[Tensor]:
    return [value.to(wide(value.dtype)) for value in values]


def latents_like(inputs: Sequence[object], result: object) -> Tensor | None:
    """Return the part of a call's input that its result is a prediction for; None if there's none.

    The result has one tensor; the input may have more channels, such as a mask's, after its own.
    """
    given = next((v for v in inputs if isinstance(v, Tensor) and v.dim() >= 3), None)
    leaves = pytree.tree_leaves(result)
    if given is None or len(leaves) != 1 or not isinstance(leaves[0], Tensor):
        return None
    output = leaves[0]
    if output.dim() != given.dim() or not torch.is_floating_point(output):
        return None
    wider = [d for d in range(given.dim()) if given.shape[d] != output.shape[d]]
    if not wider:
        return given
    [first, *others] = wider
    if others or first == 0 or given.shape[first] < output.shape[first]:
        return None
    return given.narrow(first, 0, output.shape[first])
