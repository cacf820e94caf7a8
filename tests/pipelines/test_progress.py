"""What a pipeline shows of captures and recordings, on a terminal, in a pipe and when disabled."""

from __future__ import annotations

import logging
import re
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline
from PIL import Image
from torch import Tensor, nn

import maskfx
from maskfx.ir import progress
from maskfx.pipelines import serve_call
from maskfx.runtime.programs.shared_programs import shared_programs
from tests.factories.pipelines import picture, square
from tests.factories.terminal import on_terminal

STEPS = 3
FIRST = (
    rf"first edit: capture [\d.]+ s, template of {STEPS} steps [\d.]+ s; "
    r"later edits of this picture about [\d.]+ s"
)


class Denoiser(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.narrow, self.wide = nn.Conv2d(4, 8, 3, padding=1), nn.Conv2d(8, 4, 1)

    def forward(self, sample: Tensor, timestep: Tensor) -> Tensor:
        return self.wide(nn.functional.silu(self.narrow(sample)) * timestep[:, None, None, None])


class Painter:
    """The least that is an inpainting pipeline with a progress bar."""

    progress_bar: Any = DiffusionPipeline.progress_bar
    set_progress_bar_config: Any = DiffusionPipeline.set_progress_bar_config

    def __init__(self) -> None:
        self.unet = Denoiser()

    @property
    def components(self) -> dict[str, Any]:
        return {"unet": self.unet}

    def prepare_latents(self, generator: Any, height: int, width: int) -> Tensor:
        return torch.randn(1, 4, height // 2, width // 2, generator=generator)

    def __call__(
        self,
        prompt: str = "",
        image: Any = None,
        mask_image: Any = None,
        num_inference_steps: int = STEPS,
        generator: Any = None,
        output_type: str = "pil",
    ) -> tuple[Any]:
        latents = self.prepare_latents(generator, image.height, image.width)
        for step in self.progress_bar(range(num_inference_steps)):
            time = torch.tensor([1 - step / num_inference_steps])
            latents = latents - self.unet(latents, time) / num_inference_steps
        if output_type == "latent":
            return (latents,)
        pixels = (latents[0, :3].movedim(0, -1).sigmoid() * 255).byte().numpy()
        return ([Image.fromarray(pixels.astype(np.uint8)).resize(image.size)],)


def edit(pipe: Any) -> None:
    pipe(image=picture(), mask_image=square(), generator=torch.Generator().manual_seed(0))


@pytest.fixture
def pipe(monkeypatch: pytest.MonkeyPatch) -> Any:
    shared_programs().clear()  # of an equal denoiser in the test before
    monkeypatch.setattr(serve_call, "NOTED", 0.05)  # this capture takes a fraction of a second
    return maskfx.compile(Painter(), quality="all-steps")


def test_a_terminal_shows_captures_recordings_and_what_a_first_edit_cost(pipe: Any) -> None:
    pipe.set_progress_bar_config(ncols=100)
    with on_terminal() as terminal:
        edit(pipe)
    shown = terminal.getvalue()
    for stage in ("0/3 [00:00, export]", "passes]", "comparison with the module]"):
        assert re.search(rf"capture of Denoiser: .*{re.escape(stage)}", shown), stage
    assert re.search(rf"recording of the template: .*\| 0/{STEPS} ", shown)
    assert re.search(FIRST, shown)
    assert pipe._progress_bar_config == {"ncols": 100}
    with on_terminal() as terminal:
        edit(pipe)
    assert f"| {STEPS}/{STEPS}" in terminal.getvalue()  # the pipeline's own
    for text in ("capture", "recording", "first edit"):
        assert text not in terminal.getvalue()


def test_a_pipe_shows_the_pipelines_own_bar_only(
    pipe: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    edit(pipe)
    shown = capsys.readouterr().err
    assert shown.count(f"0/{STEPS} [") == 1  # of the edit, not of the recording
    for text in ("capture", "recording", "first edit"):
        assert text not in shown


def test_a_disabled_bar_disables_all(pipe: Any) -> None:
    pipe.set_progress_bar_config(disable=True)
    with on_terminal() as terminal:
        edit(pipe)
        maskfx.template(pipe, image=picture(1))
    assert terminal.getvalue() == ""


def test_the_cost_of_a_first_edit_is_logged(pipe: Any, caplog: pytest.LogCaptureFixture) -> None:
    pipe.set_progress_bar_config(disable=True)
    with caplog.at_level(logging.INFO, "maskfx"):
        edit(pipe)
        edit(pipe)
    [line] = [r.getMessage() for r in caplog.records if r.name == progress.log.name]
    assert re.fullmatch(FIRST, line)
