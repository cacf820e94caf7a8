"""Real sockets: clients that are slow, leave, send too much, or come when there is no room."""

from __future__ import annotations

import contextlib
import gc
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from maskfx.serve.config import Limits, ServeSettings
from maskfx.serve.errors import ApiError
from maskfx.serve.http.server import LEAST
from tests.serve.served import MASK, PICTURE, Served, picture, served, until

# time enough for a busy machine, and short enough to wait for
LIMITS = Limits(header_seconds=0.6, body_seconds=0.8, reader_seconds=0.7, body_bytes=8 << 20)
BOUNDARY = "multipart/form-data; boundary=x"


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with served(ServeSettings(codecs=1, limits=LIMITS)) as one:
        yield one


def head(length: int | None = None, **more: str) -> bytes:
    lines = ["POST /v1/images/edits HTTP/1.1", "Host: localhost", f"Content-Type: {BOUNDARY}"]
    lines += [f"{name}: {value}" for name, value in more.items()]
    lines.append("Transfer-Encoding: chunked" if length is None else f"Content-Length: {length}")
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


def answer(line: socket.socket) -> tuple[int, dict[str, str], Any]:
    """Status, headers and JSON of one answer."""
    got = b""
    while b"\r\n\r\n" not in got:
        piece = line.recv(1 << 16)
        assert piece, "the connection was closed without an answer"
        got += piece
    top, _, body = got.partition(b"\r\n\r\n")
    first, *rest = top.decode().split("\r\n")
    headers = {k.lower(): v for k, v in (one.split(": ", 1) for one in rest)}
    while len(body) < int(headers["content-length"]):
        body += line.recv(1 << 16)
    return int(first.split()[1]), headers, json.loads(body)


def closed(line: socket.socket) -> bool:
    """Whether the other end is through."""
    try:
        return line.recv(1 << 16) == b""
    except ConnectionError:
        return True


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    start = time.monotonic()
    value = work()
    return time.monotonic() - start, value


def test_a_slow_head_is_closed(server: Served) -> None:
    with server.connect() as line:
        assert timed(lambda: closed(line))[0] < 3  # nothing at all
    with server.connect() as line:
        start = time.monotonic()
        ended = False
        while not ended and time.monotonic() - start < 3:
            line.settimeout(0.05)
            try:
                line.sendall(b"G")
                ended = closed(line)
            except TimeoutError:
                continue
            except ConnectionError:
                ended = True
        assert ended
        assert 0.5 < time.monotonic() - start < 3


def test_a_slow_second_head_is_closed_too(server: Served) -> None:
    with server.connect() as line:
        line.sendall(b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert answer(line)[0] == 200
        time.sleep(0.8)  # idle connections may wait longer than a head
        line.sendall(b"GET /version HT")
        seconds, ended = timed(lambda: closed(line))
        assert ended
        assert 0.4 < seconds < 3


def test_a_slow_body_is_told(server: Served) -> None:
    with server.connect() as line:
        line.sendall(head(1000) + b"--x\r\n")
        seconds, (status, headers, said) = timed(lambda: answer(line))
        assert (status, said["error"]["code"]) == (408, "request_timeout")
        assert headers["connection"] == "close"
        assert 0.6 < seconds < 3
        assert closed(line)
    until(lambda: server.frontend.seats == 0)


def test_a_slow_reader_is_dropped(server: Served) -> None:
    """A result of 6 MB, of which the client takes nothing."""
    asks = {"prompt": "x", "size": "1600x1200"}
    noisy = server.frontend._picture
    server.frontend._picture = lambda *_: picture(1600, 1200)  # type: ignore[method-assign]
    try:
        with socket.socket() as line:
            line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            line.settimeout(10)
            line.connect(("127.0.0.1", server.port))
            body = json.dumps(asks).encode()
            line.sendall(
                b"POST /v1/images/generations HTTP/1.1\r\nHost: localhost\r\n"
                b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body)
            )
            line.sendall(body)
            until(lambda: server.frontend.seats == 1)
            until(lambda: server.frontend.seats == 0, 5)
            received = 0
            while True:
                try:
                    piece = line.recv(1 << 20)
                except ConnectionError:
                    break
                if not piece:
                    break
                received += len(piece)
            assert received < 6_000_000
    finally:
        server.frontend._picture = noisy  # type: ignore[method-assign]


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_over_the_limit(server: Served, chunked: bool) -> None:
    """Reported at once if it is announced, and when the limit is passed if it isn't."""
    with server.connect() as line:
        if not chunked:
            line.sendall(head(LIMITS.body_bytes + 1))
        else:
            line.sendall(head())
            part = b'--x\r\nContent-Disposition: form-data; name="image"\r\n\r\n'
            line.sendall(b"%x\r\n%s\r\n" % (len(part), part))
            for _ in range(9):
                line.sendall(b"%x\r\n%s\r\n" % (1 << 20, bytes(1 << 20)))
        status, headers, said = answer(line)
    assert (status, said["error"]["code"]) == (413, "payload_too_large")
    assert headers["connection"] == "close"
    until(lambda: server.frontend.seats == 0)


