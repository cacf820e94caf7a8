"""A server of S3's protocol in this process, whose answers may be wrong or never come."""

from __future__ import annotations

import email.utils
import http.server
import re
import threading
import time
import urllib.parse
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

HELD = 3600.0  # seconds that an answer which never comes is held back, unless it is let go


class S3(http.server.ThreadingHTTPServer):
    """Objects by `bucket/name`; `fault` is "", or what is wrong with answers about `suffix`."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.objects: dict[str, bytes] = {}
        self.parts: dict[str, dict[int, bytes]] = {}  # of uploads that haven't ended
        self.fault, self.suffix = "", ""
        self.ranges: list[str] = []  # asked for
        self.released = threading.Event()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of clients that wait no longer."""

    @property
    def environment(self) -> dict[str, str]:
        return {
            "AWS_ENDPOINT": f"http://127.0.0.1:{self.server_address[1]}",
            "AWS_ALLOW_HTTP": "true",
            "AWS_ACCESS_KEY_ID": "a",
            "AWS_SECRET_ACCESS_KEY": "b",
            "AWS_REGION": "us-east-1",
        }


@contextmanager
def s3() -> Iterator[S3]:
    """A server that this process's environment names."""
    server = S3()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        with mock.patch.dict("os.environ", server.environment):
            yield server
    finally:
        server.released.set()
        server.shutdown()
        server.server_close()


class Answer(http.server.BaseHTTPRequestHandler):
    """Answers one connection."""

    server: S3
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None: ...

    @property
    def name(self) -> str:
        return urllib.parse.unquote(urllib.parse.urlsplit(self.path).path.lstrip("/"))

    @property
    def asked(self) -> dict[str, list[str]]:
        query = urllib.parse.urlsplit(self.path).query
        return urllib.parse.parse_qs(query, keep_blank_values=True)

    def answer(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        if "Content_Length" not in headers:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def fault(self) -> str:
        found = self.server.fault if self.name.endswith(self.server.suffix) else ""
        if found == "hangs":
            self.server.released.wait(HELD)
        return found

    def described(self, body: bytes) -> dict[str, str]:
        return {
            "ETag": f'"{zlib.crc32(body[:4096])}-{len(body)}"',
            "Last_Modified": email.utils.formatdate(usegmt=True),
        }

    def do_PUT(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.fault()
        if self.headers.get("If-None-Match") == "*" and self.name in self.server.objects:
            self.answer(412)
            return
        part = self.asked.get("partNumber")
        if part is None:
            self.server.objects[self.name] = body
        else:
            self.server.parts.setdefault(self.name, {})[int(part[0])] = body
        self.answer(200, b"", **self.described(body))

    def do_POST(self) -> None:
        """Remove several objects; begin or end an upload in parts."""
        body = self.rfile.read(int(self.headers.get("Content-Length", 0))).decode()
        self.fault()
        if "uploads" in self.asked:
            self.answer(200, b"<R><Bucket>b</Bucket><Key>k</Key><UploadId>1</UploadId></R>")
            return
        if "uploadId" in self.asked:
            parts = sorted(self.server.parts.pop(self.name).items())
            self.server.objects[self.name] = b"".join(part for _, part in parts)
            self.answer(200, b"<R><Location>l</Location><ETag>e</ETag></R>")
            return
        names = re.findall("<Key>(.*?)</Key>", body)
        for name in names:
            self.server.objects.pop(f"{self.name.rstrip('/')}/{name}", None)
        gone = "".join(f"<Deleted><Key>{name}</Key></Deleted>" for name in names)
        self.answer(200, f"<DeleteResult>{gone}</DeleteResult>".encode())

    def do_DELETE(self) -> None:
        self.fault()
        self.server.objects.pop(self.name, None)
        self.answer(204)

    def do_HEAD(self) -> None:
        self.fault()
        body = self.server.objects.get(self.name)
        if body is None:
            self.answer(404)
        else:
            self.answer(200, b"", Content_Length=str(len(body)), **self.described(body))

    def do_GET(self) -> None:
        fault = self.fault()
        if "list-type" in self.asked:
            self.list(f"{self.name.rstrip('/')}/", self.asked.get("prefix", [""])[0])
            return
        body = self.server.objects.get(self.name)
        if body is None or fault == "is absent":
            self.answer(404, b"<Error><Code>NoSuchKey</Code></Error>")
            return
        if fault == "is damaged":
            body = bytes(byte ^ (at % 97 == 50) for at, byte in enumerate(body))
        headers, span = self.described(body), self.headers.get("Range")
        if span is None or fault == "has no ranges":
            self.answer(200, body, **headers)
            return
        self.server.ranges.append(span)
        first, last = span.removeprefix("bytes=").split("-")
        start, stop = int(first), min(int(last or len(body)), len(body) - 1)
        place = f"bytes {start}-{stop}/{len(body)}"
        part = body[start : stop + 1]
        self.answer(
            206,
            part[: len(part) // 2] if fault == "is short" else part,
            Content_Range=place,
            **headers,
        )

    def list(self, bucket: str, prefix: str) -> None:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime())
        found = "".join(
            f"<Contents><Key>{name.removeprefix(bucket)}</Key><Size>{len(body)}</Size>"
            f"<LastModified>{stamp}</LastModified></Contents>"
            for name, body in sorted(self.server.objects.items())
            if name.startswith(bucket + prefix)
        )
        text = f"<ListBucketResult><IsTruncated>false</IsTruncated>{found}</ListBucketResult>"
        self.answer(200, text.encode(), Content_Type="application/xml")
