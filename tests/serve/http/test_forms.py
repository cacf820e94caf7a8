"""The forms of the routes: their fields come from `Request`, and refusals state what was wrong."""

from __future__ import annotations

from typing import Any

import pytest

from maskfx.serve.config import Limits
from maskfx.serve.errors import ApiError
from maskfx.serve.http.forms import forms, takes_of, validated
from maskfx.serve.http.schemas import JsonSchema, MultipartSchema, schema_of, wanted_of
from maskfx.serve.request import parameters_of

FORMS = forms(Limits(prompt=9, steps=7, pictures=3, images=2))


def test_every_parameter_of_a_request_is_a_field_of_the_forms_and_their_schemas() -> None:
    parameters = parameters_of()
    assert {"prompt", "seed", "steps", "guidance", "strength", "lora", "reuse"} <= parameters.keys()
    for form in (FORMS.edits, FORMS.generations, FORMS.templates):
        for field, one in parameters.items():
            there = (form.edits or not one.edits) and (form.answers or not one.pictures)
            assert (one.name in form.model_fields) == there
            for generator in (MultipartSchema, JsonSchema):
                assert (one.name in schema_of(form, generator)["properties"]) == there
            if there:
                assert takes_of(form)[one.name] == (None if one.everywhere else field)


def test_parameters_have_the_names_of_the_request() -> None:
    sent = {"prompt": b"hat", "num_inference_steps": b"5", "guidance_scale": b"2", "user": b""}
    form = validated(FORMS.edits, sent)
    assert form.parameters() == {"prompt": "hat", "steps": 5, "guidance": 2.0, "user": ""}


def test_a_refusal_states_what_any_field_allows() -> None:
    for form in (FORMS.edits, FORMS.generations, FORMS.templates, FORMS.adapters):
        for name, schema in schema_of(form)["properties"].items():
            assert wanted_of(schema.get("items", schema)), name
    with pytest.raises(ApiError, match=r"controlnet must be none, or NAME or NAME:SCALE, up to"):
        validated(FORMS.generations, {"prompt": b"x", "controlnet": b"M-*"})


def test_limits_are_in_the_schemas() -> None:
    fields = schema_of(FORMS.edits)["properties"]
    assert (fields["prompt"]["maxLength"], fields["negative_prompt"]["maxLength"]) == (9, 9)
    assert (fields["num_inference_steps"]["maximum"], fields["n"]["maximum"]) == (7, 3)
    assert fields["image"]["maxItems"] == 2
    assert fields["response_format"]["const"] == "b64_json"
    urls = schema_of(forms(Limits(urls=True)).edits)["properties"]["response_format"]
    assert urls["enum"] == ["b64_json", "url"]


def test_null_is_a_field_that_is_not_set_in_json_only() -> None:
    multipart, members = schema_of(FORMS.templates), schema_of(FORMS.templates, JsonSchema)
    assert multipart["properties"]["seed"]["type"] == "integer"
    assert {"type": "null"} in members["properties"]["seed"]["anyOf"]
    assert {"type": "null"} in schema_of(FORMS.edits, JsonSchema)["properties"]["n"]["anyOf"]
    assert "anyOf" not in members["properties"]["image"]  # it is required
    for schema in (multipart, members):
        assert (schema["required"], schema["additionalProperties"]) == (["image"], False)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("n", b"4", "n must be a whole number from 1 to 3, not 4."),
        ("n", b"few", "n must be a whole number from 1 to 3, not 'few'."),
        ("n", 2.5, "n must be a whole number from 1 to 3, not 2.5."),
        ("n", True, "n must be a whole number from 1 to 3, not True."),
        ("strength", b"0", "strength must be a number above 0, at most 1, not 0.0."),
        ("guidance_scale", b"-1", "guidance_scale must be a number from 0, at most 100, not -1.0."),
        ("prompt", b"0123456789", "prompt must be text in UTF-8 of at most 9 characters, not 10."),
        ("prompt", b"\xff", "prompt must be text in UTF-8 of at most 9 characters, not '\ufffd'."),
        ("stream", b"1", "stream must be true or false, not '1'."),
        ("output_format", b"gif", "output_format must be one of png, jpeg, webp, not 'gif'."),
        ("response_format", b"url", "response_format must be b64_json, not 'url'."),
        ("size", b"64", "size must be WIDTHxHEIGHT up to 99999x99999, or auto, not '64'."),
        ("image", [b"", b"", b""], "image must be given 1 to 2 times, not 3."),
        ("mask", 5, "mask must be a file, or a data: URL, not 5."),
        ("control", b"later", "control must be one of sync, late, not 'later'."),
        ("parallel", b"later", "parallel must be one of sync, late, not 'later'."),
        ("user", b"x" * 257, "user must be text in UTF-8 of at most 256 characters, not 257."),
    ],
)
def test_a_refusal_names_the_field_what_it_must_be_and_what_was_sent(
    name: str, value: Any, message: str
) -> None:
    with pytest.raises(ApiError) as caught:
        validated(FORMS.edits, {"prompt": b"x", name: value})
    assert (caught.value.code, caught.value.param) == ("invalid_value", name)
    assert caught.value.message == message


def test_long_values_are_shown_in_part() -> None:
    with pytest.raises(ApiError) as caught:
        validated(FORMS.edits, {"prompt": b"x", "lora": b"/" * 4000})
    assert len(caught.value.message) < 200


def test_equal_forms_have_equal_digests() -> None:
    sent = {"prompt": b"x", "image": [b"1", b"2"], "seed": b"3"}
    digest = validated(FORMS.edits, sent).digest()
    assert validated(FORMS.edits, dict(reversed(sent.items()))).digest() == digest
    others: list[dict[str, Any]] = [
        {**sent, "seed": b"4"},
        {**sent, "image": [b"12"]},
        {**sent, "image": [b"2", b"1"]},
        {**sent, "mask": b"1"},
    ]
    assert digest not in [validated(FORMS.edits, other).digest() for other in others]
