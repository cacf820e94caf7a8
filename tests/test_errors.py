"""What users get to read when they hand over something wrong: the class, and what was seen."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import maskfx
from tests.factories import masks
from tests.factories.zoo import ZOO, Size
from tests.runtime.test_oracle import assert_near, denoiser_of, dense_run, module_of, record

NAME = "UNet2DModel-noattn"  # the quickest one; its timestep is a Python int
PACKED = "FluxTransformer2DModel"
SIZE = Size(1, 8, 16, 7)


def edit(
    mask: Any, kept: Any, name: str = NAME, seed: int = 0, size: Size = SIZE, **options: Any
) -> Any:
    inputs: Mapping[str, Any] = ZOO[name].inputs(size, seed)
    return denoiser_of(name).edit([maskfx.EditStep(inputs, mask, kept, **options)])[0]


def a_mask(size: Size = SIZE, name: str = NAME) -> Tensor:
    return masks.square(ZOO[name].mask_shape(size), 0)


def test_every_error_is_one_of_ours_and_a_value_error() -> None:
    for error in (maskfx.MaskError, maskfx.CacheError):
        assert issubclass(error, maskfx.InputError)
    assert issubclass(maskfx.InputError, maskfx.MaskfxError)
    assert issubclass(maskfx.InputError, ValueError)


@pytest.mark.parametrize("shape", [(16, 8), (8, 8), (128,), (1, 8, 16), (64, 128)])
def test_mask_of_another_shape(shape: tuple[int, ...]) -> None:
    kept = record(NAME, SIZE, 0)[1]
    seen = re.escape(str(shape))
    with pytest.raises(maskfx.MaskError, match=rf"mask.*\(8, 16\).*{seen}.*pooling"):
        edit(torch.ones(shape, dtype=torch.bool), kept)


def test_mask_of_a_packed_model_is_one_of_tokens() -> None:
    size = Size(1, 4, 6, 5)
    kept = record(PACKED, size, 0)[1]
    with pytest.raises(maskfx.MaskError, match=r"\(24,\).*\(4, 6\)"):
        edit(torch.ones(4, 6, dtype=torch.bool), kept, PACKED, size=size)


@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8])
def test_mask_that_is_not_boolean(dtype: torch.dtype) -> None:
    kept = record(NAME, SIZE, 0)[1]
    with pytest.raises(maskfx.MaskError, match=rf"boolean.*{dtype}.*mask > 0.5"):
        edit(a_mask().to(dtype), kept)


def test_mask_that_is_no_tensor() -> None:
    kept = record(NAME, SIZE, 0)[1]
    with pytest.raises(maskfx.MaskError, match="boolean tensor.*ndarray"):
        edit(a_mask().numpy(), kept)


@pytest.mark.parametrize("cache", [None, "template.safetensors", {}])
def test_cache_that_is_none(cache: Any) -> None:
    with pytest.raises(maskfx.CacheError, match=f"StepCache.*{type(cache).__name__}"):
        edit(a_mask(), cache)


def test_cache_of_another_model() -> None:
    other = record("UNet2DModel", SIZE, 0)[1]
    with pytest.raises(maskfx.CacheError, match="another model"):
        edit(a_mask(), other)


def test_cache_of_the_same_class_with_other_weights() -> None:
    """The graph is the same, the rows aren't: a fine-tune must not edit the base's recording."""
    module = ZOO[NAME].build()
    for parameter in module.parameters():
        parameter.mul_(1.5)
    kept = maskfx.compile(module).record(**ZOO[NAME].inputs(SIZE, 0))[1]
    with pytest.raises(maskfx.CacheError, match="another model"):
        edit(a_mask(), kept)


@pytest.mark.parametrize(
    ("size", "seen"),
    [
        (Size(1, 16, 16, 7), "y=16.*8"),
        (Size(1, 8, 8, 7), "x=8.*16"),
        (Size(2, 8, 16, 7), "batch=2.*1"),
    ],
)
def test_cache_of_another_size(size: Size, seen: str) -> None:
    kept = record(NAME, size, 0)[1]
    with pytest.raises(maskfx.CacheError, match=seen):
        edit(a_mask(), kept, any_step=True)


def test_cache_of_as_many_tokens_in_another_shape() -> None:
    """4 x 6 tokens aren't 6 x 4: only Python numbers distinguish them in this model."""
    name, wide, tall = "QwenImageTransformer2DModel", Size(1, 4, 6, 7), Size(1, 6, 4, 7)
    kept = record(name, wide, 0)[1]
    with pytest.raises(maskfx.CacheError):
        edit(a_mask(tall, name), kept, name, size=tall, any_step=True)


