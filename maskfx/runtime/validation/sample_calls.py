"""SampleCalls: runs a call as one call per sample, where no graph computes them together.

A module may list its samples, pad their texts, or cut the tokens of each out by their number. No
graph computes that for any number of samples, but one graph computes each sample alone, and a
ragged batch runs them together. Before calls of a kind are split, the module runs once on a call
and on its samples; if the results differ, calls of that kind stay whole. So do pictures whose
tokens form one sequence.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, MutableMapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.weak import WeakIdKeyDictionary

from maskfx.compiler.capture.arguments import roles as roles_
from maskfx.compiler.compile import Compilation
from maskfx.errors import CacheError
from maskfx.ir.geometry.grids import mask_shape
from maskfx.ir.listed import Join, count_listed, picture_sides
from maskfx.ir.objects import copy_tree
from maskfx.ir.values import has_meta, same_values
from maskfx.runtime.cache.rolling.rolling_cache import RollingCache
from maskfx.runtime.cache.rows import whole
from maskfx.runtime.cache.step_cache import SiteStats, StepCache
from maskfx.runtime.programs.program_cache import ProgramCache
from maskfx.runtime.sites.mask import MaskCache
from maskfx.runtime.steps import (
    AnyStep,
    EditStep,
    RecordStep,
    ValidatedCall,
    ValidatedInputs,
    late_exchange,
    with_late,
)
from maskfx.runtime.validation.packed_pictures import PackedPictures
from maskfx.runtime.validation.sample_arguments import (
    Inputs,
    SampleArguments,
    join_results,
)
from maskfx.runtime.validation.validate import check_mask

PACKED = Join(axis=1)  # tokens of one picture after another, without a batch
PICTURE = ("tokens", "frames", "y", "x")


class SampleCalls:
    """Splits the calls of one denoiser into calls of one sample, and joins their results.

    Args:
        module: The denoiser's module.
        programs: Finds or makes the compilation that serves a sample.
    """

    def __init__(self, module: nn.Module, programs: ProgramCache) -> None:
        self.module, self.programs = module, programs
        self._arguments = SampleArguments()
        self._joins: dict[Hashable, Join | str] = {}  # or why calls of a kind stay whole
        self._parts: MutableMapping[StepCache, list[StepCache]] = WeakIdKeyDictionary()
        self.packs = False  # whether pictures in one sequence ran one by one before

    def forget(self) -> None:
        """Drop what was found out; call it if the module now computes something else."""
        self._joins.clear()
        self.packs = False
        self._parts.clear()

    # Arguments.

    def split(
        self, inputs: Inputs, values: Sequence[object], compilation: Compilation
    ) -> tuple[tuple[ValidatedInputs, ...], Join]:
        """Return each sample's arguments and the join of their results; () if it runs as a whole.

        Args:
            inputs: The call's arguments.
            values: The same, flattened.
            compilation: What serves the whole call.
        """
        if self.programs.settings.mode == "dense":
            return (), Join()
        if compilation.program is None or compilation.reasons:
            found = self.packed(inputs)
            if found:
                self.programs.stays_whole(compilation, "")
                return found, PACKED
        if compilation.program is not None:
            return (), Join()
        if compilation.capture.treats_samples_alike:  # a graph of one has the same operators
            return (), Join()
        sizes = roles_.observed_sizes(compilation.capture.leaves, values)
        calls = self._arguments.split(inputs, compilation.capture.leaves, sizes["batch"])
        how = self._joined_by(inputs, calls, sizes)
        found = () if isinstance(how, str) else tuple(map(self.validated, calls))
        if any(one.program is None for one in found):
            how = "a sample alone runs dense, too"
        if isinstance(how, str):
            self.programs.stays_whole(compilation, how)
            return (), Join()
        self.programs.stays_whole(compilation, "")
        return found, how

    def packed(self, inputs: Inputs) -> tuple[ValidatedInputs, ...]:
        """Return the arguments of each picture whose tokens are packed; () if they run together."""
        pictures = PackedPictures(inputs)
        leaves, structure = pytree.tree_flatten(dict(inputs))
        if not pictures.counts or has_meta(self.module, leaves):
            return ()
        calls = pictures.calls(self._arguments.view)
        kind = "packed", structure, tuple(pictures.counts), shapes_of(inputs)
        if kind not in self._joins:
            self._joins[kind] = self._compared(inputs, calls, [PACKED])
        if self._joins[kind] != PACKED:
            return ()
        found = tuple(map(self.validated, calls))
        if any(one.program is None for one in found):
            self._joins[kind] = "a picture alone runs dense, too"
            return ()
        self.packs = True
        return found

    def validated(self, inputs: Inputs) -> ValidatedInputs:
        """Return the arguments of one sample, with what serves them."""
        _, values, spec = roles_.flatten(inputs)
        compilation = self.programs.serving(dict(inputs), values, spec, single=True)
        sizes = roles_.observed_sizes(compilation.capture.leaves, values)
        return ValidatedInputs(values, spec, sizes, compilation)

    def _joined_by(
        self, inputs: Inputs, calls: Sequence[Inputs], sizes: Mapping[str, int]
    ) -> Join | str:
        """Return how the results of samples are joined, or why they can't be computed one by one.

        Samples in lists come out in sequences; other calls may return them in one, or in batches.
        """
        listed = bool(count_listed(inputs))
        ways = [Join(list), Join(tuple)] if listed else [Join(), Join(list), Join(tuple)]
        if not calls or len(calls) == 1 and unchanged(calls[0], inputs):
            return ways[0]
        shapes = [shapes_of(call) for call in calls]
        kind = (
            pytree.tree_structure(dict(inputs)),
            *((role, size) for role, size in sorted(sizes.items()) if role[:5] != "text:"),
            len(set(shapes)) > 1,
            len(calls),
        )
        if kind not in self._joins:
            if has_meta(self.module, pytree.tree_leaves(dict(inputs))):
                return ways[0]
            self._joins[kind] = self._compared(inputs, calls, ways)
        return self._joins[kind]

    @torch.no_grad()
    def _compared(
        self, inputs: Inputs, calls: Sequence[Inputs], ways: Sequence[Join]
    ) -> Join | str:
        """Run the module on a call and on its samples; return how, or why not, they are joined."""
        try:
            whole, *parts = (self.module(**copy_tree(dict(call))) for call in (inputs, *calls))
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # a module may raise anything for a sample alone
            return f"a sample alone fails: {type(error).__name__}: {error}"
        joins = (how for how in ways if joins_to(parts, whole, how))
        return next(joins, "its samples have other results one by one")

    # Calls.

    def calls(self, call: ValidatedCall) -> list[ValidatedCall]:
        """Return the calls of one sample that a call consists of, or the call itself."""
        samples = call.inputs.samples
        if call.parts or not samples:
            return list(call.parts) or [call]
        steps: list[AnyStep] = [call.step] * len(samples)
        if isinstance(call.step, EditStep):
            caches = self._caches(call.step.cache, call.inputs)
            steps = [replace(call.step, cache=cache, rows=False) for cache in caches]
        return [
            replace(call, step=step, inputs=one)
            for step, one in zip(late_in_samples(steps), samples, strict=True)
        ]

    def joined(self, call: ValidatedCall, results: Sequence[object]) -> object:
        """Return the result of a call from those of its parts (`calls`)."""
        if not call.inputs.samples:
            return results[0]
        written = call.written
        if written is not None:
            written.step = {n: value.clone() for n, value in call.inputs.step_arguments()}
        if not isinstance(call.step, RecordStep):
            return join_results(results, call.inputs.join)
        outputs, caches = zip(*results, strict=True)
        join = recording_of_each if call.parts else joined_cache
        return join_results(outputs, call.inputs.join), join(call.inputs, caches)

    def _caches(self, cache: StepCache, inputs: ValidatedInputs) -> list[StepCache]:
        """Return the part of a recording that belongs to each sample."""
        known = self._parts.get(cache)
        if known is None:
            count, stacked = len(inputs.samples), inputs.stacks_results
            known = [part_of(cache, i, stacked) for i in range(count)]
            self._parts[cache] = known
        return known


def joins_to(parts: Sequence[object], whole: object, how: Join) -> bool:
    """Return True if the results of samples, joined in a way, are that of their call."""
    try:
        joined = join_results(parts, how)
    except (RuntimeError, ValueError, IndexError):  # other shapes, or lists of other lengths
        return False
    alike = pytree.tree_structure(whole) == pytree.tree_structure(joined)
    return alike and same_values(joined, whole)


def late_in_samples(steps: Sequence[AnyStep]) -> list[AnyStep]:
    """Return the steps of a call's samples, of which each reads its own rows of the step before."""
    late = late_exchange(steps[0])
    if late is None:
        return list(steps)
    runs = late.run.samples(len(steps))
    pairs = zip(steps, runs, strict=True)
    return [with_late(step, replace(late, run=run)) for step, run in pairs]


