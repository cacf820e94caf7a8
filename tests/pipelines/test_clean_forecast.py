"""Steps that continue the clean latents of earlier ones."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import maskfx
from maskfx.errors import InputError
from maskfx.pipelines.schedules.forecasts import Forecasts, NoiseLevels
from maskfx.runtime.reuse.clean import KINDS, latents_like
from tests.factories.pipelines import PIPES, call_of, compiled, latents, square

SD, FLUX = "StableDiffusionInpaintPipeline", "FluxInpaintPipeline"
TIMES = (900.0, 700.0, 450.5, 100.0)


class Levels:
    """A scheduler with a table of noise levels."""

    def __init__(self, kind: str) -> None:
        self.config = {"prediction_type": kind}
        self.alphas_cumprod = torch.linspace(0.99, 0.01, 1000, dtype=torch.float64)
        self.timesteps = torch.tensor(TIMES)

    def step(self) -> None: ...

    def set_timesteps(self) -> None: ...


def shares(time: float) -> tuple[float, float]:
    power = 0.99 - 0.98 * time / 999
    return power**0.5, (1 - power) ** 0.5


def call_at(kind: str, time: float, clean: Tensor) -> tuple[Tensor, Tensor]:
    """The latents at a timestep, and the output that predicts these clean latents."""
    signal, noise = shares(time)
    eps = torch.randn(clean.shape, generator=torch.Generator().manual_seed(int(time))).double()
    output = eps if kind == "epsilon" else signal * eps - noise * clean
    return signal * clean + noise * eps, output


@pytest.mark.parametrize("kind", KINDS)
def test_clean_latents_on_a_line_give_the_outputs_of_steps_that_arent_computed(kind: str) -> None:
    pipe = SimpleNamespace(scheduler=Levels(kind))
    forecasts = Forecasts(pipe, "clean")
    start, change = torch.randn(2, 1, 4, 8, 8, dtype=torch.float64).unbind(0)
    mask = torch.ones(1, 5, 8, 8, dtype=torch.float64)
    for step, time in enumerate(TIMES):
        x, output = call_at(kind, time, start + step * change)
        inputs = {"sample": torch.cat([x, mask], 1)}
        if step < 2:
            forecasts.learn(("unet",), (time,), inputs, (output,))
        else:
            [found] = forecasts.at(("unet",), (time,), inputs)
            torch.testing.assert_close(found, output)


def test_elements_of_a_batch_have_noise_levels_of_their_own() -> None:
    pipe = SimpleNamespace(scheduler=Levels("v_prediction"))
    clean, times = torch.randn(2, 4, 8, 8, dtype=torch.float64), (900.0, 100.0)
    x, output = torch.randn(2, 2, 4, 8, 8, dtype=torch.float64).unbind(0)
    for element, time in enumerate(times):
        x[element], output[element] = call_at("v_prediction", time, clean[element])
    mixture = NoiseLevels(pipe).mixture(times)
    assert mixture is not None
    torch.testing.assert_close(mixture.clean(x, output), clean)
    torch.testing.assert_close(mixture.output(x, clean), output)


@pytest.mark.parametrize(
    "change",
    [
        lambda scheduler: scheduler.config.update(prediction_type="flow_prediction"),
        lambda scheduler: delattr(scheduler, "alphas_cumprod"),
        lambda scheduler: setattr(scheduler, "timesteps", torch.tensor([5.0])),
    ],
)
def test_outputs_go_on_where_noise_levels_arent_known(change: Any) -> None:
    scheduler = Levels("epsilon")
    change(scheduler)
    found = []
    for kind in ("output", "clean"):
        forecasts = Forecasts(SimpleNamespace(scheduler=scheduler), kind)
        for step, time in enumerate(TIMES[:2]):
            output = torch.full((1, 4, 8, 8), float(step))
            forecasts.learn(("unet",), (time,), {"sample": torch.ones(1, 4, 8, 8)}, output)
        found.append(forecasts.at(("unet",), TIMES[2:3], {"sample": torch.zeros(1, 4, 8, 8)}))
    assert torch.equal(found[0], torch.full((1, 4, 8, 8), 2.0))
    assert torch.equal(*found)


def test_only_predictions_for_the_latents_are_converted() -> None:
    x = torch.zeros(1, 9, 8, 8)
    assert latents_like([3, x], torch.zeros(1, 4, 8, 8)).shape == (1, 4, 8, 8)  # type: ignore[union-attr]
    assert latents_like([x], torch.zeros(1, 18, 8, 8)) is None  # variances too
    assert latents_like([x], torch.zeros(1, 4, 4, 4)) is None
    assert latents_like([x], (x, x)) is None
    assert latents_like([3], x) is None


def test_pipelines_with_noise_levels_continue_clean_latents_and_others_outputs() -> None:
    for name, differs in ((SD, True), (FLUX, False)):
        pipe = compiled(name)
        found = [
            latents(
                pipe,
                **call_of(
                    PIPES[name],
                    0,
                    square(),
                    num_inference_steps=12,
                    quality=maskfx.Quality(every=5, least=2, forecast=forecast),
                ),
            )
            for forecast in ("output", "clean")
        ]
        assert torch.isfinite(found[1]).all()
        assert torch.equal(*found) != differs


def test_another_name_is_an_error() -> None:
    with pytest.raises(InputError, match="forecast='x': choose one of output, clean"):
        maskfx.Quality(forecast="x")
