"""Objects: the operations on an object store that maskfx uses, one method each, by `obstore`.

Tests pass the remote store objects that fail, hang or are damaged. Only this file imports
`obstore`, and only when a URL is opened: the extra `remote`.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, cast

from maskfx.errors import InputError

if TYPE_CHECKING:
    from obstore.store import ObjectStore

SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
KINDS = "s3://BUCKET/PREFIX, gs://BUCKET/PREFIX, az://CONTAINER/PREFIX, file:///PATH or memory:///"
PREFIXES = {"gs": "GOOGLE_", "az": "AZURE_"}  # of the variables of stores other than S3
CLIENT = (  # options of HTTP that these variables may set
    *("allow_http", "allow_invalid_certificates", "http1_only", "http2_only"),
    *("proxy_url", "proxy_ca_certificate", "proxy_excludes", "user_agent"),
)
LOCAL = ("file", "memory")  # schemes without a network
REQUEST = timedelta(seconds=10)  # one HTTP request
CONNECT = timedelta(seconds=3)
RETRIES = 2  # of an HTTP request
PIECE = 8 << 20  # bytes of one request


@dataclass(frozen=True)
class ObjectInfo:
    """The name, size and time of the last write of an object."""

    name: str
    nbytes: int
    written: float  # seconds since the epoch, by the store's clock


def is_url(place: object) -> bool:
    """Return True for the URL of an object store, False for a directory."""
    return isinstance(place, str) and SCHEME.match(place) is not None


class Objects:
    """The objects below a URL; an absent one is None, every other failure raises."""

    def __init__(self, store: ObjectStore, url: str) -> None:
        import obstore

        self.url = url
        self._store, self._api = store, obstore

    async def put(self, name: str, data: bytes | memoryview) -> None:
        """Write an object as a whole; a large one in pieces, which become visible together."""
        await self._api.put_async(self._store, name, data, chunk_size=PIECE)

    async def put_new(self, name: str, data: bytes) -> bool:
        """Write an object unless there is one of this name; return False if there is."""
        try:
            await self._api.put_async(self._store, name, data, mode="create")
        except self._api.exceptions.AlreadyExistsError:
            return False
        return True

    async def get(self, name: str, most: int) -> tuple[ObjectInfo, bytes] | None:
        """Read an object at once; one of more than `most` bytes is not read, only described."""
        try:
            found = await self._api.get_async(self._store, name)
            info = info_of(found.meta)
            return info, bytes(await found.bytes_async()) if info.nbytes <= most else b""
        except FileNotFoundError:
            return None

    async def read(self, name: str, start: int, end: int) -> memoryview | None:
        """Read a range of an object, or less where the object ends."""
        try:
            found = await self._api.get_range_async(self._store, name, start=start, end=end)
        except FileNotFoundError:
            return None
        return memoryview(found)

    async def status(self, name: str) -> ObjectInfo | None:
        try:
            return info_of(await self._api.head_async(self._store, name))
        except FileNotFoundError:
            return None

    async def names(self, folder: str) -> list[ObjectInfo]:
        """List the objects of a folder and below."""
        found: list[ObjectInfo] = []
        listing = self._api.list(self._store, folder, chunk_size=1000).__aiter__()
        while True:
            try:
                some = await asyncio.wait_for(listing.__anext__(), REQUEST.total_seconds())
            except StopAsyncIteration:
                return found
            found += [info_of(meta) for meta in cast(Sequence[Any], some)]

    async def remove(self, name: str) -> None:
        """Remove an object; one that is absent is no error."""
        try:
            await self._api.delete_async(self._store, name)
        except FileNotFoundError:
            return


def info_of(meta: Any) -> ObjectInfo:
    return ObjectInfo(meta["path"], meta["size"], meta["last_modified"].timestamp())


def open_objects(url: str) -> Objects:
    """Open the objects below a URL; credentials are from the environment.

    Raises InputError if the URL can't be opened, or `obstore` isn't installed.
    """
    scheme = url.partition("://")[0].lower()
    try:
        from obstore.exceptions import BaseError
        from obstore.store import from_url
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "obstore":
            raise
        raise InputError(
            f"{url}: an object store needs the package obstore, which isn't installed; install it "
            "with: pip install 'maskfx[remote]', or give a directory"
        ) from None
    options: dict[str, Any] = {}
    if scheme == "file":
        options = {"mkdir": True, "automatic_cleanup": True}
    elif scheme not in LOCAL:
        options = {
            "client_options": client_options(scheme),
            "retry_config": {"max_retries": RETRIES, "retry_timeout": 2 * REQUEST},
        }
    try:
        return Objects(from_url(url, **options), url)
    except (BaseError, OSError, ValueError, TypeError) as error:
        raise InputError(
            f"{url}: it can't be opened as an object store: {first_line(error)}; give {KINDS}, and "
            "the account and its credentials in the variables of the store's own tools"
        ) from error


def client_options(scheme: str) -> dict[str, object]:
    """Return the options of HTTP: this module's times, and those of the environment.

    obstore ignores the environment's where any are passed.
    """
    prefix = PREFIXES.get(scheme, "AWS_")
    found = {name: os.environ.get(f"{prefix}{name.upper()}") for name in CLIENT}
    given = {name: value for name, value in found.items() if value is not None}
    return {"timeout": REQUEST, "connect_timeout": CONNECT, **given}


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text, or the name of its type if it has none."""
    return next(iter(str(error).splitlines()), "") or type(error).__name__
