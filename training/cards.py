"""The model cards, with figures from the logs of the runs that made the weights."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from maskfx.runtime.reuse.fitted_forecast import ForecastTable
from training.adapters import STRENGTH

KIND = {
    "unet": (
        "`StableDiffusionInpaintPipeline`: `UNet2DConditionModel` with three levels, "
        "`CLIPTextModel`, `AutoencoderKL` (factor 8, 4 channels)"
    ),
    "dit": (
        "`FluxFillPipeline`: `FluxTransformer2DModel` with two layers for text and sites apart and "
        "six for both, `CLIPTextModel`, `T5EncoderModel`, `AutoencoderKL` (factor 8, 4 channels)"
    ),
}
WHY = {
    "unet": """The UNet has nine channels: noisy latents, mask, and the latents of what the mask \
leaves over. Diffusers loads it into the inpaint pipeline only: a picture from text alone is an \
edit whose mask covers everything.""",
    "dit": """The transformer has the mask and the latents of what it leaves over as channels; a \
picture from text alone is an edit whose mask covers everything. It was taught by the UNet of the \
`unet` pipeline, whose answers under a guidance of 3 it gives without guidance: one call a step.""",
}
USE = {
    "unet": """pipe = maskfx.reference("unet")
edited = pipe(
    "a shiny red ball", image=image, mask_image=mask, guidance_scale=3.0, num_inference_steps=25
).images[0]""",
    "dit": """pipe = maskfx.reference("dit")
edited = pipe(
    "a shiny red ball",
    image=image,
    mask_image=mask,
    height=256,
    width=256,
    num_inference_steps=25,
    max_sequence_length=32,
).images[0]""",
}
NOTES = {
    "unet": "",
    "dit": """
The pipeline fills texts up to `max_sequence_length`, 512 tokens unless set otherwise. 32 hold \
every caption and are what most of the training saw; it is quicker too. Its default size is 1024, \
so say 256.
""",
}
ARITHMETIC = {
    "unet": " without 16-bit arithmetic",
    "dit": ", with 16-bit arithmetic for the transformer alone",
}
COOLED = {"dit": 0.78}  # of a run, in which the rate falls at the end; of others a sixth
NEEDS = {"unet": ("vae4", "text", "unet"), "dit": ("vae4", "text", "unet", "t5", "dit")}


def card(name: str, runs: Path, results: Path) -> str:
    rows = "\n".join(row(model, runs) for model in NEEDS[name])
    hours = {model: last(model, runs).get("seconds", 0) / 3600 for model in NEEDS[name]}
    commands = "\n".join(
        f"python -m training.train --model {model} --hours {hours[model]:.2f}"
        f" --cool {COOLED.get(model, 0.17) * hours[model]:.2f}"
        for model in NEEDS[name]
    )
    return f"""---
license: apache-2.0
library_name: diffusers
tags: [inpainting, text-to-image, synthetic]
---

# maskfx reference pipeline: {name}

{KIND[name]}. 256x256 pictures. Made to test and show edits, not to be art.

{WHY[name]}

```python
import maskfx

{USE[name]}
```
{NOTES[name]}
## Data

Captioned scenes drawn by `training/scenes.py`: a sky over a ground or a wall over a \
floor, and one to four things (8 shapes, 10 colours, 5 materials, 3 sizes). No pictures of the \
world, no words but those of `training/captions.py`.

## Training

| part | steps | hours | figures at the end |
|---|---|---|---|
{rows}

From nothing to these files:

```bash
{commands}
python -m training.build {name}
```

A run that was stopped goes on from its checkpoint with the same command. Hours are those of the \
run's own clock, on one or two threads of a busy CPU{ARITHMETIC[name]}; a GPU is used when there \
is one, with bigger batches. `python -m training.resume {name}` lets a training go on from \
these files where no checkpoint is left.

{quality(name, results)}"""


def row(model: str, runs: Path) -> str:
    end = last(model, runs)
    told = ("psnr", "worst", "coloured", "made", "judged", "loss")
    known = {key: value for key, value in end.items() if key in told}
    figures = ", ".join(f"{key} {value:.4g}" for key, value in known.items())
    return f"| {model} | {end.get('step', 0)} | {end.get('seconds', 0) / 3600:.2f} | {figures} |"


def last(model: str, runs: Path) -> dict[str, Any]:
    """The latest of each figure in a run's log."""
    path = runs / model / "log.jsonl"
    merged: dict[str, Any] = {}
    if path.exists():
        for line in path.read_text(encoding="utf-8").splitlines():
            merged |= json.loads(line)
    return merged


def quality(name: str, results: Path) -> str:
    path = results / f"reference-{name}.json"
    if not path.exists():
        return "## Edits\n\nNot measured yet: `python -m training.edits " + name + "`.\n"
    found = json.loads(path.read_text(encoding="utf-8"))["figures"]
    return f"""## Edits

Of {found["edits"]} edits of held-out scenes, the edited thing has the asked colour in \
{found["colour"]:.1%} and the asked shape in {found["shape"]:.1%}, as judged by a probe that gets \
{found["probe_colour"]:.1%} and {found["probe_shape"]:.1%} right on painted scenes \
(`python -m training.edits {name}`).
"""