def test_cache_of_another_dtype() -> None:
    double = maskfx.compile(ZOO[NAME].build().double())
    inputs = ZOO[NAME].inputs(SIZE, 0)
    kept = double.record(**{**inputs, "sample": inputs["sample"].double()})[1]
    with pytest.raises(maskfx.CacheError, match="float64.*float32"):
        edit(a_mask(), kept)


@pytest.mark.parametrize("name", [NAME, PACKED])
def test_cache_of_another_step(name: str) -> None:
    size = ZOO[name].sizes[1]
    kept = record(name, size, 0)[1]
    mask = a_mask(size, name)
    with pytest.raises(maskfx.CacheError, match="timestep=.*any_step=True"):
        edit(mask, kept, name, seed=1, size=size)
    edit(mask, kept, name, seed=1, size=size, any_step=True)


def test_missing_argument() -> None:
    inputs = ZOO[NAME].inputs(SIZE, 0)
    del inputs["timestep"]
    with pytest.raises(maskfx.InputError, match="timestep"):
        denoiser_of(NAME).record(**inputs)


def test_missing_argument_of_a_new_denoiser() -> None:
    inputs = ZOO[NAME].inputs(SIZE, 0)
    del inputs["timestep"]
    with pytest.raises(maskfx.InputError, match="timestep"):
        maskfx.compile(module_of(NAME)).record(**inputs)


def test_argument_that_the_module_does_not_have() -> None:
    inputs = {**ZOO[NAME].inputs(SIZE, 0), "smaple": torch.zeros(1)}
    with pytest.raises(maskfx.InputError, match="smaple"):
        denoiser_of(NAME).record(**inputs)


def test_arguments_whose_sizes_disagree() -> None:
    name, size = "SD3Transformer2DModel-control", Size(2, 12, 8, 7)
    inputs = ZOO[name].inputs(size, 0)
    record(name, size, 0)
    inputs["encoder_hidden_states"] = inputs["encoder_hidden_states"][:1].repeat(3, 1, 1)
    with pytest.raises(maskfx.InputError, match="batch is 3, but 2"):
        denoiser_of(name).record(**inputs)


def test_another_structure_is_captured_anew() -> None:
    """With residuals and without: never the graph of the other, nor its cache."""
    name, size = "SD3Transformer2DModel-control", Size(1, 8, 12, 5)
    key = "block_controlnet_hidden_states"
    inputs = ZOO[name].inputs(size, 0)
    kept = record(name, size, 0)[1]
    plain = {k: v for k, v in inputs.items() if k != key}
    for changed in (plain, {**inputs, key: inputs[key][:1]}):
        assert_near(denoiser_of(name).batch([changed])[0], module_of(name)(**changed))
    with pytest.raises(maskfx.CacheError, match="argument structure"):
        denoiser_of(name).edit([maskfx.EditStep(plain, a_mask(size, name), kept)])
    assert_near(record(name, size, 0)[0], dense_run(name, size, 0))


def test_an_output_object_or_a_tuple_serve_one_another() -> None:
    inputs = {**ZOO[NAME].inputs(SIZE, 0), "return_dict": True}
    got, kept = denoiser_of(NAME).record(**inputs)
    expected = module_of(NAME)(**inputs)
    assert type(got) is type(expected)
    assert_near(got.sample, expected.sample)
    assert_near(edit(a_mask(), kept), dense_run(NAME, SIZE, 0))


