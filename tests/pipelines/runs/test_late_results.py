"""Results of ControlNets read one step late, against diffusers with delayed networks."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

import maskfx
import tests.factories.more_pipelines  # noqa: F401 - adds pipelines
from maskfx.errors import InputError
from maskfx.pipelines.compile import pipeline_state_of
from tests.factories.lora import adapter_of
from tests.factories.pipelines import PIPES, anew, call_of, distance, latents, plain, square, white

FLUX = "FluxControlNetInpaintPipeline"
IMG2IMG = "FluxControlNetImg2ImgPipeline"
DENSE = [
    IMG2IMG,
    pytest.param("StableDiffusionControlNetInpaintPipeline-multi", marks=pytest.mark.slow),
    pytest.param("StableDiffusionControlNetInpaintPipeline-guess", marks=pytest.mark.slow),
    pytest.param("StableDiffusionXLControlNetInpaintPipeline", marks=pytest.mark.slow),
]
EDITS = [
    FLUX,
    pytest.param("StableDiffusionControlNetInpaintPipeline-multi", marks=pytest.mark.slow),
    pytest.param("StableDiffusionControlNetInpaintPipeline-guess", marks=pytest.mark.slow),
    pytest.param("StableDiffusionXLControlNetInpaintPipeline", marks=pytest.mark.slow),
]
SYNC = maskfx.Quality.of("all-steps")
LATE = replace(SYNC, control="late")


class Delayed:
    """Computes, and returns the result of the call before; that of the call itself if in time."""

    def __init__(self, compute: Any, in_time: Collection[int] = (0,)) -> None:
        self.compute, self.in_time = compute, in_time
        self.count, self.before = 0, None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        now = self.compute(*args, **kwargs)
        found = now if self.count in self.in_time else self.before
        self.count += 1
        self.before = pytree.tree_map(lambda v: v.clone() if isinstance(v, Tensor) else v, now)
        return found


def arguments(steps: int) -> dict[str, Any]:
    return {"num_inference_steps": steps, "strength": 1.0}


def edit(name: str, seed: int = 1, **more: Any) -> dict[str, Any]:
    return call_of(PIPES[name], seed, square(), **more)


def delayed(monkeypatch: pytest.MonkeyPatch, pipe: Any, in_time: Collection[int] = (0,)) -> None:
    """Delay the edits that the compiled networks beside the denoiser compute."""
    for name, one in pipeline_state_of(pipe).denoisers.items():
        if name.startswith("controlnet"):
            monkeypatch.setattr(one, "step", Delayed(one.step, in_time))


def notes(pipe: Any) -> str:
    return "\n".join(pipeline_state_of(pipe).notes)


@pytest.mark.parametrize("name", DENSE)
def test_a_dense_run_reads_the_results_of_the_step_before(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    mask = {} if PIPES[name].edits == "image" else {"mask": white()}

    def call() -> dict[str, Any]:
        return call_of(PIPES[name], 1, **mask, **arguments(4))

    dense = replace(SYNC, reuse="steps", refresh=1)  # every step computes all sites
    quality = replace(dense, control="late")
    pipe, own = anew(name), plain(name)
    first = latents(pipe, **call(), quality=quality)
    assert torch.equal(latents(pipe, **call(), quality=quality), first), "shapes are known now"
    assert not torch.equal(latents(pipe, **call(), quality=dense), first)
    for net in getattr(own.controlnet, "nets", [own.controlnet]):
        monkeypatch.setattr(net, "forward", Delayed(net.forward))
    assert torch.equal(first, latents(own, **call()))
    assert 'control="late"' not in notes(pipe)


@pytest.mark.parametrize("name", EDITS)
def test_an_edit_reads_the_results_of_the_step_before(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, Any] = {"num_inference_steps": 4}
    pipe = anew(name)
    in_time = latents(pipe, **edit(name, **given))  # records the template
    found = latents(pipe, **edit(name, **given), quality=LATE)
    delayed(monkeypatch, pipe)
    wanted = latents(pipe, **edit(name, **given))
    assert torch.equal(found, wanted)
    assert not torch.equal(found, in_time)


@pytest.mark.slow
def test_an_edit_of_all_sites_is_the_dense_run(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {**edit(FLUX, num_inference_steps=4), "mask_image": white()}
    found = latents(anew(FLUX), **given, quality=LATE)
    own = plain(FLUX)
    monkeypatch.setattr(own.controlnet, "forward", Delayed(own.controlnet.forward))
    given["generator"] = torch.Generator().manual_seed(1)
    assert distance(found, latents(own, **given)) < 1e-4


@pytest.mark.parametrize("every", [4, 1])
def test_a_step_at_which_the_function_changes_reads_its_own_results(
    every: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With forecasts the step before is the computed one before."""
    given: dict[str, Any] = {"num_inference_steps": 12 if every > 1 else 5}
    given["control_guidance_end"] = 0.5
    pipe = anew(FLUX)
    quality = replace(LATE, every=every)
    latents(pipe, **edit(FLUX, **given))
    found = latents(pipe, **edit(FLUX, **given), quality=quality)
    changed = 6 if every > 1 else 2
    assert any(f"settings change at step {changed}" in one for one in pipeline_state_of(pipe).notes)
    computed = sorted({0, 3, 5, 7, 9, 11, 6}) if every > 1 else list(range(5))
    delayed(monkeypatch, pipe, in_time=(0, computed.index(changed)))
    wanted = latents(pipe, **edit(FLUX, **given), quality=replace(quality, control="sync"))
    assert torch.equal(found, wanted)


