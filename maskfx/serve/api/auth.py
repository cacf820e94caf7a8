"""Who may ask: those that know the key. Owns nothing else; health is everybody's."""

from __future__ import annotations

import base64
import binascii
import hmac

from pydantic import SecretStr
from starlette.types import ASGIApp, Receive, Scope, Send

from maskfx.serve.errors import ApiError

OPEN = ("/health", "/health/live", "/health/ready")
SAME_SITE = (b"same-origin", b"none")


class InvalidKey(ApiError):
    """No key or a wrong one, and how it is to be given."""

    def __init__(self, challenge: str) -> None:
        super().__init__(
            "invalid_api_key",
            "The API key is missing or wrong; send it as 'Authorization: Bearer KEY'.",
        )
        self.challenge = challenge


class Auth:
    """Compares in constant time. A browser may give the key as a password (Basic), which it
    repeats by itself: that counts only for calls of the page itself.
    """

    def __init__(self, app: ASGIApp, key: SecretStr, page: frozenset[str] = frozenset()) -> None:
        self.app, self._page = app, page
        self._key = key.get_secret_value().encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN and not self._knows(scope):
            asks = "Basic realm=maskfx" if scope["path"] in self._page else "Bearer"
            raise InvalidKey(asks)
        await self.app(scope, receive, send)

    def _knows(self, scope: Scope) -> bool:
        headers = dict(scope["headers"])
        scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
        given = given.strip()
        if scheme.lower() == b"basic":
            if headers.get(b"sec-fetch-site", b"none") not in SAME_SITE:
                return False
            given = _password(given)
        elif scheme.lower() != b"bearer":
            return False
        return hmac.compare_digest(given, self._key)


def _password(given: bytes) -> bytes:
    try:
        return base64.b64decode(given, validate=True).partition(b":")[2]
    except binascii.Error:
        return b""
