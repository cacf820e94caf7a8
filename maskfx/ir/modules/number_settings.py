"""The numbers among a module's plain values: where they stand, and reading and setting them.

A place is a path: the name of a part, an attribute, and then attributes of an object that the part
calls, such as an attention processor, and keys of lists and dictionaries.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator
from typing import Any

from torch import nn

from maskfx.ir.modules.callables import is_called, is_plain
from maskfx.ir.modules.lent_methods import own_items

Place = tuple[Hashable, ...]
HIDDEN = "a number"


def numbers_of(module: nn.Module, known: Collection[Place] = ()) -> dict[Place, float]:
    """Return the numbers by place: those with a fraction, and any at places that are known."""
    found: dict[Place, float] = {}
    for name, part in module.named_modules():
        for key, value in own_items(vars(part)):
            if key.startswith("_"):
                continue
            if is_plain(value):
                found.update(numbers_in(value, (name, key), known))
            elif is_called(value):
                for inner, own in own_items(getattr(value, "__dict__", {})):
                    if not inner.startswith("_") and is_plain(own):
                        found.update(numbers_in(own, (name, key, inner), known))
    return found


def numbers_in(value: Any, place: Place, known: Collection[Place]) -> Iterator[tuple[Place, float]]:
    """Yield the numbers of a plain value, of those in containers only where they can be set."""
    if isinstance(value, (list, dict)):
        for key, one in value.items() if isinstance(value, dict) else enumerate(value):
            yield from numbers_in(one, (*place, key), known)
    elif is_free(value, place, known):
        yield place, value


def is_free(value: object, place: Place, known: Collection[Place]) -> bool:
    """Return True for a number that may be another one without other code being run."""
    return type(value) is float or (type(value) is int and place in known)


def without_numbers(value: Any, place: Place, known: Collection[Place]) -> Any:
    """Return a plain value with a word in place of the numbers that `numbers_in` yields of it."""
    if isinstance(value, dict):
        return {key: without_numbers(one, (*place, key), known) for key, one in value.items()}
    if isinstance(value, list):
        return [without_numbers(one, (*place, i), known) for i, one in enumerate(value)]
    return HIDDEN if is_free(value, place, known) else value


def held_at(module: nn.Module, place: Place) -> tuple[Any, Any]:
    """Return what holds the value at a place, a list or dictionary, and its key there."""
    name, *keys, last = place
    held: Any = vars(module.get_submodule(str(name)))
    for key in keys:
        held = held[key]
        if not isinstance(held, (list, dict)):
            held = vars(held)
    return held, last


def spelled(place: Place) -> str:
    """Return a place as a path: `down.attn.processor.scale[0]`."""
    name, *keys = place
    texts = (f".{key}" if isinstance(key, str) else f"[{key!r}]" for key in keys)
    return f"{name}{''.join(texts)}".lstrip(".")
