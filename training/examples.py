"""What the denoisers learn from: latents, masks, what the masks leave over, captions."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from training.captions import caption, caption_of, caption_of_nothing
from training.crops import WINDOW, around_a_thing, window_around
from training.latents import GRID, Latents
from training.scenes import Scene, draw_scene

# how often the mask covers all there is: of a picture, of a crop
EVERYTHING = {"picture": 0.4, "crop": 0.1}


@dataclass(frozen=True)
class Example:
    """Some edits whose outcome is known; `mask` has one channel."""

    full: Tensor
    mask: Tensor
    kept: Tensor
    texts: list[str]

    def first(self, count: int) -> Example:
        return Example(self.full[:count], self.mask[:count], self.kept[:count], self.texts[:count])


@dataclass(frozen=True)
class Examples:
    """Draws of scenes; `batch` pictures, or four times as many crops."""

    latents: Latents
    batch: int
    device: torch.device

    def pictures(self, rng: np.random.Generator, shards: int | None = None) -> Example:
        full, masks, kept, texts = [], [], [], []
        for seed, rows in self.latents.pick(rng, self.batch, shards):
            scene = draw_scene("train", seed)
            full.append(rows["full"])
            if rng.random() < EVERYTHING["picture"]:
                masks.append(torch.ones(GRID, GRID))
                kept.append(self.latents.nothing)
                text = caption(scene, rng)
            else:
                which = int(rng.integers(2))
                masks.append(rows["masks"][which].float())
                kept.append(rows["kept"][which].float())
                text = edit_caption(scene, int(rows["around"][which]), rng)
            texts.append(text)
        return self._together(full, masks, kept, texts)

    def crops(self, rng: np.random.Generator) -> Example:
        """Windows around a thing, with its own caption: much for little."""
        full, masks, kept, texts = [], [], [], []
        for seed, rows in self.latents.pick(rng, 4 * self.batch):
            scene = draw_scene("train", seed)
            which, thing = around_a_thing(rows, rng)
            mask = rows["masks"][which]
            window = window_around(mask, rng)
            full.append(rows["full"][window])
            if rng.random() < EVERYTHING["crop"]:
                masks.append(torch.ones(WINDOW, WINDOW))
                kept.append(self.latents.nothing[window])
            else:
                masks.append(mask[window].float())
                kept.append(rows["kept"][which][window].float())
            texts.append(caption_of(scene.things[thing], scene, rng))
        return self._together(full, masks, kept, texts)

    def _together(
        self, full: list[Tensor], masks: list[Tensor], kept: list[Tensor], texts: list[str]
    ) -> Example:
        def stacked(parts: list[Tensor]) -> Tensor:
            return torch.stack([part.float() for part in parts]).to(self.device)

        return Example(stacked(full), stacked(masks)[:, None], stacked(kept), texts)


def unheard(texts: list[str], share: float, rng: np.random.Generator) -> list[str]:
    """The captions, some of them left out."""
    return ["" if rng.random() < share else text for text in texts]


def edit_caption(scene: Scene, thing: int, rng: np.random.Generator) -> str:
    """A prompt for what the mask hides: mostly of the thing, sometimes of the whole scene."""
    if thing >= 0 and rng.random() < 0.7:
        return caption_of(scene.things[thing], scene, rng)
    if thing < 0 and rng.random() < 0.2:
        return caption_of_nothing(scene, rng)
    return caption(scene, rng)
