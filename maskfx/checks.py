"""Do the arguments, the mask, the cache and the plan of a step fit? If not, say what to do."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from maskfx.capture import Capture
from maskfx.errors import CacheError, InputError, MaskError, MissingRequest
from maskfx.runtime.cache import StepCache
from maskfx.steps import Call, EditStep, constants_of, dtype_of, steps_of


def check_edit(step: EditStep, call: Call, weights: str) -> Tensor:
    """The mask of an edit that fits its inputs; `weights` is the fingerprint of those now."""
    cache, sizes = step.cache, call.sizes
    if not isinstance(cache, StepCache):
        raise CacheError(
            f"EditStep.cache: expected a StepCache from record(), got {type(cache).__name__}"
        )
    wanted = (sizes["y"], sizes["x"]) if "y" in sizes else (sizes.get("tokens", 0),)
    mask = step.mask
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        seen = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
        raise MaskError(
            f"EditStep.mask: expected a boolean tensor of shape {wanted}, got {seen}; "
            "use mask > 0.5"
        )
    if tuple(mask.shape) != wanted:
        raise MaskError(
            f"EditStep.mask: expected shape {wanted}, got {tuple(mask.shape)}; "
            "resize it to the latent (by max-pooling, so that thin strokes survive)"
        )
    if cache.masks is not None and not cache.masks.allow(mask.cpu()):
        raise MaskError(
            f"EditStep.mask: {int(mask.sum())} sites that don't lie within what EditStep.cache was "
            f"kept for (Masks: inside of {int(cache.masks.ever.sum())} sites, covering "
            f"{int(cache.masks.always.sum())}); record a template with other Masks"
        )
    program = call.compilation.program
    if cache.dtype != dtype_of(call):
        raise CacheError(
            f"EditStep.cache holds {cache.dtype}, the inputs are {dtype_of(call)}; record it again"
        )
    if cache.weights != weights:
        raise CacheError(
            "EditStep.cache was recorded with other weights (another model, or before a "
            "change of weights); record it again"
        )
    if cache.constants != constants_of(call.compilation.capture, call.values):
        raise CacheError(
            f"EditStep.cache was recorded with {cache.constants}, the inputs say "
            f"{constants_of(call.compilation.capture, call.values)}; record it again"
        )
    if cache.program != (program.code if program else dense_code(call)):
        raise CacheError(
            "EditStep.cache was recorded by another model, or with other argument structure; "
            "record it again"
        )
    for role, size in cache.sizes.items():
        if not role.startswith("text:") and sizes.get(role) != size:
            raise CacheError(
                f"EditStep.cache was recorded at {role}={size}, the inputs have "
                f"{sizes.get(role)}; "
                "record one for this size"
            )
    if not step.any_step:
        for name, now in steps_of(call).items():
            recorded = cache.step.get(name)
            if recorded is not None and not torch.equal(recorded, now):
                raise CacheError(
                    f"EditStep.cache was recorded at {name}={recorded.tolist()}, "
                    "the inputs have "
                    f"{now.tolist()}; use this step's cache, or say any_step=True"
                )
    return mask.detach().cpu().clone()


def check_plan(step: EditStep, call: Call) -> dict[int, Tensor]:
    """The sites that each region computes: the plan's, or what the cache has the rows for."""
    program = call.compilation.program
    count = len(program.interface.regions) if program else 0
    plan = {}
    for region, sites in step.plan.items():
        if not 1 <= region <= count:
            known = f"there are regions 1 to {count}" if count else "this denoiser has none"
            raise InputError(
                f"EditStep.plan: region {region}, but {known}; compile with plans=True, and see "
                "CompiledDenoiser.regions"
            )
        if not isinstance(sites, Tensor) or sites.dtype != torch.bool:
            raise MaskError(f"EditStep.plan[{region}]: expected a boolean mask, got {sites!r:.60}")
        if sites.shape != step.mask.shape or bool((step.mask & ~sites).any()):
            raise MaskError(
                f"EditStep.plan[{region}]: expected a mask of shape {tuple(step.mask.shape)} that "
                f"covers EditStep.mask, got shape {tuple(sites.shape)}"
            )
        plan[region] = sites.detach().cpu().clone()
    whole = torch.ones(step.mask.shape, dtype=torch.bool)
    for region in range(1, count + 1):
        assert program is not None
        keys, inputs = program.interface.region_taps(region)
        has_keys = keys <= step.cache.rows.keys()
        if inputs <= step.cache.rows.keys():
            if not has_keys:  # every plan gives the same picture
                plan[region] = whole
        elif has_keys:
            plan.pop(region, None)
        else:
            raise CacheError(
                f"EditStep.cache keeps neither keys and values nor inputs of region {region} "
                f"({program.interface.regions[region - 1].place}); keep one of them, or record "
                "it again"
            )
    return plan


def dense_code(call: Call) -> str:
    """What recordings of a module without a program are known by."""
    return f"dense {call.spec}"


def signature_of(module: nn.Module) -> inspect.Signature | None:
    try:
        return inspect.signature(module.forward)
    except (TypeError, ValueError):
        return None


def check_arguments(
    module: nn.Module, signature: inspect.Signature | None, inputs: Mapping[str, Any]
) -> None:
    """Do the inputs fit the module's signature?"""
    if signature is None:
        return
    try:
        signature.bind(**inputs)
    except TypeError as error:
        raise MissingRequest(
            f"{type(module).__name__}: {error}; it got {sorted(inputs)}; pass the arguments that "
            "the pipeline passes"
        ) from error


def same_ranks(capture_: Capture, values: Sequence[Any]) -> bool:
    return all(
        isinstance(v, Tensor) == leaf.tensor and (not leaf.tensor or v.dim() == len(leaf.roles))
        for v, leaf in zip(values, capture_.leaves, strict=True)
    )
