"""DenseBatcher: runs dense calls of equal shapes as one call of the module with a longer batch.

The batch dimension is inferred from the arguments (`compiler/capture/arguments/infer_roles.py`),
once per shape. Before calls of a kind are batched, two different calls run once in one batch and
once alone; if the results differ, calls of that kind are not batched, and `refused` keeps the
reason.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from maskfx.compiler.capture.arguments import roles as roles_
from maskfx.compiler.capture.arguments.infer_roles import infer
from maskfx.compiler.capture.arguments.roles import Argument
from maskfx.errors import MaskfxError
from maskfx.ir.lru import LruCache
from maskfx.ir.objects import holds_objects, open_objects
from maskfx.ir.values import Equality, copies, has_meta, same_constant, same_values
from maskfx.runtime.execution.constant_parts import ConstantParts
from maskfx.runtime.lora.calls import adapted
from maskfx.runtime.lora.layers import AdapterSet

FORMS = 64  # forms kept: shapes whose roles needn't be inferred again
TRIES = 3  # attempts of a proof that is inconclusive

Inputs = Mapping[str, object]
Pair = tuple[AdapterSet | None, AdapterSet | None]


@dataclass(frozen=True, eq=False)
class CallForm:
    """The properties that calls of one shape share."""

    spec: pytree.TreeSpec
    leaves: list[Argument]
    axes: list[int | None]  # of each argument: its batch dimension
    batch: int
    kind: Hashable  # the key of a proof: everything but sizes


@dataclass(frozen=True, eq=False)
class ShapedCall:
    """The flattened arguments of one call."""

    form: CallForm
    values: list[Any]

    def fits(self, other: ShapedCall, equal: Equality) -> bool:
        """Return True if both may be batched: same form, equal values of unbatched arguments."""
        return self.form is other.form and all(
            axis is not None or _same(one, another, equal)
            for one, another, axis in zip(self.values, other.values, self.form.axes, strict=True)
        )


@dataclass(frozen=True, eq=False)
class CallGroup:
    """Calls that run as one, by their numbers; a single call is passed to the module unchanged.

    Each call has its adapters in `adapters`, or None.
    """

    numbers: list[int]
    calls: list[ShapedCall]
    adapters: list[AdapterSet | None]

    def add(self, number: int, call: ShapedCall, adapters: AdapterSet | None) -> None:
        self.numbers.append(number)
        self.calls.append(call)
        self.adapters.append(adapters)


class DenseBatcher:
    """Batches the dense calls of one module."""

    def __init__(self, module: nn.Module, roles: Mapping[str, roles_.Roles] | None) -> None:
        self.module, self.roles = module, roles
        self.constants = ConstantParts(module)
        self.refused: dict[Hashable, str] = {}  # kinds that are not batched, and why
        self._proved: set[Hashable] = set()
        self._tries: Counter[Hashable] = Counter()
        self._equal = Equality()
        self._forms: LruCache[Hashable, CallForm | None] = LruCache(FORMS)

    def groups(
        self, calls: Sequence[Inputs], adapters: Sequence[AdapterSet | None] = ()
    ) -> list[CallGroup]:
        """Group the calls that may run as one call of the module, each with its adapters."""
        groups: list[CallGroup] = []
        sets = adapters or [None] * len(calls)
        for number, (inputs, own) in enumerate(zip(calls, sets, strict=True)):
            call = self._shaped(inputs)
            mates = next(
                (g for g in groups if call and g.calls and g.calls[0].fits(call, self._equal)), None
            )
            if call is None:
                groups.append(CallGroup([number], [], [own]))
            elif mates is None:
                groups.append(CallGroup([number], [call], [own]))
            else:
                mates.add(number, call, own)
        return [part for group in groups for part in self._parts(group)]

    def run(self, group: CallGroup) -> list[object]:
        """Run the module once for all calls of a group."""
        return self._run(group.calls, group.adapters)

    def run_alone(self, inputs: Inputs, adapters: AdapterSet | None) -> Any:
        """Run the module for one call, whose arguments it gets as they are."""
        values, spec = pytree.tree_flatten(dict(inputs))
        origins = {id(value): [value] for value in values if isinstance(value, Tensor)}
        with (
            adapted([(1, adapters)]),
            self.constants.over(spec, origins, changed_weights([adapters])),
        ):
            return self.module(**inputs)

    def forget(self) -> None:
        """Drop all proofs; call it if the module now computes something else."""
        self.constants.forget()
        self.refused.clear()
        self._proved.clear()
        self._tries.clear()

    def _parts(self, group: CallGroup) -> list[CallGroup]:
        """Return the group as it is, or by adapters, or one by one, as the module allows."""
        if len(group.numbers) == 1:
            return [group]
        alone = zip(group.numbers, group.adapters, strict=True)
        if not self._works(group.calls[0]):
            return [CallGroup([number], [], [own]) for number, own in alone]
        first = group.adapters[0]
        other = next((own for own in group.adapters if key_of(own) != key_of(first)), first)
        if key_of(first) == key_of(other) or self._works(group.calls[0], (first, other)):
            return [group]
        parts: dict[Hashable, CallGroup] = {}
        for number, call, own in zip(group.numbers, group.calls, group.adapters, strict=True):
            parts.setdefault(key_of(own), CallGroup([], [], [])).add(number, call, own)
        return list(parts.values())

    def _shaped(self, inputs: Inputs) -> ShapedCall | None:
        values, spec = pytree.tree_flatten(dict(inputs))
        if holds_objects(spec):  # the module may write into them
            return None
        key = (spec, *map(_shape, values))
        form = self._forms.find(key, lambda: self._form(inputs, values, spec))
        return None if form is None else ShapedCall(form, values)

    def _form(self, inputs: Inputs, values: list[object], spec: pytree.TreeSpec) -> CallForm | None:
        try:
            leaves = infer(self.module, inputs, self.roles)
            batch = roles_.observed_sizes(leaves, values)["batch"]
        except MaskfxError:  # the roles can't be inferred
            return None
        axes = [roles_.batch_axis(leaf.roles) for leaf in leaves]
        if all(axis is None for axis in axes):
            return None
        types = [(v.dtype, v.dim()) if isinstance(v, Tensor) else type(v) for v in values]
        return CallForm(spec, leaves, axes, batch, (spec, *axes, *types))

    def _run(
        self, calls: Sequence[ShapedCall], adapters: Sequence[AdapterSet | None] = ()
    ) -> list[object]:
        form = calls[0].form
        columns = list(zip(*(call.values for call in calls), strict=True))
        values = [
            column[0] if axis is None else torch.cat(column, axis)
            for column, axis in zip(columns, form.axes, strict=True)
        ]
        origins = {
            id(value): column
            for value, column, axis in zip(values, columns, form.axes, strict=True)
            if axis == 0 and isinstance(value, Tensor)
        }
        with (
            adapted([(form.batch, own) for own in adapters]),
            self.constants.over(form.spec, origins, changed_weights(adapters)),
        ):
            output = self.module(**pytree.tree_unflatten(values, form.spec))
        open_objects(output)
        flat, spec = pytree.tree_flatten(output)
        parts = [
            [own.clone() for own in value.split(form.batch)]
            if isinstance(value, Tensor)
            else [value] * len(calls)
            for value in flat
        ]
        return [pytree.tree_unflatten(list(row), spec) for row in zip(*parts, strict=True)]

    # Proof.

    def _works(self, call: ShapedCall, adapters: Pair = (None, None)) -> bool:
        """Return True if two different calls of this kind get equal results batched and alone.

        With different adapters too, if `adapters` are given.
        """
        kind = kind_of(call, adapters)
        known = kind in self._proved or kind in self.refused
        if not known and not has_meta(self.module, call.values):
            self._prove(call, adapters)
        return kind in self._proved

    def _prove(self, call: ShapedCall, adapters: Pair) -> None:
        """Run the proof for this kind of call.

        Results that aren't finite and out-of-memory errors are inconclusive; another call is tried.
        """
        form, kind = call.form, kind_of(call, adapters)
        self._tries[kind] += 1
        if self._tries[kind] > TRIES:
            self.refused[kind] = "to try it took too much memory, or gave no finite numbers"
            return
        rows = zip(call.values, form.axes, form.leaves, strict=True)
        unlike = [value if axis is None else _unlike(value, leaf) for value, axis, leaf in rows]
        pair = [call, replace(call, values=unlike)]
        try:
            alone = [
                self._run([replace(one, values=copies(one.values))], [own])[0]
                for one, own in zip(pair, adapters, strict=True)
            ]
            if not _finite(alone):
                return
            fresh = [replace(one, values=copies(one.values)) for one in pair]
            together = self._run(fresh, adapters)
        except torch.OutOfMemoryError:
            return
        except Exception as error:  # a module may raise anything for a longer batch
            self.refused[kind] = f"a longer batch fails: {type(error).__name__}: {error}"
            return
        if same_values(together, alone):
            self._proved.add(kind)
        else:
            self.refused[kind] = "calls get other results in one than alone"


def changed_weights(adapters: Sequence[AdapterSet | None]) -> set[int]:
    """Return the ids of the weights that adapters change."""
    return {id(update.weight) for own in adapters if own for update in own.layers}


def key_of(adapters: AdapterSet | None) -> Hashable:
    return None if adapters is None else adapters.key


def kind_of(call: ShapedCall, adapters: Pair) -> Hashable:
    """Return the key of a proof; there is another one for calls with different adapters."""
    if all(own is None or not own.layers for own in adapters):
        return call.form.kind
    return (call.form.kind, frozenset(changed_weights(adapters)))


def _shape(value: object) -> Hashable:
    if isinstance(value, Tensor):
        return value.shape, value.dtype, value.device
    return (type(value),)


def _same(one: object, other: object, equal: Equality) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return equal(one, other)
    return same_constant(one, other)


def _unlike(value: Tensor, leaf: Argument) -> Tensor:
    """Return other numbers that are valid for the argument; masks are returned unchanged."""
    if value.dtype == torch.bool or "mask" in leaf.path:
        return value
    if value.is_floating_point():
        return value * 0.75 + 0.1
    # smaller indices are in any table; a step of zero becomes one
    return value // 2 + (value == 0) if leaf.step else value // 2


def _finite(results: object) -> bool:
    tensors = [v for v in pytree.tree_leaves(results) if isinstance(v, Tensor)]
    return all(bool(v.isfinite().all()) for v in tensors)
