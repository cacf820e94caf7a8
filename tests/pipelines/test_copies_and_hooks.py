"""What users do with a compiled pipeline's modules: copy them, pickle them, hang hooks on them."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from accelerate.hooks import (  # type: ignore[import-untyped,unused-ignore]
    CpuOffload,
    add_hook_to_module,
    remove_hook_from_module,
)
from diffusers.hooks.hooks import HookRegistry, ModelHook
from torch import Tensor, nn

import maskfx
from maskfx.pipelines.compile import is_compiled
from maskfx.pipelines.parts.stand_in import (
    MethodCall,
    computing,
    find_denoisers,
    install,
    installed,
    remove,
    running,
)
from maskfx.runtime.transport.sendable import bare
from tests.factories.pipelines import (
    PIPES,
    STEPS,
    anew,
    call_of,
    distance,
    latents,
    plain,
    white,
)

FLUX, TEXT = "FluxInpaintPipeline", "FluxPipeline"


class Denoiser(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor, timestep: int) -> Tensor:
        return self.weight * x * timestep


# Copies.


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda it: pickle.loads(pickle.dumps(it))], ids=["deep", "pickle"]
)
def test_a_copy_of_a_denoiser_computes_by_itself(copied: Callable[[Any], Any]):
    module, x = Denoiser(), torch.ones(1)
    install(module)
    install(module, "float")
    made = copied(module)
    made.weight = nn.Parameter(torch.full((1,), 5.0))
    assert made(x, 2) == 10
    assert module(x, 2) == 2
    assert not [name for name in vars(made) if installed(made, name)]
    remove(module)
    assert installed(module, "__getstate__") is not None
    remove(module, "float")
    assert vars(module).keys() == vars(Denoiser()).keys()


def test_a_copy_has_the_method_that_stood_there_before():
    module, x = Denoiser(), torch.ones(1)
    before = module.forward = lambda x, timestep: x - timestep  # type: ignore[method-assign]
    install(module)
    assert vars(copy.copy(module))["forward"] is before
    assert copy.deepcopy(module)(x, 3) == -2


def test_a_module_that_decides_what_its_copies_have_still_does():
    class Counted(Denoiser):
        def __getstate__(self) -> Any:
            return 7, vars(self).keys()

    module = Counted()
    install(module)
    assert module.__getstate__()[0] == 7


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda it: pickle.loads(pickle.dumps(it))], ids=["deep", "pickle"]
)
def test_a_copied_pipeline_is_as_it_was_before(copied: Callable[[Any], Any]):
    pipe = maskfx.compile(PIPES[TEXT].build(), quality="all-steps")
    given = call_of(PIPES[TEXT])
    found = latents(pipe, **given)
    made = copied(pipe)
    assert type(made) is type(plain(TEXT))
    assert is_compiled(pipe)
    assert not is_compiled(made)
    assert made.transformer is not pipe.transformer
    assert torch.equal(latents(made, **call_of(PIPES[TEXT])), found)
    made.transformer.proj_out.weight.data.zero_()
    assert torch.equal(latents(pipe, **call_of(PIPES[TEXT])), found)
    maskfx.decompile(maskfx.compile(made))


# Hooks.


def times(factor: float) -> Callable[..., Any]:
    def hook(module: object, inputs: object, output: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return tuple(factor * value for value in output)

    return hook


def before(module: object, args: tuple[Any, ...], given: dict[str, Any]) -> Any:
    return args, {**given, "hidden_states": 1.5 * given["hidden_states"]}


def hang(net: Any) -> list[Any]:
    """Hang hooks on a denoiser: both change its results."""
    return [
        net.register_forward_hook(times(1.25)),
        net.register_forward_pre_hook(before, with_kwargs=True),
    ]


def with_hooks(pipe: Any, hung: Callable[[Any], list[Any]], **given: Any) -> Tensor:
    handles = hung(pipe.transformer)
    try:
        return latents(pipe, **given)
    finally:
        for handle in handles:
            handle.remove()


def test_a_denoisers_own_hooks_act_once_per_call():
    calls = list[object]()
    pipe = anew(TEXT)
    wanted = with_hooks(plain(TEXT), hang, **call_of(PIPES[TEXT]))
    assert torch.equal(with_hooks(pipe, hang, **call_of(PIPES[TEXT])), wanted)
    handle = pipe.transformer.register_forward_hook(lambda *_: calls.append(None))
    latents(pipe, **call_of(PIPES[TEXT]))
    handle.remove()
    assert len(calls) == STEPS


def test_a_denoisers_own_hooks_act_in_edits():
    given = call_of(PIPES[FLUX], 0, white())
    wanted = with_hooks(plain(FLUX), hang, **call_of(PIPES[FLUX], 0, white()))
    assert distance(with_hooks(anew(FLUX), hang, **given), wanted) < 1e-4


@pytest.mark.slow
def test_hooks_of_a_part_that_come_after_a_capture_act_in_edits():
    pipe = anew(FLUX)

    def on_a_block(factor: float) -> Callable[[Any], list[Any]]:
        return lambda net: [net.transformer_blocks[0].register_forward_hook(times(factor))]

    usual = latents(pipe, **call_of(PIPES[FLUX], 0, white()))
    for factor in (1.5, 2.0):
        wanted = with_hooks(plain(FLUX), on_a_block(factor), **call_of(PIPES[FLUX], 0, white()))
        found = with_hooks(pipe, on_a_block(factor), **call_of(PIPES[FLUX], 0, white()))
        assert distance(found, wanted) < 1e-4
        assert distance(found, usual) > 1e-2
    assert distance(latents(pipe, **call_of(PIPES[FLUX], 0, white())), usual) < 1e-4


def test_hooks_of_a_denoiser_within_another_act():
    outer, inner, calls = Denoiser(), Denoiser(), list[object]()
    for module in (outer, inner):
        install(module)
        module.register_forward_hook(lambda *_: calls.append(None))
    with computing([outer]):
        outer(torch.ones(1), 1)
        assert not calls
        inner(torch.ones(1), 1)
    assert len(calls) == 1


def test_a_denoiser_is_sent_to_another_process_without_its_own_hooks():
    module: Any = nn.Sequential(nn.Identity())
    for part in (module, module[0]):
        part.register_forward_hook(print)
        part.register_forward_pre_hook(print)
    kept: Any = bare(module)
    left: Any = bare(module, hooks=False)

    def hooks(of: Any) -> list[int]:
        return [len(of._forward_hooks), len(of._forward_pre_hooks)]

    assert hooks(kept) == hooks(module) == [1, 1]
    assert hooks(left) == [0, 0]
    assert hooks(left[0]) == [1, 1]


# torch.compile.


class Caller:
    """A run; it notes whether its calls are traced."""

    def __init__(self) -> None:
        self.traced = list[bool]()

    def handles(self, module: nn.Module) -> bool:
        return True

    def call(self, module: nn.Module, inputs: dict[str, Any]) -> Any:
        self.traced.append(torch.compiler.is_dynamo_compiling())
        return inputs["x"] - 1

    def codes(self, autoencoder: nn.Module, method: str) -> bool:
        return True

    def code(self, part: nn.Module, method: str, call: MethodCall) -> Any:
        self.traced.append(torch.compiler.is_dynamo_compiling())


def test_a_denoiser_that_torch_compiles_dispatches_without_being_traced():
    module, run, x = Denoiser(), Caller(), torch.full((1,), 3.0)
    install(module)
    own: Any = torch.compile(module, backend="eager")
    assert own(x, 2) == 6
    with running(run):
        assert own(x, 2) == 2
        assert module(x, 2) == 2
    assert own(x, 5) == 15
    assert run.traced == [False, False]


def test_a_denoiser_that_torch_compile_has_wrapped_is_found():
    module = Denoiser()
    assert find_denoisers({"unet": torch.compile(module, backend="eager")}) == {"unet": module}


@pytest.mark.parametrize("by", ["diffusers", "accelerate"])
def test_hooks_that_other_packages_register_later_stay(by: str):
    class Doubled(ModelHook if by == "diffusers" else CpuOffload):  # type: ignore[misc]
        def post_forward(self, module: nn.Module, output: Tensor) -> Tensor:
            return 2 * output

    module: Any = Denoiser()
    x = torch.ones(1)
    install(module)
    if by == "diffusers":
        HookRegistry.check_if_exists_or_initialize(module).register_hook(Doubled(), "doubled")
    else:
        add_hook_to_module(module, Doubled("cpu"))
    assert module(x, 3) == 6
    remove(module)
    assert module(x, 3) == 6
    made = copy.deepcopy(module)
    made.weight.data.fill_(5)
    assert made(x, 3) == 15
    if by == "diffusers":
        module._diffusers_hook.remove_hook("doubled")
    else:
        remove_hook_from_module(module)
    install(module)
    remove(module)
    assert module(x, 3) == 3
    assert not [name for name in vars(module) if installed(module, name)]
