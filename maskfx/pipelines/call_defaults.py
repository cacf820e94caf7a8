"""Default call arguments of a model, read from call.json beside its pipeline's model_index.json.

A pipeline class has defaults for all models of its kind; call.json has those of one trained model.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from maskfx.errors import InputError

NAME = "call.json"


def call_of(folder: Path) -> dict[str, Any]:
    """Return the pipeline's call arguments by name; empty if the folder has no call.json."""
    path = folder / NAME
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise InputError(f"{path}: it isn't JSON: {error}") from error
    if not isinstance(values, dict):
        raise InputError(f'{path}: wanted is a table of arguments, such as {{"guidance_scale": 3}}')
    for name, value in values.items():
        if not isinstance(value, bool | int | float | str):
            raise InputError(
                f"{path}: {name} is {value!r}; what a file can tell is numbers, texts, true, false"
            )
    return values
