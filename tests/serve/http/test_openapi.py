"""The OpenAPI document is true: Schemathesis calls every route by it, well and badly."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.checks import load_all_checks
from schemathesis.core.parameters import ParameterLocation
from schemathesis.specs.openapi.checks import positive_data_acceptance

from maskfx.serve.config import ServeSettings
from maskfx.serve.http.openapi import FAILURES
from tests.serve.served import MASK, Served, served

KEY = "sk-test"
# What a schema can't say: which fields go together, and which bytes are a picture.
BEYOND_A_SCHEMA: list[Any] = [positive_data_acceptance]

load_all_checks()
schemathesis.openapi.media_type("image/png", st.just(MASK))


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with served(ServeSettings(codecs=1, api_key=KEY)) as one:
        yield one


@pytest.fixture(scope="module")
def api(server: Served) -> Any:
    headers = {"Authorization": f"Bearer {KEY}"}
    found = schemathesis.openapi.from_url(server.url + "/openapi.json", headers=headers)
    found.config.checks.negative_data_rejection.expected_statuses.append("413")  # text too long
    return found


OPERATIONS = [
    ("/v1/images/edits", "POST"),
    ("/v1/images/generations", "POST"),
    ("/v1/templates", "POST"),
    ("/v1/templates", "GET"),
    ("/v1/templates/{template_id}", "GET"),
    ("/v1/templates/{template_id}", "DELETE"),
    ("/v1/adapters", "POST"),
    ("/v1/adapters", "GET"),
    ("/v1/adapters/{adapter}", "GET"),
    ("/v1/adapters/{adapter}", "DELETE"),
    ("/v1/models", "GET"),
    ("/v1/models/{name}", "GET"),
    ("/version", "GET"),
    ("/metrics", "GET"),
    ("/health", "GET"),
    ("/health/live", "GET"),
    ("/health/ready", "GET"),
]


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
@pytest.mark.parametrize(("path", "verb"), OPERATIONS)
def test_every_route_does_as_the_document_says(
    api: Any, path: str, verb: str, mode: GenerationMode
) -> None:
    operation = api[path][verb]
    if mode is GenerationMode.NEGATIVE and not (operation.body or operation.path_parameters):
        pytest.skip("nothing of it can be wrong")

    @settings(
        max_examples=25 if operation.body else 3,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def call(case: schemathesis.Case[Any]) -> None:
        headers = {"Authorization": f"Bearer {KEY}"}
        in_time(case.body)
        # a wrong key is replaced by the right one, so that only the body may be wrong
        assert case.meta is not None
        # Schemathesis finds some bodies wrong that it made to be right: they show nothing
        assume(mode is GenerationMode.NEGATIVE or not case.meta.generation.mode.is_negative)
        assume(not (operation.body and case.meta.is_negative_at(ParameterLocation.HEADER)))
        # far beyond the server's own deadlines: on a busy machine the server's answer counts
        case.call_and_validate(headers=headers, excluded_checks=BEYOND_A_SCHEMA, timeout=120)

    call()


def in_time(body: Any) -> None:
    """Raise a valid deadline to a minute: how much is too little (503) depends on the machine."""
    if isinstance(body, dict) and type(body.get("slo_ms")) in (int, float):
        body["slo_ms"] = max(body["slo_ms"], 60_000.0) if body["slo_ms"] > 0 else body["slo_ms"]


def test_every_route_is_described(server: Served) -> None:
    with server.client(Authorization=f"Bearer {KEY}") as client:
        told = client.get("/openapi.json").json()
    operations = {(path, verb) for path, verbs in told["paths"].items() for verb in verbs}
    assert operations == {(path, verb.lower()) for path, verb in OPERATIONS} >= set(FAILURES)
    for path, verb in operations:
        responses = told["paths"][path][verb]["responses"]
        assert "422" not in responses
        assert ("401" in responses) == (not path.startswith("/health"))
        assert "403" not in responses
    edit = told["paths"]["/v1/images/edits"]["post"]
    fields = edit["requestBody"]["content"]["multipart/form-data"]["schema"]
    assert fields["additionalProperties"] is False
    assert fields["required"] == ["prompt"]
    assert fields["properties"]["image"]["maxItems"] == 4
