"""Spans of launched servers: continued traces, what lies in them, requests that end otherwise."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from maskfx.serve.frontend.ticket import new_ticket
from maskfx.serve.frontend.tracing import Tracing, exporter_to
from maskfx.serve.messages import JobSpan
from tests.serve.frontend.test_dispatch import CARD
from tests.serve.fronts import request
from tests.serve.launched import Served, served
from tests.serve.served import MASK, PICTURE
from tests.serve.traced import ENDPOINT

STEPS, LONG, SECONDS = 6, 40, 0.05
MODEL = f"fake:seconds_per_step={SECONDS},steps={STEPS},width=64,height=64"
CALLER = "00f067aa0ba902b7"  # the span of the caller
PLAIN, KILLED, GONE, QUEUED, FAILED, UNWANTED, TEMPLATE, OTHER = (f"{k:032x}" for k in range(1, 9))
Span = dict[str, Any]


def traceparent(trace: str, flags: str = "01") -> dict[str, str]:
    return {"traceparent": f"00-{trace}-{CALLER}-{flags}"}


def body(**more: Any) -> dict[str, Any]:
    return {"prompt": "a cat", "seed": 7, "size": "64x64"} | more


def post(client: httpx.Client, trace: str, **more: Any) -> httpx.Response:
    headers = traceparent(trace)
    return client.post("/v1/images/generations", json=body(**more), headers=headers)


def until_busy(client: httpx.Client, running: int, waiting: int = 0) -> None:
    end = time.monotonic() + 20
    while (health := client.get("/health").json())["running"] != running or (
        health["waiting"] != waiting
    ):
        assert time.monotonic() < end, health
        time.sleep(0.005)


def until_stepped(client: httpx.Client, more: int = 2) -> None:
    """A number of further steps, of any request."""
    name = "maskfx_step_latency_seconds_count "
    seen: list[float] = []
    end = time.monotonic() + 20
    while not seen or seen[-1] < seen[0] + more:
        assert time.monotonic() < end, "it makes no steps"
        lines = client.get("/metrics").text.splitlines()
        seen.append(next(float(x.removeprefix(name)) for x in lines if x.startswith(name)))
        time.sleep(0.005)


@contextlib.contextmanager
def leaving(server: Served, trace: str) -> Iterator[None]:
    """A call whose client leaves at the end of the block."""
    text = json.dumps(body(num_inference_steps=LONG))
    head = {
        "Host": "localhost",
        "Content-Type": "application/json",
        "Content-Length": str(len(text)),
    }
    lines = [f"{name}: {value}" for name, value in (head | traceparent(trace)).items()]
    with socket.create_connection(("127.0.0.1", server.port), 10) as line:
        first = "POST /v1/images/generations HTTP/1.1"
        line.sendall("\r\n".join([first, *lines, "", text]).encode())
        yield


def calls(server: Served) -> None:
    """Everything that the tests below look at."""
    with httpx.Client(base_url=server.url, timeout=60) as client:
        assert post(client, PLAIN, n=2).is_success
        assert post(client, FAILED, prompt="fake:fail").status_code == 500
        unwanted = traceparent(UNWANTED, "00")
        assert client.post("/v1/images/generations", json=body(), headers=unwanted).is_success
        files = {"image": PICTURE, "mask": MASK}
        assert client.post("/v1/images/edits", files=files, data={"prompt": "x"}).is_success
        sent = client.post("/v1/templates", files={"image": PICTURE}, headers=traceparent(TEMPLATE))
        assert sent.is_success
        with leaving(server, GONE):
            until_busy(client, 1)
            until_stepped(client)
        until_busy(client, 0)
        with ThreadPoolExecutor() as pool:
            again = pool.submit(posted, server, KILLED)
            other = pool.submit(posted, server, OTHER)
            until_busy(client, 2)
            with leaving(server, QUEUED):
                until_busy(client, 2, 1)
                until_stepped(client, 6)  # of two requests
            until_busy(client, 2)
            server.workers()[0].kill()
            assert again.result() == other.result() == 200


def posted(server: Served, trace: str) -> int:
    with httpx.Client(base_url=server.url, timeout=60) as client:
        return post(client, trace, num_inference_steps=LONG).status_code


@pytest.fixture(scope="module")
def spans() -> dict[str, list[Span]]:
    """By trace, in the order of their beginning."""
    found: defaultdict[str, list[Span]] = defaultdict(list)
    where: dict[str, Any] = {"module": "tests.serve.traced", "otlp_endpoint": ENDPOINT}
    with served(**where, model=MODEL, max_num_seqs=2) as server:
        calls(server)
        for span in ended(server)[0]["spans"]:
            found[span["trace"]].append(span)
    for each in found.values():
        each.sort(key=lambda span: span["began"])
    return dict(found)


def ended(server: Served) -> list[dict[str, Any]]:
    """What it logged when it had ended."""
    server.process.terminate()
    assert server.process.wait(20) == 0
    until = time.monotonic() + 10
    while not (told := server.events("spans")):
        assert time.monotonic() < until, "".join(server.lines)
        time.sleep(0.02)
    return told


def root(spans: list[Span], number: int = 0) -> Span:
    """The request's own span."""
    roots = [span for span in spans if span["parent"] in (None, CALLER)]
    return sorted(roots, key=lambda span: str(span["maskfx.request_id"]))[number]


