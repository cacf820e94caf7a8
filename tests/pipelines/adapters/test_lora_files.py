"""LoRA files: what the formats become, and what is refused and why."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save, save_file
from torch import Tensor, nn
from transformers import CLIPTextConfig, CLIPTextModel

from maskfx.errors import InputError
from maskfx.pipelines.adapters.lora_files import LoraTarget, converted
from maskfx.runtime.lora import files
from maskfx.runtime.lora.adapter import Adapter
from maskfx.runtime.lora.files import (
    METADATA,
    AdapterFile,
    FileLimits,
    parse,
    read_adapter_file,
    targets_of,
)
from tests.factories.lora import low_rank
from tests.factories.lora_files import lora_tensors
from tests.factories.pipelines import PIPES

LIMITS = FileLimits(nbytes=1 << 20, tensors=100, rank=8)
QUERY = "down_blocks.0.attentions.0.transformer_blocks.0.attn1.to_q"
CONV = "down_blocks.0.resnets.0.conv1"
TEXT = "encoder.layers.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def unet() -> LoraTarget:
    pipe = PIPES["StableDiffusionInpaintPipeline"].build()
    sizes: dict[str, Any] = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 1}
    pipe.text_encoder = CLIPTextModel(CLIPTextConfig(**sizes, num_hidden_layers=1, vocab_size=9))
    return LoraTarget.of(pipe)


@pytest.fixture(scope="module")
def flux() -> LoraTarget:
    return LoraTarget.of(PIPES["FluxInpaintPipeline"].build())


def adapter_of(tensors: dict[str, Tensor], target: LoraTarget, **settings: Any) -> Adapter:
    metadata = {METADATA: json.dumps(settings)} if settings else None
    parsed, found = parse("a", save(tensors, metadata), LIMITS)
    return converted("a", parsed, found, target, LIMITS)


def pair(target: LoraTarget, part: str, layer: str, rank: int = 2) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(1)
    outputs, *inputs = target.layers[part][layer]
    ones = [1] * (len(inputs) - 1)
    down = torch.randn(rank, *inputs, generator=draw)
    return down, torch.randn(outputs, rank, *ones, generator=draw)


def test_convolutions_of_any_dimension_are_layers() -> None:
    module = nn.ModuleDict({"line": nn.Conv1d(4, 6, 3), "film": nn.Conv3d(4, 6, (1, 2, 2))})
    module["each"] = nn.Conv3d(4, 4, 3, groups=4)  # of one channel each
    targets = targets_of(module)
    assert targets == {"line": (6, 4, 3), "film": (6, 4, 1, 2, 2)}
    tensors = lora_tensors("", module, chosen=lambda layer: layer in targets)
    own = {"": {key.removeprefix("."): value for key, value in tensors.items()}}
    found = files.adapter_of("a", own, {}, {}, {"": targets}, LIMITS)
    assert low_rank(found.parts[""]["film"]).down.shape == (2, 4, 1, 2, 2)


def test_kohya_and_diffusers_names_give_the_same_adapter(unet: LoraTarget) -> None:
    kohya, diffusers = dict[str, Tensor](), dict[str, Tensor]()
    names = {
        "lora_unet_down_blocks_0_attentions_0_transformer_blocks_0_attn1_to_q": ("unet", QUERY),
        "lora_unet_down_blocks_0_resnets_0_conv1": ("unet", CONV),
        "lora_te_text_model_encoder_layers_0_self_attn_q_proj": ("text_encoder", TEXT),
    }
    for name, (part, layer) in names.items():
        down, up = pair(unet, part, layer)
        kohya |= {f"{name}.lora_down.weight": down, f"{name}.lora_up.weight": up}
        kohya[f"{name}.alpha"] = torch.tensor(1.0)
        diffusers |= {f"{part}.{layer}.lora.down.weight": down}
        diffusers |= {f"{part}.{layer}.lora.up.weight": up}
    one = adapter_of(kohya, unet)
    assert {part: set(layers) for part, layers in one.parts.items()} == {
        "unet": {QUERY, CONV},
        "text_encoder": {TEXT},
    }
    down, up = pair(unet, "unet", CONV)
    update = low_rank(one.parts["unet"][CONV])
    assert torch.equal(update.down, down)
    assert torch.equal(update.up, up.flatten(1))
    assert update.scale == 0.5
    scaled = {f"{part}.lora_alpha": 1 for part in ("unet", "text_encoder")}
    assert adapter_of(diffusers, unet, **scaled).digest == one.digest
    assert adapter_of(diffusers, unet).digest != one.digest, "scales are part of the digest"


def test_xlabs_files_split_the_joint_projection(flux: LoraTarget) -> None:
    width = flux.layers["transformer"]["transformer_blocks.0.attn.to_q"][1]
    name = "double_blocks.0.processor.qkv_lora1"
    up = torch.randn(3 * width, 2)
    tensors = {f"{name}.down.weight": torch.randn(2, width), f"{name}.up.weight": up}
    layers = adapter_of(tensors, flux).parts["transformer"]
    prefix = "transformer_blocks.0.attn.to_"
    assert {prefix + kind for kind in "qkv"} == set(layers)
    assert torch.equal(torch.cat([low_rank(layers[prefix + kind]).up for kind in "qkv"]), up)


@pytest.mark.parametrize(
    ("settings", "scale"),
    [
        ({}, 1.0),
        ({"lora_alpha": 3}, 1.5),
        ({"lora_alpha": 8, "use_rslora": True}, 8 / 2**0.5),
        ({"lora_alpha": 3, "alpha_pattern": {"attn1.to_q": 1}}, 0.5),
        ({"lora_alpha": 3, "alpha_pattern": {"to_k": 1}}, 1.5),
    ],
)
def test_scales_follow_pefts_settings(
    settings: dict[str, Any], scale: float, unet: LoraTarget
) -> None:
    down, up = pair(unet, "unet", QUERY)
    tensors = {f"unet.{QUERY}.lora_A.weight": down, f"unet.{QUERY}.lora_B.weight": up}
    own = {f"unet.{name}": value for name, value in settings.items()}
    found = low_rank(adapter_of(tensors, unet, **own).parts["unet"][QUERY])
    assert found.scale == pytest.approx(scale)


def bad(target: LoraTarget, kind: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    down, up = pair(target, "unet", QUERY)
    key = f"unet.{QUERY}"
    good = {f"{key}.lora_A.weight": down, f"{key}.lora_B.weight": up}
    match kind:
        case "dora":
            return good | {f"{key}.lora_magnitude_vector.weight": torch.ones(4)}, {}
        case "dora setting":
            return good, {"unet.use_dora": True}
        case "loha":
            return {f"{key}.hada_w1_a": down}, {}
        case "part":
            return {k.replace("unet", "prior"): v for k, v in good.items()}, {}
        case "layer":
            return {k.replace("to_q", "to_x"): v for k, v in good.items()}, {}
        case "half":
            return {f"{key}.lora_A.weight": down}, {}
        case "shape":
            return good | {f"{key}.lora_A.weight": down[:, :-1].clone()}, {}
        case "rank":
            down, up = pair(target, "unet", QUERY, rank=9)
            return {f"{key}.lora_A.weight": down, f"{key}.lora_B.weight": up}, {}
        case "nan":
            return good | {f"{key}.lora_A.weight": down * float("nan")}, {}
        case "unknown":
            return good | {f"{key}.bias": up.clone()}, {}
        case "integers":
            return good | {f"{key}.lora_A.weight": down.int()}, {}
    return {f"t{i}": torch.ones(1) for i in range(101)}, {}


@pytest.mark.parametrize(
    ("kind", "match"),
    [
        ("dora", r"DoRA \(.*magnitude.*supported; use another file"),
        ("dora setting", "use_dora"),
        ("loha", "LoHa"),
        ("part", "changes 'prior'.*another model"),
        ("layer", "to_x: the pipeline has no such"),
        ("half", "one of its two matrices is missing"),
        ("shape", "the pipeline's weight is"),
        ("rank", "rank 9, and a LoRA may have 8"),
        ("nan", "the file is damaged"),
        ("unknown", "1 tensors aren't part of a LoRA"),
        ("integers", "floating-point"),
        ("many", "101 tensors"),
    ],
)
def test_unfit_files_are_refused_by_name(kind: str, match: str, unet: LoraTarget) -> None:
    tensors, settings = bad(unet, kind)
    with pytest.raises(InputError, match=f"^a: .*{match}"):
        adapter_of(tensors, unet, **settings)


def test_damaged_changed_and_oversized_files(tmp_path: Path, unet: LoraTarget) -> None:
    path = tmp_path / "a.safetensors"
    pipe = PIPES["StableDiffusionInpaintPipeline"].build()
    save_file(lora_tensors("unet", pipe.unet), path)
    file = AdapterFile.of(path)
    whole = path.read_bytes()
    read_adapter_file(file, LIMITS)
    with pytest.raises(InputError, match="is it a whole model"):
        read_adapter_file(file, FileLimits(nbytes=10))
    for size in (0, 4, 9, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(InputError, match="not a whole safetensors file .*; copy it again"):
            read_adapter_file(AdapterFile.of(path), LIMITS)
        with pytest.raises(InputError, match="register it again"):
            read_adapter_file(file, LIMITS)
    path.write_bytes(whole)  # the same content, written again
    with pytest.raises(InputError, match="register it again"):
        read_adapter_file(AdapterFile(file.path, file.size, file.changed - 1), LIMITS)
    path.unlink()
    with pytest.raises(InputError, match="No such file or directory.*put it back"):
        read_adapter_file(file, LIMITS)
    (tmp_path / "b.pt").write_bytes(whole)
    with pytest.raises(InputError, match="a pickle can run code"):
        AdapterFile.of(tmp_path / "b.pt")
