"""Put trained adapters into `maskfx/shipped/unet/`: LoRAs as files, the ControlNet as a folder.

    python -m training.build_adapters sepia blueprint edges

Weights are the averaged ones of the checkpoints, in 16 bits, in the formats of diffusers.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from diffusers import ControlNetModel
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor

from bench.quality.edits import fitting_scene
from maskfx.shipped import CONTROLNETS, LORAS, reference
from maskfx.shipped import FOLDER as SHIPPED
from training.adapters import STRENGTH, STYLES, edges_of, make_control
from training.build import EXAMPLE, EXAMPLE_RATIO
from training.cards import adapter_card, last
from training.loop import averaged_weights, put_weights
from training.paint import paint
from training.train import RUNS

ROOT = Path(__file__).resolve().parents[1]
BASE = "unet"  # the pipeline that they are trained for
NETS = ("edges",)
RESULTS = ("controlnet_down_blocks.", "controlnet_mid_block.")  # the layers that return them
LOGS = "adapters.json"  # the last figures of each training


def lora_state(weights: dict[str, Tensor], shapes: dict[str, torch.Size]) -> dict[str, Tensor]:
    """Return a LoRA in the format of diffusers.

    Args:
        weights: the terms by path, as `LowRank` has them.
        shapes: of the layers' weights, by name.
    """
    state: dict[str, Tensor] = {}
    for key, value in weights.items():
        path, _, side = key.rpartition(".")
        layer = path.replace("/", ".")
        shape = shapes[layer]
        if side == "down":
            value = value.view(value.shape[0], *shape[1:])
        elif len(shape) == 4:
            value = value[:, :, None, None]
        letter = {"down": "A", "up": "B"}[side]
        state[f"unet.{layer}.lora_{letter}.weight"] = value.half().contiguous()
    return state


def term_weights(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the terms of a LoRA in the format of diffusers; the reverse of `lora_state`."""
    found: dict[str, Tensor] = {}
    for key, value in state.items():
        layer, _, letter = key.removeprefix("unet.").removesuffix(".weight").rpartition(".lora_")
        side = {"A": "down", "B": "up"}[letter]
        found[f"{layer.replace('.', '/')}.{side}"] = value.flatten(1).float()
    return found


def build_lora(name: str, runs: Path, target: Path) -> Path:
    unet = reference(BASE).unet
    shapes = {
        path: layer.weight.shape
        for path, layer in unet.named_modules()
        if isinstance(getattr(layer, "weight", None), Tensor)
    }
    weights = averaged_weights(runs / name / "checkpoint.pt")
    path = target / LORAS / f"{name}.safetensors"
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(lora_state(weights, shapes), path, {"format": "pt"})
    return path


def build_net(name: str, runs: Path, target: Path) -> Path:
    net: ControlNetModel = make_control(reference(BASE).unet)
    weights = averaged_weights(runs / name / "checkpoint.pt")
    put_weights(net, with_results(weights, STRENGTH))
    folder = target / CONTROLNETS / name
    net.half().save_pretrained(folder, safe_serialization=True)
    write_example(folder / "example")
    return folder / "diffusion_pytorch_model.safetensors"


def with_results(weights: dict[str, Tensor], factor: float) -> dict[str, Tensor]:
    """Return a ControlNet's weights with its results multiplied."""
    return {k: v * factor if k.startswith(RESULTS) else v for k, v in weights.items()}


def write_example(folder: Path) -> None:
    """Write the edges of another thing in the place of the pipeline's example edit."""
    scene, at = fitting_scene(EXAMPLE, EXAMPLE_RATIO)
    changed = scene.replaced(at, shape="cross", colour="yellow")
    folder.mkdir(exist_ok=True)
    Image.fromarray(edges_of(paint(changed).pixels)).save(folder / "control.png")
    (folder / "prompt.txt").write_text("a yellow cross\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("names", nargs="+", choices=[*STYLES, *NETS])
    parser.add_argument("--runs", type=Path, default=RUNS)
    parser.add_argument("--target", type=Path, default=SHIPPED / BASE)
    args = parser.parse_args()
    for name in args.names:
        build = build_net if name in NETS else build_lora
        path = build(name, args.runs, args.target)
        path.chmod(0o644)
        print(f"{path}: {path.stat().st_size / 1e6:.1f} MB")
    said = {name: last(name, args.runs) for name in (*STYLES, *NETS)}
    (args.target / LOGS).write_text(json.dumps(said, indent=1) + "\n", encoding="utf-8")
    card = adapter_card((*STYLES, *NETS), args.runs, ROOT / "bench" / "results")
    (args.target / "ADAPTERS.md").write_text(card, encoding="utf-8")


if __name__ == "__main__":
    main()