@pytest.mark.slow
def test_a_step_at_which_an_adapter_joins_reads_its_own_results(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name, given = IMG2IMG, arguments(5)
    pipe = anew(name)
    lora = [maskfx.Lora(adapter_of(pipe, 4, 1, "transformer"), first=3)]
    found = latents(pipe, **call_of(PIPES[name], 1, **given), quality=LATE, lora=lora)
    for one in (pipeline_state_of(pipe).denoisers["controlnet"],):
        monkeypatch.setattr(one, "plain_step", Delayed(one.plain_step, (0, 3)))
    assert torch.equal(found, latents(pipe, **call_of(PIPES[name], 1, **given), lora=lora))


def test_the_last_steps_network_isnt_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    name, given = IMG2IMG, arguments(4)
    pipe = anew(name)
    latents(pipe, **call_of(PIPES[name], 1, **given))
    net = pipeline_state_of(pipe).denoisers["controlnet"]
    counted = Delayed(net.plain_step, range(9))
    monkeypatch.setattr(net, "plain_step", counted)
    latents(pipe, **call_of(PIPES[name], 1, **given), quality=LATE)
    assert counted.count == 3


def test_a_network_that_fails_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    name, given = IMG2IMG, arguments(4)
    pipe = anew(name)
    net = pipeline_state_of(pipe).denoisers["controlnet"]
    computed = net.plain_step

    def fails(step: Any) -> Any:
        calls.append(step)
        if len(calls) == 2:
            raise RuntimeError("the network fails")
        return computed(step)

    calls: list[Any] = []
    monkeypatch.setattr(net, "plain_step", fails)
    with pytest.raises(RuntimeError, match="the network fails"):
        latents(pipe, **call_of(PIPES[name], 1, **given), quality=LATE)


@pytest.mark.slow
def test_a_recorded_picture_reads_in_time_and_that_is_noted() -> None:
    name, given = IMG2IMG, arguments(4)
    pipe = anew(name)
    wanted = latents(pipe, **call_of(PIPES[name], 1, **given), record=True, quality=SYNC)
    pipe = anew(name)
    found = latents(pipe, **call_of(PIPES[name], 1, **given), record=True, quality=LATE)
    assert torch.equal(found, wanted)
    assert "record=True" in notes(pipe)


def test_without_a_network_beside_the_denoiser_it_is_an_error() -> None:
    with pytest.raises(InputError, match=r"one denoiser \(transformer\)"):
        latents(anew("FluxPipeline"), **call_of(PIPES["FluxPipeline"]), quality=LATE)


def test_where_nothing_is_read_late_it_is_noted() -> None:
    name, given = IMG2IMG, arguments(1)
    pipe = anew(name)
    latents(pipe, **call_of(PIPES[name], 1, **given), quality=LATE)
    assert "no step reads the results of the step before" in notes(pipe)


def test_other_values_are_refused() -> None:
    with pytest.raises(InputError, match="sync, late"):
        maskfx.Quality(control="later")
