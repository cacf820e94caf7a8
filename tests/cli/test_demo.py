"""What `make demo` shows: an edit by a trained pipeline where there is one, else numbers."""

import re
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from maskfx.cli import demo
from maskfx.cli.demo_sheet import GAP, LINE, SIDE, Panel, difference, masked, sheet
from maskfx.errors import InputError
from maskfx.pipelines.state import Template
from maskfx.runtime.hardware import cpu_threads
from tests.factories.shipped import ship_dit, ship_unet


def test_a_sheet_has_the_panels_side_by_side():
    red = np.zeros((256, 256, 3), np.uint8)
    red[..., 0] = 255
    made = sheet("a heading", [Panel(red, "red", ("one", "two")), Panel(255 - red, "cyan")])
    assert made.width == 3 * GAP + 2 * SIDE
    pixels = np.asarray(made)
    middle = GAP + 3 * LINE + SIDE // 2
    assert pixels[middle, GAP + SIDE // 2].tolist() == [255, 0, 0]
    assert pixels[middle, 2 * GAP + SIDE + SIDE // 2].tolist() == [0, 255, 255]
    below = pixels[GAP + 3 * LINE + 12 + SIDE :, : GAP + SIDE]
    assert (below < 200).any()  # the notes
    assert (pixels[: GAP + LINE] < 100).any()  # the heading


def test_masks_are_tinted_and_differences_brightened():
    grey = np.full((32, 32, 3), 100, np.uint8)
    mask = np.zeros((32, 32), bool)
    mask[8:20, 8:20] = True
    shown = masked(grey, mask)
    assert (shown[~mask] == 100).all()
    assert shown[14, 14, 0] > shown[14, 14, 1]
    other = grey.copy()
    other[0, 0] = 90
    assert difference(grey, other, 4)[0, 0].tolist() == [40, 40, 40]
    assert difference(grey, other, 4).sum() == 120


def test_similarity_is_that_of_the_mask():
    one, mask = np.full((8, 8, 3), 100, np.uint8), np.zeros((8, 8), bool)
    mask[:2] = True
    other = one.copy()
    other[4:] = 0
    assert demo.similarity(one, other, mask) == 100
    other[:2] = 110
    assert demo.similarity(one, other, mask) == pytest.approx(20 * np.log10(255 / 10))


def test_libraries_are_quiet_for_the_time_of_the_demo(capfd: pytest.CaptureFixture[str]):
    from diffusers.utils import logging as of_diffusers
    from diffusers.utils.deprecation_utils import deprecate
    from transformers.utils import logging as of_transformers

    libraries: tuple[Any, ...] = (of_diffusers, of_transformers)
    before = [(one.get_verbosity(), one.is_progress_bar_enabled()) for one in libraries]
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        with demo.quiet_libraries():
            deprecate("an argument", "9.0.0", "Use another.", standard_warn=False)
            for one in libraries:
                one.get_logger(f"{one.__name__.partition('.')[0]}.pipelines").warning("a notice")
                list(one.tqdm([1]))
    assert [str(one.message) for one in warned] == []
    assert capfd.readouterr() == ("", "")
    assert before == [(one.get_verbosity(), one.is_progress_bar_enabled()) for one in libraries]


def test_both_sides_use_the_cores_that_are_left(monkeypatch: pytest.MonkeyPatch):
    """As many threads in the parts of the dense side's modules as in maskfx's graphs."""
    left = iter([3, 2, 3, 2, 3])  # at each call of the dense side, then in its part
    monkeypatch.setattr(cpu_threads, "cores_left", lambda threads: next(left))
    seen: list[int] = []

    class Inner(torch.nn.Module):
        def forward(self) -> None:
            seen.append(torch.get_num_threads())

    inner, before = Inner(), torch.get_num_threads()
    outer = torch.nn.Sequential(inner)
    with demo.settling([outer]):
        [times] = demo.alternate([lambda: inner()], 1)
    assert seen == [2, 2]
    assert len(times) == 1
    assert torch.get_num_threads() == before
    inner()  # without hooks
    assert seen == [2, 2, before]


def test_the_ratio_is_the_median_of_the_rounds(monkeypatch: pytest.MonkeyPatch):
    """A slow round of one side alone changes neither a median nor the ratio."""
    steps = iter([9.0, 9.0, 4.0, 1.0, 90.0, 1.0, 6.0, 2.0])  # warm-up, then dense and edit in turn
    pixels = np.zeros((1, 1, 3), np.uint8)
    monkeypatch.setattr(demo, "timed", lambda pipe, call: demo.DemoResult(pixels, 1.0, next(steps)))
    pipe: Any = SimpleNamespace(components={})
    dense, edited, faster = demo.compared(pipe, pipe, {})
    assert (dense.step, edited.step, faster) == (6.0, 1.0, 4.0)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["unet", "dit"])
def test_a_trained_pipeline_edits_its_example(
    name: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(demo, "STEPS", 3)
    {"unet": ship_unet, "dit": ship_dit}[name](tmp_path)
    demo.main(name, tmp_path, tmp_path / "out")
    told = capsys.readouterr().out
    assert "there is a red heart on a green field" in told
    assert re.search(r"\d+\.\d times faster", told)
    assert re.search(r"\d+\.\d dB inside the mask", told)
    assert "outside it has the picture's own pixels, all of them" in told
    drawn = Image.open(tmp_path / "out" / f"{name}.png")
    assert drawn.width == 6 * GAP + 5 * SIDE
    # the last panel is black where nothing may differ
    last = np.asarray(drawn)[GAP + 3 * LINE + 8 :][: SIDE // 4, -GAP - SIDE : -GAP]
    assert last.max() == 0


def test_without_a_trained_pipeline_it_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    called: list[Any] = []
    monkeypatch.setattr(demo, "edit_step", lambda: called.append("step"))
    demo.main(None, tmp_path, tmp_path / "out")
    assert called == ["step"]
    assert "No trained pipeline" in capsys.readouterr().out
    assert not (tmp_path / "out").exists()


def test_a_pipeline_that_is_not_there_is_named(tmp_path: Path):
    with pytest.raises(InputError, match=r"no trained pipeline 'zebra'.*training.build"):
        demo.main("zebra", tmp_path, tmp_path / "out")


@pytest.mark.parametrize("shape", [(1, 4, 8, 16), (1, 32, 16)])
def test_an_edit_begins_with_noise_of_its_own_where_masked(
    shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
):
    """In latents as pictures, and in patches of two by two of a picture twice as wide as high."""
    kept, mask = torch.zeros(shape), Image.new("L", (128, 64))
    mask.paste(255, (0, 48, 64, 64))  # the last quarter of rows, the left half
    library = SimpleNamespace(start=lambda name: [kept])
    monkeypatch.setattr(demo, "pipeline_state_of", lambda pipe: SimpleNamespace(library=library))
    example = demo.Example(Image.new("RGB", mask.size), mask, "")
    made = demo.same_noise(None, Template("t"), example) != 0
    sites = made.all(1)[0] if len(shape) == 4 else made.all(-1)[0].view(4, 8)
    wanted = torch.zeros(sites.shape, dtype=torch.bool)
    wanted[3 * len(sites) // 4 :, : sites.shape[1] // 2] = True
    assert torch.equal(sites, wanted)
