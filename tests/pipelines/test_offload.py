"""Denoisers that lie on the host until they run, as `enable_model_cpu_offload` has it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import accelerate  # type: ignore[import-untyped,unused-ignore]
import numpy as np
import pytest
import torch
from accelerate.hooks import add_hook_to_module  # type: ignore[import-untyped,unused-ignore]

import maskfx
from maskfx.compiler.capture.capture import capture
from maskfx.pipelines.parts.stand_in import installed, users_of
from maskfx.runtime.hardware.offload import bring, device_of
from maskfx.runtime.programs import program_cache
from tests.factories import emulated
from tests.factories.offloading import Elsewhere
from tests.factories.pipelines import PIPES, call_of, square

NAME = "FluxInpaintPipeline"
DEVICE = torch.device(emulated.NAME, 0)


def pixels(pipe: Any, device: torch.device | str = "cpu", seed: int = 0) -> Any:
    given = emulated.to(call_of(PIPES[NAME], seed, square()), device)
    return np.asarray(pipe(**given).images[0]).astype(int)


def test_an_offloaded_denoiser_computes_what_is_masked_and_is_captured_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wanted = [
        pixels(maskfx.compile(PIPES[NAME].build(), quality="all-steps"), seed=seed)
        for seed in (0, 1)
    ]
    captured: list[object] = []

    def counting(*given: Any, **named: Any) -> Any:
        captured.append(given)
        return capture(*given, **named)

    monkeypatch.setattr(program_cache, "capture", counting)
    pipe, hook = maskfx.compile(PIPES[NAME].build(), quality="all-steps"), Elsewhere()
    add_hook_to_module(pipe.transformer, hook)
    for seed in (0, 1):
        found = pixels(pipe, seed=seed)
        assert abs(found - wanted[seed]).max() <= 1
        assert np.array_equal(pixels(pipe, seed=seed), found)
        hook.away = True
    assert hook.brought == 2
    assert len(captured) == 1
    assert "runs dense" not in maskfx.explain(pipe)


def test_a_hook_of_the_cpu_moves_no_weights_in_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """diffusers makes one for cpu:0 (`enable_model_cpu_offload` on a machine without a GPU)."""
    module = torch.nn.Linear(2, 2)
    accelerate.cpu_offload_with_hook(module, torch.device("cpu:0"))
    bring(module)
    moved: list[object] = []
    monkeypatch.setattr(torch.nn.Module, "to", lambda *given: moved.append(given))
    module(torch.ones(1, 2))
    assert moved == []
    assert device_of(module) == torch.device("cpu")


def test_offloading_that_began_before_the_compile_keeps_edits_on_rows() -> None:
    """diffusers removes and adds all hooks at the end of each call, the recording's too."""
    pipe = PIPES[NAME].build()
    pipe.enable_model_cpu_offload(device="cpu")
    pipe = maskfx.compile(pipe, quality="all-steps")
    pixels(pipe)
    assert "called none" not in maskfx.explain(pipe)
    assert installed(pipe.transformer) is None  # until the next run
    maskfx.decompile(pipe)
    assert users_of(pipe.transformer) == 0


def test_a_template_is_found_again_while_the_weights_are_on_disk(tmp_path: Path) -> None:
    pipe = maskfx.compile(PIPES[NAME].build(), quality="all-steps")
    pipe.transformer.enable_group_offload(
        torch.device("cpu"), offload_type="leaf_level", offload_to_disk_path=str(tmp_path)
    )
    found = [pixels(pipe, seed=seed) for seed in (0, 1, 0)]
    assert len(pipe.templates()) == 1
    assert np.array_equal(found[0], found[2])


def test_a_run_that_calls_no_compiled_denoiser_is_noted() -> None:
    pipe = maskfx.compile(PIPES[NAME].build(), quality="all-steps")
    pixels(pipe)
    assert "called none" not in maskfx.explain(pipe)
    pipe.transformer.forward = type(pipe.transformer).forward.__get__(pipe.transformer)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("maskfx.pipelines.call.put_back", lambda part: None)
        pixels(pipe)
    assert "a run in which the pipeline called none of its compiled" in maskfx.explain(pipe)


@pytest.mark.slow
def test_weights_changed_while_they_were_away_are_used() -> None:
    pipe, hook = maskfx.compile(PIPES[NAME].build(), quality="all-steps"), Elsewhere()
    add_hook_to_module(pipe.transformer, hook)
    before = pixels(pipe)
    hook.away = True
    for parameter in pipe.transformer.parameters():
        parameter.data = parameter.data * 1.2
    changed = PIPES[NAME].build()
    for parameter in changed.transformer.parameters():
        parameter.mul_(1.2)
    found = pixels(pipe)
    assert abs(found - pixels(maskfx.compile(changed, quality="all-steps"))).max() <= 1
    assert abs(found - before).max() > 1


@pytest.mark.slow
def test_an_offloaded_denoiser_is_brought_to_its_device() -> None:
    wanted = pixels(maskfx.compile(PIPES[NAME].build(), quality="all-steps"))
    pipe = maskfx.compile(PIPES[NAME].build(), quality="all-steps")
    pipe.vae.to(DEVICE)
    _, hook = accelerate.cpu_offload_with_hook(pipe.transformer, DEVICE)
    assert next(pipe.transformer.parameters()).device.type == "cpu"
    for _ in range(2):
        found = pixels(pipe, DEVICE)
        assert next(pipe.transformer.parameters()).device == DEVICE
        assert abs(found - wanted).max() <= 1
        hook.offload()
    assert "runs dense" not in maskfx.explain(pipe)
