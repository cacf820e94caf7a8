"""Checks of the arguments of public functions: InputError names the argument, its value and what
is wanted."""

from __future__ import annotations

import os
from collections.abc import Collection
from math import isfinite
from numbers import Real
from typing import NoReturn

from maskfx.errors import InputError


def refuse(where: str, name: str, value: object, wanted: str) -> NoReturn:
    raise InputError(f"{where}: {name}={value!r:.60}: give {wanted}")


def check_whole(where: str, name: str, value: object, least: int, *, or_none: bool = False) -> None:
    """Refuse what is no whole number, or less than `least`."""
    if value is None and or_none:
        return
    if type(value) is not int or value < least:
        refuse(where, name, value, f"a whole number, {least} or more" + ", or None" * or_none)


def check_number(
    where: str,
    name: str,
    value: object,
    unit: str = "a number",
    *,
    above: bool = False,
    finite: bool = False,
    or_none: bool = False,
) -> None:
    """Refuse what is no number, negative, or, with `above`, 0.

    Args:
        where: The function or class.
        name: The argument.
        value: Its value.
        unit: What is counted, such as "seconds".
        above: Refuse 0 too.
        finite: Refuse infinity too.
        or_none: Accept None.
    """
    if value is None and or_none:
        return
    number = is_number(value)
    if not number or not (value > 0 if above else value >= 0) or finite and not isfinite(value):  # type: ignore[operator,arg-type]
        bound = "above 0" if above else "0 or more"
        refuse(where, name, value, f"{unit}, {bound}" + ", or None" * or_none)


def is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def check_choice(where: str, name: str, value: object, known: Collection[str]) -> None:
    if not isinstance(value, str) or value not in known:
        raise InputError(f"{where}: {name}={value!r:.60}: choose one of {', '.join(known)}")


def check_flag(where: str, name: str, value: object, *, or_none: bool = False) -> None:
    if not (type(value) is bool or value is None and or_none):
        refuse(where, name, value, "True or False" + ", or None" * or_none)


def check_type(
    where: str,
    name: str,
    value: object,
    types: type | tuple[type, ...],
    wanted: str,
    *,
    or_none: bool = False,
) -> None:
    """Refuse objects of other types; `wanted` is what to give."""
    if not (isinstance(value, types) or value is None and or_none):
        refuse(where, name, value, wanted)


def check_path(where: str, name: str, value: object) -> None:
    check_type(where, name, value, (str, os.PathLike), "a path")


def check_callable(where: str, name: str, value: object, *, or_none: bool = False) -> None:
    if not (callable(value) or value is None and or_none):
        refuse(where, name, value, "a function" + ", or None" * or_none)