def test_no_room_is_told_before_the_body_is_read(server: Served) -> None:
    server.frontend.most_seats = 0
    try:
        waits = []
        for _ in range(9):
            with server.connect() as line:
                line.sendall(head(5 << 20, Expect="100-continue"))
                seconds, (status, headers, said) = timed(lambda line=line: answer(line))  # type: ignore[misc]
                waits.append(seconds)
                assert (status, said["error"]["code"]) == (429, "queue_full")
                assert headers["retry-after"] == "2"
        assert sorted(waits)[4] < 0.05
    finally:
        server.frontend.most_seats = 1000


def test_an_answer_survives_the_body_that_follows_it(server: Served) -> None:
    """To close with bytes unread would reset the connection before the client reads."""
    server.frontend.most_seats = 0
    try:
        for _ in range(5):
            with server.connect() as line:
                line.sendall(head(5 << 20))
                for _ in range(5):
                    line.sendall(bytes(1 << 20))
                assert answer(line)[0] == 429
                assert closed(line)
    finally:
        server.frontend.most_seats = 1000


def test_an_answer_survives_a_body_that_comes_late() -> None:
    """The client was busy between its head and its body, for longer than the answer took."""
    with served(ServeSettings(codecs=1)) as own, own.connect() as line:
        own.frontend.most_seats = 0
        line.sendall(head(4))
        time.sleep(LEAST + 0.5)
        for byte in b"late":  # the second would fail: the first resets what was aborted
            line.sendall(bytes([byte]))
            time.sleep(0.05)
        assert answer(line)[0] == 429
        assert closed(line)


@pytest.mark.parametrize("code", ["draining", "no_workers"])
def test_other_refusals_tell_when_to_come_back(server: Served, code: str) -> None:
    server.frontend.refuse = [ApiError(code, "Not now.")]
    response = server.edit()
    assert (response.status_code, response.json()["error"]["code"]) == (503, code)
    assert int(response.headers["retry-after"]) >= 1


def leave(server: Served, stream: bool) -> float:
    """Ask for a long edit, leave in its middle; returns the seconds until it is cancelled."""
    front = server.frontend
    front.asked.clear()
    front.cancelled.clear()
    before = disconnected(server)
    data = {"prompt": "x", "num_inference_steps": "200", "n": "2"}
    if stream:
        data |= {"stream": "true", "partial_images": "1"}
    request = httpx.Request(
        "POST", server.url + "/v1/images/edits", files={"image": PICTURE, "mask": MASK}, data=data
    )
    lines = [f"{name}: {value}" for name, value in request.headers.items()]
    with server.connect() as line:
        line.sendall(("POST /v1/images/edits HTTP/1.1\r\n" + "\r\n".join(lines)).encode())
        line.sendall(b"\r\n\r\n" + request.read())
        until(lambda: len(front.asked) == 2)
        if stream:
            got = b""
            while b"image_edit.partial_image" not in got:
                got += line.recv(1 << 16)
    start = time.monotonic()
    until(lambda: len(front.cancelled) == 2)
    seconds = time.monotonic() - start
    until(lambda: front.seats == 0)
    until(lambda: disconnected(server) == before + 1)
    return seconds


def disconnected(server: Served) -> float:
    name = "maskfx_http_requests_client_disconnected_total"
    return server.metrics.registry.get_sample_value(name) or 0.0


@pytest.mark.parametrize("stream", [False, True])
def test_who_leaves_is_cancelled_within_a_step(server: Served, stream: bool) -> None:
    server.frontend.step = 0.05
    try:
        assert leave(server, stream) < 0.5
    finally:
        server.frontend.step = 0.0


