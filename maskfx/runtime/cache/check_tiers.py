"""Checks of the arguments of `Tiers(...)`."""

from __future__ import annotations

from maskfx.errors import InputError
from maskfx.ir.argument_checks import (
    check_flag,
    check_number,
    check_type,
    check_whole,
    refuse,
)
from maskfx.runtime.cache.quantize import Encoding


def check_places(
    store: object, host_bytes: object, device_bytes: object, disk_bytes: object, mover: object
) -> None:
    """Raise InputError if a place of entries isn't one, or is given without its limit."""
    check_number("Tiers", "host_bytes", host_bytes, "bytes")
    check_number("Tiers", "device_bytes", device_bytes, "bytes")
    check_number("Tiers", "disk_bytes", disk_bytes, "bytes", or_none=True)
    if store is not None and not hasattr(store, "put"):
        refuse("Tiers", "store", store, "maskfx.Store(path), maskfx.RemoteStore(url) or None")
    if mover is not None and not hasattr(mover, "to_device"):
        refuse("Tiers", "mover", mover, "maskfx.DeviceMover(device) or None")
    if device_bytes and mover is None:
        raise InputError(
            f"Tiers(device_bytes={device_bytes}) needs a mover; give "
            "mover=maskfx.DeviceMover(device), or device_bytes=0"
        )
    if store is None and disk_bytes is not None:
        raise InputError(
            f"Tiers(disk_bytes={disk_bytes}) without a directory; give store=Store(path), or "
            "leave disk_bytes out"
        )


def check_habits(ttl: object, encoding: object, write_through: object, readers: object) -> None:
    """Raise InputError for another argument of another type, or out of range."""
    check_number("Tiers", "ttl", ttl, "seconds", or_none=True)
    check_whole("Tiers", "readers", readers, 1)
    check_type("Tiers", "encoding", encoding, Encoding, "an Encoding")
    check_flag("Tiers", "write_through", write_through)
