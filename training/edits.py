"""Do edits give what was asked? A probe looks at edits of held-out scenes.

    python -m training.edits unet --edits 500

One thing of a scene gets another colour and another shape: the mask is around it, the prompt
names the new thing. The pipelines are those that `maskfx.reference` loads, run densely.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import nn

from bench.harness import header, write_json
from maskfx.pipelines.call_defaults import call_of
from maskfx.shipped import FOLDER as SHIPPED
from maskfx.shipped import names, reference
from training.captions import caption_of
from training.loop import averaged_weights, put_weights
from training.masks import mask_around
from training.paint import paint
from training.probe import KEPT, crop_around, make_probe, scores
from training.scenes import COLOURS, SHAPES, Thing, draw_scene
from training.train import RUNS

RESULTS = Path(__file__).resolve().parents[1] / "bench" / "results"


@dataclass(frozen=True)
class Edit:
    """`wanted` is the scene painted with the new thing: what a perfect edit might look like."""

    pixels: np.ndarray
    mask: np.ndarray
    prompt: str
    thing: Thing
    wanted: np.ndarray


def draw_edits(count: int) -> Iterator[Edit]:
    """Held-out edits; prompts name the new thing."""
    for seed in range(count):
        rng = np.random.default_rng((12, seed))
        scene = draw_scene("held-out", 1000 + seed)
        index = int(rng.integers(len(scene.things)))
        old = scene.things[index]
        shape = str(rng.choice([one for one in SHAPES if one != old.shape]))
        colour = str(rng.choice([one for one in COLOURS if one != old.colour]))
        changed = scene.replaced(index, shape=shape, colour=colour)
        new = changed.things[index]
        prompt = caption_of(new, changed, rng)
        mask = mask_around(old, rng)
        yield Edit(paint(scene).pixels, mask, prompt, new, paint(changed).pixels)


def load_probe(runs: Path) -> nn.Module:
    """The probe that was trained here, or else the one that the repository holds."""
    probe, checkpoint = make_probe(), runs / "probe" / "checkpoint.pt"
    kept = checkpoint.exists() or not KEPT.exists()
    weights = averaged_weights(checkpoint) if kept else load_file(KEPT)
    put_weights(probe, {key: value.float() for key, value in weights.items()})
    return probe.eval()


@torch.no_grad()
def seen(probe: nn.Module, pixels: np.ndarray, thing: Thing) -> tuple[str, str]:
    crop = crop_around(pixels, thing.x, thing.y, thing.radius)
    for_shape, for_colour = scores(probe, crop[None])
    return SHAPES[int(for_shape.argmax())], COLOURS[int(for_colour.argmax())]


def measure(name: str, count: int, steps: int, runs: Path, batch: int, sheet: Path | None) -> Any:
    probe, pipe = load_probe(runs), reference(name)
    pipe.to("cuda" if torch.cuda.is_available() else "cpu")
    pipe.set_progress_bar_config(disable=True)
    right = {"shape": 0, "colour": 0, "probe_shape": 0, "probe_colour": 0}
    edits, told = list(draw_edits(count)), call_of(SHIPPED / name)
    rows = []
    for start in range(0, count, batch):
        group = edits[start : start + batch]
        made = pipe(
            [edit.prompt for edit in group],
            **told | {"num_inference_steps": steps},
            image=[Image.fromarray(edit.pixels) for edit in group],
            mask_image=[Image.fromarray(edit.mask) for edit in group],
            generator=[torch.Generator().manual_seed(start + i) for i in range(len(group))],
            height=256,
            width=256,
        ).images
        for edit, image in zip(group, made, strict=True):
            for prefix, pixels in (("", np.asarray(image)), ("probe_", edit.wanted)):
                shape, colour = seen(probe, pixels, edit.thing)
                right[prefix + "shape"] += shape == edit.thing.shape
                right[prefix + "colour"] += colour == edit.thing.colour
            if len(rows) < 24:
                cut = np.where(edit.mask[..., None], 127, edit.pixels)
                rows.append(np.concatenate([edit.pixels, cut, np.asarray(image)], 1))
                print(edit.prompt, flush=True)
    if sheet is not None:
        columns = [np.concatenate(rows[i::3], 0) for i in range(min(3, len(rows)))]
        high = min(len(column) for column in columns)
        whole = np.concatenate([column[:high] for column in columns], 1).astype(np.uint8)
        Image.fromarray(whole).save(sheet)
    return {"edits": count, "steps": steps, **{key: n / count for key, n in right.items()}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("name", choices=names())
    parser.add_argument("--edits", type=int, default=500)
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--runs", type=Path, default=RUNS)
    parser.add_argument("--sheet", type=Path, help="a picture of the first edits")
    parser.add_argument("--no-result", action="store_true", help="print only")
    args = parser.parse_args()
    figures = measure(args.name, args.edits, args.steps, args.runs, args.batch, args.sheet)
    print(json.dumps(figures))
    if not args.no_result:
        about = header("training.edits", sys.argv[1:])
        write_json(RESULTS / f"reference-{args.name}.json", {**about, "figures": figures})


if __name__ == "__main__":
    main()