def within(spans: list[Span], one: Span) -> list[Span]:
    return [span for span in spans if span["parent"] == one["id"]]


def names(spans: list[Span]) -> list[str]:
    return [span["name"] for span in spans]


WHOLE = ["queue", "encode", *(f"step[{n}]" for n in range(STEPS)), "decode"]
LONG_ONE = ["queue", "encode", *(f"step[{n}]" for n in range(LONG)), "decode"]


def test_a_callers_trace_goes_on_with_a_span_for_each_picture(
    spans: dict[str, list[Span]],
) -> None:
    for number in range(2):
        one = root(spans[PLAIN], number)
        assert (one["name"], one["parent"]) == ("image_generation", CALLER)
        assert one["maskfx.request_id"].endswith(f"-{number}")
        inner = within(spans[PLAIN], one)
        assert names(inner) == WHOLE
        assert {span.get("maskfx.worker") for span in inner} == {None, "worker-0.1"}
        times = [one["began"], *(t for s in inner for t in (s["began"], s["ended"])), one["ended"]]
        assert times == sorted(times), "they lie in the request, one after the other"
        stepping = (inner[-2]["ended"] - inner[2]["began"]) / 1e9
        assert stepping > 0.8 * STEPS * SECONDS
        assert (one["maskfx.finished_reason"], one["status"]) == ("stop", "UNSET")
        assert (one["maskfx.steps"], one["maskfx.tries"]) == (STEPS, 1)
    assert len(spans[PLAIN]) == 2 * (1 + len(WHOLE))


def test_a_call_without_a_trace_begins_one(spans: dict[str, list[Span]]) -> None:
    (own,) = (each for each in spans.values() if root(each)["name"] == "image_edit")
    assert root(own)["parent"] is None
    assert names(within(own, root(own))) == WHOLE


def test_a_template_is_recorded(spans: dict[str, list[Span]]) -> None:
    one = root(spans[TEMPLATE])
    assert one["name"] == "template"
    recorded = [f"record[{n}]" for n in range(STEPS)]
    assert names(within(spans[TEMPLATE], one)) == ["queue", "encode", *recorded]


def test_a_caller_who_wants_no_spans_gets_none(spans: dict[str, list[Span]]) -> None:
    assert UNWANTED not in spans


def test_a_failure_is_said(spans: dict[str, list[Span]]) -> None:
    one = root(spans[FAILED])
    assert (one["status"], one["maskfx.finished_reason"]) == ("ERROR", "generation_failed")
    assert names(within(spans[FAILED], one)) == ["queue", "encode", "step[0]"]


def test_who_left_has_the_steps_until_then(spans: dict[str, list[Span]]) -> None:
    one = root(spans[GONE])
    assert (one["status"], one["maskfx.finished_reason"]) == ("UNSET", "cancelled")
    inner = names(within(spans[GONE], one))
    assert inner == LONG_ONE[: len(inner)]
    assert 4 <= len(inner) < len(LONG_ONE) - 1


def test_who_left_the_queue_has_only_waited(spans: dict[str, list[Span]]) -> None:
    one = root(spans[QUEUED])
    assert one["maskfx.finished_reason"] == "cancelled"
    (queue,) = within(spans[QUEUED], one)
    assert queue["name"] == "queue"
    assert queue["ended"] == one["ended"]
    assert queue["ended"] - queue["began"] > SECONDS * 1e9


def test_who_began_again_has_the_steps_of_both_workers(spans: dict[str, list[Span]]) -> None:
    one = root(spans[KILLED])
    assert one["events"] == ["begin_again"]
    assert (one["maskfx.tries"], one["maskfx.finished_reason"]) == (2, "stop")
    inner = within(spans[KILLED], one)
    first = [span for span in inner if span.get("maskfx.attempt") == 1]
    second = [span for span in inner if span.get("maskfx.attempt") == 2]
    whole = LONG_ONE[1:]
    assert names(first) == whole[: len(first)]
    assert 3 <= len(first) < len(whole)
    assert {span["maskfx.worker"] for span in first} == {"worker-0.1"}
    assert names(second) == whole
    assert {span["maskfx.worker"] for span in second} == {"worker-0.2"}
    before, between = (span for span in inner if span["name"] == "queue")
    assert first[-1]["ended"] <= between["began"] <= between["ended"] <= second[0]["began"]


