"""Checks an edit's mask, recording and regions; messages end with what to do."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from maskfx.errors import CacheError, InputError, MaskError
from maskfx.export.host.arguments import Arguments
from maskfx.export.host.arrays import Bools
from maskfx.export.host.layout import HostLayout
from maskfx.export.host.recording import Recording
from maskfx.ir.json_values import Document

KEYS, STRETCH = "keys", "stretch"  # kinds of regions


def check_mask(name: str, mask: object, wanted: tuple[int, ...]) -> None:
    if not isinstance(mask, np.ndarray) or mask.dtype != bool or mask.shape != wanted:
        seen = f"{mask.dtype} {mask.shape}" if isinstance(mask, np.ndarray) else type(mask).__name__
        raise MaskError(
            f"{name}: expected booleans of shape {wanted}, got {seen}; resize the mask to the "
            "latent by max-pooling, so that thin strokes survive"
        )


def check_edit(
    manifest: Document,
    arguments: Arguments,
    mask: Bools,
    recording: Recording,
    any_step: bool,
) -> None:
    """Check that a recording serves an edit of these arguments with this mask."""
    check_mask("Edit.mask", mask, arguments.mask_shape)
    if recording.code != manifest["code"]:
        raise CacheError(
            "Edit.recording was recorded by another program than the exported one; record it with "
            "this export, or with the denoiser that was exported"
        )
    if recording.weights != manifest["weights"]:
        raise CacheError("Edit.recording was recorded with other weights; record it again")
    if recording.constants != arguments.constants:
        raise CacheError(
            f"Edit.recording was recorded with {recording.constants}, the arguments are "
            f"{arguments.constants}; record it again"
        )
    for role, size in recording.sizes.items():
        if not role.startswith("text:") and arguments.sizes.get(role) != size:
            raise CacheError(
                f"Edit.recording was recorded at {role}={size}, the arguments have "
                f"{arguments.sizes.get(role)}; record one for this size"
            )
    if recording.masks is not None and not allowed(mask, *recording.masks):
        raise MaskError(
            f"Edit.mask: {int(mask.sum())} sites that don't lie within what the recording was kept "
            "for (Masks); record a template with other Masks"
        )
    for name, now in arguments.step.items():
        recorded = recording.step.get(name)
        if not any_step and recorded is not None and not np.array_equal(recorded, now):
            raise CacheError(
                f"Edit.recording was recorded at {name}={recorded.tolist()}, the arguments have "
                f"{now.tolist()}; use this step's recording, or say any_step=True"
            )


def allowed(mask: Bools, ever: Bools, always: Bools) -> bool:
    """Return True if an edit may have this mask; an empty and a full one read nothing."""
    inside = not (mask & ~ever).any() and not (always & ~mask).any()
    return bool(inside or not mask.any() or mask.all())


def check_regions(
    manifest: Document,
    layout: HostLayout,
    mask: Bools,
    chosen: Mapping[int, Bools],
    recording: Recording,
) -> dict[int, Bools]:
    """Return the active sites of the regions that have others than the mask's.

    A region of keys and values that the recording keeps the inputs of alone computes all sites. One
    inside of a stretch computes that stretch's sites at least.
    """
    known = dict(enumerate(manifest["regions"], 1))
    for number, sites in chosen.items():
        if number not in known:
            raise InputError(
                f"Edit.regions: there is no region {number}, only {list(known)}; use one of these, "
                "or leave it out"
            )
        check_mask(f"Edit.regions[{number}]", sites, mask.shape)
    regions = dict(chosen)
    for number, region in known.items():
        if region["kind"] != KEYS:
            continue
        around = regions.get(region["inside"], mask)
        keys, inputs = read_taps(manifest, layout, number)
        if number in regions:
            regions[number] = regions[number] | around
        elif region["inside"] in regions:
            regions[number] = around
        if inputs <= recording.rows.keys():
            if not keys <= recording.rows.keys():
                regions[number] = np.ones_like(mask)
        elif number in chosen and keys <= recording.rows.keys():
            regions[number] = around
        elif not keys <= recording.rows.keys() and not around.all():
            raise CacheError(
                f"Edit.recording keeps neither keys and values nor inputs of region {number} "
                f"({region['place']}); keep one of them, or record it again"
            )
    return regions


def read_taps(manifest: Document, layout: HostLayout, region: int) -> tuple[set[str], set[str]]:
    """Return the taps that a region loads to project no keys, and those to project all keys."""
    keys: set[str] = set()
    inputs: set[str] = set()
    for value in manifest["graphs"]["edit"]["inputs"]:
        source = value["source"]
        if source["kind"] == "rest" and region in regions_of(layout, source["segments"]):
            keys.add(source["tap"])
        elif source["kind"] == "loaded" and region in regions_of(layout, source["after"]):
            inputs.add(source["tap"])
    return keys, inputs


def regions_of(layout: HostLayout, segments: list[str]) -> set[int]:
    """Return the regions whose sites these segments hold."""
    found = [layout.segments[name] for name in segments if layout.segments[name].is_image]
    return {s.region if s.kind == "tokens" else layout.levels[s.level].region for s in found}
