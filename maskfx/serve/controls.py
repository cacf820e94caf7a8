"""The ControlNets of a request, and the number of its control images and scales: one for each.

T2I-Adapters have the same fields, so errors name neither kind.
A ControlNet that takes several kinds of images at once (`ControlNetUnionModel`) has an image for
each kind that the field `control_mode` names.
"""

from __future__ import annotations

from collections.abc import Sequence

from maskfx.serve.errors import ApiError

NONE = "none"  # the value of the field `controlnet` for a request without any
Chosen = list[tuple[str, float | None]]  # nets, with their scales if they are given


def nets_in(text: str | None, nets: Sequence[str], param: str = "controlnet") -> Chosen:
    """Return the ControlNets that the field `controlnet` chooses of a model's; all by default.

    IP-Adapters are chosen likewise, by the field `param`.

    Raises ApiError for a name that the model doesn't have, and for one that comes twice.
    """
    if text is None:
        return [(name, None) for name in nets]
    if text == NONE:
        return []
    pairs = [one.partition(":") for one in text.split(",")]
    names = [name for name, _, _ in pairs]
    for place, name in enumerate(names):
        if name not in nets or name in names[:place]:
            problem = "is named twice" if name in nets else f"isn't one of {', '.join(nets)}"
            raise ApiError("invalid_value", f"{param}: {name!r} {problem}.", param=param)
    return [(name, float(scale) if scale else None) for name, _, scale in pairs]


def check_controls(sent: int, nets: int) -> None:
    """Raise ApiError if the number of control images differs from that of the ControlNets used."""
    if sent == nets:
        return
    if nets == 0:
        raise ApiError(
            "invalid_value",
            "control_image must be left out, as controlnet names none.",
            param="control_image",
        )
    if sent == 0 and nets == 1:
        raise ApiError(
            "missing_parameter",
            "This model needs a control image; send one as control_image.",
            param="control_image",
        )
    wanted = "once" if nets == 1 else f"{nets} times, once for each that the request uses"
    raise ApiError(
        "invalid_value" if sent else "missing_parameter",
        f"control_image must be given {wanted}, not {sent} times.",
        param="control_image",
    )


def check_modes(
    modes: Sequence[int] | None, known: object, kinds: int, images: int, at_once: bool
) -> None:
    """Raise ApiError unless each control image has a kind that the ControlNet takes.

    Args:
        modes: The field `control_mode`.
        known: The model's default.
        kinds: The number of kinds that its ControlNet takes.
        images: That of the control images.
        at_once: Whether one ControlNet takes them all.
    """
    if modes is None:
        if known is not None:
            return
        raise ApiError(
            "missing_parameter",
            f"This model's ControlNet takes {kinds} kinds of images; send the number of the kind, "
            f"from 0 to {kinds - 1}, as control_mode, once per control image.",
            param="control_mode",
        )
    again = at_once and len(set(modes)) < len(modes)
    if len(modes) != images or max(modes) >= kinds or again:
        raise ApiError(
            "invalid_value",
            f"control_mode must be a number from 0 to {kinds - 1} per control image"
            f"{', each another one' if at_once else ''}, not {', '.join(map(str, modes))}.",
            param="control_mode",
        )


def check_range(start: float | None, end: float | None) -> None:
    """Raise ApiError if control images would act in no step."""
    start, end = start or 0.0, 1.0 if end is None else end
    if start >= end:
        raise ApiError(
            "invalid_value",
            f"control_guidance_start must be less than control_guidance_end, not {start:g} of "
            f"{end:g}.",
            param="control_guidance_start",
        )


def check_scales(scales: Sequence[float] | None, nets: int) -> None:
    """Raise ApiError unless there is one scale for all ControlNets used, or one for each."""
    if scales is None or len(scales) in (1, nets) and nets:
        return
    wanted = "one number" if nets == 1 else f"one number, or one for each of {nets} control images"
    wanted = wanted if nets else "left out, as controlnet names none"
    raise ApiError(
        "invalid_value",
        f"controlnet_conditioning_scale must be {wanted}; it has {len(scales)}.",
        param="controlnet_conditioning_scale",
    )
