"""The request of `maskfx edit`, the same for an edit in this process and one on a server."""

from __future__ import annotations

from dataclasses import dataclass

from maskfx.serve.request import Mask, Pixels


@dataclass(frozen=True, eq=False)
class Wanted:
    """One requested edit."""

    picture: Pixels
    mask: Mask
    prompt: str
    seed: int | None = None
    steps: int | None = None
    guidance: float | None = None
    strength: float | None = None
    negative_prompt: str | None = None
