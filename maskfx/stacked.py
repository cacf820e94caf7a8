"""Stacked: dense calls of equal shapes as one call of the module, a longer batch.

Which dimension is the batch is inferred from the arguments (`roles.py`). Before calls of a kind
share one, two unlike ones do so once beside the module; where they get other results than alone,
calls of that kind stay alone.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from maskfx import roles as roles_
from maskfx.errors import MaskfxError
from maskfx.values import copies, has_meta, same_constant, same_values

log = logging.getLogger(__name__)

Inputs = Mapping[str, Any]
Axes = tuple[int | None, ...]  # of each argument: which of its dimensions is the batch


@dataclass(frozen=True)
class Shaped:
    """One call's arguments, flat."""

    values: list[Any]
    spec: pytree.TreeSpec
    axes: Axes
    batch: int

    @property
    def kind(self) -> Hashable:
        """What a proof is for: everything but sizes."""
        types = tuple((v.dtype, v.dim()) if isinstance(v, Tensor) else type(v) for v in self.values)
        return str(self.spec), self.axes, types

    def fits(self, other: Shaped) -> bool:
        """May they be one call: equal shapes, and the same numbers where there is no batch?"""
        if self.spec != other.spec or self.axes != other.axes or self.batch != other.batch:
            return False
        return all(map(_fit, self.values, other.values, self.axes))


class Stacked:
    """One module's."""

    def __init__(self, module: nn.Module, roles: Mapping[str, roles_.Roles] | None) -> None:
        self.module, self.roles = module, roles
        self._proved: dict[Hashable, bool] = {}

    def groups(self, calls: Sequence[Inputs]) -> list[list[int]]:
        """Which of these calls may be one, by their numbers; many are alone."""
        found: list[tuple[Shaped | None, list[int]]] = []
        for number, inputs in enumerate(calls):
            shaped = self._shaped(inputs)
            for known, numbers in found:
                if shaped is not None and known is not None and known.fits(shaped):
                    numbers.append(number)
                    break
            else:
                found.append((shaped, [number]))
        out = []
        for shaped, numbers in found:
            together = len(numbers) > 1 and shaped is not None and self._works(shaped)
            out += [numbers] if together else [[number] for number in numbers]
        return out

    def run(self, calls: Sequence[Inputs]) -> list[Any]:
        """The results of calls of one group."""
        shaped = [self._shaped(inputs) for inputs in calls]
        return self._run([one for one in shaped if one is not None])

    def forget(self) -> None:
        """The module computes something else now."""
        self._proved.clear()

    def _shaped(self, inputs: Inputs) -> Shaped | None:
        try:
            leaves = roles_.infer(self.module, inputs, self.roles)
            _, values, spec = roles_.flatten(inputs)
            sizes = roles_.observed_sizes(leaves, values)
        except MaskfxError:  # there is no telling what is what
            return None
        axes = tuple(
            leaf.roles.index("batch") if "batch" in leaf.roles else None for leaf in leaves
        )
        batched = any(axis is not None for axis in axes)
        return Shaped(values, spec, axes, sizes["batch"]) if batched else None

    def _run(self, calls: Sequence[Shaped]) -> list[Any]:
        first = calls[0]
        columns = zip(*(call.values for call in calls), strict=True)
        values = [
            column[0] if axis is None else torch.cat(column, axis)
            for column, axis in zip(columns, first.axes, strict=True)
        ]
        output = self.module(**pytree.tree_unflatten(values, first.spec))
        flat, spec = pytree.tree_flatten(output)
        parts = [
            [own.clone() for own in value.split(first.batch)]
            if isinstance(value, Tensor)
            else [value] * len(calls)
            for value in flat
        ]
        return [pytree.tree_unflatten(list(row), spec) for row in zip(*parts, strict=True)]

    def _works(self, call: Shaped) -> bool:
        """Do two unlike calls of this kind get in one what they get alone?"""
        if call.kind not in self._proved:
            self._proved[call.kind] = not has_meta(self.module, call.values) and self._agrees(call)
        return self._proved[call.kind]

    def _agrees(self, call: Shaped) -> bool:
        pairs = zip(call.values, call.axes, strict=True)
        unlike = [value if axis is None else _unlike(value) for value, axis in pairs]
        pair = [call, Shaped(unlike, call.spec, call.axes, call.batch)]

        def fresh() -> list[Shaped]:
            return [Shaped(copies(one.values), one.spec, one.axes, one.batch) for one in pair]

        try:
            alone = [self._run([one])[0] for one in fresh()]
            return same_values(self._run(fresh()), alone)
        except Exception:
            log.debug("calls of %s can't share one", type(self.module).__name__, exc_info=True)
            return False


def _fit(one: Any, other: Any, axis: int | None) -> bool:
    if not isinstance(one, Tensor) or not isinstance(other, Tensor):
        return same_constant(one, other)
    if one.shape != other.shape or one.dtype != other.dtype or one.device != other.device:
        return False
    return axis is not None or one is other or torch.equal(one, other)


def _unlike(value: Tensor) -> Tensor:
    """Other numbers of the same kind and range."""
    if value.dtype == torch.bool:
        return value.clone()
    return value * 0.75 + 0.1 if value.is_floating_point() else value // 2
