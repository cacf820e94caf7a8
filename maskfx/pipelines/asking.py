"""What a pipeline does with its mask and its picture; asked once for arguments of a name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from maskfx.errors import EngineError
from maskfx.pipelines.identity import noise_of
from maskfx.pipelines.masks import is_picture, like_mask
from maskfx.pipelines.probe import as_one_longer, encodes, first_inputs, same_inputs
from maskfx.pipelines.works import Arguments, Options, Template, Works


def tells_mask(pipe: Any, works: Works, arguments: Arguments) -> bool:
    """Does what the denoisers are told depend on the mask?"""

    def ask() -> bool:
        heard = [
            first_inputs(
                pipe,
                works.call,
                works.denoisers,
                works.execute,
                {
                    **quiet(works, arguments, "probe"),
                    "mask_image": like_mask(arguments["mask_image"], value),
                },
            )
            for value in (0, 1)
        ]
        return not same_inputs(*heard)

    return learned(works, "mask", arguments, ask, True)


def takes_picture(pipe: Any, works: Works, arguments: Arguments) -> bool:
    """Is `image` the picture that is edited? Then it is encoded; a control image may be not."""
    if works.masks:
        return True
    if arguments.get("image") is None:
        return False
    given = quiet(works, arguments, "probe")

    def ask() -> bool:
        return encodes(
            pipe,
            lambda: first_inputs(pipe, works.call, works.denoisers, works.execute, given),
        )

    return learned(works, "image", arguments, ask, False)


def mixes_pictures(pipe: Any, works: Works, arguments: Arguments) -> bool:
    """Is each result made of all pictures that are given, the first of which is edited?

    Elsewhere each is made of one. Asked with a picture more: there the batch grows, or the call
    fails, or nothing grows.
    """
    pictures = arguments.get("image")
    if not isinstance(pictures, (list, tuple)) or len(pictures) < 2:
        return False
    if not takes_picture(pipe, works, arguments):
        return False

    def ask() -> bool:
        given = quiet(works, arguments, "probe")
        try:
            few, more = (
                first_inputs(
                    pipe, works.call, works.denoisers, works.execute, {**given, "image": told}
                )
                for told in ([*pictures], [*pictures, pictures[-1]])
            )
        except EngineError:
            raise
        except Exception:  # it has no prompt for that one
            return False
        return as_one_longer(few, more)

    return learned(works, "pictures", arguments, ask, False)


def learned(
    works: Works, what: str, arguments: Arguments, ask: Callable[[], bool], unknown: bool
) -> bool:
    """The answer for arguments of these names; asked once."""
    names = frozenset(n for n, v in arguments.items() if v is not None and "callback" not in n)
    if (what, names) not in works.learned:
        try:
            works.learned[what, names] = ask()
        except EngineError:  # cancelled, or too late: that says nothing of the pipeline
            raise
        except Exception as error:  # the call itself will say what is wrong, if something is
            works.notes[f"what becomes of {what}= isn't known: {error!s:.100}"] += 1
            return unknown
    return works.learned[what, names]


def quiet(works: Works, arguments: Arguments, noise: str) -> Arguments:
    """The same call, seen by nobody and with noise of its own."""
    kept = {n: v for n, v in arguments.items() if "callback" not in n}
    if "generator" in works.parameters:
        kept["generator"] = noise_of(noise)
    return kept


def original_of(pipe: Any, works: Works, arguments: Arguments, options: Options) -> Any:
    """The picture whose pixels stay outside the mask."""
    found = options.image
    if found is None and takes_picture(pipe, works, arguments):
        found = arguments.get("image")
        if found is not None and mixes_pictures(pipe, works, arguments):
            found = found[0]
    if found is None and isinstance(options.template, Template):
        found = options.template.images
    return found if is_picture(found) else None


def gives_pictures(works: Works, arguments: Arguments) -> bool:
    kind = works.parameters.get("output_type")
    usual = kind.default if kind is not None else "pil"
    return bool(arguments.get("output_type", usual) != "latent")
