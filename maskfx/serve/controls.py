"""The number of control images and of scales of a request: one per ControlNet of the model."""

from __future__ import annotations

from collections.abc import Sequence

from maskfx.serve.errors import ApiError


def check_controls(sent: int, nets: int) -> None:
    """Raise ApiError if the number of control images differs from that of the ControlNets."""
    if sent == nets:
        return
    if sent == 0 and nets == 1:
        raise ApiError(
            "missing_parameter",
            "This model needs a control image; send one as control_image.",
            param="control_image",
        )
    wanted = "once" if nets == 1 else f"{nets} times, in the order of the model's ControlNets"
    raise ApiError(
        "invalid_value" if sent else "missing_parameter",
        f"control_image must be given {wanted}, not {sent} times.",
        param="control_image",
    )


def check_scales(scales: Sequence[float] | None, nets: int) -> None:
    """Raise ApiError unless there is one scale for all ControlNets, or one for each."""
    if scales is None or len(scales) in (1, nets):
        return
    wanted = "one number" if nets == 1 else f"one number, or one per ControlNet, which are {nets}"
    raise ApiError(
        "invalid_value",
        f"controlnet_conditioning_scale must be {wanted}, not {len(scales)} numbers.",
        param="controlnet_conditioning_scale",
    )
