"""Denoisers whose weights are stored in eight bits, and widened while each layer runs."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from diffusers.hooks.hooks import HookRegistry, ModelHook
from diffusers.hooks.layerwise_casting import apply_layerwise_casting
from torch import nn

import maskfx
from maskfx.compiler.capture.capture import capture
from maskfx.compiler.capture.tracing.twin import NoTwin, Twin
from maskfx.ir.modules.part_hooks import acts_within, widened_type
from maskfx.pipelines.parts.stand_in import is_hooked
from maskfx.runtime.programs import program_cache
from maskfx.runtime.weights import WeightChange, Weights
from tests.factories.pipelines import PIPES, Steps, call_of, distance, latents, square, white

FLUX = "FluxInpaintPipeline"
NARROW = torch.float8_e4m3fn


def cast(module: Any, wide: torch.dtype = torch.float32) -> Any:
    apply_layerwise_casting(module, NARROW, wide, skip_modules_pattern=("norm",))
    return module


def layers() -> Any:
    torch.manual_seed(0)
    return cast(nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 4)))


def pipe_of(name: str) -> Any:
    pipe = PIPES[name].build()
    cast(pipe.transformer if hasattr(pipe, "transformer") else pipe.unet)
    return pipe


def test_a_twin_widens_its_weights_and_leaves_the_module_alone() -> None:
    module, x = layers(), torch.randn(3, 8)
    wanted = module(x)
    twin = Twin(module).module
    before = [p.data_ptr() for p in module.parameters()]
    assert torch.equal(twin(x), wanted)
    assert before == [p.data_ptr() for p in module.parameters()]
    exported = torch.export.export(twin, (x,), strict=False)
    assert torch.equal(exported.module()(x), wanted)
    assert {type(p) for p in module.parameters()} == {nn.Parameter}
    assert [p.dtype for p in module.parameters()].count(NARROW) == 4


def test_a_module_may_be_cast_as_one() -> None:
    torch.manual_seed(0)
    module: Any = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 4))
    whole: Any = apply_layerwise_casting
    whole(module, NARROW, torch.float32, skip_modules_pattern=None)
    x, weights = torch.randn(3, 8), Weights(module)
    held = [p.data for p in module.parameters()]
    wanted = module(x)
    assert {p.dtype for p in module.parameters()} == {NARROW}
    assert torch.equal(Twin(module).module(x), wanted)
    assert weights.change() is WeightChange.MOVED
    assert held


def test_a_twin_refuses_partial_functions_of_a_part() -> None:
    module: Any = nn.Sequential(nn.Linear(8, 16))
    module[0].forward = partial(nn.Linear.forward, module[0])
    with pytest.raises(NoTwin, match="partial function runs the Linear itself"):
        Twin(module)
    module[0].forward = partial(torch.nn.functional.relu, inplace=False)
    assert torch.equal(Twin(module).module(torch.ones(2)), torch.ones(2))


def test_weights_that_a_run_widens_and_narrows_are_the_same() -> None:
    module, x = layers(), torch.randn(3, 8)
    weights = Weights(module)
    known = weights.fingerprint()
    held = [p.data for p in module.parameters()]  # so that no address is used again
    module(x)
    assert weights.change() is WeightChange.MOVED
    assert weights.change() is WeightChange.NONE
    assert weights.fingerprint() == known
    assert not weights.overwritten()
    module(x)
    assert weights.change() is WeightChange.MOVED
    assert not weights.overwritten()
    module[0].weight.data = torch.ones(16, 8).to(NARROW)
    assert weights.change() is WeightChange.MOVED
    assert weights.overwritten()
    module[1].weight.data = torch.zeros(16)
    assert weights.change() is WeightChange.TENSORS
    with torch.no_grad():
        module[0].weight.copy_(torch.ones(16, 8))
    assert weights.change() is WeightChange.VALUES
    assert held


def test_hooks_that_only_cast_are_no_hooks() -> None:
    module = layers()
    assert widened_type(module[0]) is torch.float32
    assert widened_type(module[1]) is None
    assert not is_hooked(module)
    assert not acts_within(module)
    HookRegistry.check_if_exists_or_initialize(module[0]).register_hook(ModelHook(), "other")
    assert is_hooked(module)
    assert acts_within(module)
    assert widened_type(module[0]) is None


def test_a_denoiser_with_cast_weights_is_captured_once_and_narrows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kind, captured = PIPES[FLUX], list[object]()

    def counting(*given: Any, **named: Any) -> Any:
        captured.append(given)
        return capture(*given, **named)

    monkeypatch.setattr(program_cache, "capture", counting)
    wanted = latents(pipe_of(FLUX), **call_of(kind, 0, white()))
    pipe = maskfx.compile(pipe_of(FLUX), quality="all-steps")
    assert distance(latents(pipe, **call_of(kind, 0, white())), wanted) < 1e-4
    nothing = latents(pipe, **call_of(kind, 1, square(0, 0)))  # runs the module itself
    assert torch.equal(nothing, latents(pipe_of(FLUX), **call_of(kind, 1, square(0, 0))))
    steps = Steps(monkeypatch)
    latents(pipe, **call_of(kind, 2, square()))
    assert steps.kinds() == {"RecordStep", "EditStep"}
    assert distance(latents(pipe, **call_of(kind, 0, white())), wanted) < 1e-4
    assert len(captured) == 1
    weights = list(pipe.transformer.parameters())
    assert {type(p) for p in weights} == {nn.Parameter}
    assert [p.dtype for p in weights].count(NARROW) > 50
    assert "Nothing runs in full" in maskfx.explain(pipe)


def test_a_denoiser_with_other_hooks_runs_as_a_whole_and_stays_as_it_is() -> None:
    module = PIPES[FLUX].build().transformer
    given: dict[str, Any] = {}
    module.register_forward_pre_hook(lambda _, args, named: given.update(named), with_kwargs=True)
    pipe = PIPES[FLUX].build()
    pipe.register_modules(transformer=module)
    latents(pipe, **call_of(PIPES[FLUX]), mask_image=square())
    module._forward_pre_hooks.clear()
    part = module.transformer_blocks[0].attn
    HookRegistry.check_if_exists_or_initialize(part).register_hook(ModelHook(), "other")
    before = {name: p.clone() for name, p in module.named_parameters()}
    denoiser = maskfx.compile(module)
    given.pop("joint_attention_kwargs", None)
    output, _ = denoiser.record(**given)
    assert torch.equal(output[0], module(**given)[0])
    assert "hooks act on its parts" in denoiser.explain()
    assert all(torch.equal(p, before[name]) for name, p in module.named_parameters())


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "StableDiffusionInpaintPipeline",
        "QwenImageInpaintPipeline",
        "StableDiffusion3InpaintPipeline",
    ],
)
def test_other_denoisers_with_cast_weights(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = PIPES[name]
    wanted = latents(pipe_of(name), **call_of(kind, 0, white()))
    pipe = maskfx.compile(pipe_of(name), quality="all-steps")
    assert distance(latents(pipe, **call_of(kind, 0, white())), wanted) < 1e-4
    steps = Steps(monkeypatch)
    latents(pipe, **call_of(kind, 1, square()))
    assert steps.kinds() == {"EditStep"}
