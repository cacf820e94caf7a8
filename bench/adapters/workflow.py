"""Katz's workflows: a pipeline with ControlNets, and requests with LoRA files on disk.

The models are Stable Diffusion 1.5 at fewer channels, with random weights, or the UNet that ships
with its trained ControlNet and others beside it. Knows nothing of timing.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import diffusers
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import maskfx
from bench import masks
from bench.engine.bed import build, smooth_picture
from maskfx.pipelines.adapters.lora_files import LoraTarget, converted
from maskfx.runtime.lora.adapter import WeightedLayers
from maskfx.runtime.lora.files import FileLimits

RATIO = 0.11  # masked share: the median of production masks
make: Any = diffusers  # its classes have no types


@dataclass(frozen=True)
class Scale:
    """Size of the models (None: those that ship), the picture's side, and the rank of LoRAs."""

    channels: int | None
    side: int
    rank: int


SCALES = {
    "tiny": Scale(32, 128, 8),
    "small": Scale(64, 256, 16),
    "half": Scale(160, 256, 32),
    "shipped": Scale(None, 256, 8),
}


@dataclass(frozen=True)
class Setting:
    """Numbers of ControlNets and of LoRAs, written as in 1C/2L."""

    nets: int
    loras: int

    @classmethod
    def of(cls, text: str) -> Setting:
        nets, loras = text.upper().split("/")
        if not (nets.endswith("C") and loras.endswith("L")):
            raise ValueError(f"{text!r}: give ControlNets and LoRAs as in 1C/2L")
        return cls(int(nets[:-1]), int(loras[:-1]))

    def __str__(self) -> str:
        return f"{self.nets}C/{self.loras}L"


def waken(module: nn.Module) -> nn.Module:
    """Give parameters that begin as zero random values, so that ControlNets change pictures."""
    for parameter in module.parameters():
        if not bool(parameter.any()):
            nn.init.normal_(parameter, std=0.02)
    return module.eval().requires_grad_(False)


def build_workflow(nets: int, scale: Scale) -> Any:
    """An inpainting pipeline of diffusers with this number of ControlNets."""
    if scale.channels is None:
        plain = maskfx.reference("unet", controlnet="edges")
        trained = nets_of(plain)[0]
        controls = [copy.deepcopy(trained) for _ in range(nets)]
        apart = controls[1:]
    else:
        plain = build(scale.channels)
        waken(plain.unet)
        torch.manual_seed(1)
        controls = [waken(make.ControlNetModel.from_unet(plain.unet)) for _ in range(nets)]
        apart = controls
    for net in apart:  # each has the same weights otherwise
        for parameter in net.parameters():
            parameter.data.add_(0.02 * torch.randn(parameter.shape) * parameter.std(correction=0))
    plain.vae.requires_grad_(False)
    return with_nets(plain, controls)


def with_nets(plain: Any, controls: list[nn.Module]) -> Any:
    """A pipeline's components with these ControlNets."""
    parts = {name: part for name, part in plain.components.items() if name != "controlnet"}
    if controls:
        kind = make.StableDiffusionControlNetInpaintPipeline
        parts["controlnet"] = controls if len(controls) > 1 else controls[0]
    else:
        kind = make.StableDiffusionInpaintPipeline
    pipe = kind(**parts, requires_safety_checker=False)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def nets_of(pipe: Any) -> list[nn.Module]:
    found = getattr(pipe, "controlnet", None)
    return [] if found is None else list(getattr(found, "nets", [found]))


def call_of(pipe: Any, scale: Scale, seed: int, steps: int, masked: bool = True) -> dict[str, Any]:
    """The arguments of one request; without a mask all sites are edited."""
    side, noise = scale.side, torch.Generator().manual_seed(seed)
    width = pipe.unet.config.cross_attention_dim
    grid = masks.make("square", side, side, RATIO) if masked else torch.ones(side, side)
    given = {
        "prompt_embeds": torch.randn(1, 77, width, generator=noise),
        "negative_prompt_embeds": torch.zeros(1, 77, width),
        "image": smooth_picture(side, 0),
        "mask_image": Image.fromarray((grid * 255).byte().numpy()),
        "height": side,
        "width": side,
        "num_inference_steps": steps,
        "strength": 1.0,
        "generator": noise,
    }
    if nets := len(nets_of(pipe)):
        control = [smooth_picture(side, 10 + i) for i in range(nets)]
        given["control_image"] = control if nets > 1 else control[0]
    return given


# LoRA files.


def write_loras(folder: Path, unet: nn.Module, count: int, rank: int) -> list[Path]:
    """Files with random updates of all attention layers, each a tenth as long as the weight."""
    paths = []
    for seed in range(count):
        draw, tensors = torch.Generator().manual_seed(seed), dict[str, Tensor]()
        for layer, own in unet.named_modules():
            if isinstance(own, nn.Linear) and ".attn" in layer:
                down = torch.randn(rank, own.in_features, generator=draw)
                up = torch.randn(own.out_features, rank, generator=draw)
                length = 0.1 * float(own.weight.norm()) / float(down.norm() * up.norm())
                tensors[f"unet.{layer}.lora_A.weight"] = down
                tensors[f"unet.{layer}.lora_B.weight"] = length * rank**0.5 * up
        paths.append(folder / f"lora-{seed}.safetensors")
        save_file(tensors, paths[-1])
    return paths


def read_lora(pipe: Any, path: Path) -> WeightedLayers:
    """Read and convert a file, as maskfx does."""
    adapter = converted(path.name, load_file(path), {}, LoraTarget.of(pipe), FileLimits())
    return WeightedLayers(adapter.parts["unet"], 1.0, adapter.digest)


def save_nets(folder: Path, nets: Sequence[nn.Module]) -> list[Path]:
    """Write ControlNets as diffusers does."""
    paths = [folder / f"net-{number}" for number in range(len(nets))]
    for net, path in zip(nets, paths, strict=True):
        copy.copy(net).save_pretrained(path)  # type: ignore[operator]
    return paths


def load_net(path: Path) -> nn.Module:
    found: nn.Module = make.ControlNetModel.from_pretrained(path)
    return found.eval()
