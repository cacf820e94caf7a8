"""Without a key, web pages of other sites are kept out, and the server's own page isn't."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from maskfx.serve.config import ServeSettings
from maskfx.serve.http.origins import name_in
from tests.serve.served import MASK, PICTURE, Served, served

SITE = "https://evil.example"
FILES = {"image": ("a.png", PICTURE), "mask": ("m.png", MASK)}


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with served() as one:
        yield one


def post(server: Served, **headers: str) -> tuple[int, str]:
    """An edit as a form sends it; the status and the error's code."""
    with server.client(**headers) as client:
        response = client.post("/v1/images/edits", data={"prompt": "a"}, files=FILES)
    return response.status_code, response.json().get("error", {}).get("code", "")


@pytest.mark.parametrize(
    "origin", [SITE, "null", "http://localhost:1", "http://127.0.0.1", "http://127.0.0.1:80000"]
)
def test_a_form_of_another_site_makes_nothing(server: Served, origin: str) -> None:
    before = len(server.frontend.asked)
    assert post(server, origin=origin) == (403, "origin_not_allowed")
    with server.client(origin=origin) as client:
        assert client.delete("/v1/templates/t").json()["error"]["code"] == "origin_not_allowed"
    assert len(server.frontend.asked) == before
    assert server.frontend.seats == 0


def test_the_own_page_and_clients_that_are_no_browsers_go_on(server: Served) -> None:
    for host in (f"127.0.0.1:{server.port}", f"localhost:{server.port}", f"[::1]:{server.port}"):
        assert post(server, host=host, origin=f"http://{host}") == (200, "")
        assert post(server, host=host) == (200, "")


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8000", "localhost.evil.example:1"])
def test_a_rebound_name_reads_nothing(server: Served, host: str) -> None:
    with server.client(host=host, origin=f"http://{host}") as client:
        for path in ("/", "/v1/models", "/v1/templates", "/metrics", "/openapi.json", "/nowhere"):
            response = client.get(path)
            assert response.status_code == 403, path
            error = response.json()["error"]
            assert (error["code"], error["param"]) == ("host_not_allowed", "Host")
            assert "allowed_hosts" in error["message"]
            assert response.headers["x-request-id"]
        assert client.get("/health").status_code == 200


def test_a_call_without_a_host_is_no_browsers(server: Served) -> None:
    with server.connect() as line:
        line.sendall(b"GET /v1/models HTTP/1.0\r\n\r\n")
        assert line.recv(99).startswith(b"HTTP/1.1 200")
    with server.connect() as line:
        line.sendall(b"GET /v1/models HTTP/1.0\r\nOrigin: null\r\n\r\n")
        assert line.recv(99).startswith(b"HTTP/1.1 403")


def test_names_of_a_proxy_are_settings() -> None:
    hosts, origins = ("edit.example.org",), ("https://edit.example.net",)
    settings = ServeSettings(codecs=1, allowed_hosts=hosts, allowed_origins=origins)
    with served(settings) as server:
        passed = {"host": "Edit.example.org", "origin": "https://edit.example.org"}
        assert post(server, **passed) == (200, "")  # the proxy passes Host on
        assert post(server, origin="https://edit.example.net") == (200, "")  # or replaces it
        assert post(server, host="edit.example.net") == (403, "host_not_allowed")
        assert post(server, origin="https://edit.example.org") == (403, "origin_not_allowed")
        assert post(server, origin="https://edit.example.net:1") == (403, "origin_not_allowed")


def test_any_name_is_a_setting() -> None:
    with served(ServeSettings(codecs=1, allowed_hosts=("*",), allowed_origins=("*",))) as server:
        assert post(server, host="a.example", origin=SITE) == (200, "")


def test_with_a_key_the_key_decides() -> None:
    with served(ServeSettings(codecs=1, api_key="k")) as server:
        assert post(server, origin=SITE) == (401, "invalid_api_key")
        key = {"authorization": "Bearer k"}
        assert post(server, host="a.example", origin=SITE, **key) == (200, "")


@pytest.mark.parametrize(
    ("host", "name"),
    [("a.b:1", "a.b"), ("a.b", "a.b"), ("[::1]:8000", "::1"), ("[::1]", "::1"), ("", "")],
)
def test_a_hosts_name(host: str, name: str) -> None:
    assert name_in(host) == name
