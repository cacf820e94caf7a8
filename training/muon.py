"""Steps of equal length in all directions, for the matrices inside a transformer (Muon).

A matrix's gradient, gathered over some steps, is replaced by the nearest one whose singular values
are all one: what few examples show counts as much as what many do. A step costs more than Adam's
and teaches more.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

# Of Newton-Schulz's polynomials, each the best for what the one before leaves (Polar Express,
# Amsel and others, 2025, for matrices whose smallest singular value is 0.001 of the largest).
POLYNOMIALS = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
)
SAFETY = 1.02  # rounding shall not carry the largest singular value beyond one
ADAM_SIZE = 0.2  # of an entry's usual step under Adam, in rates: so that rates compare


def orthogonal(matrices: Tensor) -> Tensor:
    """Of each (rows, columns), about the nearest matrix whose singular values are one."""
    x = matrices.bfloat16()
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.mT
    x = x / (SAFETY * x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for once, thrice, five in POLYNOMIALS:
        square = x @ x.mT
        rest = torch.baddbmm(square, square, square, beta=thrice, alpha=five)
        x = torch.baddbmm(x, rest, x, beta=once)
    return (x.mT if tall else x).to(matrices.dtype)


class Muon(torch.optim.Optimizer):
    """Matrices of one shape are turned together."""

    def __init__(
        self, matrices: Sequence[Tensor], lr: float, momentum: float = 0.95, decay: float = 0.01
    ) -> None:
        super().__init__(list(matrices), {"lr": lr, "momentum": momentum, "decay": decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            alike: dict[torch.Size, list[Tensor]] = defaultdict(list)
            for matrix in group["params"]:
                if matrix.grad is not None:
                    alike[matrix.shape].append(matrix)
            for shape, matrices in alike.items():
                turned = orthogonal(self._gathered(matrices, group["momentum"]))
                size = ADAM_SIZE * max(shape) ** 0.5
                torch._foreach_mul_(matrices, 1 - group["lr"] * group["decay"])
                torch._foreach_add_(matrices, list(turned.unbind()), alpha=-group["lr"] * size)

    def _gathered(self, matrices: list[Tensor], momentum: float) -> Tensor:
        """Gradients of now and before, stacked."""
        grads = [matrix.grad for matrix in matrices]
        for matrix in matrices:
            self.state[matrix].setdefault("before", torch.zeros_like(matrix))
        before = [self.state[matrix]["before"] for matrix in matrices]
        torch._foreach_lerp_(before, grads, 1 - momentum)
        return torch.stack(torch._foreach_lerp(grads, before, momentum))
