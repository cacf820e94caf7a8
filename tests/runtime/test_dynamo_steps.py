"""torch.compile(module, backend="maskfx") with a timestep that is one number for the batch."""

import pytest
import torch
from torch import Tensor, nn

import maskfx
from maskfx.runtime.dynamo import GraphDenoiser, maskfx_backend
from tests.factories.zoo import ZOO
from tests.passes.tools import error


class Timed(nn.Module):
    """A denoiser that gives its timestep a batch axis, as UNets do, or reads it as a number."""

    def __init__(self, as_number: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.into, self.out = nn.Conv2d(4, 8, 3, padding=1), nn.Conv2d(8, 4, 3, padding=1)
        self.time, self.as_number = nn.Linear(1, 8), as_number

    def forward(self, sample: Tensor, timestep: Tensor) -> Tensor:
        steps = timestep[None].to(sample.device).expand(sample.shape[0])
        wide = self.into(sample) + self.time(steps[:, None] / 1000)[:, :, None, None]
        if self.as_number:
            wide = wide * torch.cos(timestep / 1000)
        return self.out(wide.relu())


@pytest.mark.parametrize("as_number", [False, True])
def test_a_step_of_one_number_is_recorded_and_edited(as_number: bool) -> None:
    torch._dynamo.reset()
    module, graphs = Timed(as_number).eval().requires_grad_(False), list[GraphDenoiser]()

    def backend(gm: torch.fx.GraphModule, inputs: list[Tensor]) -> GraphDenoiser:
        graphs.append(GraphDenoiser(gm))
        return graphs[-1]

    compiled = torch.compile(module, backend=backend)
    inputs = {"sample": torch.randn(2, 4, 8, 8), "timestep": torch.tensor(700.0)}
    wanted = module(**inputs)
    with maskfx.editing() as run:
        assert error(compiled(**inputs), wanted) < 1e-5
    (cache,) = run.recorded
    mask = torch.arange(64).view(8, 8) < 20
    with maskfx.editing(mask=mask, cache=cache):
        assert error(compiled(**inputs), wanted) < 1e-4
    assert len(graphs) == 1  # no graph breaks
    denoiser = graphs[0].denoiser
    assert denoiser is not None
    assert denoiser.programs, denoiser.compilations[0].reasons


@pytest.mark.slow
@pytest.mark.parametrize("name", ["UNet2DConditionModel-sd15", "UNet2DConditionModel-sdxl"])
def test_a_unet_takes_a_scalar_timestep_and_has_no_graph_breaks(name: str) -> None:
    torch._dynamo.reset()
    case = ZOO[name]
    module, inputs = case.build(), case.inputs(case.sizes[0], 0)
    inputs["timestep"] = inputs["timestep"][0]
    assert torch._dynamo.explain(module)(**inputs).graph_break_count == 0
    compiled = torch.compile(module, backend=maskfx_backend, fullgraph=True)
    wanted = module(**inputs)
    with maskfx.editing() as run:
        assert error(compiled(**inputs), wanted) < 1e-4
    mask = torch.arange(64).view(8, 8) < 20
    with maskfx.editing(mask=mask, cache=run.recorded):
        assert error(compiled(**inputs), wanted) < 1e-4
