"""Graphs of denoisers that read the sides of the picture from a tensor: any size, in any host."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import maskfx
from maskfx.export.denoiser import ExportedDenoiser
from maskfx.export.exporter import export
from maskfx.export.host import Edit, Host, Record
from tests.export.hosted import check_export
from tests.export.test_host_onnx import Sessions, apart, arrays
from tests.factories.masks import MASKS
from tests.factories.own_cases import OWN
from tests.factories.own_sides import rows
from tests.factories.zoo import Size

TALL, WIDE, SMALL = Size(2, 10, 6, 7), Size(1, 4, 12, 5), Size(1, 6, 8, 3)


@pytest.mark.parametrize(
    "name",
    [
        "sides-of-patches",
        "sides-counted",
        *(
            pytest.param(f"sides-{name}", marks=pytest.mark.slow)
            for name in ("in-pixels", "in-one-row", "turned", "of-a-video")
        ),
    ],
)
def test_onnxruntime_agrees_at_two_sizes(name: str, tmp_path: Path) -> None:
    check_export(OWN[name], tmp_path / "x")


def test_one_export_serves_any_sides(tmp_path: Path) -> None:
    """The tokens of pictures of several sizes, which only a tensor shows, in one batch."""
    case = OWN["sides-of-tokens"]
    module, folder = case.build(), tmp_path / "x"
    export(module, folder, example_inputs=case.inputs(TALL, 0))
    host = Host.read(folder)
    run = Sessions(host, folder)
    calls = [case.inputs(size, n) for n, size in enumerate((TALL, WIDE, SMALL))]
    recorded = host.step([Record(arrays(call)) for call in calls], run)
    edits = []
    for call, result in zip(calls, recorded, strict=True):
        assert apart(result.outputs[0], module(**call)) < 1e-4
        assert result.recording is not None
        sides = tuple(call["img_sizes"][0].tolist())
        edits.append(Edit(arrays(call), MASKS["random"](sides, 1).numpy(), result.recording))
    for call, result in zip(calls, host.step(edits, run), strict=True):
        assert apart(result.outputs[0], module(**call)) < 1e-4
        [dense] = host.dense(arrays(call), run)
        assert apart(dense, module(**call)) < 1e-4


@pytest.fixture(scope="module")
def patches(tmp_path_factory: pytest.TempPathFactory) -> Path:
    case, folder = OWN["sides-of-patches"], tmp_path_factory.mktemp("sides") / "x"
    export(case.build(), folder, format="pt2", example_inputs=case.inputs(TALL, 0), verify=False)
    return folder


def refused(graph: str, inputs: object) -> list[np.ndarray[Any, Any]]:
    raise AssertionError(graph)


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ([[5, 4], [5, 4]], r"\(x/2\) is 4, expected 3 of a picture"),
        ([[5, 3], [3, 5]], "samples have different numbers"),
        ([[5, 3, 1], [5, 3, 1]], "img_sizes: expected 2 numbers, got 3"),
    ],
)
def test_a_host_refuses_other_numbers(
    patches: Path, numbers: list[list[int]], message: str
) -> None:
    call = arrays(OWN["sides-of-patches"].inputs(TALL, 0))
    with pytest.raises(maskfx.InputError, match=message):
        Host.read(patches).request({**call, "img_sizes": np.array(numbers)}, refused)


def test_the_runtime_serves_any_sides(patches: Path) -> None:
    case = OWN["sides-of-patches"]
    module = case.build()
    denoiser = ExportedDenoiser(module, patches)
    for seed, size in enumerate((TALL, WIDE)):
        call: dict[str, Any] = case.inputs(size, seed)
        found, wanted = denoiser.dense(call), module(**call)
        assert float((found - wanted).norm() / wanted.norm()) < 1e-4
        output, kept = denoiser.record(**call)
        mask = MASKS["random"](denoiser.mask_shape(call), seed)
        [edited] = denoiser.edit([maskfx.EditStep(call, mask, kept)])
        assert float((edited - wanted).norm() / wanted.norm()) < 1e-4
    with pytest.raises(maskfx.InputError, match="img_sizes"):
        denoiser.record(**{**call, "img_sizes": rows(WIDE, 5, 5)})
    assert torch.equal(call["img_sizes"], case.inputs(WIDE, 1)["img_sizes"])
