"""Refuses the calls of other sites' web pages, where no key is set that would keep them out.

Any page in a browser may send forms to a loopback address; its `Origin` differs from the server's.
A page whose host name was rebound to a loopback address may read the responses too; its `Host` is
that name.
"""

from __future__ import annotations

from collections.abc import Collection

from starlette.types import ASGIApp, Receive, Scope, Send

from maskfx.serve.config import ANY, is_loopback
from maskfx.serve.errors import ApiError
from maskfx.serve.http.middleware import OPEN

SHOWN = 64  # characters of a header in an error


class Origins:
    """Checks `Host` and `Origin`, except on health routes.

    Args:
        app: The app behind it.
        hosts: Names in `Host` to accept besides those of loopback, without a port; `*` for any.
        origins: Origins to accept besides the server's own, as browsers send them; `*` for any.
    """

    def __init__(self, app: ASGIApp, hosts: Collection[str], origins: Collection[str]) -> None:
        self.app = app
        self._hosts = frozenset(host.lower() for host in hosts)
        self._origins = frozenset(origin.lower().rstrip("/") for origin in origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN:
            headers = dict(scope["headers"])
            host = headers.get(b"host", b"").decode("latin-1").lower()
            self._check_host(host)
            if b"origin" in headers:
                self._check_origin(headers[b"origin"].decode("latin-1").lower(), host)
        await self.app(scope, receive, send)

    def _check_host(self, host: str) -> None:
        """Raise ApiError unless the host is accepted; browsers always send one."""
        name = name_in(host)
        if not host or is_loopback(name) or not self._hosts.isdisjoint((ANY, name)):
            return
        raise ApiError(
            "host_not_allowed",
            f"Host {host[:SHOWN]!r} is none of this server's names; without an API key it accepts "
            "loopback names, and those in the setting allowed_hosts.",
            param="Host",
        )

    def _check_origin(self, origin: str, host: str) -> None:
        own = host and origin.partition("://")[2] == host
        if own or not self._origins.isdisjoint((ANY, origin)):
            return
        raise ApiError(
            "origin_not_allowed",
            f"Origin {origin[:SHOWN]!r} is another site's; without an API key the server accepts "
            "its own page, and origins in the setting allowed_origins.",
            param="Origin",
        )


def name_in(host: str) -> str:
    """Return a `Host` header without its port and the brackets of an IPv6 address."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0]
