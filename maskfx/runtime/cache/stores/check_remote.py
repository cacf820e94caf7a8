"""Checks of the arguments of `RemoteStore(...)`."""

from __future__ import annotations

from maskfx.ir.argument_checks import check_number, check_type, is_number, refuse
from maskfx.runtime.cache.stores.bounded_calls import RemoteAccess


def check_remote(
    url: object,
    access: object,
    backlog_bytes: object,
    noted_after: object,
    looked_after: object,
    abandoned_after: object,
) -> None:
    """Raise InputError for an argument of another type, or out of range."""
    check_type("RemoteStore", "url", url, str, 'a URL, such as "s3://bucket/prefix"')
    check_number("RemoteStore", "backlog_bytes", backlog_bytes, "bytes")
    check_number("RemoteStore", "noted_after", noted_after, "seconds")
    check_number("RemoteStore", "looked_after", looked_after, "seconds")
    # below 0 where a payload is abandoned at once, whatever the store rounds times to
    if not is_number(abandoned_after) or abandoned_after != abandoned_after:
        refuse("RemoteStore", "abandoned_after", abandoned_after, "seconds")
    wanted = "a RemoteAccess, or None"
    check_type("RemoteStore", "access", access, RemoteAccess, wanted, or_none=True)
