"""A server, and `maskfx edit`, with exported graphs make the picture of the compiled denoiser."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from maskfx.cli import main as cli
from tests.factories import served
from tests.serve import launched

pytestmark = pytest.mark.slow

NAME = "StableDiffusion3InpaintPipeline"
READY = 600.0  # seconds; the first edit's templates are recorded while the server warms up


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "plain"
    served.build(NAME).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def exported(plain: Path) -> Path:
    folder = plain.with_name("exported")
    assert cli.main(["export", str(plain), "--out", str(folder), "--no-verify"]) == 0
    assert (folder / "transformer" / "edit.onnx").is_file()
    assert not list((folder / "transformer").glob("*.safetensors"))
    return folder


def edited(folder: Path, name: str, *more: str) -> np.ndarray:
    """The picture of one edit by the command."""
    mask = np.where(served.square(), 0, 255).astype(np.uint8)
    Image.fromarray(np.dstack([served.picture(), mask])).save(folder / "alpha.png")
    out = folder / f"{name}.png"
    line = ["edit", str(folder / "alpha.png"), "--prompt", "a cat", "--out", str(out)]
    assert cli.main([*line, "--steps", "3", "--seed", "5", *more]) == 0
    return np.asarray(Image.open(out)).astype(int)


def test_edits_here_and_by_a_server_agree_with_the_compiled_ones(
    plain: Path, exported: Path, tmp_path: Path
) -> None:
    wanted = edited(tmp_path, "compiled", "--model", str(plain))
    inside = served.square()
    assert np.abs(wanted - served.picture())[inside].max() > 8
    here = edited(tmp_path, "here", "--model", str(exported))
    assert np.abs(here - wanted).max() <= 1  # of 255
    with launched.served(READY, model=str(exported), workers=1) as server:
        there = edited(tmp_path, "there", "--server", server.url)
    assert np.abs(there - wanted).max() <= 1
