"""Files with full differences: what the formats become, what is refused, and whole calls."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save, save_file
from torch import Tensor, nn

import maskfx
from maskfx.errors import InputError
from maskfx.pipelines.adapters.layer_spellings import ldm_names
from maskfx.pipelines.adapters.lora_files import LoraTarget, converted
from maskfx.runtime.lora.adapter import Adapter, Difference, LowRank
from maskfx.runtime.lora.files import FileLimits, parse
from maskfx.runtime.lora.registry import Adapters
from tests.factories.lora import difference_of, differences_of, merge
from tests.factories.pipelines import (
    PIPES,
    anew,
    call_of,
    distance,
    latents,
    pipe_of,
    plain,
    white,
)
from tests.factories.small_unets import sd

LIMITS = FileLimits()
INPAINT = "StableDiffusionInpaintPipeline"  # its UNet takes four channels
FLUX = "FluxInpaintPipeline"
QUERY = "down_blocks.0.attentions.0.transformer_blocks.0.attn1.to_q"
CONV = "down_blocks.0.resnets.0.conv1"
NORM = "down_blocks.0.resnets.0.norm1"


@pytest.fixture(scope="module")
def target() -> LoraTarget:
    return LoraTarget.of(PIPES[INPAINT].build())


def adapter_of(tensors: dict[str, Tensor], target: LoraTarget, name: str = "a") -> Adapter:
    parsed, found = parse(name, save(tensors), LIMITS)
    return converted(name, parsed, found, target, LIMITS)


def change(target: LoraTarget, name: str, seed: int = 1) -> Tensor:
    shape = target.parameters["unet"][name]
    return 0.1 * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def whole_state(module: nn.Module, seed: int = 1, gain: float = 0.1) -> dict[str, Tensor]:
    """Differences of all parameters, by their names in the module."""
    changes = differences_of(module, seed, gain=gain)
    return {
        f"{layer}.{name}": value
        for layer, own in changes.items()
        for name in ("weight", "bias")
        if (value := getattr(own, name)) is not None
    }


SPELLINGS = {
    "diffusers": (f"unet.{CONV}", f"unet.{QUERY}"),
    "plain": (CONV, QUERY),
    "kohya": (f"lora_unet_{CONV}".replace(".", "_"), f"lora_unet_{QUERY}".replace(".", "_")),
    "comfy": (
        "diffusion_model.input_blocks.1.0.in_layers.2",
        "diffusion_model.input_blocks.1.1.transformer_blocks.0.attn1.to_q",
    ),
    "kohya ldm": (
        "lora_unet_input_blocks_1_0_in_layers_2",
        "lora_unet_input_blocks_1_1_transformer_blocks_0_attn1_to_q",
    ),
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_lycoris_and_comfy_names(spelling: str, target: LoraTarget) -> None:
    conv, query = SPELLINGS[spelling]
    weight, bias = change(target, f"{CONV}.weight"), change(target, f"{CONV}.bias")
    other = change(target, f"{QUERY}.weight")
    tensors = {f"{conv}.diff": weight, f"{conv}.diff_b": bias, f"{query}.diff": other}
    layers = adapter_of(tensors | {f"{query}.alpha": torch.tensor(4.0)}, target).parts["unet"]
    assert set(layers) == {CONV, QUERY}
    found, second = layers[CONV], layers[QUERY]
    assert isinstance(found, Difference)
    assert isinstance(second, Difference)
    assert found.weight is not None
    assert torch.equal(found.weight, weight)
    assert found.bias is not None
    assert torch.equal(found.bias, bias)
    assert second.bias is None


def test_low_rank_updates_with_differences_of_biases_and_norms(target: LoraTarget) -> None:
    flat = f"lora_unet_{CONV}".replace(".", "_")
    down, up = (
        torch.randn(2, *target.layers["unet"][CONV][1:]),
        torch.randn(target.layers["unet"][CONV][0], 2, 1, 1),
    )
    bias, norm = change(target, f"{CONV}.bias"), change(target, f"{NORM}.weight")
    tensors = {
        f"{flat}.lora_down.weight": down,
        f"{flat}.lora_up.weight": up,
        f"{flat}.alpha": torch.tensor(1.0),
        f"{flat}.diff_b": bias,
        f"lora_unet_{NORM}".replace(".", "_") + ".w_norm": norm,
    }
    layers = adapter_of(tensors, target).parts["unet"]
    found, other = layers[CONV], layers[NORM]
    assert isinstance(found, LowRank)
    assert found.scale == 0.5
    assert found.bias is not None
    assert torch.equal(found.bias, bias)
    assert isinstance(other, Difference)
    assert other.weight is not None
    assert torch.equal(other.weight, norm)
    without = {key: value for key, value in tensors.items() if not key.endswith("diff_b")}
    assert adapter_of(without, target).digest != adapter_of(tensors, target).digest


def test_the_first_code_names_are_those_that_diffusers_converts() -> None:
    from diffusers.loaders.single_file_utils import convert_ldm_unet_checkpoint

    for kind in (INPAINT, "StableDiffusionXLInpaintPipeline"):
        unet = PIPES[kind].build().unet
        names = ldm_names({n.rpartition(".")[0] for n in unet.state_dict()})
        state = {
            f"model.diffusion_model.{names[key.rpartition('.')[0]]}.{key.rpartition('.')[2]}": value
            for key, value in unet.state_dict().items()
        }
        back = convert_ldm_unet_checkpoint(state, unet.config)
        for key, value in unet.state_dict().items():
            assert torch.equal(back[key], value), key


# Whole state dicts, as IC-Light's.


def test_a_file_of_plain_names_holds_differences_or_is_refused(target: LoraTarget) -> None:
    unet = PIPES[INPAINT].build().unet
    state = whole_state(unet)
    layers = adapter_of(state, target).parts["unet"]
    assert len(layers) == len({name.rpartition(".")[0] for name in state})
    with pytest.raises(InputError, match="weights of a model and not differences"):
        adapter_of(dict(unet.state_dict()), target)
    with pytest.raises(InputError, match="^a: .*"):
        adapter_of(state | {"elsewhere.weight": torch.ones(2)}, target)


def test_a_widened_first_convolution_needs_its_channels(target: LoraTarget) -> None:
    wide = LoraTarget.of(PIPES[f"{INPAINT}-9"].build())
    weight = change(wide, "conv_in.weight")
    assert weight.shape[1] == 9
    assert set(adapter_of({"conv_in.weight": weight}, wide).parts["unet"]) == {"conv_in"}
    message = "unet.conv_in.weight: a difference of .* it is for a layer with 9 input channels"
    with pytest.raises(InputError, match=message):
        adapter_of({"conv_in.weight": weight}, target)
    head = torch.randn(weight.shape[0], 5, 3, 3)
    found = adapter_of({"head": head}, wide).parts["unet"]["conv_in"]
    assert isinstance(found, Difference)
    assert found.weight is not None
    assert torch.equal(found.weight[:, 4:], head)
    assert not found.weight[:, :4].any()
    with pytest.raises(InputError, match="a first convolution with 9 input channels"):
        adapter_of({"head": head}, target)


# Fooocus's patches.


def compressed(state: Mapping[str, Tensor]) -> dict[str, tuple[Tensor, Tensor, Tensor]]:
    found = {}
    for key, value in state.items():
        low, high = value.min(), value.max()
        steps = ((value - low) / (high - low).clamp(min=1e-9) * 255).round().to(torch.uint8)
        found[key] = steps, low, high
    return found


def patch_file(path: Path, unet: nn.Module) -> Path:
    names = ldm_names({name.rpartition(".")[0] for name in unet.state_dict()})
    state = {
        f"diffusion_model.{names[key.rpartition('.')[0]]}.{key.rpartition('.')[2]}": value
        for key, value in whole_state(unet, 3).items()
        if value.dim() > 1
    }
    torch.save(compressed(state), path)
    return path


def test_patches_of_fooocus(tmp_path: Path, target: LoraTarget) -> None:
    unet = PIPES[INPAINT].build().unet
    path, wanted = patch_file(tmp_path / "inpaint.patch", unet), whole_state(unet, 3)
    tensors, settings = parse(path.name, path.read_bytes(), LIMITS)
    layers = converted(path.name, tensors, settings, target, LIMITS).parts["unet"]
    found = layers[CONV]
    assert isinstance(found, Difference)
    assert found.weight is not None
    assert distance(found.weight, wanted[f"{CONV}.weight"]) < 0.02  # of 256 levels


class Code:
    def __reduce__(self) -> tuple[Any, Any]:
        return print, ("run",)


def test_other_pickles_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(InputError, match="a.patch: not a file of tensors"):
        parse("a.patch", pickle.dumps({"a": Code()}), LIMITS)
    assert "run" not in capsys.readouterr().out


@pytest.mark.parametrize("value", [torch.ones(2), (torch.ones(2), torch.ones(1), torch.ones(1))])
def test_patches_of_another_kind_are_refused(value: Any, tmp_path: Path) -> None:
    torch.save({"x.weight": value}, tmp_path / "a.patch")
    with pytest.raises(InputError, match="isn't bytes with their least and greatest"):
        parse("a.patch", (tmp_path / "a.patch").read_bytes(), LIMITS)


@pytest.mark.parametrize(
    ("key", "match"),
    [
        (f"lora_unet_{CONV}.set_weight", "replaces the model's"),
        (f"unet.{CONV}.diff", "the pipeline's parameter is"),
        (f"unet.{CONV}.nothing", "."),
    ],
)
def test_what_is_refused_by_name(key: str, match: str, target: LoraTarget) -> None:
    with pytest.raises(InputError, match=f"^a: .*{match}"):
        adapter_of({key: torch.ones(3)}, target)


# Calls.


def test_a_call_has_the_differences_of_its_file(tmp_path: Path) -> None:
    """As diffusers has them with a state dict that was changed by hand."""
    pipe, original, reference = (pipe_of(INPAINT, sd) for _ in range(3))
    pipe = maskfx.compile(pipe, quality="all-steps")
    path = patch_file(tmp_path / "inpaint.patch", reference.unet)
    tensors, settings = parse(path.name, path.read_bytes(), LIMITS)
    layers = converted("a", tensors, settings, LoraTarget.of(reference), LIMITS).parts["unet"]
    state = reference.unet.state_dict()
    for layer, own in layers.items():
        assert isinstance(own, Difference)
        assert own.weight is not None
        state[f"{layer}.weight"] += 0.7 * own.weight
    reference.unet.load_state_dict(state)
    wanted = latents(reference, **call_of(PIPES[INPAINT], 1, white()))
    found = latents(pipe, **call_of(PIPES[INPAINT], 1, white()), lora=[(str(path), 0.7)])
    assert distance(latents(original, **call_of(PIPES[INPAINT], 1, white())), wanted) > 0.01
    assert distance(found, wanted) < 1e-4


def test_a_transformers_call_has_the_differences_of_its_file(tmp_path: Path) -> None:
    pipe, reference = anew(FLUX), PIPES[FLUX].build()
    save_file(whole_state(reference.transformer, 2), tmp_path / "light.safetensors")
    adapters = Adapters(tmp_path)
    assert adapters.names() == ["light"]
    merge(reference.transformer, [difference_of(reference.transformer, 2, gain=0.1)])
    wanted = latents(reference, **call_of(PIPES[FLUX], 1, white()))
    path = str(tmp_path / "light.safetensors")
    found = latents(pipe, **call_of(PIPES[FLUX], 1, white()), lora=path)
    assert distance(latents(plain(FLUX), **call_of(PIPES[FLUX], 1, white())), wanted) > 0.01
    assert distance(found, wanted) < 1e-4
