"""One ragged batch of several tasks that keep patches: each picture is the one it is alone."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from torch import Tensor

import maskfx
from maskfx.pipelines.compile import pipeline_state_of, share_denoisers
from maskfx.pipelines.quality import Quality
from maskfx.runtime.denoiser import CompiledDenoiser
from maskfx.runtime.steps import AnyStep, EditStep
from tests.factories.pipelines import (
    PIPES,
    call_of,
    distance,
    flux_control,
    latents,
    noise,
    picture,
    pipe_of,
    square,
)
from tests.pipelines.test_patches import Turns, reuse

TEXT, IMAGE, INPAINT = "FluxPipeline", "FluxImg2ImgPipeline", "FluxInpaintPipeline"
CONTROL = "FluxControlNetPipeline"
STEPS = 8


@pytest.mark.slow
def test_dense_edit_control_and_image_members_share_a_ragged_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    parts = flux_control()
    compiled = partial(maskfx.compile, quality=Quality(patches=0.1))
    pipes: dict[str, Any] = {}
    for name in (TEXT, IMAGE, INPAINT, CONTROL):
        own = {k: v for k, v in parts.items() if k != "controlnet" or name == CONTROL}
        pipes[name] = compiled(pipe_of(name, lambda own=own: dict(own)))  # type: ignore[misc]
        share_denoisers(pipes[TEXT], pipes[name])
    text = call_of(PIPES[TEXT], 1)
    patches = reuse(judge=Turns())
    tasks: list[tuple[str, Quality | str, dict[str, Any]]] = [
        (TEXT, "all-steps", text),
        (TEXT, patches, {**call_of(PIPES[TEXT], 2), "height": 48}),
        (IMAGE, patches, call_of(PIPES[IMAGE], 3, strength=0.8)),
        (INPAINT, replace(patches, reuse="template"), call_of(PIPES[INPAINT], 4, square())),
        (INPAINT, reuse(judge=Turns(), order="stretch"), call_of(PIPES[INPAINT], 5, square(4, 28))),
        (CONTROL, patches, {**call_of(PIPES[TEXT], 6), "control_image": picture(50)}),
    ]

    def call(number: int) -> dict[str, Any]:
        _, quality, given = tasks[number]
        seeded = {"generator": noise(number), "num_inference_steps": STEPS, "quality": quality}
        return {**given, **seeded}

    def alone(number: int) -> Tensor:
        return latents(pipes[tasks[number][0]], **call(number))

    wanted = [alone(number) for number in range(len(tasks))]
    state = pipeline_state_of(pipes[TEXT])
    batches: list[list[AnyStep]] = []
    step = CompiledDenoiser.step

    def stepping(denoiser: CompiledDenoiser, steps: Any, *more: Any) -> Any:
        if denoiser is state.denoisers["transformer"]:
            batches.append(list(steps))
        return step(denoiser, steps, *more)

    monkeypatch.setattr(CompiledDenoiser, "step", stepping)
    with maskfx.Engine(maskfx.BatchPolicy(patience=2.0)) as engine:
        tickets = [
            engine.submit(pipes[name], **call(number), output_type="latent", return_dict=False)
            for number, (name, _, _) in enumerate(tasks)
        ]
        found = [ticket.result()[0] for ticket in tickets]
        assert max(step.requests for step in engine.steps) == len(tasks)
    for number, (one, other) in enumerate(zip(found, wanted, strict=True)):
        assert distance(one, other) < 1e-4, tasks[number][0]
    kept = [ticket.patches.share for ticket in tickets[1:]]
    assert all(0 < share < 0.95 for share in kept), kept
    edits = max(sum(isinstance(s, EditStep) and s.record for s in batch) for batch in batches)
    assert edits == len(tasks) - 1  # all that keep patches, in one step of the graph
    state.pool.nbytes()
    assert all(block.unused and block.own == 0 for block in state.pool._all())
    assert not state.notes
