"""The request of `maskfx edit`, the same for an edit in this process and one on a server."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from maskfx.serve.request import Mask, Pixels


@dataclass(frozen=True, eq=False)
class EditCall:
    """One requested edit."""

    picture: Pixels
    mask: Mask
    parameters: Mapping[str, Any]  # those that are set, by the names of `serve.request.Request`
