"""StepSamples: steps of several samples, such as the branches of guidance, as one of each sample.

Ranks compute samples without an exchange. Knows nothing of ranks.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.weak import WeakIdKeyDictionary

from maskfx.compiler.capture.arguments import roles as roles_
from maskfx.compiler.capture.arguments.infer_roles import infer
from maskfx.compiler.capture.arguments.roles import Argument
from maskfx.errors import MaskfxError
from maskfx.ir.listed import Join, count_listed
from maskfx.ir.lru import LruCache
from maskfx.ir.objects import holds_objects
from maskfx.ir.values import copy_of
from maskfx.runtime.cache.step_cache import StepCache, changed
from maskfx.runtime.denoiser import CompiledDenoiser
from maskfx.runtime.steps import AnyStep, DenseStep, EditStep, RecordStep, is_fixed, late_exchange
from maskfx.runtime.validation.sample_arguments import SampleArguments, join_results
from maskfx.runtime.validation.sample_calls import join_rows
from maskfx.runtime.validation.validate import expand_timesteps

KINDS = 256  # kept: shapes of calls of which it is known whether samples can be computed alone


class StepSamples:
    """Cuts steps of one denoiser into those of their samples.

    A dense step is cut if the module gives its samples the same results alone (it is run to find
    out, once for all calls of the same kind), an edit or a recording if its program serves the
    samples. Edits that replace the rows which they read stay whole, and so do steps whose exchanges
    may be late.
    """

    def __init__(self, denoiser: CompiledDenoiser) -> None:
        self._denoiser = denoiser
        self._apart: LruCache[Hashable, bool] = LruCache(KINDS)
        self._cut = SampleArguments()
        # the parts of recordings, which ranks know by number
        self._caches: MutableMapping[StepCache, list[StepCache]] = WeakIdKeyDictionary()

    def of(self, step: AnyStep) -> list[AnyStep]:
        """Return the steps of each sample, or the step itself."""
        if late_exchange(step) is not None:
            return [step]
        if isinstance(step, EditStep) and not (is_fixed(step) and cuttable(step)):
            return [step]
        calls = [] if has_one(step.inputs) else self._arguments(step.inputs)
        if len(calls) < 2:
            return [step]
        samples: list[AnyStep]
        if isinstance(step, DenseStep):
            samples = [replace(step, inputs=call) for call in calls]
            return samples if self._alike(samples) else [step]
        if isinstance(step, RecordStep):
            samples = [replace(step, inputs=call) for call in calls]
            return samples if self._served(step, samples) else [step]
        if step.cache.sizes.get("batch") != len(calls):
            return [step]
        caches, later = self._parts(step.cache, len(calls)), list[StepCache | None]()
        if step.then is not None and step.then.sizes.get("batch") == len(calls):
            later += self._parts(step.then, len(calls))
        samples = [
            replace(step, inputs=call, cache=cache, rows=False, then=then)
            for call, cache, then in zip(calls, caches, later or [None] * len(calls), strict=True)
        ]
        return samples if self._served(step, samples) else [step]

    def _arguments(self, inputs: Mapping[str, object]) -> list[dict[str, object]]:
        """Return the arguments of each sample; [] if they aren't known."""
        try:
            given = expand_timesteps(inputs, self._denoiser.module)
            if count_listed(given):
                return []
            _, values, spec = roles_.flatten(given)
            if holds_objects(spec):  # the module may write into them
                return []
            leaves = infer(self._denoiser.module, given, self._denoiser.roles)
            batch = roles_.observed_sizes(leaves, values)["batch"]
        except MaskfxError:  # the step itself is refused, with the reason
            return []
        axes = [roles_.batch_axis(leaf.roles) for leaf in leaves]
        return [
            pytree.tree_unflatten(
                [
                    value if axis is None else self._part(value, axis, number, batch, leaf)
                    for value, axis, leaf in zip(values, axes, leaves, strict=True)
                ],
                spec,
            )
            for number in range(batch)
        ]

    def _part(self, value: Tensor, axis: int, number: int, batch: int, leaf: Argument) -> Tensor:
        """Return a sample's part of an argument."""
        each = value.shape[axis] // batch
        return self._cut.view(value, ((axis, number * each, each),), keep=not leaf.step)

    def _alike(self, samples: Sequence[AnyStep]) -> bool:
        """Return True if the module computes these calls alone as it does together."""
        groups = self._denoiser.alike(
            [sample.inputs for sample in samples], [sample.adapters for sample in samples]
        )
        return len(groups) == 1

    def _served(self, step: EditStep | RecordStep, samples: Sequence[AnyStep]) -> bool:
        """Return True if the program of an edit or a recording serves each of its samples."""
        values, spec = pytree.tree_flatten(dict(step.inputs))
        program = step.cache.program if isinstance(step, EditStep) else ""
        kind = (spec, program, *map(shape_of, values))
        return self._apart.find(kind, lambda: self._same_program([step, *samples]))

    def _same_program(self, steps: Sequence[AnyStep]) -> bool:
        self._denoiser.compile_for(steps)
        with self._denoiser.locked():
            groups = list(self._denoiser.groups(steps))
        if len(groups) != 1 or len(groups[0][1]) < len(steps):
            return False
        whole, *parts = (member.batch for member in groups[0][2])
        return parts == [1] * whole

    def _parts(self, cache: StepCache, count: int) -> list[StepCache]:
        found = self._caches.get(cache)
        if found is None:
            found = self._caches[cache] = [cache.of_elements([n]) for n in range(count)]
        return found


