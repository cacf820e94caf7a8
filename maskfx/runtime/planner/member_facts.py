"""Facts of a member's recording that its choices depend on: bytes, and where its rows lie."""

from __future__ import annotations

from maskfx.runtime.batch.member import Member
from maskfx.runtime.cache.rows import StoredValue, device_of, stored_parts
from maskfx.runtime.cache.stores.read_speed import ReadSpeed


def facts_of(member: Member) -> tuple[object, ...]:
    """Return the facts; equal for the steps of a request whose rows lie alike.

    The first plan of rows in a store measures its speed, with rows that the step may read.
    """
    if member.cache is None:
        return ()
    rows = member.cache.rows.values()
    where = {device_of(each) for each in list(rows)[:1]}  # an entry lies in one tier
    facts = sum(each.nbytes for each in rows), *where, member.written is None
    facts = *facts, bool(member.cache.given), bool(member.cache.adapters)
    unread = unread_parts(member)
    if not unread:
        return facts
    parts = [part for found in unread.values() for part in found]
    speed = parts[0].speed
    for part in parts:
        if speed.line is not None:
            break
        part.read()
    return *facts, speed.line, *unread_parts(member)


def speed_of(member: Member) -> ReadSpeed | None:
    """Return how fast the store is read that has rows of a member; None if it has none."""
    return next((found[0].speed for found in unread_parts(member).values()), None)


def unread_parts(member: Member) -> dict[str, tuple[StoredValue, ...]]:
    """Return what has to be read from a store, by tap."""
    if member.cache is None:
        return {}
    found = {tap: stored_parts(rows) for tap, rows in member.cache.rows.items()}
    return {tap: parts for tap, parts in found.items() if parts}
