"""The real `openai` client, as people use it."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import openai
import pytest

from maskfx.serve.config import ServeSettings
from maskfx.serve.errors import ApiError
from tests.serve.served import EDITED, MASK, PICTURE, Served, picture, pixels_of, served

KEY = "sk-test"


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with served(ServeSettings(codecs=1, api_key=KEY)) as one:
        yield one


@pytest.fixture
def client(server: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key=KEY, max_retries=0) as one:
        yield one


def test_edits_with_a_mask(server: Served, client: openai.OpenAI) -> None:
    answer = client.images.edit(
        image=PICTURE,
        mask=MASK,
        prompt="a cat",
        n=2,
        size="auto",
        response_format="b64_json",
        extra_body={"seed": 3, "num_inference_steps": 2},
    )
    assert answer.data is not None
    assert len(answer.data) == 2
    assert answer.data[0].b64_json is not None
    made = pixels_of(answer.data[0].b64_json)
    assert np.array_equal(made[~EDITED], picture()[~EDITED])
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.input_tokens + answer.usage.output_tokens
    assert server.frontend.asked[-1].request.steps == 2


def test_edits_of_several_images(server: Served, client: openai.OpenAI) -> None:
    client.images.edit(image=[PICTURE, PICTURE], prompt="both")
    assert len(server.frontend.asked[-1].pictures.images) == 2


def test_generations(client: openai.OpenAI) -> None:
    answer = client.images.generate(prompt="a hill", size="32x32", output_format="webp")
    assert answer.data is not None
    assert pixels_of(answer.data[0].b64_json or "").shape == (32, 32, 3)
    assert (answer.size, answer.output_format) == ("32x32", "webp")


def test_streams(client: openai.OpenAI) -> None:
    edits = list(
        client.images.edit(image=PICTURE, mask=MASK, prompt="x", stream=True, partial_images=2)
    )
    assert [one.type for one in edits] == ["image_edit.partial_image"] * 2 + [
        "image_edit.completed"
    ]
    made = list(client.images.generate(prompt="x", stream=True, partial_images=1))
    assert [one.type for one in made] == [
        "image_generation.partial_image",
        "image_generation.completed",
    ]
    for event in (*edits, *made):
        type(event).model_validate(event.model_dump())  # nothing that it needs is missing
        assert (event.size, event.created_at > 0) == ("64x48", True)
    assert edits[-1].type == "image_edit.completed"
    assert edits[-1].usage.total_tokens > 0


def test_a_failure_in_a_stream_is_raised(server: Served, client: openai.OpenAI) -> None:
    server.frontend.fail, server.frontend.step = ApiError("generation_failed", "Not finite."), 1.3
    try:
        with pytest.raises(openai.APIError, match="Not finite") as failed:
            list(client.images.edit(image=PICTURE, prompt="x", stream=True))
    finally:
        server.frontend.fail, server.frontend.step = None, 0.0
    assert failed.value.code == "generation_failed"


def test_errors_are_its_own(client: openai.OpenAI, server: Served) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        client.images.edit(image=PICTURE, prompt="x", extra_body={"strength": 7})
    assert (bad.value.code, bad.value.param) == ("invalid_value", "strength")
    assert bad.value.request_id is not None
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("none")
    wrong = openai.OpenAI(base_url=server.url + "/v1", api_key="sk-wrong", max_retries=0)
    with wrong, pytest.raises(openai.AuthenticationError) as refused:
        wrong.models.list()
    assert refused.value.code == "invalid_api_key"


@pytest.mark.parametrize(("code", "kind"), [("queue_full", "429"), ("no_workers", "503")])
def test_it_comes_back_when_told(server: Served, code: str, kind: str) -> None:
    server.frontend.refuse = [ApiError(code, "Not now.", retry_after=1)]
    with openai.OpenAI(base_url=server.url + "/v1", api_key=KEY, max_retries=1) as client:
        answer = client.images.edit(image=bytes(PICTURE), mask=MASK, prompt="x")
    assert answer.data is not None
    assert server.frontend.refuse == [], kind


def test_models(client: openai.OpenAI) -> None:
    names = [one.id for one in client.models.list()]
    assert names == ["fake/model", "fake/model:ink"]
    card = client.models.retrieve(names[0]).model_dump()["maskfx"]
    assert (card["multiple"], card["site"], card["size"]) == (8, 8, [64, 48])
    assert "mask" in card["takes"]
