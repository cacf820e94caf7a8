"""Do adapters do what they are for? Probes look at edits of held-out scenes.

    python -m training.adapter_edits --edits 300

- A LoRA: one thing gets another colour and shape, as in training.edits, with the LoRA; the style
  probe names the style of what was painted. Beside it stand the same edits without a LoRA.
- The ControlNet: the control picture has the edges of the scene with the new thing, and the prompt
  names its colour alone, so that only the edges can show the shape. Beside it stand the same edits
  without the ControlNet, and edits with the edges and the whole prompt.

Pipelines run densely, as diffusers runs them. Asked for: the style in 90 % of the edits, the shape
of the edges in 85 %.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file

from bench.harness import header, write_json
from maskfx.pipelines.adapters.lora_files import LoraTarget, converted
from maskfx.pipelines.call_defaults import call_of
from maskfx.runtime.lora.adapter import WeightedLayers
from maskfx.runtime.lora.files import FileLimits
from maskfx.runtime.lora.patch import patched
from maskfx.shipped import FOLDER, lora, reference
from training.adapters import STYLES, edges_of
from training.edits import Edit, draw_edits, load_probe, seen
from training.style_probe import NAMES, load_style_probe, style_of
from training.train import RUNS

RESULTS = Path(__file__).resolve().parents[1] / "bench" / "results"
BASE, NET = "unet", "edges"
SIDE = 256


class Painter:
    """Runs edits in batches by one of diffusers' pipelines."""

    def __init__(self, pipe: Any, steps: int, batch: int) -> None:
        pipe.set_progress_bar_config(disable=True)
        self.pipe, self.batch = pipe, batch
        self.told = call_of(FOLDER / BASE) | {"num_inference_steps": steps}

    def paint(
        self, edits: Sequence[Edit], whole: bool = True, edges: bool = False
    ) -> Iterator[np.ndarray]:
        """Yield the pictures; prompts are whole, or name the colour alone."""
        for start in range(0, len(edits), self.batch):
            group = edits[start : start + self.batch]
            more: dict[str, Any] = {}
            if edges:
                more["control_image"] = [Image.fromarray(edges_of(one.wanted)) for one in group]
            images = self.pipe(
                [edit.prompt if whole else edit.thing.colour for edit in group],
                image=[Image.fromarray(edit.pixels) for edit in group],
                mask_image=[Image.fromarray(edit.mask) for edit in group],
                generator=[torch.Generator().manual_seed(start + i) for i in range(len(group))],
                height=SIDE,
                width=SIDE,
                **self.told | more,
            ).images
            yield from (np.asarray(image) for image in images)


def written_in(pipe: Any, style: str | None) -> AbstractContextManager[object]:
    """The LoRA of a style in the UNet's weights, within the context."""
    if style is None:
        return nullcontext()
    path = lora(style)
    found = converted(path.name, load_file(path), {}, LoraTarget.of(pipe), FileLimits())
    return patched(pipe.unet, [WeightedLayers(found.parts["unet"], 1.0, found.digest)])


def judge_styles(count: int, steps: int, batch: int, sheet: list[np.ndarray]) -> dict[str, Any]:
    """Return how often each style was found, with its LoRA and without one."""
    pipe, probe = reference(BASE), load_style_probe()
    painter, edits = Painter(pipe, steps, batch), list(draw_edits(count))
    figures: dict[str, Any] = {}

    def named(made: Sequence[np.ndarray]) -> list[str]:
        return [
            style_of(probe, pixels, edit.thing.x, edit.thing.y, edit.thing.radius)
            for pixels, edit in zip(made, edits, strict=True)
        ]

    for style in (None, *STYLES):
        with written_in(pipe, style):
            made = list(painter.paint(edits))
        found = named(made)
        figures[style or "none"] = {one: found.count(one) / count for one in NAMES}
        sheet += made[:8]
    perfect = {}
    for style, change in STYLES.items():
        ideal = [np.where(e.mask[..., None], change(e.wanted), e.pixels) for e in edits]
        perfect[style] = named(ideal).count(style) / count
    return {"found": figures, "found_in_painted_scenes": perfect}


def judge_edges(
    count: int, steps: int, batch: int, runs: Path, sheet: list[np.ndarray]
) -> dict[str, Any]:
    """Return how often edits have the shape of the edges, and the colour of the prompt."""
    probe, edits = load_probe(runs), list(draw_edits(count))
    plain = Painter(reference(BASE), steps, batch)
    led = Painter(reference(BASE, controlnet=NET), steps, batch)
    figures: dict[str, Any] = {}
    for name, painter, whole in (
        ("colour", plain, False),
        ("edges_and_colour", led, False),
        ("edges_and_prompt", led, True),
    ):
        made = list(painter.paint(edits, whole, edges=painter is led))
        found = [seen(probe, pixels, e.thing) for pixels, e in zip(made, edits, strict=True)]
        things = [edit.thing for edit in edits]
        figures[name] = {
            "shape": np.mean([f[0] == t.shape for f, t in zip(found, things, strict=True)]).item(),
            "colour": np.mean(
                [f[1] == t.colour for f, t in zip(found, things, strict=True)]
            ).item(),
        }
        sheet += made[:8]
    sheet += [edges_of(edit.wanted) for edit in edits[:8]]
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--what", nargs="+", choices=("styles", "edges"), default=["styles", NET])
    parser.add_argument("--edits", type=int, default=300)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--runs", type=Path, default=RUNS)
    parser.add_argument("--sheet", type=Path, help="a picture of the first edits")
    parser.add_argument("--no-result", action="store_true", help="print only")
    args = parser.parse_args()
    sheet: list[np.ndarray] = []
    figures: dict[str, Any] = {
        "edits": args.edits,
        "edits_with_edges": args.edits,
        "steps": args.steps,
    }
    if "styles" in args.what:
        figures["styles"] = judge_styles(args.edits, args.steps, args.batch, sheet)
    if NET in args.what:
        figures[NET] = judge_edges(args.edits, args.steps, args.batch, args.runs, sheet)
    print(json.dumps(figures, indent=1))
    if args.sheet is not None:
        rows = [np.concatenate(sheet[i : i + 8], 1) for i in range(0, len(sheet) - 7, 8)]
        Image.fromarray(np.concatenate(rows, 0)).save(args.sheet)
    if not args.no_result:
        about = header("training.adapter_edits", sys.argv[1:])
        write_json(RESULTS / "reference-adapters.json", {**about, "figures": figures})


if __name__ == "__main__":
    main()