def test_who_leaves_while_sending_is_forgotten(server: Served) -> None:
    before = disconnected(server)
    with server.connect() as line:
        line.sendall(head(5000) + b"--x\r\n")
        until(lambda: server.frontend.seats == 1)
    until(lambda: server.frontend.seats == 0)
    until(lambda: disconnected(server) == before + 1)


def test_failures_in_a_stream(server: Served) -> None:
    """A status while nothing was sent, an event afterwards."""
    front = server.frontend
    front.fail = ApiError("generation_failed", "Not finite.")
    try:
        response = server.edit(stream="true")
        assert (response.status_code, response.json()["error"]["code"]) == (
            500,
            "generation_failed",
        )
        front.step = 1.3
        response = server.edit(stream="true")
        assert response.status_code == 200
        name, data = response.text.strip().split("\n")
        assert name == "event: error"
        assert json.loads(data[6:])["error"]["code"] == "generation_failed"
        front.fail = RuntimeError("secret")
        assert "secret" not in server.edit(stream="true").text
    finally:
        front.fail, front.step = None, 0.0


def test_one_failure_ends_its_siblings(server: Served) -> None:
    front = server.frontend
    front.fail = ApiError("out_of_memory", "No room.")
    try:
        response = server.edit(n=3)
    finally:
        front.fail = None
    assert (response.status_code, response.json()["error"]["code"]) == (503, "out_of_memory")


def test_what_is_no_http_gets_json_too(server: Served) -> None:
    with server.connect() as line:
        line.sendall(b"nonsense\r\n\r\n")
        status, headers, said = answer(line)
    assert (status, said["error"]["code"]) == (400, "malformed_body")
    assert len(headers["x-request-id"]) == 32


def test_no_server_header_and_answers_that_leave_at_once(server: Served) -> None:
    """Without TCP_NODELAY every answer takes 40 ms."""
    waits = []
    with server.connect() as line:
        for _ in range(11):
            line.sendall(b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n")
            seconds, (status, headers, _) = timed(lambda: answer(line))
            waits.append(seconds)
            assert status == 200
            assert "server" not in headers
    assert sorted(waits)[2] < 0.03


def test_a_deadline_that_has_passed(server: Served) -> None:
    response = server.edit(slo_ms="0.01")
    assert (response.status_code, response.json()["error"]["code"]) == (503, "deadline_exceeded")


def test_many_at_once_keep_health_quick(server: Served) -> None:
    """60 uploads at once; health answers in between, and doesn't wait for any of them.

    Both are measured at the same time, so that another load of the machine is in both.
    """
    upload = request_of(server, {"image": PICTURE, "mask": MASK})
    health = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    waits: list[float] = []
    gc.collect()  # of what earlier tests left in this process, which is the server's too
    with contextlib.ExitStack() as stack:
        own = stack.enter_context(server.connect())
        lines = [stack.enter_context(server.connect()) for _ in range(60)]
        began = time.monotonic()
        for line in lines:
            line.settimeout(60)
            line.sendall(upload)
        busy = threading.Event()
        ends: list[tuple[float, int]] = []

        def read() -> None:
            ends.extend((time.monotonic() - began, answer(line)[0]) for line in lines)
            busy.set()

        reading = threading.Thread(target=read)
        reading.start()
        while not busy.is_set():
            own.sendall(health)
            waits.append(timed(lambda: answer(own))[0])
            time.sleep(0.02)
        reading.join()
    assert [status for _, status in ends] == [200] * 60
    seconds = time.monotonic() - began
    # what a caller that comes at any time waits on average
    expected = sum(wait * wait for wait in waits) / seconds
    assert expected < seconds / 8


def request_of(server: Served, files: dict[str, bytes]) -> bytes:
    """The bytes of an edit."""
    with server.client() as client:
        request = client.build_request(
            "POST",
            "/v1/images/edits",
            data={"prompt": "a cat"},
            files={name: ("x.png", content) for name, content in files.items()},
        )
    lines = ["POST /v1/images/edits HTTP/1.1", *(f"{k}: {v}" for k, v in request.headers.items())]
    return ("\r\n".join(lines) + "\r\n\r\n").encode() + request.read()
