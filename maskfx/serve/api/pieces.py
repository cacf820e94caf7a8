"""A large answer in pieces: a client that reads slowly holds its seat, not a copy of the answer."""

from __future__ import annotations

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

PIECE = 256 << 10  # bytes


class InPieces(Response):
    """Every piece waits until the one before has left."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        start = {"type": "http.response.start", "status": self.status_code}
        await send({**start, "headers": self.raw_headers})
        whole = memoryview(self.body)
        for at in range(0, len(whole), PIECE):
            body, more = bytes(whole[at : at + PIECE]), at + PIECE < len(whole)
            await send({"type": "http.response.body", "body": body, "more_body": more})
