"""Objects among the arguments of a denoiser: read ones narrow, written ones are the caller's."""

from typing import Any

import pytest
import torch
from diffusers.models.transformers.transformer_flux2 import (
    Flux2KVAttnProcessor,
    Flux2KVParallelSelfAttnProcessor,
)

import maskfx
from maskfx import DenseStep, EditStep, RecordStep
from tests.factories.masks import MASKS
from tests.factories.own_calls import HeldKeys, LayerKeys, with_keys
from tests.factories.own_cases import OWN
from tests.factories.zoo import ZOO, Draw, Size
from tests.runtime.test_oracle import assert_near

CASE = OWN["handed-keys"]
SIZE = CASE.sizes[0]


def written(seed: int) -> dict[str, object]:
    """Inputs whose object is filled by the call."""
    cache = HeldKeys("write", LayerKeys(), LayerKeys())
    return {**CASE.inputs(SIZE, seed), "cache": cache}


def held_by(inputs: dict[str, object]) -> HeldKeys:
    cache = inputs["cache"]
    assert isinstance(cache, HeldKeys)
    return cache


def check_written(inputs: dict[str, object], wanted: dict[str, object]) -> None:
    """One call has written into this object what the module writes."""
    found, own = held_by(inputs), held_by(wanted)
    assert found.written == own.written == 1
    for one, other in zip(found.layers, own.layers, strict=True):
        assert one.keys is not None
        assert other.keys is not None
        assert torch.equal(one.keys, other.keys)


@pytest.mark.parametrize("kind", ["dense", "recorded", "edited", "in a batch"])
@torch.no_grad()
def test_a_call_writes_once_into_the_object_of_its_caller(kind: str) -> None:
    module = CASE.build()
    denoiser = maskfx.compile(module)
    given, own = written(1), written(1)
    wanted = module(**own)
    mask = MASKS["stroke"](CASE.mask_shape(SIZE), 1)
    match kind:
        case "dense":
            found = denoiser.step([DenseStep(given)])[0]
        case "recorded":
            found, _ = denoiser.record(**given)
        case "edited":
            _, cache = denoiser.record(**written(1))
            found = denoiser.edit([EditStep(given, mask, cache)])[0]
        case _:
            other, apart = written(2), written(2)
            _, read = denoiser.record(**CASE.inputs(SIZE, 3))
            steps = [
                DenseStep(given),
                DenseStep(other),
                EditStep(CASE.inputs(SIZE, 3), mask, read),
            ]
            found, second, third = denoiser.step(steps)
            assert_near(second, module(**apart), "the other member")
            assert_near(third, module(**CASE.inputs(SIZE, 3)), "the edit")
            check_written(other, apart)
    assert_near(found, wanted, kind)
    check_written(given, own)
    assert "it writes into its argument cache" in denoiser.explain()


@torch.no_grad()
def test_keys_of_other_lengths_share_a_capture_and_a_step() -> None:
    module = CASE.build()
    denoiser = maskfx.compile(module)
    size = Size(batch=2, height=SIZE.height, width=SIZE.width, text=SIZE.text)
    longer = Size(batch=2, height=SIZE.height, width=SIZE.width, text=SIZE.text + 3)
    calls = [with_keys(one, seed) for seed, one in enumerate((size, longer))]
    caches = [cache for _, cache in denoiser.step([RecordStep(call) for call in calls])]
    masks = [MASKS["stroke"](CASE.mask_shape(SIZE), seed) for seed in range(2)]
    steps = [EditStep(c, m, k) for c, m, k in zip(calls, masks, caches, strict=True)]
    for found, call in zip(denoiser.edit(steps), calls, strict=True):
        assert_near(found, module(**call), "an edit")
    assert len(denoiser.compilations) == 1
    assert denoiser.programs


@torch.no_grad()
def test_an_edit_reads_the_keys_of_its_own_object() -> None:
    module = CASE.build()
    denoiser = maskfx.compile(module)
    call = with_keys(SIZE, 0)
    _, cache = denoiser.record(**call)
    other = {**call, "cache": with_keys(SIZE, 1)["cache"]}
    everywhere = torch.ones(CASE.mask_shape(SIZE), dtype=torch.bool)
    found = denoiser.edit([EditStep(other, everywhere, cache)])[0]
    assert_near(found, module(**other), "with other keys")


@pytest.mark.parametrize("references", [5, pytest.param(12, marks=pytest.mark.slow)])
@torch.no_grad()
def test_a_call_that_returns_the_keys_of_references_edits_on_rows(references: int) -> None:
    """The keys of the first tokens and the number of these are in an object of the result."""
    case = ZOO["Flux2Transformer2DModel-klein"]

    def inputs(size: Size, seed: int) -> dict[str, Any]:
        given = case.inputs(size, seed)
        first = Draw(seed + 90).normal(size.batch, references, given["hidden_states"].shape[-1])
        places = given["img_ids"][..., :references, :].clone()
        places[..., 0] += 10
        given["hidden_states"] = torch.cat([first, given["hidden_states"]], 1)
        given["img_ids"] = torch.cat([places, given["img_ids"]], -2)
        return {**given, "kv_cache_mode": "extract", "num_ref_tokens": references}

    def leaves(result: Any) -> tuple[list[torch.Tensor], list[object]]:
        picture, held = result
        layers = [*held.double_block_caches, *held.single_block_caches]
        found = [t for layer in layers for t in (layer.k_ref, layer.v_ref)]
        return [picture, *found], [type(held), held.num_ref_tokens]

    module: Any = case.build()
    for block in module.transformer_blocks:
        block.attn.set_processor(Flux2KVAttnProcessor())
    for block in module.single_transformer_blocks:
        block.attn.set_processor(Flux2KVParallelSelfAttnProcessor())
    denoiser, steps, wanted = maskfx.compile(module), [], []
    for seed, size in enumerate(case.sizes[:3]):
        _, cache = denoiser.record(**inputs(size, seed))
        mask = MASKS["random"]((references + size.height * size.width,), seed)
        mask[:references] = False
        steps.append(EditStep(inputs(size, seed), mask, cache))
        wanted.append(module(**inputs(size, seed)))
    for one, other in zip(denoiser.edit(steps), wanted, strict=True):
        (found, facts), (expected, said) = leaves(one), leaves(other)
        assert facts == said
        for tensor, right in zip(found, expected, strict=True):
            assert_near(tensor, right)
    assert all(one.program is not None and not one.reasons for one in denoiser.compilations)
