"""LoRA files that jobs may name, each merged into a copy of the layers that it changes.

With merged weights, jobs with and without an adapter run at the same time, at the same speed, and
isolated from each other. The cost is memory (one copy of the changed weights per adapter in use)
and a separate capture at an adapter's first job; jobs with different adapters don't share steps.
"""

from __future__ import annotations

import copy
import json
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from maskfx.errors import InputError
from maskfx.pipelines.stand_in import installed
from maskfx.serve.models.model_source import PICKLED

DOWN, UP = (".lora_A.weight", ".lora_B.weight")
METADATA = "lora_adapter_metadata"  # metadata key under which diffusers stores peft's settings


@dataclass(frozen=True, eq=False)
class LoraChange:
    """The low-rank update of one layer's weight."""

    part: str  # name of the pipeline's component
    layer: str
    down: Tensor
    up: Tensor
    scale: float

    def of(self, weight: Tensor) -> Tensor:
        """Return the scaled low-rank product in the weight's shape."""
        down, up = self.down.float(), self.up.float()
        return self.scale * (up.flatten(1) @ down.flatten(1)).view(weight.shape)


def adapters_in(folder: Path | None) -> dict[str, Path]:
    """Return a folder's adapters by name; clients can use no others."""
    if folder is None:
        return {}
    if not folder.is_dir():
        raise InputError(f"lora_dir {folder}: no such directory")
    pickled = sorted(path.name for path in folder.iterdir() if path.suffix in PICKLED)
    if pickled:
        raise InputError(
            f"lora_dir {folder}: {', '.join(pickled[:3])}: a pickle can run code; convert it to "
            "safetensors where you trust it, or take it out of the directory"
        )
    return {path.stem: path for path in sorted(folder.glob("*.safetensors"))}


def changes_of(path: Path, pipe: object) -> list[LoraChange]:
    """Return a file's updates of a pipeline's layers; InputError if the file doesn't fit it."""
    if not hasattr(pipe, "lora_state_dict"):
        raise InputError(f"{path.name}: {type(pipe).__name__} accepts no LoRA; leave lora_dir out")
    tensors, settings = read(path)
    found = pipe.lora_state_dict(tensors, return_alphas=True)
    state, alphas = (found if isinstance(found, tuple) else (found, None))[:2]
    check_settings(path, settings)
    by_part: dict[str, dict[str, Tensor]] = defaultdict(dict)
    for key, value in state.items():
        part, _, rest = key.partition(".")
        by_part[part][rest] = value
    changes = []
    for part, tensors in by_part.items():
        module = getattr(pipe, part, None)
        if not isinstance(module, nn.Module):
            raise InputError(f"{path.name}: it changes {part!r}, which this pipeline doesn't have")
        changes += part_changes(path.name, part, module, tensors, alphas or {}, settings)
    return changes


def read(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read a file's tensors and peft's settings, keyed by part and name."""
    try:
        with safe_open(path, framework="pt") as file:
            text = (file.metadata() or {}).get(METADATA, "{}")
        tensors, settings = load_file(path), json.loads(text)
    except (OSError, SafetensorError, ValueError) as error:
        raise InputError(
            f"{path.name}: not a safetensors file ({error}); if it is a pickle, convert it to "
            "safetensors where you trust it, or take it out of the directory"
        ) from error
    return tensors, settings if isinstance(settings, dict) else {}


def check_settings(path: Path, settings: dict[str, Any]) -> None:
    """Raise InputError for peft settings that change the arithmetic (e.g. DoRA)."""
    for name, value in settings.items():
        last = name.rpartition(".")[2]
        if value and last in ("use_dora", "use_rslora", "alpha_pattern", "rank_pattern"):
            raise InputError(
                f"{path.name}: {last} isn't supported; save the adapter without it, or take it out "
                "of the directory"
            )


def part_changes(
    name: str,
    part: str,
    module: nn.Module,
    tensors: dict[str, Tensor],
    alphas: dict[str, Any],
    settings: dict[str, Any],
) -> list[LoraChange]:
    """Return one part's updates, each checked against the shape of its layer."""
    layers = dict(module.named_modules())
    tensors = as_peft(tensors)
    changes = []
    for key in [key for key in tensors if key.endswith(DOWN)]:
        layer = key.removesuffix(DOWN)
        down, up = tensors.pop(key), tensors.pop(layer + UP, None)
        alpha = alphas.get(f"{part}.{layer}.alpha", settings.get(f"{part}.lora_alpha"))
        rank = down.shape[0]
        target = layers.get(layer)
        weight = getattr(target, "weight", None)
        if up is None or not isinstance(target, (nn.Linear, nn.Conv2d)) or weight is None:
            raise InputError(
                f"{name}: {part}.{layer}: the pipeline has no such linear or convolution layer; "
                "the LoRA was made for another model"
            )
        scale = 1.0 if alpha is None else float(alpha) / rank
        change = LoraChange(part, layer, down, up, scale)
        if up.shape[1] != rank or up.shape[0] * down[0].numel() != weight.numel():
            raise InputError(
                f"{name}: {part}.{layer}: {tuple(up.shape)} by {tuple(down.shape)}, but the "
                f"pipeline's weight is {tuple(weight.shape)}; it was made for another model"
            )
        changes.append(change)
    if tensors:
        raise InputError(
            f"{name}: {len(tensors)} tensors aren't part of a LoRA, such as {next(iter(tensors))}; "
            "take the file out of the directory"
        )
    return changes


def as_peft(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors under peft's names."""
    from diffusers import utils

    spelling: Any = utils
    if any(key.endswith(DOWN) for key in tensors):
        return dict(tensors)
    if any(key.endswith(".lora.down.weight") for key in tensors):
        return dict(spelling.convert_unet_state_dict_to_peft(tensors))
    return dict(spelling.convert_state_dict_to_peft(tensors))


@torch.no_grad()
def changed_parts(pipe: object, changes: list[LoraChange]) -> dict[str, nn.Module]:
    """Return copies of the changed parts; they share all unchanged weights with the originals."""
    by_part: dict[str, list[LoraChange]] = defaultdict(list)
    for change in changes:
        by_part[change.part].append(change)
    found = {}
    for part, own in by_part.items():
        module = getattr(pipe, part)
        touched = {id(module.get_submodule(c.layer).weight) for c in own}
        kept: dict[int, Any] = {
            id(p): p for p in (*module.parameters(), *module.buffers()) if id(p) not in touched
        }
        copied = bare_copy(module, kept)
        for change in own:
            weight: Any = copied.get_submodule(change.layer).weight
            weight.add_(change.of(weight).to(weight))
        found[part] = copied
    return found


def bare_copy(module: nn.Module, shared: dict[int, Any]) -> nn.Module:
    """Copy a module without its stand-in, which would forward the copy's calls to the original."""
    standin = installed(module)
    made = copy.deepcopy(module, shared)
    if standin is not None:
        made.__dict__.pop("forward", None)
        if standin.before is not None:
            made.__dict__["forward"] = standin.before
    return made