def test_a_python_number_is_never_taken_from_an_earlier_call() -> None:
    case, size = ZOO["ControlNetModel"], Size(1, 8, 8, 7)
    denoiser, module = denoiser_of("ControlNetModel"), module_of("ControlNetModel")
    for scale in (0.75, 0.25):
        inputs = {**case.inputs(size, 0), "conditioning_scale": scale}
        assert_near(denoiser.batch([inputs])[0], module(**inputs))


@pytest.mark.parametrize("verb", ["step", "edit", "batch"])
def test_nothing_to_do(verb: str) -> None:
    with pytest.raises(maskfx.InputError, match="empty"):
        getattr(denoiser_of(NAME), verb)([])


@pytest.mark.parametrize("inputs", [None, [torch.zeros(1, 3, 8, 8)], torch.zeros(1, 3, 8, 8)])
def test_inputs_that_are_no_mapping(inputs: Any) -> None:
    with pytest.raises(maskfx.InputError, match=f"mapping.*{type(inputs).__name__}"):
        denoiser_of(NAME).batch([inputs])


def test_inputs_without_a_tensor() -> None:
    with pytest.raises(maskfx.MaskfxError, match="no tensor"):
        maskfx.compile(nn.Identity()).record(input=3)


def test_member_that_is_no_step() -> None:
    with pytest.raises(maskfx.InputError, match="EditStep"):
        denoiser_of(NAME).step([ZOO[NAME].inputs(SIZE, 0)])  # type: ignore[list-item]


@pytest.mark.parametrize("module", [None, "sd15", torch.relu, nn.Linear])
def test_compiling_what_is_no_module(module: Any) -> None:
    with pytest.raises(maskfx.InputError, match=r"torch.nn.Module.*"):
        maskfx.compile(module)


def test_unknown_mode() -> None:
    with pytest.raises(maskfx.InputError, match="mask_cash.*mask_cache"):
        maskfx.compile(nn.Identity(), mode="mask_cash")


def test_roles_of_no_argument() -> None:
    denoiser = maskfx.compile(module_of(NAME), roles={"smaple": ("batch", "", "y", "x")})
    with pytest.raises(maskfx.InputError, match="smaple.*sample"):
        denoiser.record(**ZOO[NAME].inputs(SIZE, 0))


def test_roles_that_do_not_fit() -> None:
    denoiser = maskfx.compile(module_of(NAME), roles={"sample": ("batch", "tokens", "")})
    with pytest.raises(
        maskfx.InputError,
        match="roles={'sample': .*}: 3 roles for a tensor of shape .*one role per dimension",
    ):
        denoiser.record(**ZOO[NAME].inputs(SIZE, 0))


def test_editing_needs_mask_and_cache_or_neither() -> None:
    kept = record(NAME, SIZE, 0)[1]
    for options in ({"mask": a_mask()}, {"cache": kept}):
        with (
            pytest.raises(
                maskfx.InputError, match=r"(mask=|cache=) without (mask=|cache=); pass both to edit"
            ),
            maskfx.editing(**options),
        ):
            pass


def test_editing_records_then_edits() -> None:
    denoiser, inputs = denoiser_of(NAME), ZOO[NAME].inputs(SIZE, 0)
    with maskfx.editing() as active:
        denoiser(**inputs)
    with maskfx.editing(mask=a_mask(), cache=active.recorded[0]):
        got = denoiser(**inputs)
    assert_near(got, dense_run(NAME, SIZE, 0))


def test_a_refused_member_leaves_the_denoiser_usable() -> None:
    kept = record(NAME, SIZE, 0)[1]
    with pytest.raises(maskfx.MaskError):
        edit(torch.ones(3, 3, dtype=torch.bool), kept)
    assert_near(edit(a_mask(), kept), dense_run(NAME, SIZE, 0))
