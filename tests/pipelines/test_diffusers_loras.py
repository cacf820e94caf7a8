"""`lora=` against diffusers' own `load_lora_weights`, which puts PEFT's layers into the model."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

import maskfx
from tests.factories.lora_files import is_query, lora_tensors
from tests.factories.pipelines import PIPES, anew, call_of, compiled, distance, latents, white

pytest.importorskip("peft")

UNET, FLUX, SD3 = (
    "StableDiffusionInpaintPipeline",
    "FluxInpaintPipeline",
    "StableDiffusion3InpaintPipeline",
)
METADATA = "lora_adapter_metadata"  # of PEFT's settings, as diffusers saves them
ALPHA = 3.0  # of rank 2: layers' products count 1.5 times


def is_attention(layer: str) -> bool:
    return layer.endswith((".to_q", ".to_k", ".to_out.0"))


def chosen(name: str) -> Callable[[str], bool]:
    return is_attention if name == UNET else is_query


def tensors_of(pipe: Any, name: str, seed: int) -> tuple[str, dict[str, Tensor]]:
    """The part with the denoiser, and updates of its layers under PEFT's names."""
    part = "unet" if name == UNET else "transformer"
    found = lora_tensors(part, getattr(pipe, part), seed=seed, scale=0.03, chosen=chosen(name))
    return part, {key: value.contiguous() for key, value in found.items()}


def write_peft(path: Path, pipe: Any, name: str) -> None:
    """As diffusers saves a model with PEFT's layers: PEFT's settings are in the metadata."""
    part, tensors = tensors_of(pipe, name, 1)
    settings: dict[str, Any] = {f"{part}.r": 2, f"{part}.lora_alpha": ALPHA}
    targets = sorted({key.split(".lora_")[0].removeprefix(f"{part}.") for key in tensors})
    settings[f"{part}.target_modules"] = targets
    save_file(tensors, path, {"format": "pt", METADATA: json.dumps(settings)})


def write_diffusers(path: Path, pipe: Any, name: str) -> None:
    """As diffusers saved attention processors: no settings, other names."""
    _, tensors = tensors_of(pipe, name, 2)
    names = {".lora_A.": ".lora.down.", ".lora_B.": ".lora.up."}
    save_file({renamed(key, names): value for key, value in tensors.items()}, path)


def write_kohya(path: Path, pipe: Any, name: str) -> None:
    """As kohya's scripts: dots are underscores, and each layer has its alpha."""
    part, tensors = tensors_of(pipe, name, 3)
    found: dict[str, Tensor] = {}
    for key, value in tensors.items():
        layer, _, kind = key.removeprefix(f"{part}.").partition(".lora_")
        flat = f"lora_{part}_" + layer.replace(".", "_")
        found[flat + {"A.weight": ".lora_down.weight", "B.weight": ".lora_up.weight"}[kind]] = value
        found[f"{flat}.alpha"] = torch.tensor(ALPHA)
    save_file(found, path)


def renamed(key: str, names: dict[str, str]) -> str:
    for one, other in names.items():
        key = key.replace(one, other)
    return key


WRITERS = {"peft": write_peft, "diffusers": write_diffusers, "kohya": write_kohya}
# the formats that diffusers' class of the pipeline reads
FORMATS = {UNET: list(WRITERS), FLUX: list(WRITERS), SD3: ["peft", "diffusers"]}


def theirs(name: str, paths: list[Path], weights: list[float], **call: Any) -> Tensor:
    """The latents of diffusers' pipeline with the files that it loaded itself."""
    pipe = PIPES[name].build()
    names = [path.stem for path in paths]
    for path in paths:
        pipe.load_lora_weights(str(path.parent), weight_name=path.name, adapter_name=path.stem)
    pipe.set_adapters(names, weights)
    return latents(pipe, **call)


def written(folder: Path, name: str) -> list[Path]:
    """A file of each format."""
    plain = PIPES[name].build()
    paths = [folder / f"{kind}.safetensors" for kind in FORMATS[name]]
    for path in paths:
        WRITERS[path.stem](path, plain, name)
    return paths


@pytest.mark.slow
@pytest.mark.parametrize("name", list(FORMATS))
def test_pictures_are_those_of_diffusers(name: str, tmp_path: Path) -> None:
    paths = written(tmp_path, name)
    own, plain = anew(name, compiled_pipe=compiled(name)), PIPES[name].build()

    def call() -> dict[str, Any]:
        return call_of(PIPES[name], 1, white())

    without, seen = latents(plain, **call()), []
    for path in paths:
        wanted = theirs(name, [path], [1.0], **call())
        assert distance(wanted, without) > 1e-2, path
        found = latents(own, **call(), lora=str(path))
        assert distance(found, wanted) < 1e-4, path
        seen.append(found)
    assert min(distance(*pair) for pair in combinations(seen, 2)) > 1e-3
    first, last = paths[0], paths[-1]
    wanted = theirs(name, [first, last], [0.6, 1.2], **call())
    both: list[Any] = [(str(first), 0.6), (str(last), 1.2)]
    found = latents(own, **call(), lora=both)
    assert distance(found, wanted) < 1e-4
    more: dict[str, Any] = {"output_type": "latent", "return_dict": False}
    with maskfx.Engine(ranks=2) as engine:
        found = engine.submit(own, **call(), **more, adapters=both).result()[0]
        (group,) = engine.runner.rank_groups()
        assert group.computed_here == group.failures == 0
    assert distance(found, wanted) < 1e-4
