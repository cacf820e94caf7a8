"""ControlNets that the settings add to a model that was saved without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from maskfx.errors import InputError
from maskfx.serve.models.model_source import load_pipeline
from tests.factories.shipped import ship_unet


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    ship_unet(folder)
    return folder / "unet"


def save_net(model: Path, folder: Path, seed: int) -> None:
    import diffusers

    library: Any = diffusers
    unet = library.UNet2DConditionModel.from_pretrained(model / "unet")
    torch.manual_seed(seed)
    net = library.ControlNetModel.from_unet(
        unet, conditioning_channels=3, load_weights_from_unet=False
    )
    net.save_pretrained(folder, safe_serialization=True)


def test_a_model_gets_one_controlnet_or_several(model: Path, tmp_path: Path) -> None:
    for index in range(2):
        save_net(model, tmp_path / f"net-{index}", index)
    one = load_pipeline(str(model), "bfloat16", "cpu", [str(tmp_path / "net-0")])
    assert type(one).__name__ == "StableDiffusionControlNetInpaintPipeline"
    assert one.controlnet.dtype == one.unet.dtype == torch.bfloat16
    both = load_pipeline(
        str(model), "float32", "cpu", [str(tmp_path / f"net-{index}") for index in range(2)]
    )
    assert len(both.controlnet.nets) == 2
    firsts = [net.conv_in.weight for net in both.controlnet.nets]
    assert not torch.equal(*firsts)


def test_what_is_no_controlnet_is_refused(model: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="controlnets: 'nowhere' is neither a folder nor a hub id"):
        load_pipeline(str(model), "float32", "cpu", ["nowhere"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="can't be loaded.*the folder of a ControlNet"):
        load_pipeline(str(model), "float32", "cpu", [str(tmp_path / "empty")])