def test_a_jump_of_the_wall_clock_changes_no_duration() -> None:
    wall = [10**18]
    kept = InMemorySpanExporter()
    tracing = Tracing(kept, lambda: wall[0])
    trace = tracing.begin(request()[0], 100.0)
    assert trace is not None
    wall[0] -= 86_400 * 10**9
    trace.started("w", 1, 102.0)
    trace.spent(JobSpan("a", 1, "step", 103.0, 103.5, 0))
    wall[0] += 2 * 86_400 * 10**9
    trace.ended("stop", 104.0)
    tracing.close()
    times = {span.name: (span.start_time, span.end_time) for span in kept.get_finished_spans()}
    now, second = 10**18, 10**9
    assert times == {
        "queue": (now, now + 2 * second),
        "step[0]": (now + 3 * second, now + 7 * second // 2),
        "image_edit": (now, now + 4 * second),
    }


# Where they go.


@contextlib.contextmanager
def collector() -> Iterator[tuple[str, list[tuple[str, bytes]]]]:
    """What takes spans by OTLP: its URL, and what came to which path."""
    came: list[tuple[str, bytes]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            came.append((self.path, self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Handler) as http:
        thread = threading.Thread(target=http.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{http.server_port}", came
        finally:
            http.shutdown()
            thread.join()


def test_a_collector_gets_them_at_the_servers_end() -> None:
    with collector() as (url, came), served(model=MODEL, otlp_endpoint=url + "/") as server:
        with httpx.Client(base_url=server.url, timeout=30) as client:
            assert post(client, PLAIN).status_code == 200
        server.process.terminate()
        assert server.process.wait(20) == 0
    assert {path for path, _ in came} == {"/v1/traces"}
    found = []
    for _, data in came:
        for resource in ExportTraceServiceRequest.FromString(data).resource_spans:
            said = {each.key: each.value.string_value for each in resource.resource.attributes}
            assert said["service.name"] == "maskfx"
            found += [span for scope in resource.scope_spans for span in scope.spans]
    assert {span.trace_id.hex() for span in found} == {PLAIN}
    assert sorted(span.name for span in found) == sorted(["image_generation", *WHOLE])


@pytest.mark.slow
def test_a_collector_that_isnt_there_costs_no_picture_and_the_server_ends_well() -> None:
    with served(model=MODEL, otlp_endpoint=ENDPOINT) as server:
        with httpx.Client(base_url=server.url, timeout=30) as client:
            assert post(client, PLAIN).status_code == 200
        server.process.terminate()
        assert server.process.wait(15) == 0


@pytest.mark.parametrize("base", ["http://x:4318", "http://x:4318/", "http://x:4318/v1/traces"])
def test_the_endpoint_is_a_base_url(base: str) -> None:
    exporter = exporter_to(base)
    assert exporter._endpoint == "http://x:4318/v1/traces"  # type: ignore[attr-defined]


# Without.

WITHOUT = """
import sys
sys.modules[sys.argv[1]] = None
from maskfx.serve.launch import serve
from maskfx.serve.config import ServeSettings
sys.exit(serve(ServeSettings(model="fake", port=0, otlp_endpoint="http://127.0.0.1:9")))
"""


@pytest.mark.parametrize("missing", ["opentelemetry.sdk", "opentelemetry.exporter"])
def test_without_the_extra_it_is_refused_with_what_to_do(missing: str) -> None:
    command = [sys.executable, "-c", WITHOUT, missing]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=30, check=False)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "pip install 'maskfx[otel]'" in done.stderr
    assert missing in done.stderr


def test_nothing_of_it_is_imported_unless_it_is_wanted() -> None:
    code = "import sys, maskfx.serve.frontend.frontend, maskfx.serve.http\n"
    code += "import maskfx.serve.launch as launch\n"
    code += "from maskfx.serve.config import ServeSettings\n"
    code += "assert launch.tracing_of(ServeSettings()) is None\n"
    # FastAPI has the API alone
    code += "ours = {'maskfx.serve.frontend.tracing', 'opentelemetry.sdk'}\n"
    code += "sys.exit(any(name in sys.modules for name in ours))"
    assert os.spawnl(os.P_WAIT, sys.executable, sys.executable, "-c", code) == 0


def test_a_request_without_a_trace_isnt_timed_by_its_worker() -> None:
    ticket = new_ticket("a", *request(images=(), mask=None), CARD, 0, 0.0)
    assert not ticket.job(0.0).traced
