"""Let a training go on from the weights that the package ships, where no checkpoint is left.

    python -m training.resume unet

Takes the autoencoder and the tokenizer too: what was learned belongs to them.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from maskfx.shipped import CONTROLNETS, lora, trained_for
from maskfx.shipped import FOLDER as SHIPPED
from training.adapters import STRENGTH, STYLES
from training.build_adapters import BASE, LOGS, NETS, term_weights, with_results
from training.train import RUNS

# which parts of a pipeline a training trains
TRAINED = {
    "unet": ("unet", "text_encoder"),
    "dit": ("transformer", "text_encoder", "text_encoder_2"),
}
# which of them has learned the words before, and in which run
READ = {
    "unet": {"text": "text_encoder"},
    "dit": {"text": "text_encoder", "t5": "text_encoder_2"},
}


def resume(name: str, shipped: Path, runs: Path) -> Path:
    """The checkpoint that `training.train` goes on from."""
    folder, checkpoint = shipped / name, runs / name / "checkpoint.pt"
    if checkpoint.exists():
        raise FileExistsError(f"{checkpoint}: goes on from there as it is; move it away first")
    said = json.loads((folder / "training.json").read_text(encoding="utf-8"))
    weights: dict[str, Tensor] = {}
    for part in TRAINED[name]:
        for path in sorted((folder / part).glob("*.safetensors")):
            weights |= {f"{part}.{key}": value.float() for key, value in load_file(path).items()}
    kept = {"vae": "vae4/frozen", "tokenizer": "tokenizer", "tokenizer_2": "pieces"}
    for source, target in kept.items():
        if (folder / source).exists() and not (runs / target).exists():
            shutil.copytree(folder / source, runs / target)
    for model, figures in said.items():
        (runs / model).mkdir(parents=True, exist_ok=True)
        with (runs / model / "log.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(figures) + "\n")
    for run, part in READ[name].items():
        words = {
            "text_encoder." + key.removeprefix(part + "."): value
            for key, value in weights.items()
            if key.startswith(part + ".")
        }
        keep(runs, run, said, words)
    return keep(runs, name, said, weights)


def resume_adapter(name: str, shipped: Path, runs: Path) -> Path:
    """The checkpoint of a LoRA or a ControlNet, from what ships for the pipeline."""
    checkpoint = runs / name / "checkpoint.pt"
    if checkpoint.exists():
        raise FileExistsError(f"{checkpoint}: goes on from there as it is; move it away first")
    said = json.loads((shipped / BASE / LOGS).read_text(encoding="utf-8"))
    if name in NETS:
        net = trained_for(BASE, CONTROLNETS, name, shipped)
        state = load_file(net / "diffusion_pytorch_model.safetensors")
        kept = {key: value.float() for key, value in state.items()}
        weights = with_results(kept, 1 / STRENGTH)
    else:
        weights = term_weights(load_file(lora(name, BASE, shipped)))
    (runs / name).mkdir(parents=True, exist_ok=True)
    with (runs / name / "log.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(said[name]) + "\n")
    return keep(runs, name, said, weights)


def keep(runs: Path, model: str, said: dict[str, Any], weights: dict[str, Tensor]) -> Path:
    """A checkpoint without an optimizer's state."""
    path = runs / model / "checkpoint.pt"
    state = {"step": said[model]["step"], "seconds": said[model]["seconds"]}
    torch.save(state | {"weights": weights, "average": weights}, path)
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("name", choices=[*sorted(TRAINED), *STYLES, *NETS])
    parser.add_argument("--runs", type=Path, default=RUNS)
    args = parser.parse_args()
    goes_on = resume if args.name in TRAINED else resume_adapter
    print(goes_on(args.name, SHIPPED, args.runs))


if __name__ == "__main__":
    main()
