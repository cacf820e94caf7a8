"""torch.compile(module, backend="maskfx"): dense as the module, recording and editing inside."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import maskfx
from maskfx.runtime.dynamo import GraphDenoiser, maskfx_backend
from tests.factories.masks import MASKS
from tests.factories.zoo import ZOO, Size
from tests.runtime.test_oracle import assert_kept_outside, assert_near, tensors

pytestmark = pytest.mark.slow

NAMES = ("UNet2DConditionModel-sd15", "FluxTransformer2DModel")


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Kept:
    """The backend, and the graphs that it was given."""

    def __init__(self) -> None:
        self.graphs: list[GraphDenoiser] = []

    def __call__(self, gm: torch.fx.GraphModule, example_inputs: Any) -> Any:
        graph = maskfx_backend(gm, example_inputs)
        assert isinstance(graph, GraphDenoiser)
        self.graphs.append(graph)
        return graph


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dynamic", [None, True])
def test_dense_record_and_edit(name: str, dynamic: bool | None) -> None:
    case, size = ZOO[name], ZOO[name].sizes[0] if dynamic is None else ZOO[name].sizes[2]
    module, backend = case.build(), Kept()
    compiled = torch.compile(module, backend=backend, dynamic=dynamic)
    inputs = case.inputs(size, 0)
    expected = module(**inputs)
    assert_near(compiled(**inputs), expected, "dense")
    assert backend.graphs[0].denoiser is None, "a dense call compiled rows"

    with maskfx.editing() as run:
        assert_near(compiled(**inputs), expected, "recording")
    (cache,) = run.recorded
    denoiser = backend.graphs[-1].denoiser
    assert denoiser is not None
    assert denoiser.compilations[0].program is not None, denoiser.compilations[0].reasons

    mask = MASKS["stroke"](case.mask_shape(size), 1)
    with maskfx.editing(mask=mask, cache=cache):
        assert_near(compiled(**inputs), expected, "edit")
        other = dict(inputs)
        text = inputs["encoder_hidden_states"]
        other["encoder_hidden_states"] = -text
        edited = compiled(**other)
    assert_kept_outside(mask, edited, expected_record(expected, run, cache), "edit")
    assert not torch.equal(tensors(edited)[0], tensors(expected)[0])
    assert_near(compiled(**other), module(**other), "dense again")


def expected_record(expected: Any, run: Any, cache: maskfx.StepCache) -> Any:
    """The output as it was recorded."""
    return tuple(cache.output)


def test_weights_that_are_replaced_are_followed() -> None:
    case = ZOO["FluxTransformer2DModel"]
    size, module, backend = case.sizes[0], case.build(), Kept()
    compiled = torch.compile(module, backend=backend)
    inputs = case.inputs(size, 0)
    with maskfx.editing():
        compiled(**inputs)
    last = module.proj_out
    assert isinstance(last, nn.Linear)
    last.weight = nn.Parameter(-2 * last.weight)
    with maskfx.editing() as run:
        assert_near(compiled(**inputs), module(**inputs))
    assert len(run.recorded) == 1


class Scaled(nn.Module):
    """A denoiser with a number of its own that Python branches on."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Conv2d(4, 4, 3, padding=1)
        self.gain = 0.5

    def forward(self, sample: Tensor) -> Tensor:
        hidden: Tensor = self.last(sample)
        return hidden * self.gain if self.gain > 0.1 else hidden


def test_numbers_of_the_module_are_followed() -> None:
    torch.manual_seed(0)
    module, backend = Scaled().eval(), Kept()
    compiled = torch.compile(module, backend=backend, dynamic=True)
    sample = torch.randn(2, 4, 8, 8)
    for gain in (0.5, 0.75):
        module.gain = gain
        with maskfx.editing() as run:
            recorded = compiled(sample)
        assert_near(recorded, module(sample))
        denoiser = backend.graphs[-1].denoiser
        assert denoiser is not None
        assert denoiser.compilations[0].program is not None, denoiser.compilations[0].reasons
        mask = MASKS["stroke"]((8, 8), 0)
        with maskfx.editing(mask=mask, cache=run.recorded):
            assert_near(compiled(sample), module(sample))
            assert_kept_outside(mask, compiled(sample + 1), recorded)
    assert len(backend.graphs) == 1, "Dynamo made a graph anew: the number was no input of it"


class Broken(nn.Module):
    """A convolutional denoiser whose graph breaks in the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(4, 8, 3, padding=1)
        self.last = nn.Conv2d(8, 4, 3, padding=1)

    def forward(self, sample: Tensor) -> Tensor:
        hidden = self.first(sample).relu()
        torch._dynamo.graph_break()
        out: Tensor = self.last(hidden)
        return out


def test_a_graph_with_breaks_edits_part_by_part() -> None:
    torch.manual_seed(0)
    module, backend = Broken().eval(), Kept()
    compiled = torch.compile(module, backend=backend)
    sample = torch.randn(2, 4, 8, 8)
    with maskfx.editing() as run:
        recorded = compiled(sample)
    assert len(backend.graphs) == len(run.recorded) == 2
    mask = MASKS["stroke"]((8, 8), 0)
    with maskfx.editing(mask=mask, cache=run.recorded):
        assert_near(compiled(sample), module(sample))
        assert_kept_outside(mask, compiled(sample + 1), recorded)
    with (
        maskfx.editing(mask=mask, cache=[run.recorded[0], run.recorded[0]]),
        pytest.raises(AssertionError),
    ):
        assert_kept_outside(mask, compiled(sample + 1), recorded)


def test_a_cache_of_another_graph_is_refused() -> None:
    torch.manual_seed(0)
    compiled = torch.compile(Broken().eval(), backend=maskfx_backend)
    sample = torch.randn(2, 4, 8, 8)
    with maskfx.editing() as run:
        compiled(sample)
    mask = MASKS["stroke"]((8, 8), 0)
    with (
        maskfx.editing(mask=mask, cache=run.recorded[0]),
        pytest.raises(maskfx.CacheError, match="another model"),
    ):
        compiled(sample)


def test_a_graph_without_a_picture_runs_as_it_is() -> None:
    module = nn.Linear(4, 4)
    compiled = torch.compile(module, backend=maskfx_backend)
    value = torch.randn(2, 4)
    with maskfx.editing() as run:
        assert_near(compiled(value), module(value))
    assert run.recorded == []


def test_sizes_of_a_call_may_change() -> None:
    case = ZOO["FluxTransformer2DModel"]
    module = case.build()
    compiled = torch.compile(module, backend=maskfx_backend)
    for seed, size in enumerate((Size(2, 4, 4, 7), Size(2, 4, 6, 5))):
        inputs = case.inputs(size, seed)
        with maskfx.editing() as run:
            assert_near(compiled(**inputs), module(**inputs), size)
        mask = MASKS["stroke"](case.mask_shape(size), seed)
        with maskfx.editing(mask=mask, cache=run.recorded[0]):
            assert_near(compiled(**inputs), module(**inputs), size)
