"""LatentBlend: sets a run's latents outside the mask to those of its template."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from maskfx.errors import InputError
from maskfx.pipelines.masks.mask_grids import MaskGrids
from maskfx.pipelines.templates.template_library import TemplateSource
from maskfx.runtime.hardware.devices import moved


@dataclass(frozen=True)
class LatentBlend:
    """Sets latents outside the mask to a template's.

    The background is then the one that was recorded, whatever the noise of the run.

    Args:
        grids: The mask over the run's latents.
        source: The template.
        passed: Whether the caller passed the template, for any images that the call makes.
        in_rows: Whether the pipeline lays out several images as a row (a b a b), not one by one.
    """

    grids: MaskGrids
    source: TemplateSource
    passed: bool = False
    in_rows: bool = False

    def apply(self, own: Tensor, recorded: Tensor | None) -> Tensor:
        """Return `own` where masked, and the template's `recorded` latents elsewhere."""
        if recorded is None or recorded.dim() != own.dim() or recorded.shape[1:] != own.shape[1:]:
            return own
        sites = self.grids.of_latents(own)
        if sites is None:
            return own
        self._check_pictures(len(own), len(recorded))
        elements = self.source.elements(len(recorded))
        index = [elements[i * len(elements) // len(own)] for i in range(len(own))]
        if index != list(range(len(recorded))):
            recorded = torch.stack([recorded[i] for i in index])
        return torch.where(sites, own, moved(recorded, own.device).to(own.dtype))

    def _check_pictures(self, own: int, recorded: int) -> None:
        """Raise InputError if images of a passed template can't be assigned to this call's."""
        if not self.passed or self.source.count > 1 or recorded in (1, own):
            return
        if self.in_rows or own % recorded:
            raise InputError(
                f"template={self.source.name!r} has {recorded} pictures, this call makes {own}; "
                "edit all of them in one call, or pass the recorded picture to edit as image="
            )
