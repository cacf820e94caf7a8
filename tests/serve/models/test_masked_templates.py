"""Templates of models that see the mask: recorded with none, they serve every mask."""

from __future__ import annotations

from pathlib import Path

import httpx
import numpy as np
import pytest

from tests.factories.served import build, picture, square
from tests.serve.launched import Served, served
from tests.serve.served import file, pixels_of


@pytest.mark.slow
def test_a_template_of_a_pipeline_with_mask_channels_serves_a_mask(tmp_path: Path) -> None:
    """The edit that follows reads the recording: all its steps are masked ones."""
    build("StableDiffusionInpaintPipeline-9").save_pretrained(tmp_path)
    image = file(picture(3))
    white = file(np.where(square(), 255, 0).astype(np.uint8))
    more = {"num_inference_steps": "3", "strength": "1"}
    with served(seconds=300, model=str(tmp_path)) as server, connected(server) as client:
        data = {"id": "one", **more}
        made = client.post("/v1/templates", files={"image": image}, data=data)
        assert made.status_code == 200, made.text
        before = steps(client)
        data = {"prompt": "a cat", "seed": "1", "template_id": "one", **more}
        edited = client.post("/v1/images/edits", files={"mask_image": white}, data=data)
        assert edited.status_code == 200, edited.text
        assert steps(client) == before + 3, "it was recorded again"
        pixels = pixels_of(edited.json()["data"][0]["b64_json"])
        assert np.array_equal(pixels[~square()], picture(3)[~square()])
        assert client.get("/v1/templates/one").json()["bytes"] == made.json()["bytes"]


def connected(server: Served) -> httpx.Client:
    return httpx.Client(base_url=server.url, timeout=300)


def steps(client: httpx.Client) -> float:
    """That the worker has made so far."""
    name = "maskfx_step_latency_seconds_count "
    lines = client.get("/metrics").text.splitlines()
    return next(float(line.removeprefix(name)) for line in lines if line.startswith(name))
