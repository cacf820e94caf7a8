"""Put the trained weights into `maskfx/shipped/<name>/`, as the package ships them.

    python -m training.build unet dit probe

Weights are the averaged ones of the checkpoints, in 16 bits. Probes stay beside this file.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

from diffusers import FluxFillPipeline, StableDiffusionInpaintPipeline
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor, nn

from bench.quality.edits import draw_edit
from maskfx.pipelines import call_defaults
from maskfx.shipped import FOLDER as SHIPPED
from training import dit, unet
from training.cards import NEEDS, card, last
from training.latents import frozen_vae
from training.loop import averaged_weights, put_weights
from training.probe import KEPT
from training.style_probe import KEPT as KEPT_STYLES
from training.text import learn_pieces, learn_tokenizer, make_encoder, make_t5
from training.train import RUNS

ROOT = Path(__file__).resolve().parents[1]
EXAMPLE, EXAMPLE_RATIO = 31, 0.09  # the edit that shows what a pipeline does


def unet_pipeline(runs: Path) -> StableDiffusionInpaintPipeline:
    weights = averaged_weights(runs / "unet" / "checkpoint.pt")
    tokenizer = learn_tokenizer(runs / "tokenizer")
    return StableDiffusionInpaintPipeline(
        vae=frozen_vae(runs, 4),
        text_encoder=filled(make_encoder(tokenizer), weights, "text_encoder"),
        tokenizer=tokenizer,
        unet=filled(unet.make_unet(), weights, "unet"),
        scheduler=unet.make_scheduler(),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )


def dit_pipeline(runs: Path) -> FluxFillPipeline:
    weights = averaged_weights(runs / "dit" / "checkpoint.pt")
    tokenizer, pieces = learn_tokenizer(runs / "tokenizer"), learn_pieces(runs / "pieces")
    return FluxFillPipeline(
        vae=frozen_vae(runs, 4),
        text_encoder=filled(make_encoder(tokenizer), weights, "text_encoder"),
        tokenizer=tokenizer,
        text_encoder_2=filled(make_t5(pieces), weights, "text_encoder_2"),
        tokenizer_2=pieces,
        transformer=filled(dit.make_transformer(), weights, "transformer"),
        scheduler=dit.make_scheduler(),
    )


PROBES = {"probe": KEPT, "style_probe": KEPT_STYLES}  # files beside this one
PIPELINES = {"unet": unet_pipeline, "dit": dit_pipeline}
# what each gets, as it was trained
CALLS = {
    "unet": {"guidance_scale": 3.0, "num_inference_steps": 25, "strength": 1.0},
    "dit": {"max_sequence_length": 32, "num_inference_steps": 25, "strength": 1.0},
}


def filled(module: Any, weights: dict[str, Tensor], part: str) -> nn.Module:
    """A module with its part of a checkpoint's weights."""
    prefix = part + "."
    put_weights(
        module, {k.removeprefix(prefix): v for k, v in weights.items() if k.startswith(prefix)}
    )
    whole: nn.Module = module.eval()
    return whole


def build(name: str, runs: Path, target: Path) -> Path:
    """One pipeline's folder, made new."""
    pipeline = PIPELINES[name](runs)
    for part in pipeline.components.values():
        if isinstance(part, nn.Module):
            part.half()
    folder = target / name
    if folder.exists():
        shutil.rmtree(folder)
    pipeline.save_pretrained(folder, safe_serialization=True)
    forget_paths(folder)
    (folder / "README.md").write_text(card(name, runs, ROOT / "bench" / "results"))
    said = {model: last(model, runs) for model in NEEDS[name]}
    (folder / "training.json").write_text(json.dumps(said, indent=1) + "\n")
    write_call(target, name)
    write_example(folder / "example")
    for kept in ("vocab.json", "merges.txt"):  # what a training goes on with
        shutil.copy(runs / "tokenizer" / kept, folder / "tokenizer")
    for path in folder.rglob("*.safetensors"):
        path.chmod(0o644)
    return folder


def forget_paths(folder: Path) -> None:
    """Configs say where on this machine a part was loaded from; no other machine has that."""
    for path in folder.rglob("config.json"):
        told = json.loads(path.read_text(encoding="utf-8"))
        if told.pop("_name_or_path", None) is not None:
            path.write_text(json.dumps(told, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def write_call(target: Path, name: str) -> None:
    told = json.dumps(CALLS[name], indent=2) + "\n"
    (target / name / call_defaults.NAME).write_text(told, encoding="utf-8")


def write_example(folder: Path) -> None:
    """An edit of a held-out scene, for people to see what the pipeline does."""
    edit = draw_edit(EXAMPLE, EXAMPLE_RATIO)
    folder.mkdir()
    Image.fromarray(edit.pixels).save(folder / "picture.png")
    Image.fromarray(edit.mask).save(folder / "mask.png")
    (folder / "prompt.txt").write_text(edit.prompt + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    names = [*sorted(PIPELINES), *PROBES]
    parser.add_argument("names", nargs="+", choices=names)
    parser.add_argument("--runs", type=Path, default=RUNS)
    parser.add_argument("--target", type=Path, default=SHIPPED)
    args = parser.parse_args()
    for name in args.names:
        if name in PROBES:
            weights = averaged_weights(args.runs / name / "checkpoint.pt")
            save_file({key: value.half() for key, value in weights.items()}, PROBES[name])
            PROBES[name].chmod(0o644)
            continue
        folder = build(name, args.runs, args.target)
        size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        print(json.dumps({"folder": str(folder), "megabytes": round(size / 1e6, 1)}))


if __name__ == "__main__":
    main()