def steps_of_samples(step: AnyStep, inputs: ValidatedInputs, known: MaskCache) -> list[AnyStep]:
    """Return the steps of samples that have programs or picture sizes of their own.

    The mask of an edit, and those of its regions, are checked, and divided where sizes differ;
    `known` keeps the parts.
    """
    given = [dict(pytree.tree_unflatten(one.values, one.spec)) for one in inputs.samples]
    steps: list[AnyStep] = [replace(step, inputs=own) for own in given]
    if isinstance(step, EditStep):
        if len(step.cache.samples) != len(given):
            raise CacheError(
                f"EditStep.cache is that of {step.cache.sizes.get('batch', 1)} samples alike, the "
                f"inputs have {len(given)} whose pictures or programs differ; record them"
            )
        if step.cache.constants != inputs.constants:
            raise CacheError(
                f"EditStep.cache was recorded with {step.cache.constants}, the inputs say "
                f"{inputs.constants}; record it again"
            )
        masks = divided("mask", step.mask, inputs, known)
        plans, wides = (
            {
                region: divided(f"{name}[{region}]", sites, inputs, known)
                for region, sites in of.items()
            }
            for name, of in (("plan", step.plan), ("wide", step.wide))
        )
        steps = [
            replace(
                step,
                inputs=own,
                mask=masks[i],
                cache=step.cache.samples[i],
                plan={region: each[i] for region, each in plans.items()},
                wide={region: each[i] for region, each in wides.items()},
                rows=False,
                then=None,
            )
            for i, own in enumerate(given)
        ]
    return late_in_samples(steps)


