"""Computes a request's `Work` for the scheduler, from its mask, its size and the model's card."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from maskfx.ir.geometry.level_shares import work_of as mask_work
from maskfx.runtime.reuse.step_selection import WHOLE, StepSelection
from maskfx.runtime.step_kinds import StepKind
from maskfx.scheduling.load import Work
from maskfx.serve.messages import Ready
from maskfx.serve.request import Card, Mask, Pictures, Pixels, Request, RequestKind

Size = tuple[int, int]  # width, height


def card_of(ready: Ready, name: str) -> Card:
    """Return the card of a worker's model, under the name that clients use."""
    return Card(
        name=name,
        family=ready.family,
        size=ready.size,
        multiple=ready.multiple,
        steps=ready.steps,
        guidance=ready.guidance,
        takes=frozenset(ready.takes),
        generates=ready.generates,
        site=ready.site,
        controls=ready.controls,
        nets=tuple(ready.nets),
        ip_adapters=tuple(ready.ip_adapters),
        margin=ready.margin,
        every=ready.every,
        least=ready.least,
        whole=ready.whole,
        strength=ready.strength,
        patches=ready.patches,
        levels=ready.levels,
    )


def size_of(asked: Size | None, images: Sequence[Pixels], card: Card) -> Size:
    """Return the width and height of the result image, before the model rounds them."""
    if asked is not None:
        return asked
    if images:
        height, width, _ = images[0].shape
        return width, height
    return card.size


def steps_of(steps: int | None, strength: float | None, card: Card) -> int:
    """Return the number of steps of a run; a strength below 1 skips the first ones."""
    whole = card.steps if steps is None else steps
    return max(1, whole if strength is None else min(whole, int(whole * strength)))


def active_share(mask: Mask | None, site: int, margin: int = 0) -> float:
    """Return the share of sites that contain a masked pixel or lie within the margin around one."""
    if mask is None:
        return 1.0
    sites = active_sites(mask, site, margin)
    return float(np.count_nonzero(sites)) / sites.size


def active_sites(mask: Mask, site: int, margin: int = 0) -> Mask:
    """Return the sites that contain a masked pixel or lie within the margin around one."""
    height, width = mask.shape
    if height % site or width % site:
        mask = np.pad(mask, ((0, -height % site), (0, -width % site)))
        height, width = mask.shape
    rows = mask.reshape(height // site, site, width).any(axis=1)  # contiguous rows first: faster
    sites = np.asarray(rows.reshape(height // site, width // site, site).any(axis=2))
    return spread(spread(sites, margin).T, margin).T


def spread(sites: Mask, margin: int) -> Mask:
    """Grow a mask by `margin` rows up and down."""
    grown = sites.copy()
    for shift in range(1, min(margin, len(sites) - 1) + 1):
        grown[shift:] |= sites[:-shift]
        grown[:-shift] |= sites[shift:]
    return grown


def work_of(request: Request, pictures: Pictures, card: Card, template_bytes: int = 0) -> Work:
    """Return the sites, steps and branches of a request.

    `template_bytes` is the size of its template's recording. Only computed steps count: of an edit
    with a partial mask and of a recording those of the server's quality, of whole pictures those
    of the request's.
    """
    width, height = size_of(request.size, pictures.images, card)
    whole = -(-width // card.site) * -(-height // card.site)
    recording = request.kind is RequestKind.RECORD
    mask = None if recording else pictures.mask
    active = None if mask is None else active_sites(mask, card.site, card.margin)
    share = 1.0 if active is None else float(np.count_nonzero(active)) / active.size
    strength = card.strength if request.strength is None and pictures.images else request.strength
    steps = steps_of(request.steps, strength, card)
    masked = mask is not None and not mask.all()
    edited = StepSelection(card.every, least=card.least).left(0, steps)
    computed = edited if masked or recording else steps_computed(request, steps, card)
    guidance = card.guidance if request.guidance is None else request.guidance
    guided = guidance is not None and guidance > 1 and "negative_prompt" in card.takes
    return Work(
        sites=max(1, round(share * whole)),
        whole=whole,
        steps=computed,
        branches=2 if guided else 1,
        template=request.template,
        bytes=template_bytes // edited,
        total=steps,
        kind=kind_of(request, masked, card),
        **weights_of(active, whole, card) if masked and active is not None else {},
    )


def steps_computed(request: Request, steps: int, card: Card) -> int:
    """Return the number of steps of a whole picture that are computed."""
    name = request.quality if request.quality not in (None, "auto") else card.whole
    return WHOLE[name or card.whole].left(0, steps)


def weights_of(active: Mask, whole: int, card: Card) -> dict[str, float]:
    """Return the figures of `Work` that depend on the levels of the model; none if it has one."""
    if not card.levels:
        return {}
    sites, pairs = mask_work(card.levels, active)
    scale = whole / active.size  # of the result, whose size may differ from the mask's
    return {"weighted": sites * scale, "pairs": pairs * scale**2}


def kind_of(request: Request, masked: bool, card: Card) -> StepKind:
    """Return what most steps of a request compute."""
    if request.kind is RequestKind.RECORD:
        return StepKind.RECORD
    if request.reuse != "off" and (card.patches or request.reuse is not None):
        return StepKind.REUSE
    return StepKind.EDIT if masked else StepKind.DENSE
