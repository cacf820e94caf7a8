"""Checks the arguments, mask, cache and plan of a step; error messages end with what to do."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from maskfx.compiler.capture.arguments.roles import STEP_WORDS
from maskfx.errors import CacheError, InputError, MaskError, MissingRequest
from maskfx.ir.programs.program import KEYS, STRETCH, Interface
from maskfx.ir.programs.sources import Loaded
from maskfx.runtime.cache.rolling.rolling_cache import RollingCache
from maskfx.runtime.cache.step_cache import StepCache
from maskfx.runtime.sites.mask import Mask
from maskfx.runtime.steps import EditStep, ValidatedCall, ValidatedInputs


@dataclass(frozen=True)
class RegionChoices:
    """The masks that an edit's `plan` and `wide` give to regions, by their numbers."""

    plan: tuple[tuple[int, Mask], ...]
    wide: tuple[tuple[int, Mask], ...]


def check_mask(mask: object, wanted: tuple[int, ...], name: str = "mask") -> Tensor:
    """Check that an edit's mask is boolean and of the wanted shape; return it.

    The mask of a video may have no frames; it is the same in each then.
    """
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        seen = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
        raise MaskError(
            f"EditStep.{name}: expected a boolean tensor of shape {wanted}, got {seen}; "
            "use mask > 0.5"
        )
    if len(wanted) == 3 and tuple(mask.shape) == wanted[1:]:
        return mask.expand(wanted)
    if tuple(mask.shape) != wanted:
        flat = f" or {wanted[1:]}, the same in all frames" if len(wanted) == 3 else ""
        raise MaskError(
            f"EditStep.{name}: expected shape {wanted}{flat}, got {tuple(mask.shape)}; "
            "resize it to the latent (by max-pooling, so that thin strokes survive)"
        )
    return mask


def check_recording(cache: object) -> StepCache:
    if not isinstance(cache, StepCache):
        raise CacheError(
            f"EditStep.cache: expected a StepCache from record(), got {type(cache).__name__}"
        )
    return cache


def check_caches(calls: Sequence[ValidatedCall]) -> None:
    """Check that the caches of edits have their adapters, and may be written where they are."""
    own = [part for call in calls for part in call.parts or (call,)]
    check_adapters(own)
    check_written(own)


def check_choice(step: EditStep) -> None:
    """Check that the stretches of an edit can be chosen while it runs."""
    if step.choice is None:
        return
    cache = step.cache
    if not isinstance(cache, RollingCache) or not step.record or not cache.compares_inputs:
        raise InputError(
            "EditStep.choice: the cache doesn't keep what stretches read; give record=True and a "
            "cache of RollingPool.start(patches=..., since_read=True)"
        )
    if step.wide:
        raise InputError(
            f"EditStep.choice chooses all stretches, but {list(step.wide)} have sites in "
            "EditStep.wide; leave out one of the two"
        )
    if len(cache.in_full):
        raise InputError(
            f"EditStep.choice chooses all stretches, but the first {len(cache.in_full)} compute "
            "all sites, because the cache has no rows of them; give it more bytes"
        )


def check_written(calls: Sequence[ValidatedCall]) -> None:
    """Check that the steps that replace the rows of their cache have one each that allows it."""
    seen: set[int] = set()
    for call in calls:
        step = call.step
        if not isinstance(step, EditStep) or not isinstance(step.cache, RollingCache):
            if isinstance(step, EditStep) and step.record:
                raise CacheError(
                    "EditStep.record: EditStep.cache is a recording, which doesn't change; give "
                    "the step a RollingCache (RollingPool.start)"
                )
            continue
        if step.cache.closed:
            raise CacheError("EditStep.cache: this RollingCache was closed; start another")
        if step.record and id(step.cache) in seen:
            raise CacheError(
                "EditStep.cache: two members of a step write one RollingCache; start one for each"
            )
        seen |= {id(step.cache)} if step.record else set()


def check_adapters(calls: Sequence[ValidatedCall]) -> None:
    """Check that edits have the adapters that their recordings were made with.

    An edit may have more: then what it reads has fewer, as the caller chose.
    """
    for call in calls:
        if not isinstance(call.step, EditStep) or not call.step.cache.adapters:
            continue
        own = () if call.adapters is None else call.adapters.digests
        missing = [one for one in call.step.cache.adapters if one not in own]
        if missing:
            raise CacheError(
                f"EditStep.cache was recorded with adapters (digest, weight) {missing}, which this "
                f"edit hasn't: it has {list(own)}; give it the same, or record it again without"
            )