def divided(name: str, sites: Tensor, inputs: ValidatedInputs, known: MaskCache) -> list[Tensor]:
    """Return a mask over the sites of each picture, given that of all of them."""
    if not inputs.pictures:
        return [sites] * len(inputs.samples)
    return known.parts(check_mask(sites, inputs.mask_shape, name), inputs.pictures)


def picture_sizes(one: Mapping[str, int], other: Mapping[str, int]) -> dict[str, int]:
    """Return the sizes of a call whose picture, or whose number of tokens, is that of a sample."""
    rest = {role: size for role, size in other.items() if role not in PICTURE}
    return {**rest, **{role: size for role, size in one.items() if role in PICTURE}}


def picture_shapes(
    inputs: Inputs, samples: Sequence[ValidatedInputs], join: Join
) -> tuple[tuple[int, ...], ...]:
    """Return the mask's shape for the picture of each sample, if these differ in size; else ().

    Pictures in one sequence of tokens have shapes of their own even if these are alike.
    """
    shapes = [mask_shape(one.sizes) for one in samples] or picture_sides(inputs)
    return tuple(shapes) if join == PACKED or len(set(shapes)) > 1 else ()


def unchanged(one: Inputs, other: Inputs) -> bool:
    """Return True if the arguments are the same objects."""
    pairs = zip(pytree.tree_leaves(dict(one)), pytree.tree_leaves(dict(other)), strict=True)
    return all(a is b for a, b in pairs)


def shapes_of(inputs: Inputs) -> tuple[object, ...]:
    leaves = pytree.tree_leaves(dict(inputs))
    return tuple(v.shape for v in leaves if isinstance(v, Tensor))


# Recordings. That of a call has the batch of its samples, in all of its values.


def joined_cache(inputs: ValidatedInputs, parts: Sequence[StepCache]) -> StepCache:
    """Return the recording of a call from those of its samples."""
    join = torch.stack if inputs.stacks_results else torch.cat
    columns = zip(*(part.output for part in parts), strict=True)
    output = [join(own) if isinstance(own[0], Tensor) else own[0] for own in columns]
    found = inputs.recording(output, parts[0].weights)
    join_rows(found, parts)
    return found


def recording_of_each(inputs: ValidatedInputs, parts: Sequence[StepCache]) -> StepCache:
    """Return the recording of a call as those of its samples."""
    return StepCache(
        "",
        dict(inputs.sizes),
        parts[0].dtype,
        [],
        {},
        parts[0].weights,
        inputs.constants,
        adapters=parts[0].adapters,
        samples=list(parts),
    )


def join_rows(found: StepCache, parts: Sequence[StepCache]) -> None:
    """Give a recording without rows those of its samples, and what edits need to know of them."""
    found.adapters = parts[0].adapters
    for tap in parts[0].rows:
        found.rows[tap] = torch.cat([whole(part.rows[tap]) for part in parts])
    for key, first in parts[0].stats.items():
        each = [part.stats[key] for part in parts]
        found.stats[key] = SiteStats(
            torch.cat([whole(stats.values) for stats in each]),
            torch.cat([stats.total for stats in each]),
            torch.cat([stats.centre for stats in each]),
            first.size,
        )


def part_of(cache: StepCache, index: int, stacked: bool) -> StepCache:
    """Return the part of a call's recording that belongs to one sample."""
    part = cache.element(index) if isinstance(cache, RollingCache) else cache.of_elements([index])
    if stacked:
        part.output = [v.squeeze(0) if isinstance(v, Tensor) else v for v in part.output]
    return part
