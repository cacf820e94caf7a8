"""Arguments of unusual shapes and names: what can't be narrowed runs dense and is named."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import maskfx
from maskfx.errors import InputError
from maskfx.export.exporter import export
from maskfx.runtime.programs import program_cache
from tests.factories.own_cases import OWN
from tests.factories.zoo import Size
from tests.runtime.test_oracle import assert_near


class Sound(nn.Module):
    """Convolutions along time of [batch, channels, times]."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv1d(4, 8, 3, padding=1), nn.Conv1d(8, 4, 3, padding=1)
        self.time = nn.Linear(1, 8)

    def forward(self, sample: Tensor, timestep: Tensor) -> Tensor:
        shift = self.time(timestep.float()[:, None])[:, :, None]
        out: Tensor = self.last(F.silu(self.first(sample) + shift))
        return out


class Fixed(nn.Module):
    """A convolution, scaled by a number among the arguments whose name is like a timestep's."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(4, 4, 3, padding=1)

    def forward(
        self, sample: Tensor, timestep: Tensor | float, ref_fixed_timestep: float = 0.5
    ) -> Tensor:
        shift = torch.as_tensor(timestep).reshape(-1, 1, 1, 1)
        out: Tensor = self.layer(sample) * math.cos(ref_fixed_timestep) + shift
        return out


def built(kind: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return kind().eval().requires_grad_(False)


@pytest.mark.parametrize("batch", [1, 2])
def test_a_sound_runs_dense_and_the_report_says_why(batch: int) -> None:
    module = built(Sound)
    denoiser = maskfx.compile(module)
    call: dict[str, Any] = {
        "sample": torch.randn(batch, 4, 33),
        "timestep": torch.arange(batch),
    }
    output, kept = denoiser.record(**call)
    mask = torch.ones(denoiser.mask_shape(call), dtype=torch.bool)
    mask[0] = False
    assert_near(output, module(**call))
    assert_near(denoiser.edit([maskfx.EditStep(call, mask, kept)])[0], module(**call))
    report = denoiser.explain()
    assert "conv1d" in report
    assert "its rows fail" not in report


def test_a_number_that_the_module_declares_stays_a_number() -> None:
    """Timesteps beside it become one number per request."""
    module = built(Fixed)
    denoiser = maskfx.compile(module)
    call: dict[str, Any] = {
        "sample": torch.randn(2, 4, 8, 8),
        "timestep": 3.0,
        "ref_fixed_timestep": 0.25,
    }
    output, kept = denoiser.record(**call)
    mask = torch.rand(8, 8) < 0.2
    assert_near(output, module(**call))
    assert_near(denoiser.edit([maskfx.EditStep(call, mask, kept)])[0], module(**call))
    assert [one.reasons for one in denoiser.compilations] == [{}]
    other = {**call, "ref_fixed_timestep": 0.75}
    assert_near(denoiser.record(**other)[0], module(**other))


class Dropping(Fixed):
    """A layer of it sets random values to zero in training mode."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Sequential(self.layer, nn.Dropout(0.5))  # type: ignore[assignment]


def test_dropout_in_training_mode_runs_dense_until_eval() -> None:
    """It isn't captured, as no two calls are alike."""
    module = built(Dropping).train()
    denoiser = maskfx.compile(module)
    call: dict[str, Any] = {"sample": torch.randn(1, 4, 8, 8), "timestep": torch.tensor([3.0])}
    denoiser.record(**call)
    assert "dropout acts in each call" in denoiser.explain()
    assert [one.program for one in denoiser.compilations] == [None]
    module.eval()
    output, kept = denoiser.record(**call)
    mask = torch.rand(8, 8) < 0.2
    assert_near(output, module(**call))
    assert_near(denoiser.edit([maskfx.EditStep(call, mask, kept)])[0], module(**call))
    assert [one.reasons for one in denoiser.compilations] == [{}]


@pytest.mark.parametrize("path", [None, 3])
def test_an_export_without_a_path_is_an_input_error(path: Any) -> None:
    with pytest.raises(InputError, match="export: path is"):
        export(built(Fixed), path)


@pytest.mark.wrong_program
def test_sizes_without_rows_are_kept_up_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program_cache, "DISORDERED", 2)
    case = OWN["packed-between"]
    denoiser = maskfx.compile(case.build())
    inputs = case.inputs(Size(1, 8, 8, 5), 0)
    denoiser.record(**{**inputs, "count": 10})
    for count in (64, 65, 66, 67):
        denoiser.record(**{**inputs, "count": count})
    assert [one.program is not None for one in denoiser.compilations] == [True, False, False]


class Rows(nn.Module):
    """A convolution, shifted by the mean of a few rows, or by a row for each sample."""

    def __init__(self, each: bool = False) -> None:
        super().__init__()
        self.first, self.last = (nn.Conv2d(4, 4, 3, padding=1) for _ in range(2))
        self.rows, self.each = nn.Linear(3, 4), each

    def forward(self, sample: Tensor, timestep: Tensor, rows: Tensor) -> Tensor:
        own = self.rows(rows) if self.each else self.rows(rows).mean(0)
        shift = timestep[:, None] / 1000 + own
        out: Tensor = self.last(F.silu(self.first(sample) + shift[:, :, None, None]))
        return out


def rows_call(batch: int, rows: int) -> dict[str, Any]:
    torch.manual_seed(10 * batch + rows)
    sample, timestep = torch.randn(batch, 4, 8, 12), torch.full((batch,), 5.0)
    return {"sample": sample, "timestep": timestep, "rows": torch.randn(rows, 3)}


def test_as_many_rows_as_samples_by_chance() -> None:
    """Calls of other batches have as many rows as before, which the module takes."""
    module = built(Rows)
    denoiser = maskfx.compile(module)
    for batch, rows in ((2, 2), (3, 2), (1, 2), (2, 3), (2, 2)):
        call = rows_call(batch, rows)
        output, kept = denoiser.record(**call)
        mask = torch.rand(8, 12) < 0.2
        found = [output, *denoiser.edit([maskfx.EditStep(call, mask, kept)])]
        for got in (*found, *denoiser.batch([call, rows_call(2, 2)])[:1]):
            assert_near(got, module(**call))
    assert [one.reasons for one in denoiser.compilations] == [{}, {}]


@pytest.mark.parametrize("first", [(2, 2), (1, 2)])
def test_a_result_for_each_row_of_an_argument(first: tuple[int, int]) -> None:
    """A module gives several results of one sample; none of a graph's is that of a sample."""
    module = built(partial(Rows, each=True))
    denoiser = maskfx.compile(module)
    for batch, rows in (first, (1, 2), (2, 2), (1, 1)):
        call = rows_call(batch, rows)
        output, kept = denoiser.record(**call)
        assert output.shape == module(**call).shape
        mask = torch.rand(8, 12) < 0.2
        for got in (output, *denoiser.edit([maskfx.EditStep(call, mask, kept)])):
            assert_near(got, module(**call))
    with pytest.raises(InputError, match="rows: its batch is 3, but 2 in sample"):
        maskfx.compile(module).batch([rows_call(2, 2), rows_call(2, 3)])
