"""The control images of a call, as its ControlNets or T2I-Adapters take them.

Knows nothing of requests.
"""

from __future__ import annotations

from collections.abc import Sequence

from PIL import Image

from maskfx.serve.models.call_signature import CallSignature
from maskfx.serve.models.canvas import Canvas


def control_argument(
    signature: CallSignature, canvas: Canvas, images: Sequence[Image.Image], nets: str | None = None
) -> dict[str, object]:
    """Return the argument with the control images; empty if the call takes none.

    Args:
        signature: The call's signature.
        canvas: Has the size of the images.
        images: An image for each net that is used; others get a black one.
        nets: The field `controlnet`, which chooses the nets; None: all.
    """
    name = signature.control_argument
    if name is None:
        return {}
    value = signature.control(images, nets, Image.new("RGB", canvas.padded))
    if any(signature.grey):
        several = value if isinstance(value, list) else [value]
        pairs = zip(several, signature.grey, strict=True)
        several = [one.convert("L") if grey else one for one, grey in pairs]
        value = several if isinstance(value, list) else several[0]
    return {name: value}
