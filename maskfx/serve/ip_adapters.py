"""The IP-Adapters of a request: which are used, with which scale, and which pictures each is shown.

A request without pictures uses none. One adapter may be shown several pictures; of several, each is
shown one.
"""

from __future__ import annotations

from collections.abc import Sequence

from maskfx.serve.controls import Chosen, nets_in
from maskfx.serve.errors import ApiError
from maskfx.serve.request import Request

CHOICE, PICTURES, SCALE = "ip_adapter", "ip_adapter_image", "ip_adapter_scale"


def chosen(
    text: str | None, scales: Sequence[float] | None, shown: int, names: Sequence[str]
) -> list[tuple[str, float]]:
    """Return the IP-Adapters that a request uses, in the order of their pictures, with scales.

    Raises ApiError if names, scales and pictures don't fit.

    Args:
        text: The field `ip_adapter`.
        scales: The field `ip_adapter_scale`.
        shown: The number of pictures.
        names: The model's IP-Adapters.
    """
    found: Chosen = [] if text is None and not shown else nets_in(text, names, CHOICE)
    check_pictures(shown, len(found))
    if scales is not None and (not found or len(scales) not in (1, len(found))):
        wanted = "left out, as the request uses no IP-Adapter"
        if found:
            wanted = "one number, or one per IP-Adapter that is used"
        raise ApiError(
            "invalid_value", f"{SCALE} must be {wanted}; it has {len(scales)}.", param=SCALE
        )
    usual = [*(scales or [1.0])]
    usual = usual * len(found) if len(usual) == 1 else usual
    pairs = zip(found, usual, strict=True)
    return [(name, other if own is None else own) for (name, own), other in pairs]


def check_pictures(shown: int, used: int) -> None:
    """Raise ApiError unless each IP-Adapter that is used has a picture."""
    if not used and shown:
        raise ApiError(
            "invalid_value",
            f"{PICTURES} must be left out, as the request uses no IP-Adapter.",
            param=PICTURES,
        )
    if used and not shown:
        raise ApiError(
            "missing_parameter",
            f"{CHOICE} needs a picture for each IP-Adapter that it names; send them as {PICTURES}.",
            param=PICTURES,
        )
    if used > 1 and shown != used:
        raise ApiError(
            "invalid_value",
            f"{PICTURES} must be given {used} times, once per IP-Adapter in their order, not "
            f"{shown} times; name one in {CHOICE} to show it several pictures.",
            param=PICTURES,
        )


def of_request(request: Request, shown: int, names: Sequence[str]) -> list[tuple[str, float]]:
    """Return the IP-Adapters that a request uses, as `chosen`."""
    return chosen(request.ip_adapters, request.ip_scale, shown, names)