def cuttable(step: EditStep) -> bool:
    """Return True if the parts of an edit's recording can be those of its samples."""
    return type(step.cache) is StepCache and step.choice is None and bool(step.mask.any())


def has_one(inputs: object) -> bool:
    """Return True if it is plain that a call has one sample: the first axes have one item."""
    values = inputs.values() if isinstance(inputs, Mapping) else ()
    found = [value.shape[0] for value in values if isinstance(value, Tensor) and value.dim() > 2]
    return bool(found) and max(found) == 1


def shape_of(value: object) -> Hashable:
    return (tuple(value.shape), value.dtype) if isinstance(value, Tensor) else (type(value),)


def join_samples(
    steps: Sequence[AnyStep], counts: Sequence[int], results: Sequence[Any], module: nn.Module
) -> Iterator[object]:
    """Yield the result of each step from those of its samples.

    Args:
        steps: The steps.
        counts: The number of samples of each.
        results: Those of all samples, in order.
        module: The denoiser's module.
    """
    at = 0
    for step, count in zip(steps, counts, strict=True):
        own = results[at : at + count]
        at += count
        if count == 1:
            yield own[0]
        elif isinstance(step, RecordStep):
            outputs, caches = zip(*own, strict=True)
            yield join_results(outputs, Join()), joined_recording(step, caches, module)
        else:
            yield join_results(own, Join())


def joined_recording(step: RecordStep, parts: Sequence[StepCache], module: nn.Module) -> StepCache:
    """Return the recording of a step from those of its samples."""
    first = parts[0]
    columns = zip(*(part.output for part in parts), strict=True)
    given: list[object] = []
    if first.given:  # as they are, since some have no batch
        inputs = expand_timesteps(step.inputs, module)
        given = [copy_of(value) for value in roles_.flatten(inputs)[1]]
    found = changed(
        first,
        sizes={**first.sizes, "batch": len(parts)},
        output=[torch.cat(own) if isinstance(own[0], Tensor) else own[0] for own in columns],
        step={
            name: torch.cat([part.step[name] for part in parts]) if value.dim() else value
            for name, value in first.step.items()
        },
        rows={},
        stats={},
        given=given,
    )
    join_rows(found, parts)
    return found