def check_cache(cache: StepCache, inputs: ValidatedInputs, mask: Mask, weights: str) -> None:
    """Check that a recording serves edits of these inputs with this mask.

    Args:
        cache: The recording.
        inputs: The inputs of the edit.
        mask: The mask of the edit.
        weights: The fingerprint of the current weights.
    """
    if cache.masks is not None and not cache.masks.allow(mask.sites):
        raise MaskError(
            f"EditStep.mask: {mask.count} sites that don't lie within what EditStep.cache "
            f"was kept for (Masks: inside of {int(cache.masks.ever.sum())} sites, covering "
            f"{int(cache.masks.always.sum())}); record a template with other Masks"
        )
    if cache.dtype != inputs.latent.dtype:
        raise CacheError(
            f"EditStep.cache holds {cache.dtype}, the inputs are {inputs.latent.dtype}; "
            "record it again"
        )
    if cache.weights != weights:
        raise CacheError(
            "EditStep.cache was recorded with other weights (another model, or before a "
            "change of weights); record it again"
        )
    if cache.constants != inputs.constants:
        raise CacheError(
            f"EditStep.cache was recorded with {cache.constants}, the inputs say "
            f"{inputs.constants}; record it again"
        )
    if cache.program != inputs.program_code:
        raise CacheError(
            "EditStep.cache was recorded by another model, with other argument structure, or with "
            "other values of a mask that sizes depend on; record it again"
        )
    for role, size in cache.sizes.items():
        if not role.startswith("text:") and inputs.sizes.get(role) != size:
            raise CacheError(
                f"EditStep.cache was recorded at {role}={size}, the inputs have "
                f"{inputs.sizes.get(role)}; "
                "record one for this size"
            )


def check_timesteps(calls: Sequence[ValidatedCall]) -> None:
    """Check that the caches of edits were recorded at the steps of their inputs.

    Reads the numbers of all members from a device in one copy, because each copy blocks the host.
    """
    pairs = [
        (name, call.step.cache.step[name], now)
        for each in calls
        for call in each.parts or (each,)
        if isinstance(call.step, EditStep)
        and not (call.step.any_step or isinstance(call.step.cache, RollingCache))
        for name, now in call.inputs.step_arguments()
        if name in call.step.cache.step
    ]
    found = numbers_of([value for _, *both in pairs for value in both])
    for (name, *_), recorded, now in zip(pairs, found[::2], found[1::2], strict=True):
        if recorded != now:
            raise CacheError(
                f"EditStep.cache was recorded at {name}={recorded}, the inputs have {now}; use "
                "this step's cache, or say any_step=True"
            )


def numbers_of(values: Sequence[Tensor]) -> list[list[float]]:
    """Return the numbers in small tensors, with one copy per device and dtype."""
    groups: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for number, value in enumerate(values):
        groups.setdefault((value.device, value.dtype), []).append(number)
    out: list[list[float]] = [[] for _ in values]
    for group in groups.values():
        numbers = torch.cat([values[i].reshape(-1) for i in group]).tolist()
        for i in group:
            count = values[i].numel()
            out[i], numbers = numbers[:count], numbers[count:]
    return out


def check_regions(
    choices: RegionChoices, mask: Mask, cache: StepCache, interface: Interface
) -> dict[int, Mask]:
    """Check an edit's plan and `wide`; return the mask of each region they apply to.

    A region is a part of the graph that may have other sites than the mask's.
    """
    wide = check_wide(choices, mask, cache, interface)
    return {**wide, **check_plan(choices, mask, cache, interface, wide)}


def check_wide(
    choices: RegionChoices, mask: Mask, cache: StepCache, interface: Interface
) -> dict[int, Mask]:
    """Return the masks of the stretches in `wide`; check that the rows they start from are cached.

    A stretch is a sequence of consecutive blocks.
    """
    known, keys = interface.regions_of(STRETCH), interface.regions_of(KEYS)
    for region, chosen in choices.wide:
        check_region("wide", region, known)
        if chosen.shape != mask.shape:
            raise MaskError(
                f"EditStep.wide[{region}]: expected a mask of shape {mask.shape}, got shape "
                f"{chosen.shape}"
            )
        if cache.masks is not None and bool((cache.masks.always & ~chosen.sites).any()):
            raise MaskError(
                f"EditStep.wide[{region}]: EditStep.cache keeps nothing of the "
                f"{int(cache.masks.always.sum())} sites in Masks.always, and this stretch leaves "
                "some of them out; add them, or record a template with other Masks"
            )
    wide = dict(choices.wide)
    if isinstance(cache, RollingCache):
        wide |= dict.fromkeys(cache.in_full, mask.everywhere)
    for source in interface.inputs.values() if wide else ():
        if not isinstance(source, Loaded) or source.tap in cache.rows:
            continue
        before, after = map(interface.pyramid.region_in, (source.before, source.after))
        if after not in keys and not wide.get(before, mask).covers(wide.get(after, mask)):
            reader = (
                f"EditStep.wide[{after}]: EditStep.cache doesn't keep what this stretch (up to "
                f"{interface.regions[after - 1].place}) begins with"
                if after
                else "EditStep.mask: EditStep.cache doesn't keep what the output is computed from"
            )
            raise CacheError(
                f"{reader}; give the stretches before it all of its sites, or record the step "
                "again and keep all of it"
            )
    return wide