def judge_section(card: Mapping[str, Any]) -> str:
    """Return the part of a pipeline's card that is about its judge."""
    weights = "\n".join(f"| {name} | {value:.2f} |" for name, value in card["importance"].items())
    by_run = ", ".join(f"{value:.3f}" for value in card["table_accuracy_by_run"])
    share = card["held_out_computed_share"]
    return f"""## Judge

`judge.npz` decides which patches of {card["side"]} x {card["side"]} sites are computed \
(`maskfx.PatchReuse(judge="auto")`); `judge.json` has all figures. A random forest learnt from \
{card["runs"] - card["held_out"]} runs of {card["steps"]} steps whether a patch's output, \
continued from earlier steps, would be wrong by more than {card["tolerance"]:.0%}, and was \
tabulated: {card["stretches"]} stretches, ages up to {card["age"]}.

| feature | importance |
|---|---|
{weights}

On {card["held_out"]} runs of other prompts and noise the table is right in \
{card["table_accuracy"]:.1%} of the samples (by run: {by_run}), where always the same answer is \
in {max(share, 1 - share):.1%}; the forest's AUC is {card["auc"]:.3f}, and the table decides as \
the forest in {card["table_agreement"]:.1%}.

```bash
python -m training.judges {card["model"]}
```
"""


ADAPTERS = {
    "sepia": ("LoRA, rank 8", "what is painted has brown tones, as of an old photograph"),
    "blueprint": ("LoRA, rank 8", "white outlines on blue"),
    "edges": (
        "`ControlNetModel`",
        "what is painted has the edges of the control picture: white lines on black where "
        "neighbouring pixels differ by more than 24 of 255",
    ),
}


def adapter_card(names: Sequence[str], runs: Path, results: Path) -> str:
    """The card of a pipeline's adapters."""
    what = "\n".join(f"| {name} | {kind} | {does} |" for name, (kind, does) in ADAPTERS.items())
    rows = "\n".join(row(name, runs) for name in names)
    hours = {name: last(name, runs).get("seconds", 0) / 3600 for name in names}
    commands = "\n".join(
        f"python -m training.train --model {name} --hours {hours[name]:.2f}" for name in names
    )
    return f"""---
license: apache-2.0
library_name: diffusers
tags: [lora, controlnet, inpainting, synthetic]
---

# Adapters of the maskfx reference pipeline: unet

| name | kind | effect |
|---|---|---|
{what}

```python
import maskfx
from maskfx.shipped import lora

pipe = maskfx.compile(maskfx.reference("unet"))
old = pipe("a red ball", image=image, mask_image=mask, lora=str(lora("sepia"))).images[0]

led = maskfx.compile(maskfx.reference("unet", controlnet="edges"))
drawn = led("a red ball", image=image, mask_image=mask, control_image=edges).images[0]
```

## Data

Crops of the scenes that the pipeline was trained on, around one thing each. The pipeline's own \
weights stay as they are.

## Training

| part | steps | hours | figures at the end |
|---|---|---|---|
{rows}

```bash
{commands}
python -m training.build_adapters {" ".join(names)}
```

Hours are those of one thread of a busy CPU. The run of `edges` was changed on its way: its first \
3,396 steps left out half of the captions, at a rate of 0.0005; later ones four fifths, at 0.0015. \
Up to step 6,018 all crops were of the same 768, which it overfitted; so were those of `sepia` up \
to step 1,830 and those of `blueprint`. From nothing they would see new crops all the time. Up to \
step 5,949 `sepia` learned tones that left black black, which is not seen as brown.

The results of `edges` are those of the training times {STRENGTH:g}: the pipeline takes half of \
them by default (`controlnet_conditioning_scale=0.5`). A scale of 1 follows edges more. In 48 \
edits that aren't among those below the shape was seen in 85, 90, 94, 98 and 98 % at 0.5, 0.75, 1, \
1.25 and 1.5, the colour in 100 % up to 1, then in 96 and 90 %.

{adapter_quality(results)}"""


def adapter_quality(results: Path) -> str:
    path = results / "reference-adapters.json"
    if not path.exists():
        return "## Edits\n\nNot measured yet: `python -m training.adapter_edits`.\n"
    found = json.loads(path.read_text(encoding="utf-8"))["figures"]
    styles, edges = found["styles"]["found"], found["edges"]
    said = ", ".join(
        f"{styles[name][name]:.1%} with `{name}` (without a LoRA {styles['none'][name]:.1%})"
        for name in styles
        if name != "none"
    )
    return f"""## Edits

Of {found["edits"]} edits of held-out scenes, {found["steps"]} steps each, what was painted has \
the style in {said}, as judged by a probe.

In {found["edits_with_edges"]} edits with `edges` and a prompt that names the colour alone the \
thing has the shape of the edges in {edges["edges_and_colour"]["shape"]:.1%} (without them \
{edges["colour"]["shape"]:.1%}) and the colour in {edges["edges_and_colour"]["colour"]:.1%}; with \
a prompt that names the shape too, {edges["edges_and_prompt"]["shape"]:.1%} and \
{edges["edges_and_prompt"]["colour"]:.1%} (`python -m training.adapter_edits`).{at_one(edges)}
"""


def at_one(edges: dict[str, dict[str, float]]) -> str:
    found = edges.get("edges_and_colour_at_scale_1")
    if found is None:
        return ""
    return (
        f" With `controlnet_conditioning_scale=1` and the colour alone, {found['shape']:.1%} and "
        f"{found['colour']:.1%}."
    )


def forecast_section(name: str, table: ForecastTable) -> str:
    """Return the part of a pipeline's card that is about its fitted forecasts."""
    rows = "\n".join(
        f"| {'edits' if run.masked else 'whole pictures'} | {len(run.times)}, from "
        f"{run.times[0]:.4g} | {', '.join(map(str, run.computed))} |"
        for run in table.runs
    )
    return f"""## Forecasts

`forecasts.json` has the weights by which outputs of skipped steps follow from the latents and \
from outputs computed before (`maskfx.Quality(forecast="fitted")`), for these schedules and steps:

| of | calls, from the time | computed |
|---|---|---|
{rows}

```bash
python -m training.forecasts {name}
```
"""
