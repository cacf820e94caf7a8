"""The trained pipelines that the package ships: what they are, and that edits of them are right."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import maskfx
from bench.quality.bed import denoiser_of
from maskfx.pipelines import call_defaults
from maskfx.pipelines.masks.masks import grid_of, pooled
from maskfx.runtime.steps import EditStep
from maskfx.serve.models.pipeline_set import side_of
from maskfx.shipped import FOLDER, names
from training.edits import draw_edits, load_probe, seen
from training.train import RUNS

SHIPPED = names()
STEPS = 10


@pytest.fixture(scope="module", params=SHIPPED)
def shipped(request: pytest.FixtureRequest) -> tuple[str, Any]:
    pipe = maskfx.reference(request.param)
    pipe.set_progress_bar_config(disable=True)
    return request.param, pipe


def call_of(name: str, edit: Any, seed: int) -> dict[str, Any]:
    return {
        **call_defaults.call_of(FOLDER / name),
        "prompt": edit.prompt,
        "image": Image.fromarray(edit.pixels),
        "mask_image": Image.fromarray(edit.mask),
        "num_inference_steps": STEPS,
        "generator": torch.Generator().manual_seed(seed),
        "height": 256,
        "width": 256,
    }


def test_the_package_ships_a_trained_pipeline():
    assert {"unet", "dit"} <= set(SHIPPED)


@pytest.mark.parametrize("name", SHIPPED)
def test_a_folder_is_small_and_says_how_it_was_made(name: str):
    folder = FOLDER / name
    assert sum(p.stat().st_size for p in folder.rglob("*") if p.is_file()) < 40e6
    assert not [*folder.rglob("*.bin"), *folder.rglob("*.pt"), *folder.rglob("*.pkl")]
    assert "_name_or_path" not in "".join(p.read_text() for p in folder.rglob("*.json"))
    card = (folder / "README.md").read_text(encoding="utf-8")
    assert "python -m training.train" in card
    assert json.loads((folder / "training.json").read_text(encoding="utf-8"))[name]["step"] > 0


def test_a_server_makes_pictures_as_large_as_the_training_had(shipped: tuple[str, Any]):
    """Flux's class has 1024 for all its models."""
    assert side_of(shipped[1]) == 256


@pytest.mark.parametrize(("by_autoencoder", "wanted"), [(256, 256), (2048, 1024), (32, 1024)])
def test_an_autoencoder_tells_of_smaller_pictures(by_autoencoder: int, wanted: int):
    vae = SimpleNamespace(config={"sample_size": by_autoencoder})
    made = dict(vae_scale_factor=8, default_sample_size=128, components={}, vae=vae)
    assert side_of(SimpleNamespace(**made)) == wanted


@pytest.mark.slow
def test_edits_have_the_asked_colour(shipped: tuple[str, Any]):
    """A glance at a few; `python -m training.edits` is the gate."""
    name, pipe = shipped
    probe, edits = load_probe(RUNS), list(draw_edits(6))
    made = [np.asarray(pipe(**call_of(name, e, i)).images[0]) for i, e in enumerate(edits)]
    right = [seen(probe, m, e.thing)[1] == e.thing.colour for m, e in zip(made, edits, strict=True)]
    assert sum(right) >= 5, right


def test_an_edit_of_trained_weights_repeats_the_dense_run(shipped: tuple[str, Any]):
    """From a template that the very same run recorded."""
    name, pipe = shipped
    edit = next(iter(draw_edits(1)))
    heard: list[dict[str, Any]] = []
    denoiser: Any = denoiser_of(pipe)
    handle = denoiser.register_forward_pre_hook(
        lambda _, args, kwargs: heard.append(named(denoiser, args, kwargs)), with_kwargs=True
    )
    pipe(**call_of(name, edit, 0))
    handle.remove()
    inputs = heard[STEPS // 2]
    fast = maskfx.compile(denoiser)
    with torch.no_grad():
        wanted = denoiser(**{**inputs, "return_dict": False})[0]
        _, cache = fast.record(**inputs)
        pixels = torch.from_numpy(edit.mask.copy())
        if wanted.dim() == 4:
            mask = pooled(pixels, wanted.shape[-2:])
            picked = mask.expand_as(wanted)
        else:  # patches in a row
            grid = grid_of(wanted.shape[1], *pixels.shape)
            assert grid is not None
            mask = pooled(pixels, grid).flatten()
            picked = mask[:, None].expand_as(wanted)
        found = fast.edit([EditStep(inputs, mask, cache)])[0][0]
    assert (found - wanted)[picked].norm() / wanted[picked].norm() < 1e-4


def named(denoiser: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    inputs = {**dict(zip(("sample", "timestep"), args, strict=False)), **kwargs}
    return {k: v for k, v in inputs.items() if v is not None and k != "return_dict"}


def test_the_unet_is_taken_where_none_is_named(tmp_path: Path):
    for name in ("zebra", "dit", "unet", "ape"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model_index.json").write_text("{}")
    assert names(tmp_path) == ["unet", "ape", "dit", "zebra"]
    (tmp_path / "unet" / "model_index.json").unlink()
    assert names(tmp_path) == ["ape", "dit", "zebra"]