def check_plan(
    choices: RegionChoices,
    mask: Mask,
    cache: StepCache,
    interface: Interface,
    wide: Mapping[int, Mask],
) -> dict[int, Mask]:
    """Return the mask of each region of keys and values, as planned or as the cache allows."""
    known = interface.regions_of(KEYS)
    for region, chosen in choices.plan:
        check_region("plan", region, known)
        if chosen.shape != mask.shape or not chosen.covers(mask):
            raise MaskError(
                f"EditStep.plan[{region}]: expected a mask of shape {mask.shape} that covers "
                f"EditStep.mask, got shape {chosen.shape}"
            )
    plan = dict(choices.plan)
    for region in known:
        kind = interface.regions[region - 1]
        around = wide.get(kind.inside, mask)
        keys, inputs = interface.region_taps(region)
        has_keys = keys <= cache.rows.keys()
        if inputs <= cache.rows.keys():
            if not has_keys:  # plans don't change the picture
                plan[region] = mask.everywhere
        elif has_keys or around.is_full:  # if all sites are computed, nothing is loaded
            plan.pop(region, None)
        else:
            raise CacheError(
                f"EditStep.cache keeps neither keys and values nor inputs of region {region} "
                f"({kind.place}); keep one of them, or record it again"
            )
        if kind.inside in wide:
            plan[region] = plan.get(region, around) | around
    return plan


def check_region(name: str, region: int, known: Sequence[int]) -> None:
    """Check that a region exists."""
    if region not in known:
        noun, nouns = ("region", "regions") if name == "plan" else ("stretch", "stretches")
        there = (
            f"there are {nouns} {known[0]} to {known[-1]}" if known else "this denoiser has none"
        )
        raise InputError(
            f"EditStep.{name}: {noun} {region}, but {there}; compile with "
            f"{'plans' if name == 'plan' else nouns}=True, and see CompiledDenoiser.{nouns}"
        )


def check_boolean(name: str, sites: object) -> Tensor:
    """Check that the sites of a region are a boolean tensor; return it."""
    if not isinstance(sites, Tensor) or sites.dtype != torch.bool:
        raise MaskError(
            f"EditStep.{name}: expected a boolean mask, got {sites!r:.60}; convert it, such as "
            "mask > 0.5"
        )
    return sites


def signature_of(module: nn.Module) -> inspect.Signature | None:
    try:
        return inspect.signature(module.forward)
    except (TypeError, ValueError):
        return None


def is_declared_number(signature: inspect.Signature | None, name: str) -> bool:
    """Return True if a parameter is annotated as a number, or has one as its default."""
    parameter = None if signature is None else signature.parameters.get(name)
    if parameter is None:
        return False
    if parameter.annotation is not inspect.Parameter.empty:
        noted = parameter.annotation
        named = noted if isinstance(noted, str) else getattr(noted, "__name__", "")
        return named in ("int", "float")
    return isinstance(parameter.default, int | float)


def check_arguments(
    module: nn.Module, signature: inspect.Signature | None, inputs: Mapping[str, object]
) -> None:
    """Check that the inputs fit the module's signature."""
    if signature is None:
        return
    try:
        signature.bind(**inputs)
    except TypeError as error:
        raise MissingRequest(
            f"{type(module).__name__}: {error}; it got {sorted(inputs)}; pass the arguments that "
            "the pipeline passes"
        ) from error


def expand_timesteps(inputs: Mapping[str, Any], module: nn.Module) -> dict[str, object]:
    """Expand timesteps to one number per request: requests at different steps share a graph.

    A number that the module declares as one stays as it is.
    """
    if not isinstance(inputs, Mapping):
        raise InputError(f"inputs must be a mapping of argument names, got {type(inputs).__name__}")
    known = next((v for v in inputs.values() if isinstance(v, Tensor) and v.dim() >= 3), None)
    if known is None:
        return dict(inputs)
    batch = known.shape[0]
    out = dict(inputs)
    for name, value in inputs.items():
        if not any(w in f"_{name}_" for w in STEP_WORDS) or isinstance(value, bool):
            continue
        if isinstance(value, (int, float)) and "timestep" in name:
            if is_declared_number(signature_of(module), name):
                continue
            dtype = torch.float32 if isinstance(value, float) else torch.long
            out[name] = torch.full((batch,), value, dtype=dtype, device=known.device)
            continue
        single = isinstance(value, Tensor) and value.numel() == 1 and value.dim() <= 1
        if single and value.shape != (batch,):
            out[name] = value.reshape(1).expand(batch).contiguous()
    return out
