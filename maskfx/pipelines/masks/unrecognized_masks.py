"""Finds pictures passed as masks by arguments in which maskfx reads no mask."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from maskfx.pipelines.masks.masks import is_picture
from maskfx.pipelines.masks.videos import MASKS, makes_video

WORDS = {"mask", "masks"}
OF_TEXT = {"attention", "embeds", "encoder", "padding", "prompt", "text", "token"}


def unrecognized_masks(arguments: Mapping[str, object]) -> list[str]:
    """Return the names of arguments that are called masks and are pictures.

    Masks of text, which the pipelines of many models accept, are none.
    """
    named = {name: set(name.lower().split("_")) for name in arguments}
    return [
        name
        for name, words in named.items()
        if words & WORDS and not words & OF_TEXT and is_picture(arguments[name])
    ]


def reason(name: str, pipeline: str, parameters: Collection[str]) -> str:
    """Return why a call with such an argument computes the whole picture, and what to do."""
    known = ("mask_image", *(MASKS if makes_video(parameters) else ()))
    return (
        f"{pipeline} with {name}=: no mask is recognized, because maskfx reads a mask from "
        f"{'=, '.join(known)}= only, so the whole picture is computed; pass the mask as "
        "mask_image= too, or give the argument of __call__ this name"
    )
